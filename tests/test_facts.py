"""The check values of docs/facts.md are what the formulae give."""

import re
from pathlib import Path

from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.spec.kv_layout import KvLayout
from twostep.spec.memory import MemoryDemand, plan_share, size_text
from twostep.spec.shape import ModelShape

PAGE = Path(__file__).parent.parent / "docs" / "facts.md"

LLAMA_2_7B = ModelShape("llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096)
LLAMA_3_8B = ModelShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
LLAMA_3_70B = ModelShape("llama", 80, 8192, 64, 8, 128, 28672, 128256, 8192)
SMOLLM2_135M = ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192)

PARAMETERS = 7e9
WEIGHTS_BYTES = 14e9
PEAKS = {"T4": (65e12, 300e9), "A10": (125e12, 600e9), "A10G": (70e12, 600e9), "A100": (312e12, 2039e9)}
"""FLOPS, bytes per second."""


def prefill_s(tokens: int, device: str) -> float:
    return 2 * PARAMETERS * tokens / PEAKS[device][0]


def decode_s(device: str) -> float:
    return WEIGHTS_BYTES / PEAKS[device][1]


def head_operations(tokens: int, head_dim: int) -> int:
    return 4 * head_dim * tokens**2 + 3 * tokens**2


def memory_values() -> dict[str, str]:
    shapes = {
        "Llama-2-7B": LLAMA_2_7B,
        "Llama-3-8B": LLAMA_3_8B,
        "Llama-3-70B": LLAMA_3_70B,
        "SmolLM2-135M": SMOLLM2_135M,
    }
    values = {f"KV bytes per token, {name}, fp16": f"{shape.kv_bytes_per_token()} B" for name, shape in shapes.items()}
    layout = KvLayout.full_attention(LLAMA_2_7B)
    demand = MemoryDemand(LLAMA_2_7B, layout, int(WEIGHTS_BYTES), step_tokens=0, logit_rows=0)
    plan = plan_share(demand, free_bytes=24 * 10**9, share=1)
    values["KV cache of 4096 tokens, Llama-2-7B, fp16"] = size_text(4096 * demand.kv_bytes_per_token)
    values["sequences of 4096 tokens in 24 GB beside 14 GB of weights"] = str(plan.full_length_sequences(4096))
    return values


def compute_values() -> dict[str, str]:
    head = head_operations(4096, 128)
    read_and_written = 8 * 4096**2 + 8 * 4096 * 128
    values = {
        "linear layers, prefill, 7B, N = 350, A10": f"{1000 * prefill_s(350, 'A10'):.3g} ms",
        "linear layers, prefill, 7B, N = 4096, A10": f"{1000 * prefill_s(4096, 'A10'):.3g} ms",
        "attention of one head in one layer, d = 128, N = 4096": f"{head:.2e} FLOP",
        "the same for 32 heads": f"{32 * head:.2e} FLOP",
        "the same for 32 layers, one prompt": f"{32 * 32 * head:.2e} FLOP",
        "arithmetic intensity of that head, unfused": f"{head / read_and_written:.1f} op/B",
    }
    for device in ("T4", "A10", "A100"):
        whole_s = prefill_s(350, device) + 149 * decode_s(device)
        values[f"decode step of one sequence, 7B fp16, {device}"] = f"{1000 * decode_s(device):.3g} ms"
        values[f"350 tokens in, 150 out, one sequence, {device}"] = f"{whole_s:.2f} s"
    for device in ("A10", "A10G", "A100"):
        flops, bandwidth = PEAKS[device]
        values[f"ridge point, {device}"] = f"{flops / bandwidth:.0f} op/B"
    return values


def table(heading: str) -> dict[str, str]:
    """First and last cell of each row below this heading."""
    [text] = re.findall(rf"^## {heading}\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1] for row in rows[1:]}


def test_memory_is_what_the_formulae_give() -> None:
    assert table("Memory") == memory_values()


def test_compute_is_what_the_formulae_give() -> None:
    assert table("Compute") == compute_values()


def test_peaks_are_those_that_the_page_names() -> None:
    named = re.findall(r"(A?\w+)(?:-80 SXM)? (\d+) TFLOPS, (\d+) GB/s", PAGE.read_text())
    assert {name: (float(flops) * 1e12, float(rate) * 1e9) for name, flops, rate in named} == PEAKS


def test_the_default_model_has_the_shape_of_the_page(default_model_path: Path) -> None:
    assert load_network(read_gguf(default_model_path)).shape == SMOLLM2_135M
