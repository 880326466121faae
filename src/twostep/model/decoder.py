"""What families of decoder-only transformers share in reading a file: sizes, checked tensors, refusals."""

from twostep.errors import ModelFileError
from twostep.model.gguf import GgufFile
from twostep.model.metadata import Metadata
from twostep.model.ops import Linear
from twostep.model.tensor import TensorType
from twostep.spec.shape import ModelShape

_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)

# Keys that change what is computed, in a way no operation of ours describes, unless they have one of these values.
_NEUTRAL: dict[str, tuple[bool | int | float | str, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scale_linear": (0, 1),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "expert_count": (0,),
}


def refuse_unsupported(metadata: Metadata, family: str) -> None:
    """Raises `ModelFileError` where a key asks for arithmetic that we would otherwise leave out silently."""
    for name, neutral in _NEUTRAL.items():
        key = f"{family}.{name}"
        value = metadata.get(key)
        if value is None or (isinstance(value, bool | int | float | str) and value in neutral):
            continue
        raise metadata.error(key, f"is {value!r:.60}; supported: {' or '.join(map(repr, neutral))}, or no such key")


def read_shape(file: GgufFile, family: str) -> ModelShape:
    """The sizes in `<family>.*`; the vocabulary is what the embedding has rows for."""
    metadata = file.metadata
    heads = metadata.positive(f"{family}.attention.head_count")
    kv_heads = metadata.positive(f"{family}.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise metadata.error(f"{family}.attention.head_count_kv", f"is {kv_heads}, which does not divide {heads} heads")
    width = metadata.positive(f"{family}.embedding_length")
    return ModelShape(
        family=family,
        layers=metadata.positive(f"{family}.block_count"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(metadata, family, width, heads),
        ffn_width=metadata.positive(f"{family}.feed_forward_length"),
        vocab=_rows(file, "token_embd.weight"),
        context=metadata.positive(f"{family}.context_length"),
    )


def _head_dim(metadata: Metadata, family: str, width: int, heads: int) -> int:
    """`key_length`, else width / heads; even, and the same for values and rotation: operations know one size."""
    key = f"{family}.attention.key_length"
    if key not in metadata and width % heads:
        raise metadata.error(f"{family}.embedding_length", f"is {width}, which {heads} heads do not divide")
    head_dim = metadata.positive(key, width // heads)
    if head_dim % 2:
        raise metadata.error(key, f"is {head_dim}; supported: even sizes")
    for name in ("attention.value_length", "rope.dimension_count"):
        other = metadata.positive(f"{family}.{name}", head_dim)
        if other != head_dim:
            raise metadata.error(f"{family}.{name}", f"is {other}; supported: the size of a head, {head_dim}")
    return head_dim


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelFileError(f"{file.path}: tensor {name!r} is missing")
    return file.tensors[name].shape[0]


class Weights:
    """Hands out names of a file's tensors, each checked to be there in the shape needed, and knows which are left."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._unused = dict.fromkeys(file.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def matrix(self, name: str, outputs: int, inputs: int) -> str:
        self._check(name, (outputs, inputs))
        return name

    def vector(self, name: str, length: int) -> str:
        """A norm's weight or a bias: never quantised."""
        self._check(name, (length,))
        kind = self._file.tensors[name].type
        if kind not in _FLOATS:
            raise self._error(name, f"is of type {kind.name}; supported for a vector: F32, F16, BF16")
        return name

    def linear(self, name: str, outputs: int, inputs: int, x: str, out: str, needs_bias: bool = False) -> Linear:
        """The operation of `<name>.weight`, with `<name>.bias` where the file has one or `needs_bias`."""
        bias = f"{name}.bias"
        has_bias = needs_bias or bias in self
        return Linear(
            weight=self.matrix(f"{name}.weight", outputs, inputs),
            bias=self.vector(bias, outputs) if has_bias else None,
            x=x,
            out=out,
        )

    def check_all_used(self, family: str) -> None:
        """A tensor nobody asked for means arithmetic that nobody would do: refuse the file rather than compute less."""
        for name in self._unused:
            raise self._error(name, f"has no place in family '{family}' as supported here")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self:
            raise self._error(name, f"is missing; needed with shape {shape}")
        found = self._file.tensors[name].shape
        if found != shape:
            raise self._error(name, f"has shape {found}, needs {shape}")
        self._unused.pop(name, None)

    def _error(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path}: tensor {name!r} {problem}")
