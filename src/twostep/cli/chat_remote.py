"""A partner for `twostep chat` at an OpenAI-compatible server: its answers are server-sent events."""

import argparse
from collections.abc import Generator, Iterator
from typing import Any

from twostep.bench.client.event_stream import ERROR, SseParser, error_in
from twostep.bench.client.outcome import FailureError, one_line, told
from twostep.cli import connection
from twostep.cli.chat import Message, Said
from twostep.cli.remote import Remote, ServerError, json_object


class RemotePartner:
    """Asks the server for its models if none is named."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._server = Remote(options.url, connection.api_key(options), connection.trust(options))
        asked = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed}
        self._asked = {name: value for name, value in asked.items() if value is not None}
        self._model = options.model or self._first_model()
        self.name = f"{self._model} at {self._server.url}"

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "messages": messages, **usage, **self._asked}
        with self._server.response("POST", "/chat/completions", body) as response:
            for event in _events(response):
                if counted := event.get("usage"):
                    said.tokens = counted.get("completion_tokens")
                for choice in event.get("choices", ()):
                    said.cut |= choice.get("finish_reason") == "length"
                    if text := choice.get("delta", {}).get("content"):
                        yield text

    def close(self) -> None:
        """Each answer has its own connection, which is closed with it."""

    def _first_model(self) -> str:
        models = self._server.get("/models")
        names = [model["id"] for model in models.get("data", ()) if isinstance(model, dict) and "id" in model]
        if not names:
            raise ServerError(f"{self._server.url} lists no models; is it an OpenAI-compatible server?")
        return str(names[0])


def _events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a stream up to its end mark. Raises `ServerError` for an error event and a stream without end."""
    parser = SseParser()
    for chunk in chunks:
        try:
            events = parser.feed(chunk)
        except FailureError as error:
            raise ServerError(told(error.failure)) from None
        for event in events:
            if event.data == b"[DONE]":
                return
            value = json_object(event.data)
            if event.kind == ERROR or "error" in value:
                raise ServerError(one_line(error_in(event.data)))
            yield value
    raise ServerError("the server ended the answer before its end")
