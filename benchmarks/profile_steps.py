"""`python -m benchmarks.profile_steps`: where the time of decode steps and prompts goes, by operation and thread.

The native program adds up, for each thread and instruction, the time of its work and of its waits for other threads.
Beside it stands what the machine allows: operations divided by the measured peak, bytes by the measured bandwidth.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks import command, machine, profile_tables
from benchmarks.jobs import prompt
from benchmarks.measurement import say
from benchmarks.model_driver import CHUNK_TOKENS, Driver, Run
from twostep.errors import TwostepError
from twostep.kernels import _native
from twostep.kernels.lowering import Attend, Instruction, LinearAdd, NormGated, NormLinear, NormLogits, lower
from twostep.kernels.machine_limits import Bandwidth, Limits, measure_limits, read_bandwidth
from twostep.kernels.native import STAGES, StepProfile
from twostep.kernels.quantize import fine_weights
from twostep.model.loaded import open_model
from twostep.model.network import Network
from twostep.model.ops import Linear, Logits
from twostep.store.catalogue import DEFAULT_MODEL
from twostep.store.resolve import resolve
from twostep.store.wheel_download import FetchProgress

POINTS = "1x128,4x128,16x128,64x128,1x1024,4x1024,16x1024,64x1024,p512,p2048"
QUICK_POINTS = "1x32,4x32,p64"
START = "start of threads"


class PointError(TwostepError):
    """`--points` cannot be read."""


@dataclass(frozen=True)
class Shape:
    """`streams` sequences that decode at `context` tokens, or one prompt of `context` tokens where `streams` is 0."""

    streams: int
    context: int

    @property
    def steps(self) -> int:
        """Of one run: a prompt's chunks, or so many that a run takes a tenth of a second or more."""
        return max(4, 64 // self.streams) if self.streams else -(-self.context // CHUNK_TOKENS)


@dataclass(frozen=True)
class Work:
    """Of an operation, in one step. Products with inputs of 16 bits count twice."""

    integer_ops: float = 0
    float_ops: float = 0
    bytes: float = 0


@dataclass(frozen=True)
class Operation:
    """Microseconds of one step, all layers together: what the machine allows, and what each thread took."""

    name: str
    work: Work
    arithmetic_us: float
    """Operations divided by the peak of all threads."""
    traffic_us: float
    """Bytes divided by the bandwidth of all threads at the step's working set; also where they would fit a cache."""
    stages_us: dict[str, list[float]]
    """Work by stage and thread."""
    wait_us: list[float]
    """Waiting for other threads, by thread."""


@dataclass(frozen=True)
class Point:
    streams: int
    context: int
    steps: int
    step_us: float
    """Wall time of a step, with sampling and Python."""
    sampling_us: float
    outside_us: float
    """Python around the kernels, and what the first thread did not measure."""
    read: Bandwidth
    operations: list[Operation]


@dataclass(frozen=True)
class Result:
    command: str
    machine: machine.Machine
    model: str
    limits: Limits
    points: list[Point]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("profile_steps", "Shows where the time of steps goes, by operation and thread.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as `benchmarks.model` has it (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: the cores available to this process")
    parser.add_argument(
        "--points",
        metavar="LIST",
        help=f"4x1024: four streams at 1 024 tokens; p512: a prompt of 512 (default: {POINTS})",
    )
    parser.add_argument("--runs", type=int, default=5, help="of each point, medians count (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print tables instead of writing a result file")
    options = parser.parse_args(arguments)
    if not options.show:
        return command.run("profile_steps", options, lambda: measure(options), f"profile-{machine.slug(options.model)}")
    return _show(options)


def _show(options: argparse.Namespace) -> int:
    try:
        print(profile_tables.points(asdict(measure(options))))
    except TwostepError as error:
        print(f"benchmarks.profile_steps: {error}", file=sys.stderr)
        return 1
    return 0


def measure(options: argparse.Namespace) -> Result:
    shapes = list(read_points(options.points or (QUICK_POINTS if options.quick else POINTS)))
    runs = 2 if options.quick else options.runs
    surroundings = machine.watched()
    network = open_model(resolve(options.model, FetchProgress())).network
    driver = _driver(network, shapes, options.threads)
    executor = driver.executor
    say("limits of this machine")
    limits = measure_limits(executor.isa, executor.threads, executor.weight_bytes)
    driver.fill()
    return Result(
        command="python -m benchmarks.profile_steps"
        + (f" --model {options.model}" if options.model != DEFAULT_MODEL else ""),
        machine=surroundings,
        model=options.model,
        limits=limits,
        points=[_point(driver, network, shape, runs, limits) for shape in shapes],
    )


def read_points(text: str) -> Iterator[Shape]:
    """Raises `PointError`."""
    for part in text.split(","):
        streams, _, context = part.strip().rpartition("p" if part.strip().startswith("p") else "x")
        try:
            shape = Shape(int(streams or 0), int(context))
        except ValueError:
            shape = Shape(0, 0)
        if shape.context < 1 or (shape.streams < 1 and not part.strip().startswith("p")):
            raise PointError(f"--points: {part!r} is neither STREAMSxTOKENS (4x1024) nor pTOKENS (p512)")
        yield shape


def _driver(network: Network, shapes: Sequence[Shape], threads: int | None) -> Driver:
    """With room for every point, and no more: memory is filled before it is measured."""
    decodes = [shape for shape in shapes if shape.streams]
    return Driver(
        network,
        prompt=max([shape.context for shape in shapes if not shape.streams], default=1),
        batch=max([shape.streams for shape in decodes], default=0),
        positions=max([shape.context + shape.steps for shape in decodes], default=0),
        threads=threads,
    )


def _point(driver: Driver, network: Network, shape: Shape, runs: int, limits: Limits) -> Point:
    measured = [_profiled(driver, shape, run) for run in range(runs + 1)][
        1:
    ]  # the first grows buffers, finds cold caches
    one, profile = measured[0]
    steps = profile.steps
    kv_bytes = one.work.kv_bytes / steps
    read = read_bandwidth(int(driver.executor.weight_bytes + kv_bytes), limits.threads)
    ns = np.median([profile.ns / steps for _, profile in measured], axis=0)
    works = _works(network, one, steps)
    step_us = median(run.seconds.total for run, _ in measured) * 1e6 / steps
    sampling_us = median(run.seconds.sampling for run, _ in measured) * 1e6 / steps
    say(f"{shape.streams or 'prompt'} x {shape.context}: {step_us:.0f} us a step")
    return Point(
        streams=shape.streams,
        context=shape.context,
        steps=steps,
        step_us=step_us,
        sampling_us=sampling_us,
        outside_us=step_us - sampling_us - float(ns[0].sum()) / 1000,
        read=read,
        operations=[
            _operation(name, works.get(name, Work()), ns[:, of], limits, read)
            for name, of in _rows_by_name(profile.instructions).items()
        ],
    )


def _profiled(driver: Driver, shape: Shape, run: int) -> tuple[Run, StepProfile]:
    driver.executor.start_profile()
    if shape.streams:
        done = driver.decode(shape.streams, shape.context, shape.steps)
    else:
        done = driver.prefill(prompt(shape.context, "profile", run))
    return done, driver.executor.stop_profile()


def _rows_by_name(instructions: Sequence[Instruction]) -> dict[str, list[int]]:
    """Rows of the profile that belong to each operation, in the order of a layer."""
    rows: dict[str, list[int]] = {}
    for row, instruction in enumerate(instructions):
        rows.setdefault(name_of(instruction), []).append(row)
    return rows | {START: [len(instructions)]}


def name_of(instruction: Instruction) -> str:
    match instruction:
        case NormLinear():
            return "q, k, v"
        case Attend():
            return "attention"
        case LinearAdd(from_heads=True):
            return "output"
        case NormGated():
            return "gate, up"
        case LinearAdd():
            return "down"
        case NormLogits():
            return "head"
    return "embedding"


def _operation(name: str, work: Work, ns: NDArray[np.float64], limits: Limits, read: Bandwidth) -> Operation:
    us = ns.sum(axis=1) / 1000  # (threads, stages, work or wait)
    integer, floats = limits.int8_dot.all_threads, limits.fp32_fma.all_threads
    return Operation(
        name=name,
        work=work,
        arithmetic_us=1e6 * (work.integer_ops / integer + work.float_ops / floats),
        traffic_us=1e6 * work.bytes / read.bytes_per_s,
        stages_us={stage: us[:, i, 0].tolist() for i, stage in enumerate(STAGES)},
        wait_us=us[:, :, 1].sum(axis=1).tolist(),
    )


def operations_of(network: Network, rows: float, logit_rows: float) -> dict[str, Work]:
    """Work of the matrices in a step of so many rows, by operation."""
    fine, works = fine_weights(network.ops), {}
    for name, matrices in _matrices(network).items():
        products = sum(_elements(network, weight) * (2 if weight in fine else 1) for weight in matrices)
        size = sum(_packed_bytes(network, weight) for weight in matrices)
        works[name] = Work(integer_ops=2 * (logit_rows if name == "head" else rows) * products, bytes=size)
    return works


def _works(network: Network, run: Run, steps: int) -> dict[str, Work]:
    """Work of a mean step by operation."""
    attention = Work(float_ops=run.work.attention_flops / steps, bytes=run.work.kv_bytes / steps)
    return {**operations_of(network, *_rows(network, run, steps)), "attention": attention}


def _rows(network: Network, run: Run, steps: int) -> tuple[float, float]:
    """Rows of a mean step, and rows through the head: counted back from the operations of the run."""
    shape = network.shape
    return run.tokens / steps, run.work.head_ops / (2 * shape.vocab * shape.width) / steps


def _matrices(network: Network) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for instruction in lower(network.ops):
        ops = [value for value in vars(instruction).values() if isinstance(value, Linear | Logits)]
        if ops:
            found.setdefault(name_of(instruction), []).extend(op.weight for op in ops)
    return found


def _elements(network: Network, weight: str) -> int:
    outputs, inputs = network.tensors[weight].shape
    return int(outputs * inputs)


def _packed_bytes(network: Network, weight: str) -> int:
    tensor = network.tensors[weight]
    return int(_native.packed_bytes(int(tensor.type), *tensor.shape))


if __name__ == "__main__":
    sys.exit(main())
