"""Files become networks: the right list of operations, or a refusal that names what is missing or unsupported."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from support.gguf_writer import NewTensor, Value, f32, write_gguf

from twostep.errors import ModelFileError
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.model.loaded import open_model
from twostep.model.network import Network
from twostep.model.ops import Add, Attention, Embed, Gated, Linear, Logits, RmsNorm, Rope
from twostep.spec.shape import ModelShape

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"
WIDTH, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 32, 4, 2, 24, 10, 2
HEAD, KV_WIDTH = WIDTH // HEADS, KV_HEADS * WIDTH // HEADS

Loaded = Callable[..., Network]


def metadata(family: str) -> dict[str, Value]:
    return {
        "general.architecture": family,
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": 64,
        f"{family}.embedding_length": WIDTH,
        f"{family}.feed_forward_length": FFN,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 0.5,
        f"{family}.rope.freq_base": 5000.0,
    }


def shapes(family: str) -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_norm.weight": (WIDTH,), "attn_q.weight": (WIDTH, WIDTH), "attn_k.weight": (KV_WIDTH, WIDTH),
        "attn_v.weight": (KV_WIDTH, WIDTH), "attn_output.weight": (WIDTH, WIDTH), "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (FFN, WIDTH), "ffn_up.weight": (FFN, WIDTH), "ffn_down.weight": (WIDTH, FFN),
    }  # fmt: skip
    if family == "qwen2":
        layer |= {"attn_q.bias": (WIDTH,), "attn_k.bias": (KV_WIDTH,), "attn_v.bias": (KV_WIDTH,)}
    layers = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (VOCAB, WIDTH), **layers, "output_norm.weight": (WIDTH,)}


def tensors(shapes: dict[str, tuple[int, ...]]) -> Iterable[NewTensor]:
    return [f32(name, np.zeros(shape, np.float32)) for name, shape in shapes.items()]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """Loads a small sound model of a family after changes: keys and shapes to set, or to leave out where None."""

    def load(family: str, keys: dict[str, Value | None] | None = None, **changes: tuple[int, ...] | None) -> Network:
        values = metadata(family) | (keys or {})
        named = shapes(family) | {name.replace("__", "."): shape for name, shape in changes.items()}
        path = write_gguf(
            tmp_path / "model.gguf",
            {key: value for key, value in values.items() if value is not None},
            tensors({name: shape for name, shape in named.items() if shape is not None}),
        )
        return load_network(read_gguf(path))

    return load


def test_llama_is_this_list(loaded: Loaded) -> None:
    network = loaded("llama")
    assert network.shape == ModelShape("llama", LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCAB, 64)
    assert network.ops[0] == Embed("token_embd.weight", "x")
    assert network.ops[1:17] == (
        RmsNorm("blk.0.attn_norm.weight", 0.5, "x", "h"),
        Linear("blk.0.attn_q.weight", None, "h", "q"),
        Linear("blk.0.attn_k.weight", None, "h", "k"),
        Linear("blk.0.attn_v.weight", None, "h", "v"),
        Rope("q", HEADS, HEAD, 5000.0, "interleaved"),
        Rope("k", KV_HEADS, HEAD, 5000.0, "interleaved"),
        Attention(0, HEADS, KV_HEADS, HEAD, "q", "k", "v", "a"),
        Linear("blk.0.attn_output.weight", None, "a", "h"),
        Add("h", "x"),
        RmsNorm("blk.0.ffn_norm.weight", 0.5, "x", "h"),
        Linear("blk.0.ffn_gate.weight", None, "h", "g"),
        Linear("blk.0.ffn_up.weight", None, "h", "u"),
        Gated("g", "u", "g"),
        Linear("blk.0.ffn_down.weight", None, "g", "h"),
        Add("h", "x"),
        RmsNorm("blk.1.attn_norm.weight", 0.5, "x", "h"),
    )
    assert network.ops[-2:] == (RmsNorm("output_norm.weight", 0.5, "x", "h"), Logits("token_embd.weight", "h"))
    assert len(network.ops) == 1 + 15 * LAYERS + 2


def test_qwen2_differs_in_rotation_and_biases(loaded: Loaded) -> None:
    ops = loaded("qwen2").ops
    assert [op.bias for op in ops if isinstance(op, Linear)][:4] == [
        "blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias", None,
    ]  # fmt: skip
    assert {op.style for op in ops if isinstance(op, Rope)} == {"halves"}


def test_head_of_its_own_is_used(loaded: Loaded) -> None:
    network = loaded("llama", output__weight=(VOCAB, WIDTH))
    assert network.ops[-1] == Logits("output.weight", "h")


def test_bias_that_the_file_has_is_used(loaded: Loaded) -> None:
    network = loaded("llama", **{"blk.1.attn_output.bias": (WIDTH,)})
    assert Linear("blk.1.attn_output.weight", "blk.1.attn_output.bias", "a", "h") in network.ops


def test_defaults_of_keys_that_may_be_missing(loaded: Loaded) -> None:
    keys = {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None}
    wide = {f"blk.{i}.attn_{part}.weight": (WIDTH, WIDTH) for i in range(LAYERS) for part in "kv"}
    network = loaded("llama", keys, **wide)
    assert network.shape.kv_heads == HEADS
    assert {op.base for op in network.ops if isinstance(op, Rope)} == {10000.0}


def test_heads_may_be_wider_than_their_share(loaded: Loaded) -> None:
    keys = {"llama.attention.key_length": 16, "llama.attention.value_length": 16, "llama.rope.dimension_count": 16}
    changed = {}
    for i in range(LAYERS):
        changed |= {f"blk.{i}.attn_q.weight": (64, WIDTH), f"blk.{i}.attn_output.weight": (WIDTH, 64)}
        changed |= {f"blk.{i}.attn_{part}.weight": (32, WIDTH) for part in "kv"}
    assert loaded("llama", keys, **changed).shape.head_dim == 16


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama, qwen2"),
        ({"general.architecture": None}, "'general.architecture' is missing"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": 0}, "'llama.block_count' is 0"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama.block_count": 1}, "tensor 'blk.1.attn_norm.weight' has no place"),
        ({"llama.attention.head_count_kv": 3}, "is 3, which does not divide 4 heads"),
        ({"llama.attention.head_count_kv": np.array([2, 2])}, "needs a whole number"),
        ({"llama.attention.head_count": 3, "llama.attention.head_count_kv": 3}, "is 32, which 3 heads do not divide"),
        ({"llama.attention.key_length": 3}, "'llama.attention.key_length' is 3; supported: even"),
        ({"llama.attention.value_length": 4}, "'llama.attention.value_length' is 4; supported: the size of a head, 8"),
        ({"llama.rope.dimension_count": 2}, "'llama.rope.dimension_count' is 2; supported: the size of a head, 8"),
        ({"llama.rope.freq_base": 0.0}, "'llama.rope.freq_base' is 0.0, needs a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "'llama.attention.layer_norm_rms_epsilon' is missing"),
        ({"llama.rope.scaling.type": "yarn"}, "'llama.rope.scaling.type' is 'yarn'; supported: 'none'"),
        ({"llama.rope.scaling.factor": 8.0}, "'llama.rope.scaling.factor' is 8.0; supported: 0 or 1"),
        ({"llama.attention.sliding_window": 4096}, "'llama.attention.sliding_window' is 4096"),
        ({"llama.expert_count": 8}, "'llama.expert_count' is 8"),
    ],
)
def test_unsound_or_unsupported_key_is_refused(loaded: Loaded, keys: dict[str, Value | None], named: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        loaded("llama", keys)
    assert named in str(caught.value)


def test_neutral_keys_are_accepted(loaded: Loaded) -> None:
    neutral = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0, "attention.causal": True}
    assert loaded("llama", {f"llama.{key}": value for key, value in neutral.items()}).ops


@pytest.mark.parametrize("name", sorted(shapes("qwen2")))
def test_every_tensor_is_needed_in_its_shape(loaded: Loaded, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"tensor '{name}' is missing"):
        loaded("qwen2", **{name: None})
    *rest, last = shapes("qwen2")[name]
    with pytest.raises(ModelFileError, match=rf"tensor '{name}' has shape .*, needs "):
        loaded("qwen2", **{name: (*rest, last + 1)})


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q_norm.weight", "blk.2.attn_q.weight"])
def test_tensor_without_a_place_is_refused(loaded: Loaded, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"tensor '{name}' has no place in family 'llama'"):
        loaded("llama", **{name: (4,)})


def test_quantised_vector_is_refused(tmp_path: Path) -> None:
    norm = NewTensor("blk.0.attn_norm.weight", 8, (WIDTH,), bytes(34))
    others = [tensor for tensor in tensors(shapes("llama")) if tensor.name != norm.name]
    path = write_gguf(tmp_path / "model.gguf", metadata("llama"), [*others, norm])
    with pytest.raises(ModelFileError, match=r"attn_norm.weight' is of type Q8_0; supported for a vector: F32, F16"):
        load_network(read_gguf(path))


def test_stories_is_a_llama() -> None:
    model = open_model(STORIES)
    assert model.network.shape == ModelShape("llama", 5, 64, 8, 4, 8, 172, 512, 512)
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.model' is 'llama'; supported: 'gpt2'"):
        _ = model.tokenizer
    with pytest.raises(ModelFileError, match=r"tokenizer.chat_template' is missing"):
        _ = model.template


def test_default_model(default_model_path: Path) -> None:
    model = open_model(default_model_path)
    assert model.network.shape == ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192)
    assert model.network.ops[-1] == Logits("token_embd.weight", "h")
    counts = Counter(type(op) for op in model.network.ops)
    assert (counts[Linear], counts[Attention], counts[Rope]) == (7 * 30, 30, 60)
    assert model.tokenizer.vocab_size == 49152


@pytest.mark.models
def test_qwen(model_path: Callable[[str], Path]) -> None:
    small = open_model(model_path("qwen2.5-coder-0.5b")).network
    assert small.shape == ModelShape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768)
    assert small.ops[-1] == Logits("output.weight", "h")
    assert open_model(model_path("qwen2.5-coder-1.5b")).network.shape.head_dim == 128
