"""Operations become instructions of the native program: the ones there are, and refusals of lists wired otherwise."""

from dataclasses import replace

import numpy as np
import pytest
from support.networks import FAMILY, with_traits
from support.tiny import TINY, tiny_network

from twostep.kernels.lowering import Attend, LinearAdd, LoweringError, NormGated, NormLinear, NormLogits
from twostep.kernels.lowering import lower as lower_lazily
from twostep.kernels.native import NativeError, NativeExecutor
from twostep.model.ops import Add, Attention, Embed, Gated, HeadNorm, Logits, Op, RmsNorm, Rope

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
    layer = [NormLinear, Attend, LinearAdd, NormGated, LinearAdd]
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
        pytest.param(changed(Add, x="q"), "after Attend for Linear, Add", id="another added"),
        pytest.param(changed(Rope, x="v"), "after NormLinear for Rope", id="values rotated"),
        pytest.param(changed(Attention, k="v", v="k"), "after NormLinear for Rope", id="keys and values exchanged"),
        pytest.param(changed(Attention, out="o"), "after Attend for Linear, Add", id="heads unused"),
        pytest.param(changed(Gated, gate="u", up="g"), "after LinearAdd for RmsNorm", id="gate and up exchanged"),
        pytest.param(changed(Logits, x="x"), "after LinearAdd for RmsNorm, Logits", id="logits without norm"),
    ],
)
def test_lists_wired_otherwise_are_refused(ops: Ops, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        lower(ops)


@pytest.mark.parametrize("change", [{"base": 1e6}, {"style": "halves"}])
def test_q_and_k_of_a_layer_rotate_alike(change: dict[str, object]) -> None:
    network = replace(tiny_network(TINY["F32"]), ops=changed(Rope, **change))
    with pytest.raises(NativeError, match="layer 0: q and k are rotated in different ways"):
        NativeExecutor(network, 1)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (changed(Rope, heads=2), "layer 0: Rope of q has 2 heads of 8, attention 3 of 8"),
        (changed(Attention, heads=1), "layer 0: Rope of q has 3 heads of 8, attention 1 of 8"),
        (changed(Attention, kv_heads=3), "layer 0: Rope of k has 1 heads of 8, attention 3 of 8"),
        (changed(Attention, layer=1), r"needs one attention in each, not in \[1, 1\]"),
        (changed(Attention, window=0), r"a window has at least 1 position, not \[None, 0\]"),
        (changed(Gated, activation="relu"), "no activation 'relu'; it has silu, gelu_tanh"),
    ],
)
def test_what_no_instruction_can_do_is_refused_by_name(ops: Ops, message: str) -> None:
    with pytest.raises(NativeError, match=message):
        NativeExecutor(replace(tiny_network(TINY["F32"]), ops=ops), 1)


NETWORK = with_traits(tiny_network(TINY["F32"]), FAMILY)


def test_a_family_of_other_traits_has_as_many_instructions() -> None:
    assert [type(i) for i in lower(NETWORK.ops)] == [type(i) for i in lower(OPS)]
    assert [op for instruction in lower(NETWORK.ops) for op in _operations(instruction)] == list(NETWORK.ops)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (HeadNorm, {"x": "v"}, "no native instruction after NormLinear for HeadNorm"),
        (HeadNorm, {"heads": 1}, "layer 0: HeadNorm of q has 1 heads of 8, attention 3 of 8"),
        (RmsNorm, {"out": "q"}, "no native instruction after Attend for Linear, RmsNorm, Add"),
    ],
)
def test_norms_wired_otherwise_are_refused(kind: type, change: dict[str, object], message: str) -> None:
    at = next(i for i, op in enumerate(NETWORK.ops) if isinstance(op, kind) and not (kind is RmsNorm and op.x == "x"))
    ops = (*NETWORK.ops[:at], replace(NETWORK.ops[at], **change), *NETWORK.ops[at + 1 :])  # type: ignore[arg-type]
    with pytest.raises(LoweringError, match=message):
        lower(ops)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("convolution", {}, "the native program knows no convolution"),
        ("attention", {"window": 3}, "parameters that its kind does not read"),
        ("attention", {"group": 1}, "a group or layer that the KV pool lacks"),
        ("attention", {"layer": 2}, "a group or layer that the KV pool lacks"),
        ("attention", {"rotation": 1}, "a rotation that the program lacks"),
        ("attention", {"q_norm": (np.ones(9, np.float32), 1e-5)}, "a norm has another size"),
        ("linear", {"to": "qkv"}, "another number of matrices"),
        ("linear", {"to": "nowhere"}, "the native program knows no nowhere"),
        ("gated", {"activation": "relu"}, "the native program knows no relu"),
    ],
)
def test_the_program_refuses_instructions_that_do_not_fit(
    kind: str, parameters: dict[str, object], message: str
) -> None:
    program = NativeExecutor(tiny_network(TINY["F32"]), 1)._program
    with pytest.raises(ValueError, match=message):
        program.add(kind, parameters)


def test_biases_of_gate_and_up_are_refused_rather_than_left_out() -> None:
    at = first(Gated) - 1
    ops = (*OPS[:at], replace(OPS[at], bias="blk.0.ffn_up.bias"), *OPS[at + 1 :])  # type: ignore[arg-type]
    with pytest.raises(LoweringError, match="after LinearAdd for RmsNorm, Linear, Linear, Gated"):
        lower(ops)


def test_the_executor_refuses_what_lowering_does() -> None:
    with pytest.raises(NativeError, match="does not end with its logits"):
        NativeExecutor(replace(tiny_network(TINY["F32"]), ops=OPS[:-2]), 1)
