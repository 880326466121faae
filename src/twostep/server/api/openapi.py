"""The API description: `/openapi.json`, and `/docs`, the same as a page that loads nothing from the network."""

from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from twostep.config.effective import budget_schema, config_schema
from twostep.engine.params import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOPS
from twostep.engine.text.conversation import ROLES
from twostep.kernels.sampling import MAX_LOGPROBS
from twostep.openai_api.api_request import REPETITION_PENALTIES
from twostep.openai_api.prompt_tokens import MAX_PROMPTS
from twostep.server.api.request_history import DEFAULT_LIMIT, MAX_LIMIT
from twostep.server.http.replies import JsonReply

Schema = dict[str, Any]


def _nullable(type_: str, **limits: Any) -> Schema:
    """Null counts as absent for every field."""
    return {"type": [type_, "null"], **limits}


def _number(least: float, most: float, default: float) -> Schema:
    return _nullable("number", minimum=least, maximum=most, default=default)


_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SWITCH = _nullable("boolean")

_SAMPLING: Schema = {
    "model": _nullable("string", description="a name from /v1/models; default: the served model"),
    "stream": _nullable("boolean", default=False, description="stream server-sent events, the last of them [DONE]"),
    "stream_options": _nullable(
        "object", properties={"include_usage": _SWITCH, "continuous_usage_stats": _SWITCH}, additionalProperties=False
    ),
    "max_tokens": _nullable("integer", minimum=1),
    "max_completion_tokens": _nullable("integer", minimum=1, description="newer name of max_tokens"),
    "n_predict": _nullable("integer", minimum=-1, description="llama.cpp's name of max_tokens; -1: no limit"),
    "min_tokens": _nullable("integer", minimum=0),
    "n": _nullable("integer", minimum=1, maximum=MAX_CHOICES, default=1),
    "temperature": _nullable("number", minimum=0, default=1),
    "top_p": _nullable("number", exclusiveMinimum=0, maximum=1, default=1),
    "top_k": _nullable("integer", minimum=-1, default=0, description="0 or -1: all tokens"),
    "min_p": _number(0, 1, 0),
    "presence_penalty": _number(-2, 2, 0),
    "frequency_penalty": _number(-2, 2, 0),
    "repetition_penalty": _number(*REPETITION_PENALTIES, 1),
    "repeat_penalty": _nullable(
        "number",
        minimum=REPETITION_PENALTIES[0],
        maximum=REPETITION_PENALTIES[1],
        description="llama.cpp's name of repetition_penalty",
    ),
    "repeat_last_n": _nullable("integer", minimum=-1, description="0: repeat_penalty is off; -1: it counts all tokens"),
    "seed": _nullable("integer", description="default: random"),
    "stop": {
        "anyOf": [
            _nullable("string", minLength=1, maxLength=MAX_STOP_CHARACTERS),
            {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
        ]
    },
    "stop_token_ids": _nullable("array", items={"type": "integer", "minimum": 0}, maxItems=MAX_STOPS),
    "ignore_eos": _SWITCH,
    "include_stop_str_in_output": _SWITCH,
    "skip_special_tokens": _nullable("boolean", default=True),
    "add_special_tokens": _nullable("boolean", description="add a beginning-of-sequence token before the prompt"),
    "parse_special": _nullable(
        "boolean",
        description="parse the text of control tokens as these tokens; default: true for prompts, false for messages",
    ),
    "logit_bias": _nullable(
        "object",
        propertyNames={"pattern": "^(0|[1-9][0-9]{0,9})$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        description="by token id",
    ),
    "priority": _nullable("integer", default=0, description="lower numbers are scheduled first"),
    "timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0, "description": "time limit for the whole answer"},
    "cache_salt": _nullable("string", description="requests share the prefix cache only with the same salt"),
    "return_token_ids": _SWITCH,
    "n_probs": _nullable("integer", minimum=0, maximum=MAX_LOGPROBS, description="llama.cpp's logprobs; 0: off"),
    "response_format": _nullable("object", description="type json_object, or json_schema with a schema"),
    "structured_outputs": _nullable("object", description="vLLM's: one of json, regex, choice, grammar, json_object"),
    "guided_json": _nullable("object", description="a JSON schema"),
    "guided_regex": _nullable("string"),
    "guided_choice": _nullable("array", items=_TEXT, minItems=1),
    "guided_grammar": _nullable("string", description="in Lark or GBNF"),
    "grammar": _nullable("string", description="llama.cpp's name of guided_grammar"),
    "json_schema": _nullable("object", description="llama.cpp's name of guided_json"),
}

_CHAT: Schema = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
            },
        },
    },
    "reasoning_effort": _nullable("string", description="passed to the chat template"),
    "reasoning": _nullable("object", description="another form of reasoning_effort: {effort: ...}"),
    "logprobs": _SWITCH,
    "top_logprobs": _nullable("integer", minimum=0, maximum=MAX_LOGPROBS),
    "add_generation_prompt": _nullable("boolean", default=True),
    "continue_final_message": _nullable("boolean", description="continue the last message instead of a new answer"),
    "chat_template_kwargs": _nullable("object"),
    "tools": _nullable("array", items={"type": "object"}, description="functions that the answer may call"),
    "tool_choice": {"anyOf": [_nullable("string"), {"type": "object"}], "default": "auto"},
    "parallel_tool_calls": _nullable("boolean", default=True),
}

