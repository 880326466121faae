"""A partner for `twostep chat` in this process."""

import argparse
from collections.abc import Generator
from contextlib import closing
from typing import Any

from twostep.cli.chat import Message, Said
from twostep.cli.request import print_notes
from twostep.engine.outputs import RequestOutput
from twostep.engine.params import SamplingParams
from twostep.errors import SamplingError
from twostep.llm import LLM
from twostep.store.catalogue import DEFAULT_MODEL

STEP_TOKENS = 512
"""Wide enough for the kernels' full speed, short enough that Ctrl-C is heard between two chunks of a long prompt."""


class LocalPartner:
    """An engine for one conversation: what was said before is found in the prefix cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._params = SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, seed=options.seed
        )  # fmt: skip
        self.name = options.model or DEFAULT_MODEL
        settings: dict[str, Any] = {"max_num_batched_tokens": STEP_TOKENS, "chunking": f"tokens={STEP_TOKENS}"}
        self._llm = LLM(self.name, max_num_seqs=1, threads=options.threads, **settings)
        print_notes(self._llm.model)

    def answer(self, messages: list[Message], said: Said) -> Generator[str, None, None]:
        said.tokens = 0
        with closing(self._llm.stream(messages, self._params)) as events:
            for event in events:
                if isinstance(event, RequestOutput):
                    [choice] = event.choices
                    if choice.error is not None:
                        raise SamplingError(choice.error)
                    said.cut = choice.finish_reason == "length"
                else:
                    said.tokens += len(event.token_ids)
                    yield event.text

    def close(self) -> None:
        self._llm.close()
