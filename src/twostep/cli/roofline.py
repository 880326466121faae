"""`twostep roofline`: what a model costs on a device, before either is here."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from twostep.cli.options import whole_within
from twostep.cli.subcommands import Subcommands
from twostep.errors import InvalidParameterError

if TYPE_CHECKING:
    from twostep.bench.report.roofline_plot import Dot, Roof
    from twostep.perf.hardware import Hardware
    from twostep.perf.roofline import Phase, Roofline, Row
    from twostep.spec.model_spec import ModelSpec
    from twostep.spec.number_types import NumberType

MOST_TOKENS, MOST_BATCH = 10_000_000, 65_536


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "roofline",
        help="operations, bytes, times and memory of a model on a device, from arithmetic alone",
        description="Shows what both phases of a request cost on a device: operations, bytes, which limit holds, "
        "times, and how many requests fit in memory. Times are given twice: at the peaks of the device, which is a "
        "lower bound, and as expected of real kernels. Nothing is run.",
    )
    _add_what(parser.add_argument_group("what"))
    _add_how(parser.add_argument_group("how"))
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print everything as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw the roofline with both phases on it, as .svg")
    parser.set_defaults(run=_run)


def _add_what(what: "argparse._ArgumentGroup") -> None:
    what.add_argument(
        "--model", required=True, metavar="MODEL",
        help="a name from the shipped table such as llama-2-7b, a .gguf file, a config.json or its folder",
    )  # fmt: skip
    where = what.add_mutually_exclusive_group(required=True)
    where.add_argument("--hardware", metavar="ID", help="a device such as a10, h100, or here (after twostep calibrate)")
    where.add_argument("--compare", metavar="ID,ID,…", help="one line for each of several devices")
    for flag, most, default, counted in (
        ("--prompt", MOST_TOKENS, 350, "prompt tokens"),
        ("--output", MOST_TOKENS, 150, "output tokens"),
        ("--batch", MOST_BATCH, 1, "requests at a time"),
    ):
        what.add_argument(
            flag, type=whole_within(1, most), default=default, metavar="N", help=f"{counted} (default: %(default)s)"
        )


def _add_how(how: "argparse._ArgumentGroup") -> None:
    how.add_argument("--weights", metavar="TYPE", help="number type of the weights (default: the model's own)")
    how.add_argument("--kv", metavar="TYPE", help="number type of the KV cache (default: the model's own, 16 bits)")
    how.add_argument(
        "--compute",
        metavar="TYPE",
        help="arithmetic of the linear layers: fp32, fp16, fp8, int8 or fp4 (default: the best for --weights)",
    )
    how.add_argument(
        "--tp",
        type=whole_within(1, 1024),
        default=1,
        metavar="N",
        help="devices that share each layer (default: %(default)s)",
    )
    how.add_argument(
        "--hardware-file",
        type=Path,
        metavar="FILE",
        help="more devices, .toml or .csv (docs/two-phases.md#your-own-hardware)",
    )


def _run(options: argparse.Namespace) -> None:
    _check_plot(options.plot)
    model = described_model(options)
    found = [_answer(model, name.strip(), options) for name in (options.compare or options.hardware).split(",")]
    answers = [answer for answer in found if not isinstance(answer, Refusal)]
    if not answers:
        raise next(answer.error for answer in found if isinstance(answer, Refusal))
    if options.plot:
        _plot(answers, options.plot)
    if options.json:
        _print_json(found, several=options.compare is not None)
    else:
        print("\n".join(_comparison(answers, found) if options.compare else _lines(answers[0])))


class Refusal(NamedTuple):
    """A device of a comparison that has no answer, and why."""

    hardware: str
    error: InvalidParameterError


# --- reading ------------------------------------------------------------------------------------------------------


def described_model(options: argparse.Namespace) -> "ModelSpec":
    """The model with the types that were asked for. Raises `TwostepError`."""
    from twostep.spec.number_types import KV_TYPES, NUMBER_TYPES

    weights = _type("--weights", options.weights, tuple(NUMBER_TYPES))
    kv = _type("--kv", options.kv, KV_TYPES)
    return _stored_model(options.model).with_types(weights, kv)


def _type(flag: str, name: str | None, known: tuple[str, ...]) -> "NumberType | None":
    from twostep.spec.number_types import number_type

    try:
        return None if name is None else number_type(name, known)
    except ValueError as error:
        raise InvalidParameterError(f"{flag}: {error}") from None


def _stored_model(name: str) -> "ModelSpec":
    from twostep.perf.model_table import model_named, model_of_config

    path = Path(name)
    if name.endswith(".gguf"):
        from twostep.model.families import load_network
        from twostep.model.gguf import read_gguf

        return load_network(read_gguf(path)).model_spec(path.stem)
    return model_of_config(path) if path.exists() else model_named(name)


def _answer(model: "ModelSpec", name: str, options: argparse.Namespace) -> "Roofline | Refusal":
    """Raises `InvalidParameterError` for an unknown device; one that cannot run the model is a refusal."""
    from twostep.perf.hardware import HERE, UnknownHardwareError, hardware_named, read_hardware
    from twostep.perf.roofline import Question, Roofline

    own = read_hardware(options.hardware_file) if options.hardware_file else {}
    question = Question(options.prompt, options.output, options.batch, options.tp)
    try:
        here = _this_machine(model) if name.lower() == HERE else None
        return Roofline(model, here or hardware_named(name, own), question, options.compute)
    except UnknownHardwareError:
        raise
    except InvalidParameterError as error:
        return Refusal(name, error)


def _this_machine(model: "ModelSpec") -> "Hardware | None":
    """With its measured roofs and the memory that is free now; None if it is not calibrated."""
    from twostep.engine.host_memory import free_memory
    from twostep.engine.profiles import machine_profile
    from twostep.perf.hardware import measured_hardware
    from twostep.spec.memory import weights_bytes

    if (profile := machine_profile()) is None:
        return None
    roofs = profile.roofs
    peaks = {"int8": roofs.int8_ops_per_s, "fp32": roofs.fp32_flops_per_s}
    return measured_hardware(profile.identity.cpu, peaks, roofs.read, free_memory(), weights_bytes(model))


def _check_plot(path: Path | None) -> None:
    from twostep.bench.report.output_files import check_outputs

    if path is not None and path.suffix != ".svg":
        raise InvalidParameterError(
            f"--plot {path}: twostep draws .svg; convert it with rsvg-convert, inkscape or a browser"
        )
    check_outputs(path)


# --- one device ---------------------------------------------------------------------------------------------------

HEAD = ("", "operations", "bytes", "intensity", "limit", "roofline", "expected", "share")


def _lines(answer: "Roofline") -> Iterator[str]:
    yield from _title(answer)
    for phase in (answer.prefill, answer.decode):
        yield ""
        yield from _phase_lines(answer, phase)
    yield ""
    yield from _memory(answer)
    yield ""
    yield from _verdict(answer)


def _title(answer: "Roofline") -> Iterator[str]:
    model, device, kind = answer.model, answer.hardware, answer.expected.arithmetic
    active = f", {_large(model.active_parameters)} active" if model.experts else ""
    types = f"weights {model.weight_type.name}, KV {model.kv_type.name}"
    yield f"model     {model.name}: {_large(model.parameters)} parameters{active}, {types}"
    times = f"{answer.question.devices} x " if answer.question.devices > 1 else ""
    peak = f"{_si(device.peak(kind))}{'OPS' if kind.startswith('int') else 'FLOPS'} {kind}"
    yield (
        f"hardware  {times}{device.name}: {_si(device.memory_bytes)}B, {_si(device.bandwidth)}B/s, {peak}, "
        f"ridge point {answer.ridge:.0f} op/B"
    )
    yield f"expected  {_origin(answer)}"


def _origin(answer: "Roofline") -> str:
    share = answer.expected.efficiency
    shares = f"{_percent(share.linear)} of peak, {_percent(share.bandwidth)} of bandwidth"
    if answer.hardware.measured:
        return "measured: the roofs are those of this machine"
    if answer.origin == "measured":
        return f"measured: kernels of this device reached {shares}"
    return f"datasheet (confidence {answer.hardware.confidence}) x what kernels of measured GPUs reach: {shares}"


def _phase_lines(answer: "Roofline", phase: "Phase") -> Iterator[str]:
    batch = answer.question.batch
    each = f"{phase.tokens} tokens" if phase.tokens > 1 else "1 token"
    of = f" of {batch} sequences" if batch > 1 else ""
    share = f"; operations and bytes of one of {answer.question.devices} devices" if answer.question.devices > 1 else ""
    yield f"{phase.name}: one step of {each}{of}, context {phase.context}{share}"
    rows = [_row(row, phase) for row in phase.rows]
    whole = ("step", _si(phase.operations) + "op", _si(phase.bytes) + "B", f"{phase.intensity:.3g} op/B",
             phase.largest.expected.bound, _time(phase.ideal_s), _time(phase.expected_s), "100 %")  # fmt: skip
    yield from _table([HEAD, *rows, whole])


def _row(row: "Row", phase: "Phase") -> tuple[str, ...]:
    work = row.ideal.work
    return (
        row.ideal.name,
        _si(work.operations) + "op" if work.operations else "-",
        _si(work.bytes) + "B" if work.bytes else "-",
        f"{work.intensity:.3g} op/B" if work.operations else "-",
        row.expected.bound,
        _time(row.ideal.seconds),
        _time(row.expected.seconds),
        _percent(row.expected.seconds / phase.expected_s),
    )


def _memory(answer: "Roofline") -> Iterator[str]:
    from twostep.spec.memory import size_text

    shape, kv = answer.model.shape, answer.model.kv_type
    each = f"2 x {shape.layers} layers x {shape.kv_heads} KV heads x {shape.head_dim} x {kv.bytes:g} B"
    yield f"KV cache  {size_text(round(answer.kv_bytes_per_token))} a token = {each}"
    windows = [window for window in answer.model.layer_windows if window is not None]
    if windows:
        yield f"          {len(windows)} of {shape.layers} layers keep a window of {max(windows)} tokens only"
    tokens, count = answer.request_tokens, answer.sequences
    room = f"{_si(answer.memory_bytes)}B - {_si(answer.weights_bytes)}B weights"
    if answer.weights_bytes > answer.memory_bytes:
        sizes = f"weights of {_si(answer.weights_bytes)}B in {_si(answer.memory_bytes)}B"
        yield f"memory    DOES NOT FIT: {sizes}{_remedy(answer)}"
        return
    yield (
        f"memory    {count} requests of {tokens} tokens fit: ({room}) / {size_text(round(answer.request_kv_bytes))}, "
        "rounded down; fewer beside activations"
    )
    if answer.question.batch > count:
        yield f"          DOES NOT FIT: a batch of {answer.question.batch}"


def _remedy(answer: "Roofline") -> str:
    needed = -(-answer.weights_bytes // int(answer.hardware.memory_bytes))
    heads = answer.model.shape.heads
    possible = [n for n in range(needed, heads + 1) if heads % n == 0]
    return f"; --tp {possible[0]} or narrower --weights" if possible else "; take narrower --weights"


def _verdict(answer: "Roofline") -> Iterator[str]:
    ideal, expected = answer.times(answer.ideal), answer.times(answer.expected)
    asked = answer.question
    yield f"first token   {_time(expected.ttft_s)} (roofline {_time(ideal.ttft_s)})"
    if asked.output > 1:
        yield f"then a token  every {_time(expected.itl_s)} (roofline {_time(ideal.itl_s)})"
    whole = f"{_time(expected.e2e_s)} (roofline {_time(ideal.e2e_s)}): TTFT + {asked.output - 1} x ITL"
    yield f"{f'{asked.output} tokens':<12}  in {whole}"
    joules = answer.joules_per_token
    energy = (
        ""
        if joules is None
        else f"; {joules:.3g} J per output token at the TDP of {answer.hardware.tdp_w:g} W (an indication)"
    )
    yield f"throughput    {answer.output_rate:.4g} output tokens/s{energy}"
    yield f"batching      {_batching(answer)}"


def _batching(answer: "Roofline") -> str:
    crossing, fit = answer.crossing_batch, answer.sequences
    if not fit:
        return "nothing fits"
    words = f"linear layers of decode turn from bandwidth to arithmetic at a batch of {crossing}"
    if fit < crossing:
        return f"{words}; memory holds only {fit} such requests: bandwidth stays the limit"
    return f"{words}, and memory holds {fit} requests"


# --- several devices ----------------------------------------------------------------------------------------------


def _comparison(answers: "Sequence[Roofline]", found: "Sequence[Roofline | Refusal]") -> Iterator[str]:
    """`found`: all that was asked for, with refusals."""
    first = answers[0]
    asked = first.question
    types = f"weights {first.model.weight_type.name}, KV {first.model.kv_type.name}"
    devices = f", {asked.devices} devices each" if asked.devices > 1 else ""
    yield f"{first.model.name}, {types}: {asked.prompt} tokens in, {asked.output} out, batch {asked.batch}{devices}"
    yield "expected times; in brackets the roofline, a lower bound"
    yield ""
    head = (
        "hardware",
        "memory",
        "ridge",
        "first token",
        "between tokens",
        "whole",
        "tokens/s",
        "J/token",
        "fit",
        "from",
    )
    yield from _table([head, *map(_compared, answers)])
    for one in found:
        if isinstance(one, Refusal):
            yield f"{one.hardware}: {one.error}"


def _compared(answer: "Roofline") -> tuple[str, ...]:
    ideal, expected = answer.times(answer.ideal), answer.times(answer.expected)
    pairs = [f"{_time(real)} ({_time(least)})" for real, least in zip(expected, ideal, strict=True)]
    fits = answer.weights_bytes <= answer.memory_bytes
    joules = answer.joules_per_token
    return (
        answer.hardware.id,
        _si(answer.memory_bytes) + "B",
        f"{answer.ridge:.0f} op/B",
        *(pairs if fits else ("-", "-", "-")),
        f"{answer.output_rate:.4g}" if fits else "-",
        f"{joules:.3g}" if fits and joules is not None else "-",
        str(answer.sequences) if fits else "weights do not",
        answer.origin,
    )


# --- output -------------------------------------------------------------------------------------------------------


def _print_json(answers: "Iterable[Roofline | Refusal]", *, several: bool) -> None:
    import json

    found = [
        {"hardware": {"id": answer.hardware}, "error": str(answer.error)}
        if isinstance(answer, Refusal)
        else answer.json()
        for answer in answers
    ]
    print(json.dumps(found if several else found[0], indent=1))


def _plot(answers: "Sequence[Roofline]", path: Path) -> None:
    from twostep.bench.report.output_files import write_file

    write_file(path, plotted(answers).encode())


def plotted(answers: "Sequence[Roofline]") -> str:
    """SVG: of one device each kind of work in both phases, of several devices the steps as a whole."""
    from twostep.bench.report.roofline_plot import roofline_svg

    first = answers[0]
    asked = first.question
    where = f" on {first.hardware.name}" if len(answers) == 1 else ""
    tokens = f"{asked.prompt} tokens in, {asked.output} out, batch {asked.batch}"
    title = f"{first.model.name}, {first.model.weight_type.name}{where}: {tokens}"
    if len(answers) == 1:
        return roofline_svg(title, [_roof(first)], [*_kind_dots(first)], ("prefill", "decode"))
    dots = [dot for colour, answer in enumerate(answers) for dot in _phase_dots(answer, colour)]
    return roofline_svg(title, [_roof(answer) for answer in answers], dots, ())


def _roof(answer: "Roofline") -> "Roof":
    from twostep.bench.report.roofline_plot import Roof

    device, share = answer.hardware, answer.expected.efficiency
    peak = device.peak(answer.expected.arithmetic)
    return Roof(device.id, peak, device.bandwidth, peak * share.linear, device.bandwidth * share.bandwidth)


LEAST_SHARE = 0.015
"""Of a step's time: kinds of work below it are not drawn."""


