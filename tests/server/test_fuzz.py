"""Whatever is asked, as the description of the API allows or not: no defect of ours, and errors in OpenAI's shape."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.http_server import Host, Served

from twostep.engine.text.conversation import ROLES
from twostep.server.api.openapi import document

OPERATIONS = [(path, method) for path, operations in document()["paths"].items() for method in operations]
BEYOND_SCHEMAS = (
    "model", "stream_options", "min_tokens", "max_completion_tokens", "stop_token_ids", "top_logprobs", "echo",
    "continue_final_message", "add_generation_prompt", "response_format", "structured_outputs", "tools", "tool_choice",
    "chat_template_kwargs", "logit_bias",
)  # fmt: skip
_TEXT = {"type": "string", "minLength": 1, "pattern": "^[a-z ]+$"}
_ROLE = {"enum": list(ROLES)}
_MESSAGE = {"type": "object", "properties": {"role": _ROLE, "content": _TEXT}, "required": ["role", "content"]}
SIMPLE = {"prompt": _TEXT, "messages": {"type": "array", "minItems": 1, "maxItems": 3, "items": _MESSAGE}}
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def described(server: Served) -> Any:
    """The description that is served, but for short answers, and without fields about which more is to be said than a
    schema can: those have to fit each other, or this model."""
    served = httpx.get(f"{server.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body["properties"] |= {name: {"type": "integer", "minimum": 1, "maximum": 3} for name in ("max_tokens", "n")}
        body["properties"] |= {name: SIMPLE[name] for name in body["properties"].keys() & SIMPLE.keys()}
        for name in BEYOND_SCHEMAS:
            body["properties"].pop(name, None)
        body["required"] = [*body["required"], "max_tokens"]
    schema = schemathesis.openapi.from_dict(served)
    schema.config.update(base_url=server.url)
    return schema


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*operation, POSITIVE) for operation in OPERATIONS]
    + [(*operation, NEGATIVE) for operation in OPERATIONS if operation[1] == "post"],
)
def test_every_answer_is_described(described: Any, path: str, method: str, mode: GenerationMode) -> None:
    statuses = set()

    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        reply = case.call(timeout=30)
        statuses.add(reply.status_code)
        assert reply.status_code != 500, reply.text
        checks = [content_type_conformance, response_schema_conformance, status_code_conformance]
        case.validate_response(reply, checks=checks)

    ask()
    assert mode is NEGATIVE or 200 in statuses or "{name}" in path, "no request that was allowed"


def test_nothing_is_left(server: Served, server_host: Host) -> None:
    snapshot = server_host.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)
    assert server.state.admission_queue.size == 0