_COMPLETION: Schema = {
    "prompt": {
        "anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "maxItems": MAX_PROMPTS}],
        "description": "text, token ids, or a list of these",
    },
    "echo": _nullable("boolean", description="start the answer's text with the prompt"),
    "logprobs": _nullable("integer", minimum=0, maximum=MAX_LOGPROBS),
}

_TOKENIZE: Schema = {
    "model": _SAMPLING["model"],
    "prompt": _nullable("string", description="the text to tokenize; required without messages"),
    "messages": {"anyOf": [_CHAT["messages"], {"type": "null"}]},
    "add_special_tokens": _SAMPLING["add_special_tokens"],
    "parse_special": _SAMPLING["parse_special"],
    "add_generation_prompt": _CHAT["add_generation_prompt"],
    "return_token_strs": _SWITCH,
}

_DETOKENIZE: Schema = {"model": _SAMPLING["model"], "tokens": {**_TOKENS, "minItems": 0}}

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT, "type": _TEXT, "param": _nullable("string"), "code": _nullable("string"),
            },
        }
    },
}  # fmt: skip

_POSTS = {
    "/v1/chat/completions": ("Create a chat completion", {**_CHAT, **_SAMPLING}, ["messages"]),
    "/v1/completions": ("Create a text completion", {**_COMPLETION, **_SAMPLING}, ["prompt"]),
    "/tokenize": ("Tokenize a text or a conversation", _TOKENIZE, []),
    "/detokenize": ("Convert tokens to text", _DETOKENIZE, ["tokens"]),
}
_GETS = {
    "/v1/models": "List the served model's names",
    "/v1/models/{name}": "Describe the model with this name",
    "/v1/config": "Settings in effect, where each was set, and how derived ones were computed",
    "/v1/requests": "List finished requests, newest first",
    "/v1/requests/{name}": "Latency breakdown of a finished request, available for a limited time",
    "/metrics": "Prometheus metrics",
    "/health": "Whether the engine makes progress",
    "/ready": "Whether requests are accepted",
}

_CONFIG = config_schema()
_CONFIG["properties"] |= {"itl_budget": budget_schema()}
_ANSWERS: dict[str, tuple[str, Schema]] = {
    "/metrics": ("text/plain", _TEXT),
    "/v1/config": ("application/json", _CONFIG),
}
"""Type and schema of answers that are described in detail."""


def document(root: str = "") -> Schema:
    """OpenAPI 3.1 document of a server that a proxy exposes under the path prefix `root`."""
    paths: Schema = {path: {"get": _get(path, about)} for path, about in _GETS.items()}
    for path, (about, fields, required) in _POSTS.items():
        body = {"type": "object", "properties": fields, "required": required}
        content = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[path] = {"post": {"summary": about, "requestBody": content, "responses": _responses(path)}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Twostep", "version": "1"},
        **({"servers": [{"url": root}]} if root else {}),
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _get(path: str, about: str) -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": _TEXT}
    many = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
    limit = {"name": "limit", "in": "query", "required": False, "schema": many}
    return {
        "summary": about,
        "parameters": [name] * ("{name}" in path) + [limit] * (path == "/v1/requests"),
        "responses": _responses(path),
    }


def _responses(path: str) -> Schema:
    kind, shape = _ANSWERS.get(path, ("application/json", {"type": "object"}))
    answer: Schema = {kind: {"schema": shape}}
    if "completions" in path:
        event = {"type": "object", "required": ["data"], "properties": {"data": _TEXT}}
        answer["text/event-stream"] = {"schema": event}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "the answer", "content": answer},
        "default": {"description": "an error, in OpenAI's form", "content": error},
    }


# --- the page -----------------------------------------------------------------------------------------------------

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font:600 1.1rem monospace;margin:2rem 0 0}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
    "td:first-child{font-family:monospace}"
)


def page() -> str:
    """The API description as HTML."""
    described = document()
    parts = [_section(path, *operation) for path, by in described["paths"].items() for operation in by.items()]
    title = "Twostep"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    link = '<p>OpenAPI document: <a href="openapi.json">openapi.json</a></p>'
    return f"{head}<h1>{title}</h1>{link}{''.join(parts)}</html>"


def _section(path: str, method: str, operation: Schema) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {"properties": {}, "required": []})
    rows = [_row(name, field, name in body["required"]) for name, field in body["properties"].items()]
    return (
        f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p><table>{''.join(rows)}</table>"
    )


def _row(name: str, field: Schema, required: bool) -> str:
    about = [field["description"]] if "description" in field else []
    if "default" in field:
        about.append(f"default {field['default']}")
    if required:
        about.append("required")
    return f"<tr><td>{name}<td>{escape(_type(field))}<td>{escape('; '.join(about))}"


def _type(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(member) for member in field["anyOf"]))
    kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
    named = " or ".join(kind for kind in kinds if kind != "null") or "null"
    least, most = field.get("minimum", field.get("exclusiveMinimum")), field.get("maximum")
    limits = [f"from {least}"] * (least is not None) + [f"to {most}"] * (most is not None)
    return " ".join([named, *limits])


class Document:
    """An ASGI application that serves the OpenAPI document."""

    def __init__(self, root: str) -> None:
        """`root`: see `document`."""
        self._reply = JsonReply(document(root))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._reply(scope, receive, send)


async def serve_page(request: Request) -> Response:
    return HTMLResponse(page())
