"""`/tokenize` and `/detokenize`, in vLLM's format."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request

from twostep.engine.refusals import shown
from twostep.errors import TwostepError
from twostep.model.loaded import LoadedModel
from twostep.openai_api.api_error import ApiError, refusal
from twostep.openai_api.api_request import model_name
from twostep.openai_api.fields import Fields
from twostep.openai_api.json_text import Many
from twostep.openai_api.prompt_tokens import chat_prompt, text_bytes, token_ids
from twostep.openai_api.tools import read_tools
from twostep.server.http.replies import SlicedReply
from twostep.server.http.request_body import parse
from twostep.server.state import ServedModel, ServerState

MAX_TEXT_BYTES = 1 << 20
"""Longest text to tokenize. It need not fit the context, but occupies a thread for a third of a second."""


class Tokens:
    """The handlers of these routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, request: Request) -> SlicedReply:
        """Tokens of a text (`prompt`) or a conversation (`messages`), as a completion would get them."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> SlicedReply:
        """The text of `tokens`, including control tokens."""
        return await self._answer(request, self._detokenize)

    async def _answer(self, request: Request, convert: Callable[[Fields, ServedModel], dict[str, Any]]) -> SlicedReply:
        """Runs in a thread, as long texts take long. Does not count towards the queue: the engine is not used."""
        state = self._state
        state.check_accepting()
        async with (
            state.bodies.read(request) as body,
            state.in_flight.track(request.receive, state.config.request_timeout_s),
        ):
            answer, unknown = await body.parsed(partial(self._convert, convert=convert))
        state.note_unknown(unknown)
        return SlicedReply(state.slices, answer)

    def _convert(
        self, body: bytearray, convert: Callable[[Fields, ServedModel], dict[str, Any]]
    ) -> tuple[dict[str, Any], Iterable[str]]:
        """The answer, and the names of unknown fields."""
        try:
            fields = Fields(parse(body))
            served = self._state.named(model_name(fields, self._state.names))
            return convert(fields, served), fields.rest()
        except RecursionError:
            raise ApiError("the body is nested too deeply") from None
        except TwostepError as error:
            raise refusal(error) from None

    def _tokenize(self, fields: Fields, served: ServedModel) -> dict[str, Any]:
        capabilities = self._state.check_accepting(served)
        tokenizer, texts = served.model.tokenizer, fields.flag("return_token_strs")
        tokens = self._tokens(fields, served.model)
        return {
            "count": len(tokens),
            "max_model_len": capabilities.max_sequence_tokens,
            "tokens": Many(tokens),
            "token_strs": Many(tokenizer.decode([id_], skip_special=False) for id_ in tokens) if texts else None,
        }

    def _tokens(self, fields: Fields, model: LoadedModel) -> list[int]:
        prompt = fields.take("prompt")
        if prompt is None:
            return self._chat_tokens(fields, model)
        if not isinstance(prompt, str):
            raise ApiError(f"prompt is {shown(prompt)}; it has to be a string", param="prompt")
        _check_text(prompt, "prompt")
        add_bos = None if fields.flag("add_special_tokens", True) else False
        parse_special = fields.flag("parse_special", True)
        return model.tokenizer.encode_raw(prompt, parse_special=parse_special, add_bos=add_bos)

    def _chat_tokens(self, fields: Fields, model: LoadedModel) -> list[int]:
        if "messages" not in fields:
            raise ApiError("prompt (text) or messages (a conversation) is required", param="messages")
        return list(chat_prompt(fields, model, read_tools(fields), check_text=_check_text))

    def _detokenize(self, fields: Fields, served: ServedModel) -> dict[str, Any]:
        tokenizer, tokens = served.model.tokenizer, fields.take("tokens")
        if isinstance(tokens, list):
            served.prompt_bounds.check_ids(tokens, "tokens")
        return {"prompt": tokenizer.decode(token_ids(tokens, "tokens", tokenizer), skip_special=False)}


def _check_text(text: str, param: str) -> None:
    if (length := text_bytes(text)) > MAX_TEXT_BYTES:
        problem = f"{param} has {length} bytes of text; at most {MAX_TEXT_BYTES} are tokenized"
        raise ApiError(problem, status=413, param=param, code="text_too_long")
