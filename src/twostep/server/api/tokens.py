"""`/tokenize` and `/detokenize`, in vLLM's form."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from starlette.requests import Request

from twostep.engine.refusals import shown
from twostep.errors import TwostepError
from twostep.model.loaded import LoadedModel
from twostep.openai_api.errors import ApiError, refusal
from twostep.openai_api.fields import Fields
from twostep.openai_api.json_text import Many
from twostep.openai_api.prompts import chat_prompt, token_ids
from twostep.openai_api.requests import model_name
from twostep.openai_api.room import text_bytes
from twostep.openai_api.tools import read_tools
from twostep.server.http.bodies import parse
from twostep.server.http.slices import SlicedReply
from twostep.server.state import ServedModel, ServerState

MAX_TEXT_BYTES = 1 << 20
"""Longest text to tokenise: it need not fit the context, but a thread works on it for a third of a second."""


class Tokens:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, request: Request) -> SlicedReply:
        """Of a text (`prompt`) or a conversation (`messages`): its tokens, as a completion would get them."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> SlicedReply:
        """The text of `tokens`, control tokens included."""
        return await self._answer(request, self._detokenize)

    async def _answer(
        self, request: Request, translate: Callable[[Fields, ServedModel], dict[str, Any]]
    ) -> SlicedReply:
        """In a thread: long texts take long. It takes no place in the queue: the engine has no part in it."""
        state = self._state
        state.check_accepting()
        async with (
            state.bodies.read(request) as body,
            state.flights.one(request.receive, state.config.request_timeout_s),
        ):
            answer, unknown = await body.understood(partial(self._translate, translate=translate))
        state.note_unknown(unknown)
        return SlicedReply(state.slices, answer)

    def _translate(
        self, body: bytearray, translate: Callable[[Fields, ServedModel], dict[str, Any]]
    ) -> tuple[dict[str, Any], Iterable[str]]:
        """The answer, and unknown fields."""
        try:
            fields = Fields(parse(body))
            served = self._state.named(model_name(fields, self._state.names))
            return translate(fields, served), fields.rest()
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
            raise ApiError(
                "there is neither prompt (a text) nor messages (a conversation); one is needed", param="messages"
            )
        return list(chat_prompt(fields, model, read_tools(fields), check_text=_check_text))

    def _detokenize(self, fields: Fields, served: ServedModel) -> dict[str, Any]:
        tokenizer, tokens = served.model.tokenizer, fields.take("tokens")
        if isinstance(tokens, list):
            served.room.check_ids(tokens, "tokens")
        return {"prompt": tokenizer.decode(token_ids(tokens, "tokens", tokenizer), skip_special=False)}


def _check_text(text: str, param: str) -> None:
    if (length := text_bytes(text)) > MAX_TEXT_BYTES:
        problem = f"{param} has {length} bytes of text; at most {MAX_TEXT_BYTES} are tokenised"
        raise ApiError(problem, status=413, param=param, code="text_too_long")