def _kind_dots(answer: "Roofline") -> "Iterator[Dot]":
    from twostep.bench.report.roofline_plot import Dot

    for colour, phase in enumerate((answer.prefill, answer.decode)):
        for row in phase.rows:
            work, share = row.ideal.work, row.expected.seconds / phase.expected_s
            if work.operations and share >= LEAST_SHARE:
                tip = f"{phase.name}, {row.ideal.name}: {_time(row.expected.seconds)}, {_percent(share)} of the step"
                rate = work.operations / row.expected.seconds
                yield Dot(row.ideal.name, work.intensity, rate, share, colour, tip)


def _phase_dots(answer: "Roofline", colour: int) -> "Iterator[Dot]":
    from twostep.bench.report.roofline_plot import Dot

    for phase in (answer.prefill, answer.decode):
        tip = f"{phase.name} on {answer.hardware.id}: {_time(phase.expected_s)}"
        yield Dot(phase.name, phase.intensity, phase.operations / phase.expected_s, 0.1, colour, tip)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns apart by two spaces; the first to the left, the rest to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def _large(count: int) -> str:
    for power, word in ((9, "billion"), (6, "million")):
        if count >= 0.9995 * 10**power:
            return f"{_digits(count / 10**power)} {word}"
    return str(count)


def _si(value: float) -> str:
    """Three significant digits and a decimal prefix: 1.50 T."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**power:
            return f"{_digits(value / 10**power)} {prefix}"
    return f"{_digits(value)} "


def _time(seconds: float) -> str:
    for power, unit in ((0, "s"), (-3, "ms"), (-6, "us")):
        if seconds >= 0.9995 * 10.0**power:
            return f"{_digits(seconds / 10.0**power)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "<1 %"


def _digits(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
