"""Operations become instructions of the native program: the ones there are, and refusals of lists wired otherwise."""

from dataclasses import replace

import pytest
from support.tiny import TINY, tiny_network

from twostep.kernels.lowering import LinearAdd, LoweringError, NormGatedSilu, NormLinear, NormLogits, RotateAttend
from twostep.kernels.lowering import lower as lower_lazily
from twostep.kernels.native import NativeError, NativeExecutor
from twostep.model.ops import Add, Attention, Embed, GatedSilu, Logits, Op, RmsNorm, Rope

Ops = tuple[Op, ...]
OPS: Ops = tiny_network(TINY["F32"]).ops


def lower(ops: Ops) -> list[object]:
    return list(lower_lazily(ops))


def first(kind: type, ops: Ops = OPS) -> int:
    return next(i for i, op in enumerate(ops) if isinstance(op, kind))


def changed(kind: type, **fields: object) -> Ops:
    """The list with the first operation of a kind changed."""
    at = first(kind)
    return (*OPS[:at], replace(OPS[at], **fields), *OPS[at + 1 :])  # type: ignore[arg-type]


def test_a_network_of_two_layers() -> None:
    layer = [NormLinear, RotateAttend, LinearAdd, NormGatedSilu, LinearAdd]
    assert [type(instruction) for instruction in lower(OPS)] == [Embed, *layer, *layer, NormLogits]


def test_projections_add_what_came_before() -> None:
    assert [i.from_heads for i in lower(OPS) if isinstance(i, LinearAdd)] == [True, False, True, False]


def test_every_operation_is_in_one_instruction() -> None:
    taken = [op for instruction in lower(OPS) for op in _operations(instruction)]
    assert taken == list(OPS)


def _operations(instruction: object) -> list[object]:
    parts = [instruction] if isinstance(instruction, Op) else vars(instruction).values()
    return [part for part in parts if isinstance(part, Op)]


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        pytest.param((), "does not end with its logits", id="nothing"),
        pytest.param(OPS[:-2], "does not end with its logits", id="no logits"),
        pytest.param(OPS[1:], "no native instruction after NoneType for RmsNorm, Linear", id="no embedding"),
        pytest.param((*OPS, OPS[0]), "after NormLogits for Embed", id="more after the logits"),
        pytest.param((OPS[0], *OPS), "after Embed for Embed", id="two embeddings"),
        pytest.param(OPS[:1] + OPS[2:], "after Embed for Linear", id="no norm"),
        pytest.param(changed(RmsNorm, x="y"), r"one residual stream, this network \['x', 'y'\]", id="norm of another"),
        pytest.param(changed(RmsNorm, out="n"), "after Embed for RmsNorm", id="norm unused"),
        pytest.param(changed(Add, out="y"), r"one residual stream, this network \['x', 'y'\]", id="two streams"),
        pytest.param(changed(Add, x="q"), "after RotateAttend for Linear, Add", id="another added"),
        pytest.param(changed(Rope, x="v"), "after NormLinear for Rope", id="values rotated"),
        pytest.param(changed(Attention, k="v", v="k"), "after NormLinear for Rope", id="keys and values exchanged"),
        pytest.param(changed(Attention, out="o"), "after RotateAttend for Linear, Add", id="heads unused"),
        pytest.param(changed(GatedSilu, gate="u", up="g"), "after LinearAdd for RmsNorm", id="gate and up exchanged"),
        pytest.param(changed(Logits, x="x"), "after LinearAdd for RmsNorm, Logits", id="logits without norm"),
    ],
)
def test_lists_wired_otherwise_are_refused(ops: Ops, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        lower(ops)


@pytest.mark.parametrize("change", [{"base": 1e6}, {"style": "halves"}])
def test_layers_rotate_alike(change: dict[str, object]) -> None:
    network = replace(tiny_network(TINY["F32"]), ops=changed(Rope, **change))
    with pytest.raises(NativeError, match="rotates all layers alike, this network in 2 ways"):
        NativeExecutor(network, 1)


def test_biases_of_gate_and_up_are_refused_rather_than_left_out() -> None:
    at = first(GatedSilu) - 1
    ops = (*OPS[:at], replace(OPS[at], bias="blk.0.ffn_up.bias"), *OPS[at + 1 :])  # type: ignore[arg-type]
    with pytest.raises(LoweringError, match="after LinearAdd for RmsNorm, Linear, Linear, GatedSilu"):
        lower(ops)


def test_the_executor_refuses_what_lowering_does() -> None:
    with pytest.raises(NativeError, match="does not end with its logits"):
        NativeExecutor(replace(tiny_network(TINY["F32"]), ops=OPS[:-2]), 1)
