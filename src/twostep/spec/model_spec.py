"""A model as arithmetic sees it: its matrices, how many of them a token uses, and how its numbers are stored.

`ModelShape` is the part that the engine runs; `ModelSpec` adds what other models have (experts, windows, plain
feed-forward layers) and the types of weights and KV cache. Pure: files and tables are read elsewhere.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from twostep.spec.number_types import FP16, NumberType
from twostep.spec.shape import ModelShape


class Experts(NamedTuple):
    """Feed-forward layers of which each token uses `active` of `routed`, chosen by a router, and all `shared` ones."""

    routed: int
    active: int
    width: int
    shared: int = 0


class Matrix(NamedTuple):
    """A linear layer that occurs in every layer of the model. `copies`: how many of the kind one layer stores."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1
    """Of the copies, how many one token is multiplied with."""

    @property
    def parameters(self) -> int:
        """Of all copies in one layer."""
        return self.inputs * self.outputs * self.copies

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with, in one layer."""
        return self.inputs * self.outputs * self.used

    def copies_read(self, tokens: int) -> float:
        """Expected number of different copies that `tokens` tokens use: n·(1 - (1 - k/n)^tokens), routed evenly.

        Real routers prefer some experts, so that this is an upper estimate.
        """
        return self.copies * (1 - (1 - self.used / self.copies) ** tokens)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with full or windowed attention. Raises `ValueError` for one that cannot be."""

    name: str
    shape: ModelShape
    windows: tuple[int | None, ...] = ()
    """By layer: the positions that a token sees, its own included; None: all. Empty: all layers see all positions."""
    experts: Experts | None = None
    gated: bool = True
    """Feed-forward layers have a gate matrix (SwiGLU), three matrices instead of two."""
    tied: bool = False
    """The output head is the embedding matrix and not stored a second time."""
    weight_type: NumberType = FP16
    head_type: NumberType = FP16
    kv_type: NumberType = FP16
    source: str = ""

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.shape.layers:
            raise ValueError(f"{self.name}: {len(self.windows)} windows for {self.shape.layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"{self.name}: a window has at least 1 position")
        experts = self.experts
        if experts is not None and not 1 <= experts.active <= experts.routed:
            raise ValueError(f"{self.name}: {experts.active} active experts of {experts.routed}")

    def with_types(self, weights: NumberType | None = None, kv: NumberType | None = None) -> Self:
        """The same model with its numbers stored otherwise; None leaves a type as it is."""
        return replace(
            self,
            weight_type=weights or self.weight_type,
            head_type=weights or self.head_type,
            kv_type=kv or self.kv_type,
        )

    @cached_property
    def attention_matrices(self) -> tuple[Matrix, ...]:
        """Of one layer: queries, keys and values in one, and the output projection."""
        shape = self.shape
        heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return Matrix("qkv", shape.width, heads + 2 * kv), Matrix("output", heads, shape.width)

    @cached_property
    def feed_forward_matrices(self) -> tuple[Matrix, ...]:
        """Of one layer; with experts, the router, the routed and the shared ones."""
        width, experts = self.shape.width, self.experts
        if experts is None:
            return self._feed_forward("", self.shape.ffn_width, 1, 1)
        router = Matrix("router", width, experts.routed)
        routed = self._feed_forward("expert ", experts.width, experts.routed, experts.active)
        shared = self._feed_forward("shared ", experts.width, experts.shared, experts.shared) if experts.shared else ()
        return router, *routed, *shared

    def _feed_forward(self, prefix: str, inner: int, copies: int, used: int) -> tuple[Matrix, ...]:
        width, up = self.shape.width, (2 if self.gated else 1) * inner
        return (
            Matrix(f"{prefix}up", width, up, copies, used),
            Matrix(f"{prefix}down", inner, width, copies, used),
        )

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """All linear layers of one layer of the model."""
        return *self.attention_matrices, *self.feed_forward_matrices

    @property
    def linear_parameters(self) -> int:
        """Of the linear layers of all layers, without embedding and output head."""
        return self.shape.layers * sum(matrix.parameters for matrix in self.matrices)

    @property
    def head_parameters(self) -> int:
        """Of the output head, which is as large as the embedding."""
        return self.shape.vocab * self.shape.width

    @property
    def parameters(self) -> int:
        """Of embedding, linear layers and output head; norms and biases, less than 0.1 %, are left out."""
        return self.linear_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with: linear layers, of experts the active ones, and output head."""
        layer = sum(matrix.active_parameters for matrix in self.matrices)
        return self.shape.layers * layer + self.head_parameters

    @cached_property
    def layer_windows(self) -> tuple[int | None, ...]:
        """By layer, whether or not `windows` was given."""
        return self.windows or (None,) * self.shape.layers

    @cached_property
    def window_layers(self) -> Mapping[int | None, int]:
        """How many layers have each window."""
        return Counter(self.layer_windows)
