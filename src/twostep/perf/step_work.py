"""Operations and bytes of a step, from the model and the step's shape: pure arithmetic, no hardware.

Formulae (docs/facts.md): a linear layer of P parameters does 2·P operations a row and reads its weights once a step;
attention does 4·d + 3 operations a query-key pair and head (two products of length d, and the softmax) and reads the KV
of each sequence once. Counted on one device without tensor parallelism.
"""

from collections.abc import Iterable
from typing import NamedTuple

from twostep.core.cost import StepShape
from twostep.spec.memory import kv_layer_bytes_per_token
from twostep.spec.model_spec import Matrix, ModelSpec
from twostep.spec.number_types import NumberType

ACTIVATION_BYTES = 2
"""Of one activation between layers: fp16 or bf16, as GPU engines keep them."""
LOGIT_BYTES = 4
SOFTMAX_OPERATIONS = 3
"""Per query-key pair and head: subtract the maximum, exponentiate, add."""
NORM_BYTES = 4
"""Of one weight of a norm, float32."""


class Work(NamedTuple):
    """What one kind of work needs. Bytes are memory traffic, each byte counted once, as if caches were perfect."""

    operations: float = 0.0
    """Multiplications and additions, each counted: a fused multiply-add is two."""
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Of all three kinds."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte; 0 without work."""
        return self.operations / self.bytes if self.bytes else 0.0


class StepWork(NamedTuple):
    """The work of one step, finer than `core.cost.Terms`: `linear` there is projections, feed-forward and, on machines
    that run it as kernels of its own, elementwise work."""

    projections: Work
    """Linear layers of attention: queries, keys, values, output."""
    feed_forward: Work
    elementwise: Work
    """Norms, residuals, rotation and activation, if each reads and writes memory; none on a CPU whose caches hold them.
    Their few operations are left out."""
    prefill_attention: Work
    decode_attention: Work
    logits: Work
    fixed: Work
    """Embedding rows, and the weights of the norms."""

    @property
    def linear(self) -> Work:
        """All linear layers but the output head."""
        return total((self.projections, self.feed_forward))

    @property
    def whole(self) -> Work:
        """Of the whole step."""
        return total(self)


def total(parts: Iterable[Work]) -> Work:
    """The sum of several kinds of work."""
    return Work(*(sum(column) for column in zip(Work(), *parts, strict=True)))


def step_work(model: ModelSpec, shape: StepShape) -> StepWork:
    """The work of a step of this shape. No part decreases when a slice of the step grows; a step without tokens has
    no work.

    In layers with a window, pairs and positions are bounded by what all rows could see at most, since a shape does not
    tell sequences apart: exact where all contexts are within the window or all beyond it.
    """
    return StepWork(
        _linear(model, model.attention_matrices, shape.tokens),
        _linear(model, model.feed_forward_matrices, shape.tokens),
        elementwise_work(model, shape.tokens),
        _prefill_attention(model, shape),
        _decode_attention(model, shape),
        _logits(model, shape.logit_rows),
        _fixed(model, shape.tokens),
    )


def matrix_work(matrix: Matrix, weight_type: NumberType, tokens: int) -> Work:
    """Of one linear layer for `tokens` rows: weights read once, rows in and out. Of experts, those expected in use."""
    rows = tokens * matrix.used
    return Work(
        2.0 * tokens * matrix.active_parameters,
        matrix.inputs * matrix.outputs * matrix.copies_read(tokens) * weight_type.bytes,
        0.0,
        float(rows * (matrix.inputs + matrix.outputs) * ACTIVATION_BYTES),
    )


def attention_operations(head_dim: int, pairs: float) -> float:
    """Of one head in one layer: 4·d for the two products, 3 for the softmax, per query-key pair."""
    return pairs * (4 * head_dim + SOFTMAX_OPERATIONS)


def _linear(model: ModelSpec, matrices: Iterable[Matrix], tokens: int) -> Work:
    layer = total(matrix_work(matrix, model.weight_type, tokens) for matrix in matrices)
    return Work(*(model.shape.layers * amount for amount in layer))


def elementwise_work(model: ModelSpec, tokens: int, devices: int = 1) -> Work:
    """Each of two norms reads and writes the row and the residual; rotation reads and writes queries and keys;
    activation reads what the up matrices gave and writes what the down matrices take. Of one of `devices` that share
    each layer: all of them compute the norms, each rotates its heads and activates its part."""
    shape = model.shape
    rotated = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    activated = sum(
        matrix.used * (matrix.outputs if matrix.name.endswith("up") else matrix.inputs)
        for matrix in model.feed_forward_matrices
        if matrix.name != "router"
    )
    values = shape.layers * tokens * (8 * shape.width + (rotated + activated) / devices)
    return Work(activation_bytes=values * ACTIVATION_BYTES)


def _prefill_attention(model: ModelSpec, shape: StepShape) -> Work:
    """Arithmetic on all pairs, one read of the KV that the slices see. The write of new KV counts with the reads."""
    rows = shape.tokens - shape.decodes
    pairs = kv_tokens = 0
    for window, layers in model.window_layers.items():
        seen = shape.prefill_pairs if window is None else min(shape.prefill_pairs, rows * window)
        beyond = shape.prefill_kv_tokens
        kept = beyond if window is None else min(beyond, rows + shape.prefills * window)
        pairs, kv_tokens = pairs + layers * seen, kv_tokens + layers * (kept + rows)
    return _attention(model, pairs, kv_tokens, rows)


def _decode_attention(model: ModelSpec, shape: StepShape) -> Work:
    """One pair per position of KV that is read, so that neither batch nor context changes the intensity."""
    pairs = sum(
        layers * (shape.decode_kv_tokens if window is None else min(shape.decode_kv_tokens, shape.decodes * window))
        for window, layers in model.window_layers.items()
    )
    return _attention(model, pairs, pairs, shape.decodes)


def _attention(model: ModelSpec, pairs: int, kv_tokens: int, rows: int) -> Work:
    """`pairs` and `kv_tokens` are sums over all layers; `rows` are queries read and results written in each."""
    sizes = model.shape
    return Work(
        sizes.heads * attention_operations(sizes.head_dim, pairs),
        0.0,
        kv_tokens * kv_layer_bytes_per_token(sizes, model.kv_type),
        2.0 * sizes.layers * rows * sizes.heads * sizes.head_dim * ACTIVATION_BYTES,
    )


def _logits(model: ModelSpec, rows: int) -> Work:
    """The output head, whose weights are read if at least one row wants logits."""
    if not rows:
        return Work()
    width, vocab = model.shape.width, model.shape.vocab
    traffic = rows * (width * ACTIVATION_BYTES + vocab * LOGIT_BYTES)
    return Work(2.0 * rows * model.head_parameters, model.head_parameters * model.head_type.bytes, 0.0, float(traffic))


def _fixed(model: ModelSpec, tokens: int) -> Work:
    if not tokens:
        return Work()
    width = model.shape.width
    norms = (2 * model.shape.layers + 1) * width * NORM_BYTES
    return Work(0.0, norms + tokens * width * model.head_type.bytes, 0.0, float(tokens * width * ACTIVATION_BYTES))
