"""Writes the golden files: what Hugging Face transformers computes, in float32, from the weights of our GGUF files.

    python tests/oracle/make_golden.py MODEL.gguf tests/oracle/golden/NAME.npz

Shares no code with Twostep: the `gguf` package reads and dequantises, transformers tokenises and computes. Needs torch,
transformers and gguf.

A golden file holds, for each prompt length L:

    ids_L         (L,)      prompt tokens
    positions_L   (P,)      the positions looked at: the last eight and some spread before them
    top_ids_L     (P, 512)  the likeliest next tokens after each of those, likeliest first
    top_logp_L    (P, 512)  their log-probabilities, float32
    greedy_L      (32,)     the continuation at temperature 0, for some L

and `perplexity`: exp of the mean of -log p(ids[i+1] | ids[..i]) over the longest prompt; and `about`: JSON, how it was
made.

The KL divergence that tests compute from this takes the tokens outside the 512 as one outcome with the mass that is
left, r = 1 - sum p in the golden file and r' = 1 - sum q, over the same tokens, in what is tested:
    sum over top of p·(log p - log q)  +  r·(log r - log r')
It never exceeds the full KL, and misses only how q distributes the rest (about a tenth of the mass).
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SONNETS = Path(__file__).parents[1] / "data" / "sonnets.txt"
FIRST_SONNET = {1: 1, 2: 2, 15: 3, 16: 4, 17: 5, 100: 6, 500: 7, 1500: 0}
"""Prompt length in tokens: the sonnet that the prompt starts with."""
STORY_LENGTHS = (1, 2, 15, 16, 17, 100, 500)
GREEDY_LENGTHS = (1, 16, 17, 100, 500)
GREEDY_TOKENS = 32
TOP = 512

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a golden file from a GGUF file")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    model = load_model(gguf.GGUFReader(arguments.model))
    prompts = story_prompts(model) if model.config.vocab_size == 512 else sonnet_prompts(arguments.model)
    with torch.inference_mode():
        golden = dict(golden_arrays(model, prompts))
    golden["about"] = np.array(json.dumps(about(arguments.model)))
    np.savez_compressed(arguments.out, **golden)


def about(path: Path) -> dict[str, str]:
    return {
        "model_file": path.name,
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "gguf": version("gguf"),
    }


def load_model(reader: gguf.GGUFReader) -> PreTrainedModel:
    """The transformers model with every parameter set from the file, dequantised to float32."""
    names = {tensor.name for tensor in reader.tensors}
    config = make_config(reader, tied="output.weight" not in names)
    model = FAMILIES[config.model_type][1](config).eval()
    missing = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            missing.pop(hf_name(tensor.name)).copy_(torch.tensor(unpermute(tensor.name, values, config)))
    if missing:
        raise SystemExit(f"the file sets no value for {sorted(missing)}")
    return model


def make_config(reader: gguf.GGUFReader, tied: bool) -> Any:
    family = reader.fields["general.architecture"].contents()

    def get(key: str) -> Any:
        return reader.fields[f"{family}.{key}"].contents()

    return FAMILIES[family][0](
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )


def hf_name(name: str) -> str:
    if name == "output.weight":
        return "lm_head.weight"
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{kind}"


def unpermute(name: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """Undoes what llama.cpp's converter did to Q and K of the Llama family: rotary pairs side by side instead of half a
    head apart."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return values
    pairs = values.reshape(heads, -1, 2, values.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def sonnet_prompts(path: Path) -> dict[int, list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    sonnets = SONNETS.read_text().split("\n\n")
    texts = {length: "\n\n".join(sonnets[first:]) for length, first in FIRST_SONNET.items()}
    return {n: tokenizer.encode(text, add_special_tokens=False)[:n] for n, text in texts.items()}


def story_prompts(model: PreTrainedModel) -> dict[int, list[int]]:
    """Beginnings of one story that the model tells (token 1 begins it), sampled so that it does not repeat itself."""
    torch.manual_seed(0)
    longest = max(STORY_LENGTHS)
    story = model.generate(torch.tensor([[1]]), do_sample=True, max_length=longest, min_length=longest)[0].tolist()
    return {length: story[:length] for length in STORY_LENGTHS}


def golden_arrays(model: PreTrainedModel, prompts: dict[int, list[int]]) -> Iterator[tuple[str, NDArray[Any]]]:
    for length, ids in prompts.items():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)
        positions = chosen_positions(length)
        top = logp[positions].topk(min(TOP, logp.shape[-1]))
        yield f"ids_{length}", np.array(ids, np.int32)
        yield f"positions_{length}", np.array(positions, np.int32)
        yield f"top_ids_{length}", top.indices.numpy().astype(np.int32)
        yield f"top_logp_{length}", top.values.numpy()
        if length in GREEDY_LENGTHS:
            yield f"greedy_{length}", greedy(model, ids)
        if length == max(prompts):
            chosen = logp[:-1].double().gather(1, torch.tensor(ids[1:])[:, None])
            yield "perplexity", np.array(torch.exp(-chosen.mean()).item())


def chosen_positions(length: int) -> list[int]:
    last = range(max(0, length - 8), length)
    spread = range(0, length, max(1, length // 10)) if length > 17 else ()
    return sorted({*last, *spread})


def greedy(model: PreTrainedModel, ids: list[int]) -> NDArray[np.int32]:
    out = list(ids)
    cache = transformers.DynamicCache()
    step = ids
    for _ in range(GREEDY_TOKENS):
        logits = model(torch.tensor([step]), cache=cache, use_cache=True).logits
        step = [int(logits[0, -1].argmax())]
        out += step
    return np.array(out[len(ids) :], np.int32)


if __name__ == "__main__":
    main()
