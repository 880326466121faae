"""What becomes of fields of OpenAI's API, vLLM, llama.cpp and Ollama that are not served; docs/server.md is made of it.

Fields that are served are described in `server.openapi`. Everything else is unknown: ignored, and named in the log.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Would change the form or the meaning of the answer, so that a request with it gets 400."""

    allowed: tuple[object, ...] = ()
    """Values with which the answer is as it is here anyway; null always is one."""
    instead: str = ""
    """What to send or to do for the same, if there is something."""


@dataclass(frozen=True)
class Hint:
    """Does not change the form or the meaning of the answer; any value is accepted."""

    why: str


_OTHERS_OFF = "only a parameter of a field that is refused"
_NO_REASONING = "the models served here do not think before they answer"
_SCHEDULING = "the scheduler and the prefix cache decide; answers are the same"
_NOTHING_KEPT = "nothing is stored or reported"

OPENAI: dict[str, Refused | Hint] = {
    "audio": Refused(),
    "best_of": Refused((1,), "n gives several answers"),
    "function_call": Refused(("none", "auto"), "use tool_choice"),
    "functions": Refused(([],), "use tools"),
    "metadata": Hint(_NOTHING_KEPT),
    "modalities": Refused((["text"],)),
    "parallel_tool_calls": Hint("completions have no tools"),
    "prediction": Hint("a predicted text only makes answers faster elsewhere"),
    "prompt_cache_key": Hint(_SCHEDULING),
    "prompt_cache_retention": Hint(_SCHEDULING),
    "reasoning_effort": Hint("it goes to the chat template, and completions have none"),
    "safety_identifier": Hint(_NOTHING_KEPT),
    "service_tier": Hint("there is one tier; priority orders requests"),
    "store": Hint(_NOTHING_KEPT),
    "suffix": Refused(("",), "write the model's own tokens for filling in the middle into prompt"),
    "user": Hint(_NOTHING_KEPT),
    "verbosity": Hint("advice to models that were trained on it"),
    "web_search_options": Refused(),
    # of chats; completions leave them over
    "tool_choice": Refused(("none", "auto"), "use /v1/chat/completions"),
    "tools": Refused(([],), "use /v1/chat/completions"),
    "top_logprobs": Refused((0,), "in completions logprobs is the number"),
}
VLLM: dict[str, Refused | Hint] = {
    "allowed_token_ids": Refused(([],), "use structured_outputs, or logit_bias"),
    "bad_words": Refused(([],), "use logit_bias"),
    "chat_template": Refused((), "render the conversation and use /v1/completions"),
    "detokenize": Refused((True,), "return_token_ids adds the ids"),
    "documents": Refused(([],), "write them into a message"),
    "early_stopping": Refused((False,)),
    "ec_transfer_params": Refused(({},)),
    "guided_decoding_backend": Hint("there is one: llguidance"),
    "guided_whitespace_pattern": Refused((), 'put {"whitespace_pattern": ...} under "x-guidance" into the schema'),
    "include_reasoning": Refused((True,)),
    "kv_transfer_params": Refused(({},)),
    "length_penalty": Refused((1,)),
    "logits_processors": Refused(([],), "use logit_bias"),
    "logprob_token_ids": Refused(([],), "use logprobs or top_logprobs"),
    "media_io_kwargs": Hint("messages have text only"),
    "mm_processor_kwargs": Hint("messages have text only"),
    "prompt_embeds": Refused(([],)),
    "prompt_logprobs": Refused(),
    "repetition_detection": Refused((), "use repetition_penalty or max_tokens"),
    "request_id": Hint("answers have ids of the server, also as the header X-Request-Id"),
    "return_mm_kwargs": Hint("messages have text only"),
    "return_prompt_text": Refused((False,), "use /tokenize with return_token_strs"),
    "return_token_offsets": Refused((False,), "use /tokenize with return_token_strs"),
    "return_tokens_as_token_ids": Refused((False,), "return_token_ids adds the ids"),
    "routed_experts_prompt_start": Refused((0,)),
    "session_id": Hint(_SCHEDULING),
    "spaces_between_special_tokens": Refused((True,)),
    "stream_interval": Hint("it only sets how tokens are spread over chunks"),
    "structural_tag": Refused((), "use structured_outputs.grammar"),
    "thinking_token_budget": Hint(_NO_REASONING),
    "truncate_prompt_tokens": Refused((), "cut the prompt before it is sent"),
    "truncation_side": Hint(_OTHERS_OFF),
    "use_beam_search": Refused((False,), "n gives several answers"),
    "vllm_xargs": Refused(({},)),
    "watermarking": Refused((False,)),
}
LLAMA_CPP: dict[str, Refused | Hint] = {
    "adaptive_decay": Hint(_OTHERS_OFF),
    "adaptive_target": Refused((-1,)),
    "backend_sampling": Hint("where a token is chosen does not change it"),
    "cache_prompt": Hint(_SCHEDULING),
    "dry_allowed_length": Hint(_OTHERS_OFF),
    "dry_base": Hint(_OTHERS_OFF),
    "dry_multiplier": Refused((0,), "use repetition_penalty"),
    "dry_penalty_last_n": Hint(_OTHERS_OFF),
    "dry_sequence_breakers": Hint(_OTHERS_OFF),
    "dynatemp_exponent": Hint(_OTHERS_OFF),
    "dynatemp_range": Refused((0,), "use temperature"),
    "grammar_lazy": Refused((False,), "use tools"),
    "grammar_triggers": Refused(([],), "use tools"),
    "id_slot": Hint(_SCHEDULING),
    "image_data": Refused(([],)),
    "lora": Refused(([],)),
    "min_keep": Refused((0,)),
    "mirostat": Refused((0,), "use temperature, top_p or min_p"),
    "mirostat_eta": Hint(_OTHERS_OFF),
    "mirostat_tau": Hint(_OTHERS_OFF),
    "n_cache_reuse": Hint(_SCHEDULING),
    "n_cmpl": Refused((1,), "use n"),
    "n_discard": Hint("what does not fit the context is refused, never cut"),
    "n_indent": Refused((0,), "use structured_outputs.regex"),
    "n_keep": Hint("what does not fit the context is refused, never cut"),
    "parse_tool_calls": Refused((True,), 'tool_choice "none" leaves the text as it is'),
    "penalize_nl": Refused((False,), "use logit_bias"),
    "post_sampling_probs": Refused((False,)),
    "preserved_tokens": Refused(([],), "skip_special_tokens false shows all"),
    "reasoning_budget_tokens": Hint(_NO_REASONING),
    "reasoning_format": Refused(("none", "auto")),
    "response_fields": Refused(([],)),
    "return_progress": Refused((False,), "timings are in the last chunk"),
    "return_tokens": Refused((False,), "use return_token_ids"),
    "samplers": Refused(),
    "speculative.n_max": Hint("speculation does not change answers"),
    "speculative.n_min": Hint("speculation does not change answers"),
    "speculative.p_min": Hint("speculation does not change answers"),
    "sse_ping_interval": Hint("comments in a stream are not part of the answer"),
    "system_prompt": Refused(("",), "send a message with the role system"),
    "t_max_predict_ms": Refused((-1, 0), "timeout_s limits the whole answer"),
    "t_max_prompt_ms": Refused((-1, 0), "timeout_s limits the whole answer"),
    "tfs_z": Refused((1,), "use top_p or min_p"),
    "thinking_budget_tokens": Hint(_NO_REASONING),
    "timings_per_token": Hint("timings are in the last chunk"),
    "top_n_sigma": Refused((-1, 0), "use top_p or min_p"),
    "typical_p": Refused((1,), "use top_p or min_p"),
    "verbose": Refused((False,), "GET /v1/requests/ID tells of a request"),
    "xtc_probability": Refused((0,), "use top_p or min_p"),
    "xtc_threshold": Hint(_OTHERS_OFF),
}
OLLAMA_AND_OTHERS: dict[str, Refused | Hint] = {
    "_debug_render_only": Refused((False,), "use /tokenize"),
    "context": Refused(([],), "send the whole conversation"),
    "ebnf": Refused((), "use grammar or guided_grammar"),
    "enable_thinking": Refused((False,), "use reasoning_effort or chat_template_kwargs"),
    "format": Refused(("",), "use response_format"),
    "images": Refused(([],)),
    "keep_alive": Hint("the model stays until the server ends"),
    "no_stop_trim": Refused((False,), "use include_stop_str_in_output"),
    "num_ctx": Hint("--max-model-len of the server sets the context; what does not fit is refused, never cut"),
    "options": Refused(({},), "give each option as a field, by OpenAI's name"),
    "raw": Refused((False,), "use /v1/completions"),
    "reasoning": Hint("it goes to the chat template, and completions have none"),
    "regex": Refused((), "use guided_regex"),
    "stop_regex": Refused(([], ""), "use stop"),
    "system": Refused(("",), "send a message with the role system"),
    "template": Refused(("",), "render the conversation and use /v1/completions"),
    "think": Refused((False,), "use reasoning_effort"),
}
ORIGINS = {"OpenAI": OPENAI, "vLLM": VLLM, "llama.cpp": LLAMA_CPP, "Ollama and others": OLLAMA_AND_OTHERS}
KNOWN = {name: field for fields in ORIGINS.values() for name, field in fields.items()}
"""By name. What an endpoint serves it takes before it looks here."""
