"""Runs in vLLM's Python, without Twostep: `hf_model.py MODEL.gguf FOLDER` converts a model for vLLM's CPU build.

That build reads no GGUF files, so the output is a transformers folder with bfloat16 weights.
"""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # type: ignore[import-not-found]


def main(source: Path, folder: Path) -> None:
    """Creates the folder atomically."""
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    unfinished = folder.with_name(folder.name + ".part")
    AutoTokenizer.from_pretrained(**place).save_pretrained(unfinished)
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=unpacked)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
