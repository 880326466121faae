"""How many tokens a server makes of so many words: asked before a run, as its tokenizer is not known."""

from collections.abc import Sequence
from statistics import linear_regression

from twostep.bench.client.client import Ask, Client
from twostep.bench.client.failed import told
from twostep.bench.load.prompt_words import WORDS
from twostep.bench.load.prompts import Seeds
from twostep.bench.load.record import Fit
from twostep.errors import TargetError

PROBES = (20, 60, 100)
"""Words of each."""


async def find_fit(client: Client, salt: str) -> Fit:
    """From three prompts with an answer of one token each. Raises `TargetError` if the server does not count them."""
    return fitted(PROBES, [await _tokens(client, words, salt) for words in PROBES])


def fitted(words: Sequence[int], tokens: Sequence[int]) -> Fit:
    """By least squares; a word is at least half a token, and the overhead no less than none."""
    slope, intercept = linear_regression(words, tokens)
    return Fit(overhead=max(0.0, intercept), per_word=max(0.5, slope))


async def _tokens(client: Client, words: int, salt: str) -> int:
    prompt = " ".join(Seeds(f"{salt}/probe").of_rest(words).choices(WORDS, k=words))
    outcome = await client.ask(Ask(words, prompt, input_tokens=words, output_tokens=1, due_ns=0), origin_ns=0)
    if outcome.input_tokens:
        return outcome.input_tokens
    if outcome.failure:
        said = told(outcome.failure)
        raise TargetError(f"{client.server.url}: a prompt of {words} words was not answered: {said}")
    raise TargetError(
        f"{client.server.url} does not report usage, so lengths of prompts cannot be known; give tokens per word"
    )
