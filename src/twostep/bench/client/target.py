"""What a user asks for: which server, and what every request to it says besides prompt and length."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import h11

from twostep.bench.client.address import Trust
from twostep.bench.client.http import Patience, Request
from twostep.bench.load.run_record import Server
from twostep.errors import InvalidParameterError

Prompt = str | Sequence[int]
"""Text, or token ids, which only `completions` takes."""

OWN_FIELDS = frozenset(
    {"model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "best_of"}
)
"""Of a body: the client needs them to be what it sets."""
OWN_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})

_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_COUNTING: dict[str, dict[str, Any]] = {"vllm": _EACH, "twostep": _EACH, "llamacpp": {"timings_per_token": True}}
"""What has servers say how many tokens each chunk has, by `owned_by` of their models. Others may refuse such fields."""
_PATHS = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True)
class Target:
    """Raises `InvalidParameterError` for headers and fields that cannot be sent."""

    url: str
    """With or without the API's version at its end."""
    endpoint: Literal["completions", "chat"] = "completions"
    model: str | None = None
    """None: the only one that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every body, besides those of the client and in place of its `temperature`, `seed`, `ignore_eos`."""
    ignore_eos: bool = True
    """Have answers as long as asked for. A field of vLLM and others; OpenAI itself refuses it."""
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Newer models of OpenAI take only the second."""
    patience: Patience = field(default_factory=Patience)
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        if own := sorted(OWN_FIELDS & self.extra.keys()):
            raise InvalidParameterError(f"extra fields name {', '.join(own)}, which the client sets itself", "extra")
        if own := sorted(OWN_HEADERS & {name.lower() for name in self.headers}):
            raise InvalidParameterError(f"headers name {', '.join(own)}, which the client sets itself", "headers")
        try:
            h11.Request(method="GET", target="/", headers=[("host", ""), *self.all_headers().items()])
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise InvalidParameterError(f"a header cannot be sent: {error}", "headers") from None

    def all_headers(self) -> dict[str, str]:
        """Of every request, by names in lower case; those of the user go before others."""
        fixed = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        fixed["accept-encoding"] = "identity"  # what is compressed comes when a buffer is full
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return fixed | key | {name.lower(): value for name, value in self.headers.items()}

    @property
    def must_be_full(self) -> bool:
        """Whether answers have to have all tokens asked for."""
        return bool(self.extra.get("ignore_eos", self.ignore_eos))

    def request(self, server: Server, prompt: Prompt, output_tokens: int) -> Request:
        """Of one answer, streamed."""
        asked = {"prompt": prompt} if self.endpoint == "completions" else {"messages": _messages(prompt)}
        body: dict[str, Any] = {"model": server.model, **asked, self.length_field: output_tokens, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **_COUNTING.get(server.owner, {})}
        body |= {"temperature": 0, "seed": 0, **({"ignore_eos": True} if self.ignore_eos else {}), **self.extra}
        return Request("POST", _PATHS[self.endpoint], self.all_headers(), json.dumps(body).encode())


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if not isinstance(prompt, str):
        raise InvalidParameterError("prompts of token ids need the endpoint completions", "endpoint")
    return [{"role": "user", "content": prompt}]
