"""What of a server's own counts of prompt tokens is not what was asked for, or cannot be."""

from collections.abc import Iterable, Iterator

from twostep.bench.client.outcome import Outcome

LENGTH_TOLERANCE = 0.05
"""Of the tokens of all prompts. Words are as long in the mean as those that the server was asked about before."""


def count_warnings(outcomes: Iterable[Outcome], has_texts: bool) -> Iterator[str]:
    """`has_texts`: some prompts were given as text, whose lengths are not the client's to make."""
    served = [outcome for outcome in outcomes if outcome.failure is None]
    counts = [(one.asked_input_tokens, one.input_tokens) for one in served if one.input_tokens is not None]
    asked, found = sum(pair[0] for pair in counts), sum(pair[1] for pair in counts)
    if not has_texts and abs(found - asked) > LENGTH_TOLERANCE * asked:
        yield f"prompts have another length than asked: the server counts {found:,} tokens, not {asked:,}"
    if odd := sum(one.input_tokens is not None and (one.cached_tokens or 0) > one.input_tokens for one in served):
        yield f"the server contradicts itself: more cached than prompt tokens in {odd} of {len(served)} replies"
