"""The numbers that fix a model's size: what memory sizing and cost arithmetic need, and nothing of its weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only transformer. All counts are per model, `*_dim` and `*_width` in elements."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    vocab: int
    context: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes one token position takes in the KV cache: 2 · layers · kv_heads · head_dim · element_bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes
