"""Defaults for three kinds of traffic. A preset sets nothing else: whatever a user says goes before it."""

from collections.abc import Mapping
from typing import Any

DEFAULT_PRESET = "chat"

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Short prompts, many turns, latency felt: a steady stream for a moderate number of people.
    "chat": {
        "enable_prefix_caching": True,
        "chunking": "time=50",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
    },
    # Long prompts over shared documents, short answers. Where nothing decodes, the time budget gives way to its
    # ceiling, and a step may be wide.
    "rag": {
        "enable_prefix_caching": True,
        "chunking": "time=100",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
    },
    # Throughput only: nobody watches a stream. Kernels are at full speed from some hundred tokens a step; wider steps
    # than these would only make whoever leaves or asks for a sign of life wait.
    "batch": {
        "enable_prefix_caching": True,
        "chunking": "tokens=1024",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 1024,
    },
}
