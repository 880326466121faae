"""The number types of weights and KV caches: what one value takes in memory, and which arithmetic multiplies it."""

from difflib import get_close_matches
from typing import NamedTuple


class NumberType(NamedTuple):
    """A stored number. `bytes` includes its part of the group's scales, so that it need not be a whole number.

    `arithmetic` lists the peaks of a hardware row that can multiply it, best first: types that are only a way to store
    weights are widened to fp16 on a GPU, or multiplied as 8-bit integers where a machine has no fp16 units.
    """

    name: str
    bytes: float
    arithmetic: tuple[str, ...]


_WIDENED = ("fp16", "int8", "fp32")

NUMBER_TYPES: dict[str, NumberType] = {
    kind.name: kind
    for kind in (
        NumberType("fp32", 4, ("fp32",)),
        NumberType("fp16", 2, ("fp16", "fp32")),
        NumberType("bf16", 2, ("fp16", "fp32")),
        NumberType("fp8", 1, ("fp8",)),
        NumberType("int8", 1, ("int8",)),
        NumberType("q8_0", 34 / 32, _WIDENED),
        NumberType("q6_k", 210 / 256, _WIDENED),
        NumberType("q5_0", 22 / 32, _WIDENED),
        NumberType("q4_1", 20 / 32, _WIDENED),
        NumberType("q4_0", 18 / 32, _WIDENED),
        NumberType("q4_k", 144 / 256, _WIDENED),
        NumberType("int4", 0.5 + 2 / 128, _WIDENED),  # groups of 128 with an fp16 scale, as GPTQ and AWQ have
        NumberType("fp4", 0.5 + 1 / 16, ("fp4",)),  # NVFP4: groups of 16 with an fp8 scale
    )
}
"""By name, widest first. `fp4` is NVFP4; `int4` weights are widened to fp16 before they are multiplied."""

KV_TYPES = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
"""Types of which KV caches are made. They are widened before they are multiplied, so that every machine has them."""

FP16 = NUMBER_TYPES["fp16"]


def number_type(name: str, known: tuple[str, ...] = tuple(NUMBER_TYPES)) -> NumberType:
    """The type of this name. Raises `ValueError` that lists the known ones, the nearest first."""
    if name.lower() in known:
        return NUMBER_TYPES[name.lower()]
    near = get_close_matches(name.lower(), known, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"unknown number type {name!r}; known: {', '.join(known)}{hint}")
