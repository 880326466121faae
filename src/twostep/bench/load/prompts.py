"""Prompts for a workload: the lengths and shared prefixes it names, for any tokenizer."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import linear_regression
from typing import Protocol

from twostep.bench.client.client import Ask, Client
from twostep.bench.client.outcome import failure_message
from twostep.bench.client.target import Prompt
from twostep.bench.load.run_record import Fit
from twostep.errors import TargetError
from twostep.workload.definition import WorkloadRequest

FIRST_ID = 1000
"""Lower token ids may be special tokens or single bytes."""
_KEPT_BLOCKS = 8192


class Source(Protocol):
    """Makes the prompts of a workload."""

    def prompt(self, number: int, request: WorkloadRequest) -> Prompt:
        """Deterministic. Prompts with equal leading blocks have equal leading content."""


@dataclass(frozen=True)
class Seeds:
    """Random generators for the content. A different salt changes all content."""

    salt: str

    def of_block(self, block: int) -> random.Random:
        return random.Random(f"{self.salt}/block {block}")

    def of_rest(self, number: int) -> random.Random:
        return random.Random(f"{self.salt}/request {number}")


class WordSource:
    """English words; `fit` gives how many. Text of the workload is used unchanged."""

    def __init__(self, fit: Fit, block_tokens: int, salt: str) -> None:
        self._spans = Spans(fit, block_tokens)
        self._seeds = Seeds(salt)
        self._block = lru_cache(_KEPT_BLOCKS)(self._block_words)

    def prompt(self, number: int, request: WorkloadRequest) -> str:
        if request.text is not None:
            return request.text
        total = max(1, self._spans.words(request.input_tokens))
        words = _joined(map(self._block, request.blocks), self._spans.sizes(), total)
        words += self._seeds.of_rest(number).choices(WORDS, k=total - len(words))
        return " ".join(words)

    def _block_words(self, block: int) -> list[str]:
        return self._seeds.of_block(block).choices(WORDS, k=self._spans.largest)


class IdSource:
    """Random token ids from `FIRST_ID` (at most half the vocabulary) up to the vocabulary size: lengths are exact.

    Text of the workload is used unchanged.
    """

    def __init__(self, vocabulary: int, block_tokens: int, salt: str) -> None:
        self._ids = range(min(FIRST_ID, vocabulary // 2), vocabulary)
        self._block_tokens = block_tokens
        self._seeds = Seeds(salt)
        self._block = lru_cache(_KEPT_BLOCKS)(self._block_ids)

    def prompt(self, number: int, request: WorkloadRequest) -> Prompt:
        if request.text is not None:
            return request.text
        ids = [id_ for block in request.blocks for id_ in self._block(block)][: request.input_tokens]
        return ids + self._seeds.of_rest(number).choices(self._ids, k=request.input_tokens - len(ids))

    def _block_ids(self, block: int) -> list[int]:
        return self._seeds.of_block(block).choices(self._ids, k=self._block_tokens)


class Spans:
    """Maps blocks of tokens to words, by position only: equal blocks at equal positions give equal words, although a
    block need not be a whole number of words."""

    def __init__(self, fit: Fit, block_tokens: int) -> None:
        self._fit, self._block_tokens = fit, block_tokens
        self.largest = int(block_tokens / fit.per_word) + 1
        """Maximum words of a block."""

    def words(self, tokens: int) -> int:
        """Words in the first `tokens` tokens, which include the overhead."""
        return max(0, round((tokens - self._fit.overhead) / self._fit.per_word))

    def sizes(self) -> Iterator[int]:
        """Yields the number of words of each block, without end."""
        before = blocks = 0
        while True:
            blocks += 1
            after = self.words(blocks * self._block_tokens)
            yield after - before
            before = after


def _joined(blocks: Iterator[Sequence[str]], sizes: Iterator[int], total: int) -> list[str]:
    """Concatenates the first words of each block, as given by `sizes`, up to `total` words."""
    words: list[str] = []
    for block, size in zip(blocks, sizes, strict=False):
        words += block[:size]
        if len(words) >= total:
            break
    return words[:total]


_TEXT = """
able about above act action added age ago air all also always among amount and animal another answer any area around
art asked away back bad ball bank base bed before began behind being below best better between big bird black blood
blue board boat body book both bottom bought box boy bring brother brought brown build building built business but buy
call came can car care carry case cause center certain chair chance change check child children church city class
clean clear close cold color come common company complete contain control cool corner cost could country course cover
cross current cut dark data daughter day dead deal death deep degree design did different direct distance doctor dog
done door down draw dream dress drive drop dry during each early earth east easy eat edge effect eight either electric
else end energy engine enough entire even evening event ever every example experience eye face fact fall family famous
far farm fast father feel feet felt few field fight figure final find fine finger fire first fish five floor flow
follow food foot force form forward found four free fresh friend from front full game garden gas gave general get girl
give glass gold good government grass great green ground group grow had hair half hall hand happy hard has have head
hear heart heat heavy held help here high hill history hold home horse hospital hot hotel hour house how human hundred
ice idea important inch include industry inside interest iron island job join just keep kept key kind king knew know
lake land language large last late law lay lead learn least leave led left leg length less let letter level life light
like line list listen little live local long look lost lot love low machine made main make man many map mark market
matter may mean measure meet member men metal middle might mile milk mind minute miss modern moment money month moon
more morning most mother mountain move much music must name nation natural near need never new next night nine north
nothing notice now number object observe off office often oil old once one only open order other our out over own page
paint pair paper park part party pass past path pattern people per period person phone picture piece place plan plane
plant play point police poor position possible power present president press problem process produce product program
property provide public pull put question quick quite race radio rain ran reach read ready real reason record red
region remember report rest result rich ride right ring rise river road rock room round rule run said salt same sat
saw say scale school science sea season seat second section see seem self sell send sense sent serve service set seven
several shape she ship shop short should show side sign silver similar simple since sing single sister sit six size
skin sky sleep small snow social soft soil soldier some son song soon sound south space speak special speed spring
square staff stage stand star start state station stay step still stone stood stop store story street strong student
study subject success such sudden sugar summer sun support sure surface system table take talk teacher team tell
temperature ten term test than that the their them then there these they thing think third this those thought thousand
three through time together told too took top total touch toward town trade train travel tree trip trouble true try
turn two type under unit until upon use usual valley value very view village visit voice wait walk wall want war warm
was watch water wave way wear weather week weight well went were west what wheel when where which while white who
whole why wide wife wild will wind window winter wish with woman women wood word work world would write year yellow
yes yet you young your
"""
WORDS = tuple(_TEXT.split())


PROBES = (20, 60, 100)
"""Words of each probe."""


async def find_fit(client: Client, salt: str) -> Fit:
    """Measures tokens per word with three prompts and one-token answers, as the tokenizer of the server is unknown.

    Raises `TargetError` if the server does not report token counts.
    """
    return fitted(PROBES, [await _tokens(client, words, salt) for words in PROBES])


def fitted(words: Sequence[int], tokens: Sequence[int]) -> Fit:
    """Least squares; at least 0.5 tokens per word and no negative overhead."""
    slope, intercept = linear_regression(words, tokens)
    return Fit(overhead=max(0.0, intercept), per_word=max(0.5, slope))


async def _tokens(client: Client, words: int, salt: str) -> int:
    prompt = " ".join(Seeds(f"{salt}/probe").of_rest(words).choices(WORDS, k=words))
    outcome = await client.ask(Ask(words, prompt, input_tokens=words, output_tokens=1, due_ns=0), origin_ns=0)
    if outcome.input_tokens:
        return outcome.input_tokens
    if outcome.failure:
        said = failure_message(outcome.failure)
        raise TargetError(f"{client.server.url}: a probe prompt of {words} words failed: {said}")
    raise TargetError(
        f"{client.server.url} does not report usage, so prompt lengths are unknown; set --tokens-per-word"
    )
