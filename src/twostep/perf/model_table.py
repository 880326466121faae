"""Models that nobody has to download: shapes by name from the shipped table, or from a `config.json` of Hugging Face.

Both state the same facts under other names. What the arithmetic of `spec` cannot describe (latent attention, state
spaces, layers that differ from each other) is refused by name, never approximated.
"""

import csv
import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from twostep.errors import InvalidParameterError, ModelFileError
from twostep.spec.model_spec import Experts, ModelSpec
from twostep.spec.number_types import NUMBER_TYPES, NumberType
from twostep.spec.shape import ModelShape

Facts = Mapping[str, Any]
"""Numbers, texts and truth values under the names of `models.csv`."""

DESCRIBED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "mimo",
    "minimax_m2", "gpt_oss", "phi", "phi3", "opt", "bloom", "gpt_neox",
}  # fmt: skip
"""Model types whose layers all have the same matrices, as `ModelSpec` states them."""
UNGATED = {"phi", "opt", "bloom", "gpt_neox"}
ALTERNATING = {"gpt_oss"}
"""Every second layer, from the first, has a window; the others see everything. Elsewhere all layers have it."""

_STORED = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}
_KEYS = {
    "model_type": ("model_type",),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "d_model": ("hidden_size", "n_embd"),
    "n_heads": ("num_attention_heads", "n_head"),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "d_ff": ("intermediate_size", "ffn_dim"),
    "vocab": ("vocab_size",),
    "max_pos": ("max_position_embeddings", "n_positions", "seq_length"),
    "tied_embeddings": ("tie_word_embeddings",),
    "n_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_tok": ("num_experts_per_tok", "num_experts_per_token"),
    "moe_d_ff": ("moe_intermediate_size",),
    "n_shared_experts": ("n_shared_experts",),
    "kv_lora_rank": ("kv_lora_rank",),
    "sliding_window": ("sliding_window",),
    "dtype": ("dtype", "torch_dtype"),
}
"""For each column of the table the keys of a `config.json` that state it."""


# --- by name ----------------------------------------------------------------------------------------------------------


@cache
def _table() -> dict[str, Facts]:
    text = files("twostep.perf").joinpath("data/models.csv").read_text("utf-8")
    return {row["model"]: row for row in csv.DictReader(text.splitlines())}


def short_name(name: str) -> str:
    """The alias of a model: its name without owner, in lower case, `meta-llama/Meta-Llama-3.1-8B` as `llama-3.1-8b`."""
    return name.rpartition("/")[2].lower().removeprefix("meta-")


@cache
def _aliases() -> dict[str, str]:
    return {short_name(name): name for name in _table()}


def model_names() -> list[str]:
    """The aliases of all models in the table whose shape can be computed with, sorted."""
    return sorted(alias for alias, name in _aliases().items() if _table()[name]["model_type"] in DESCRIBED)


