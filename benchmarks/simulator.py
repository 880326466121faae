"""`python -m benchmarks.simulator`: how fast the simulator is, on one core."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time

from benchmarks import command, machine
from benchmarks.measurement import Spread, say, spread
from twostep.config.configs import EngineConfig
from twostep.perf.hardware import hardware_named
from twostep.perf.model_table import model_named
from twostep.perf.roofline_model import RooflineModel
from twostep.sim.simulation import Simulation, simulate
from twostep.sim.targets import device_target
from twostep.workload.definition import Workload
from twostep.workload.reshape import Changes, lasting, reshaped
from twostep.workload.schedule import Open
from twostep.workload.trace_formats import find_workload

MODEL, HARDWARE, WORKLOAD, CHUNKING = "llama-3.1-8b", "h100", "azure-conv", "time=40"
REQUESTS = 2500
"""Of each replica."""
LOADS = ((1, 4.0), (1, 12.0), (4, 12.0))
"""Replicas, and requests per second of each."""
REPETITIONS = 3


@dataclass(frozen=True)
class Speed:
    """One load. Replica-seconds are virtual time, counted for each replica; times are CPU time of this process."""

    replicas: int
    rate: float
    requests: int
    virtual_s: float
    steps: int
    mean_decoding: float
    cpu_s: Spread
    replica_s_per_s: Spread
    steps_per_s: Spread


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    hardware: str
    workload: str
    speeds: list[Speed]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("simulator", "Measures the simulator.").parse_args(arguments)
    return command.run("simulator", options, lambda: measure(options))


def measure(options: Namespace) -> Result:
    surroundings = machine.watched()
    share = 20 if options.quick else 1
    speeds = [_speed(replicas, rate, REQUESTS * replicas // share) for replicas, rate in LOADS]
    return Result("python -m benchmarks.simulator", surroundings, MODEL, HARDWARE, WORKLOAD, speeds)


def _speed(replicas: int, rate: float, requests: int) -> Speed:
    made = _workload(replicas * rate, requests)
    runs = [_timed(made, replicas) for _ in range(REPETITIONS)]
    run, _ = runs[0]
    steps = [step for replica in run.replicas for step in replica.steps]
    virtual_s = run.ended_ns / 1e9
    say(f"{replicas} replicas, {rate:g} requests/s each: {virtual_s:.0f} s in {runs[0][1]:.1f} s")
    return Speed(
        replicas,
        rate,
        requests,
        virtual_s,
        len(steps),
        sum(step.decode_tokens for step in steps) / len(steps),
        spread([cpu_s for _, cpu_s in runs]),
        spread([replicas * virtual_s / cpu_s for _, cpu_s in runs]),
        spread([len(steps) / cpu_s for _, cpu_s in runs]),
    )


def _workload(rate: float, requests: int) -> Workload:
    found = lasting(find_workload(WORKLOAD, say), requests)
    return reshaped(found, Changes(requests=requests, rate=rate), lambda line: None)


def _timed(made: Workload, replicas: int) -> tuple[Simulation, float]:
    """The run, and its CPU time in seconds."""
    roofline = RooflineModel(model_named(MODEL), hardware_named(HARDWARE))
    target = device_target(roofline, EngineConfig(chunking=CHUNKING))
    before_s = process_time()
    run = simulate(made, Open(), [target.replica] * replicas, front_end=target.front_end)
    return run, process_time() - before_s


if __name__ == "__main__":
    sys.exit(main())
