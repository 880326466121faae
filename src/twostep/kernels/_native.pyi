from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

class PackedSamplingParams: ...

def pack_sampling_params(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: Sequence[tuple[int, float]],
    seed: int,
    logprobs: int | None,
) -> PackedSamplingParams: ...

class NativeSampler:
    def __init__(self, vocab: int, threads: int) -> None: ...
    def sample(self, logits: NDArray[np.float32], rows: list[Any]) -> list[Any]: ...
