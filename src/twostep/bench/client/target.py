"""The server to measure, and the parts of a request that all requests share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import h11

from twostep.bench.client.address import Trust
from twostep.bench.client.http import HttpRequest, Patience
from twostep.bench.load.run_record import Server
from twostep.errors import InvalidParameterError

Prompt = str | Sequence[int]
"""Text, or token ids, which only `completions` accepts."""

OWN_FIELDS = frozenset(
    {"model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "best_of"}
)
"""Body fields that only the client may set."""
OWN_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding"})

_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
_COUNTING: dict[str, dict[str, Any]] = {"vllm": _EACH, "twostep": _EACH, "llamacpp": {"timings_per_token": True}}
"""Fields that make servers report tokens per chunk, by `owned_by` of their models. Other servers may reject them."""
_PATHS = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True)
class Target:
    """Raises `InvalidParameterError` for invalid headers and for fields that the client sets itself."""

    url: str
    """With or without the API version at its end."""
    endpoint: Literal["completions", "chat"] = "completions"
    model: str | None = None
    """None: the only model that the server lists."""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Extra fields of every body; they may replace `temperature`, `seed` and `ignore_eos`."""
    ignore_eos: bool = True
    """Request answers of exactly the given length. A field of vLLM and others; OpenAI itself rejects it."""
    length_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Newer OpenAI models accept only the second."""
    patience: Patience = field(default_factory=Patience)
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        if own := sorted(OWN_FIELDS & self.extra.keys()):
            raise InvalidParameterError(f"extra fields contain {', '.join(own)}, which the client sets itself", "extra")
        if own := sorted(OWN_HEADERS & {name.lower() for name in self.headers}):
            raise InvalidParameterError(f"headers contain {', '.join(own)}, which the client sets itself", "headers")
        try:
            h11.Request(method="GET", target="/", headers=[("host", ""), *self.all_headers().items()])
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise InvalidParameterError(f"invalid header: {error}", "headers") from None

    def all_headers(self) -> dict[str, str]:
        """Headers of every request, with names in lower case. The user's headers override the others."""
        fixed = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        fixed["accept-encoding"] = "identity"  # compression would delay chunks
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return fixed | key | {name.lower(): value for name, value in self.headers.items()}

    @property
    def must_be_full(self) -> bool:
        """Whether an answer with fewer tokens than requested is a failure."""
        return bool(self.extra.get("ignore_eos", self.ignore_eos))

    def request(self, server: Server, prompt: Prompt, output_tokens: int) -> HttpRequest:
        """A request for one streamed answer."""
        asked = {"prompt": prompt} if self.endpoint == "completions" else {"messages": _messages(prompt)}
        body: dict[str, Any] = {"model": server.model, **asked, self.length_field: output_tokens, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **_COUNTING.get(server.owner, {})}
        body |= {"temperature": 0, "seed": 0, **({"ignore_eos": True} if self.ignore_eos else {}), **self.extra}
        return HttpRequest("POST", _PATHS[self.endpoint], self.all_headers(), json.dumps(body).encode())


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if not isinstance(prompt, str):
        raise InvalidParameterError("prompts of token ids need --endpoint completions", "endpoint")
    return [{"role": "user", "content": prompt}]
