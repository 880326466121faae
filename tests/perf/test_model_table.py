"""Models by name and from a `config.json`: parameters are the published ones, and what is not described is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from twostep.errors import InvalidParameterError, ModelFileError
from twostep.model.families import load_network
from twostep.model.gguf import read_gguf
from twostep.perf.model_table import model_named, model_names, model_of_config
from twostep.spec.memory import sequence_kv_bytes, weights_bytes

STORIES = Path(__file__).parent.parent / "data" / "stories260k.gguf"

PUBLISHED = {
    # billions of parameters, of which active for a token (embedding included where the model card does)
    "llama-2-7b": (6.74, 6.74), "llama-2-70b": (69.0, 69.0),
    "llama-3-8b": (8.03, 8.03), "llama-3.1-405b": (405.9, 405.9),
    "mistral-7b-v0.1": (7.24, 7.24), "mixtral-8x7b-v0.1": (46.7, 12.9), "mixtral-8x22b-v0.1": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22), "gpt-oss-120b": (117, 5.1), "gpt-oss-20b": (20.9, 3.6),
    "minimax-m2.5": (230, 10), "qwen2.5-7b": (7.62, 7.62), "smollm2-135m": (0.135, 0.135), "bloom": (176, 176),
    "phi-2": (2.78, 2.78), "llama-3.2-1b": (1.24, 1.24), "codellama-34b": (33.7, 33.7),
    "qwen3-coder-480b-a35b-instruct": (480, 35),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    model, (all_of_them, active) = model_named(name), PUBLISHED[name]
    assert model.parameters / 1e9 == pytest.approx(all_of_them, rel=0.012)
    embedding = 0 if model.tied else model.head_parameters
    low, high = model.active_parameters / 1e9, (model.active_parameters + embedding) / 1e9
    assert 0.96 * low <= active <= 1.04 * high


def test_every_name_that_is_offered_can_be_used() -> None:
    names = model_names()
    assert len(names) > 40
    assert all(model_named(name).parameters > 1e8 for name in names)


def test_names_are_found_with_owner_in_any_case_and_short() -> None:
    names = ("llama-3.1-8b", "Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B")
    assert {model_named(name).name for name in names} == {"meta-llama/Meta-Llama-3.1-8B"}


def test_types_are_those_of_the_release() -> None:
    assert model_named("llama-2-7b").weight_type.name == "fp16"
    assert model_named("llama-3.1-70b-instruct-fp8").weight_type.name == "fp8"
    assert model_named("qwen3-235b-a22b-nvfp4").weight_type.name == "fp4"
    assert model_named("qwen3-235b-a22b-nvfp4").head_type.name == "bf16"


def test_windows_are_kept_by_the_layers_that_have_them() -> None:
    assert model_named("mistral-7b-v0.1").windows == (4096,) * 32
    assert model_named("gpt-oss-20b").windows == (128, None) * 12
    assert model_named("mimo-7b-base").windows == ()
    full, half = model_named("mistral-7b-v0.3"), model_named("mistral-7b-v0.1")
    assert sequence_kv_bytes(half, 8192) == sequence_kv_bytes(full, 4096) == sequence_kv_bytes(full, 8192) / 2


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("deepseek-v3", "latent attention"),
        ("qwen3.5-27b", "architecture 'qwen3_5_text' is not described"),
        ("nemotron-h-56b-base-8k", "is not described"),
        ("llama-2-7", "did you mean llama-2-7b"),
        ("", "Known: bloom"),
    ],
)
def test_what_cannot_be_computed_with_is_said(name: str, complaint: str) -> None:
    with pytest.raises(InvalidParameterError, match=complaint):
        model_named(name)


# --- config.json ------------------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip


def config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in (CONFIG | changes).items() if value != "missing"}))
    return path


def test_a_config_and_the_table_describe_the_same_model(tmp_path: Path) -> None:
    found, known = model_of_config(config(tmp_path)), model_named("qwen3-30b-a3b")
    assert (found.shape, found.experts, found.tied, found.weight_type) == (
        known.shape, known.experts, known.tied, known.weight_type,
    )  # fmt: skip
    assert found == model_of_config(tmp_path)
    assert found.name == tmp_path.name


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": CONFIG}))
    assert model_of_config(path).shape.layers == 48


def test_quantised_weights_and_windows_by_layer_are_read(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 24
    path = config(tmp_path, quantization_config={"quant_method": "awq"}, sliding_window=512, layer_types=kinds)
    model = model_of_config(path)
    assert model.weight_type.name == "int4"
    assert model.windows == (512, None) * 24
    assert model_of_config(config(tmp_path, sliding_window=512, use_sliding_window=False)).windows == ()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": "missing"}, r"d_model \(hidden_size or n_embd in a config.json\) is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* is 0; it has to be a whole number of 1 or more"),
        ({"num_hidden_layers": 1.5}, "is 1.5"),
        ({"num_hidden_layers": True}, "is True"),
        ({"num_hidden_layers": [1]}, "is .1."),
        ({"num_key_value_heads": 5}, "5 KV heads do not divide 32 heads"),
        ({"num_experts_per_tok": 200}, "200 experts a token of 128"),
        ({"model_type": "mamba"}, "'mamba' is not described"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"mlp_only_layers": [0]}, "'mlp_only_layers' says that its layers differ"),
        ({"torch_dtype": "int2"}, "type 'int2' are not known"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types has to name"),
    ],
)
def test_a_config_that_cannot_be_used_names_key_and_value(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelFileError, match=complaint):
        model_of_config(config(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\ufeff{}"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFileError):
        model_of_config(tmp_path)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def test_a_weight_file_describes_itself() -> None:
    file = read_gguf(STORIES)
    network = load_network(file)
    model = network.model_spec("stories260k")
    assert model.shape == network.shape
    assert (model.tied, model.weight_type.name) == ("output.weight" not in file.tensors, "fp32")
    matrices = sum(tensor.nbytes for tensor in file.tensors.values() if len(tensor.shape) == 2)
    assert weights_bytes(model) == matrices
