"""Markdown of the validation against published measurements (docs/validation.md); computes nothing but counts."""

from collections.abc import Iterable

from benchmarks.tables import Json, table

STEPS = ("whole decode steps", "prompt time", "token time", "first token")
LAYERS = ("linear layers",)
HEAD = ("measured by others", "device", "predicted from", "points", "median error", "p95", "bias", "target")


def steps(result: Json) -> str:
    """Whole steps and phases."""
    return _table(_of(result, STEPS))


def layers(result: Json) -> str:
    return _table(_of(result, LAYERS))


def kernels(result: Json) -> str:
    return _table(one for one in result["errors"] if not one["table"].startswith((*STEPS, *LAYERS)))


def summary(result: Json) -> str:
    """How many targets were met, and the command."""
    aimed = [one for one in result["errors"] if one["target"] is not None]
    met = sum(one["median"] <= one["target"] for one in aimed)
    return f"{met} of {len(aimed)} targets on the median error are met. `{result['command']}`"


def efficiency(result: Json) -> str:
    """The fitted shares of the datasheet's peaks."""
    attention = ("prefill attention, of peak", "decode attention, of bandwidth")
    head = ("device", "arithmetic", "of peak", "of bandwidth", *attention, "a kernel, µs", "attention, µs", "kernels")
    return table(head, map(_efficiency_row, result["efficiency"]))


def _efficiency_row(row: dict[str, str]) -> list[str]:
    shares = ("linear", "bandwidth", "prefill_attention", "decode_attention")
    micro = [f"{1e6 * float(row[field]):.1f}" for field in ("kernel_s", "attention_kernel_s")]
    return [row["hardware"], row["arithmetic"], *(f"{float(row[name]):.0%}" for name in shares), *micro, row["kernels"]]


def _of(result: Json, names: tuple[str, ...]) -> list[Json]:
    return [one for one in result["errors"] if one["table"].startswith(names)]


def _table(errors: Iterable[Json]) -> str:
    return table(HEAD, map(_row, errors))


def _row(one: Json) -> list[str]:
    target = one["target"]
    met = "" if target is None else f"{target:.0%}" + ("" if one["median"] <= target else " **missed**")
    numbers = [f"{one['median']:.1%}", f"{one['p95']:.1%}", f"{one['bias']:+.1%}"]
    return [one["table"], one["hardware"], one["predicted_from"], str(one["rows"]), *numbers, met]
