"""`/tokenize` and `/detokenize`, in vLLM's form."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from twostep.engine.refusals import shown
from twostep.errors import TwostepError
from twostep.openai_api.errors import ApiError, refusal
from twostep.openai_api.fields import Fields
from twostep.openai_api.prompts import chat_prompt, token_ids
from twostep.openai_api.requests import model_name
from twostep.server.bodies import parse, read_body
from twostep.server.state import ServerState


class Tokens:
    """The routes' functions."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def tokenize(self, request: Request) -> Response:
        """Of a text (`prompt`) or a conversation (`messages`): its tokens, as a completion would get them."""
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of `tokens`, control tokens included."""
        return await self._answer(request, self._detokenize)

    async def _answer(self, request: Request, translate: Callable[[Fields], dict[str, Any]]) -> Response:
        """In a thread: long texts take long."""
        self._state.engine()
        with self._state.places.take():
            body = await read_body(request, self._state.config.max_body_bytes)
            reply, unknown = await asyncio.to_thread(self._translate, body, translate)
        self._state.note_unknown(unknown)
        return JSONResponse(reply)

    def _translate(
        self, body: bytes, translate: Callable[[Fields], dict[str, Any]]
    ) -> tuple[dict[str, Any], Iterable[str]]:
        """The reply, and fields that nobody knows."""
        try:
            fields = Fields(parse(body))
            model_name(fields, self._state.names)
            return translate(fields), fields.rest()
        except RecursionError:
            raise ApiError("the body is nested too deeply") from None
        except TwostepError as error:
            raise refusal(error) from None

    def _tokenize(self, fields: Fields) -> dict[str, Any]:
        _, ready = self._state.engine()
        tokenizer, texts = self._state.model.tokenizer, fields.flag("return_token_strs")
        tokens = self._tokens(fields)
        return {
            "count": len(tokens),
            "max_model_len": ready.longest,
            "tokens": tokens,
            "token_strs": [tokenizer.decode([id_], skip_special=False) for id_ in tokens] if texts else None,
        }

    def _tokens(self, fields: Fields) -> list[int]:
        prompt = fields.take("prompt")
        if prompt is None:
            return list(chat_prompt(fields, self._state.model))
        if not isinstance(prompt, str):
            raise ApiError(f"prompt is {shown(prompt)}; it has to be a string", param="prompt")
        add_bos = None if fields.flag("add_special_tokens", True) else False
        return self._state.model.tokenizer.encode(prompt, special=True, add_bos=add_bos)

    def _detokenize(self, fields: Fields) -> dict[str, Any]:
        tokenizer = self._state.model.tokenizer
        return {"prompt": tokenizer.decode(token_ids(fields.take("tokens"), "tokens", tokenizer), skip_special=False)}
