"""Tables of calibrations: how far predictions are from measured steps, and what typical steps consist of."""

from collections.abc import Iterator

from benchmarks.tables import Json, number, provenance
from twostep.perf.typical_steps import TERMS

REGIONS = ("mixed", "decode", "prefill")


def calibration(result: Json) -> str:
    """Errors by region, typical steps, and the limits of the machine."""
    profile = result["profile"]
    parts = [provenance(result), _took(result), "\n".join(_errors(profile)), "\n".join(_typical(result["typical"]))]
    return "\n\n".join(parts)


def _took(result: Json) -> str:
    profile = result["profile"]
    runs = f"{profile['runs']} steps run in {profile['seconds']:.0f} s"
    discarded = f"{profile['starved_runs']} discarded, as the kernels had no core in part of them"
    how = f"{profile['identity']['isa']}, {profile['identity']['threads']} threads"
    return f"{result['model']}, {how}: {runs}; {discarded}."


def _errors(profile: Json) -> Iterator[str]:
    yield "| steps | shapes | error: mean | p95 | identical steps: mean | p95 |"
    yield "|---|---|---|---|---|---|"
    for title, errors in (("not seen", profile["held_out"]), ("fitted", profile["grid"])):
        for region in (region for region in REGIONS if region in errors):
            one = errors[region]
            shares = " | ".join(f"{one[name]:.1%}" for name in ("mean", "p95", "noise_mean", "noise_p95"))
            yield f"| {title}, {region} | {one['steps']} | {shares} |"


def _typical(steps: list[Json]) -> Iterator[str]:
    yield f"| ms | whole | bound | {' | '.join(TERMS)} |"
    yield "|---" * (3 + len(TERMS)) + "|"
    for step in steps:
        terms = " | ".join(number(step[name]) for name in TERMS)
        yield f"| {step['name']} | {number(step['expected'])} | {number(step['bound'])} | {terms} |"


def readme(result: Json) -> str:
    """One sentence: how far mixed steps are from their prediction that were not seen."""
    mixed = result["profile"]["held_out"]["mixed"]
    off = f"{mixed['mean']:.1%} on average and {mixed['p95']:.1%} at the 95th percentile"
    noise = f"identical steps are {mixed['noise_mean']:.1%} and {mixed['noise_p95']:.1%} apart"
    where = f"{result['model']}, {result['machine']['cpu']}"
    return f"Steps of decodes and prompts that it did not see are {off} from its prediction; {noise} ({where})."