def model_named(name: str) -> ModelSpec:
    """The model of this name or alias. Raises `InvalidParameterError` with the nearest names, or with what stands
    against a model that the table has."""
    full = name if name in _table() else _aliases().get(short_name(name))
    if full is None:
        near = get_close_matches(short_name(name), model_names(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        allowed = "give a name from the table, a .gguf file, or a config.json or the folder that has one"
        raise InvalidParameterError(
            f"unknown model {name!r}; {hint}{allowed}. Known: {', '.join(model_names())}", "model"
        )
    return _spec(full, _table()[full], lambda words: InvalidParameterError(f"model {full}: {words}", "model"))


# --- from a config.json -----------------------------------------------------------------------------------------------


def model_of_config(path: Path) -> ModelSpec:
    """The model that a `config.json`, or the folder it is in, describes. Raises `ModelFileError`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file}: is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFileError(f"{file}: has to hold a JSON object")
    nested = config.get("text_config")
    facts = _facts({**config, **nested} if isinstance(nested, dict) else config)
    return _spec(
        str(config.get("_name_or_path") or file.resolve().parent.name),
        facts,
        lambda words: ModelFileError(f"{file}: {words}"),
    )


def _facts(config: Facts) -> Facts:
    found = {column: next((config[key] for key in keys if key in config), None) for column, keys in _KEYS.items()}
    if config.get("use_sliding_window") is False:
        found["sliding_window"] = None
    mixed = ("first_k_dense_replace", "mlp_only_layers", "interleave_moe_layer_step")
    found["mixed"] = next((key for key in mixed if config.get(key)), None)
    found["layer_types"] = config.get("layer_types")
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    found["dtype"] = {"gptq": "int4", "awq": "int4"}.get(str(method), method) or found["dtype"]
    found["source"] = "config.json"
    return found


# --- from facts to a model --------------------------------------------------------------------------------------------

Refuse = Callable[[str], Exception]


def _spec(name: str, facts: Facts, refuse: Refuse) -> ModelSpec:
    family = str(facts.get("model_type") or "")
    if facts.get("kv_lora_rank"):
        raise refuse("it has latent attention (MLA), which twostep cannot compute with yet")
    if family not in DESCRIBED:
        raise refuse(f"architecture {family!r} is not described yet; described: {', '.join(sorted(DESCRIBED))}")
    if facts.get("mixed"):
        raise refuse(f"{facts['mixed']!r} says that its layers differ from each other, which is not described yet")
    shape = _shape(facts, family, refuse)
    stored = _stored(name, facts, refuse)
    return ModelSpec(
        name=name,
        shape=shape,
        windows=_windows(facts, shape, refuse),
        experts=_experts(facts, shape, refuse),
        gated=family not in UNGATED,
        tied=str(facts.get("tied_embeddings")) == "True",
        weight_type=stored,
        head_type=NUMBER_TYPES["bf16"] if stored.bytes < 2 else stored,  # quantised files keep the head wide
        kv_type=NUMBER_TYPES["bf16" if stored.name == "bf16" else "fp16"],
        source=str(facts.get("source") or ""),
    )


def _shape(facts: Facts, family: str, refuse: Refuse) -> ModelShape:
    width, heads = _count(facts, "d_model", refuse), _count(facts, "n_heads", refuse)
    kv_heads = _count(facts, "n_kv_heads", refuse, heads)
    if heads % kv_heads:
        raise refuse(f"{kv_heads} KV heads do not divide {heads} heads")
    return ModelShape(
        family=family,
        layers=_count(facts, "layers", refuse),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_count(facts, "head_dim", refuse, width // heads),
        ffn_width=_count(facts, "d_ff", refuse, 4 * width if family == "bloom" else None),
        vocab=_count(facts, "vocab", refuse),
        context=_count(facts, "max_pos", refuse),
    )


def _count(facts: Facts, column: str, refuse: Refuse, default: int | None = None) -> int:
    value = facts.get(column)
    if value in (None, "") and default is not None:
        return default
    try:
        number = float(value) if not isinstance(value, bool) and value is not None else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not isfinite(number) or number != int(number) or number < 1:
        named = f"{column} ({' or '.join(_KEYS[column])} in a config.json)"
        raise refuse(f"{named} is {value!r:.60}; it has to be a whole number of 1 or more")
    return int(number)


def _experts(facts: Facts, shape: ModelShape, refuse: Refuse) -> Experts | None:
    if facts.get("n_experts") in (None, "", 0):
        return None
    routed, active = _count(facts, "n_experts", refuse), _count(facts, "experts_per_tok", refuse)
    if active > routed:
        raise refuse(f"{active} experts a token of {routed} experts")
    shared = facts.get("n_shared_experts")
    count = 0 if shared in (None, "", 0) else _count(facts, "n_shared_experts", refuse)
    return Experts(routed, active, _count(facts, "moe_d_ff", refuse, shape.ffn_width), count)


def _windows(facts: Facts, shape: ModelShape, refuse: Refuse) -> tuple[int | None, ...]:
    """Windows as wide as the context count as none."""
    if facts.get("sliding_window") in (None, "", 0):
        return ()
    window = _count(facts, "sliding_window", refuse)
    if window >= shape.context:
        return ()
    kinds = facts.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != shape.layers or set(kinds) - {"sliding_attention", "full_attention"}:
            raise refuse("layer_types has to name sliding_attention or full_attention for each layer")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    step = 2 if shape.family in ALTERNATING else 1
    return tuple(None if layer % step else window for layer in range(shape.layers))


def _stored(name: str, facts: Facts, refuse: Refuse) -> NumberType:
    """How the weights are stored; the table keeps fp8 and NVFP4 in the model's name."""
    ending = name.lower()
    for mark, kind in (("nvfp4", "fp4"), ("-fp8", "fp8")):
        if mark in ending and facts.get("source") != "config.json":
            return NUMBER_TYPES[kind]
    stored = str(facts.get("dtype") or "bfloat16")
    kind = _STORED.get(stored, stored)
    if kind not in NUMBER_TYPES:
        raise refuse(f"weights of type {stored!r} are not known; known: {', '.join(NUMBER_TYPES)}")
    return NUMBER_TYPES[kind]
