"""Prometheus' text format, version 0.0.4: families of samples to lines.

Own code, since our histograms come as counts from the engine's process, where client libraries want every value again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from twostep.engine.timing.histogram import Counted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Family(NamedTuple):
    """One metric. `samples`: for each set of labels a value, or the counts of a histogram with these `bounds`."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    about: str
    samples: Sequence[tuple[Labels, float | Counted]]
    bounds: Sequence[float] = ()


def exposition(families: Iterable[Family], labels: Labels) -> str:
    """The text; `labels` go to every sample."""
    return "".join(f"{line}\n" for family in families for line in _lines(family, labels))


def _lines(family: Family, common: Labels) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.about)}"
    yield f"# TYPE {family.name} {family.kind}"
    for own, value in family.samples:
        labels = {**common, **own}
        if isinstance(value, Counted):
            yield from _histogram(family, labels, value)
        else:
            yield f"{family.name}{_braces(labels)} {value}"


def _histogram(family: Family, labels: Labels, counted: Counted) -> Iterator[str]:
    bounds = (*map(str, family.bounds), "+Inf")
    for bound, count in zip(bounds, accumulate(counted.counts), strict=True):
        yield f"{family.name}_bucket{_braces({**labels, 'le': bound})} {count}"
    yield f"{family.name}_sum{_braces(labels)} {counted.total}"
    yield f"{family.name}_count{_braces(labels)} {sum(counted.counts)}"


def _braces(labels: Labels) -> str:
    inner = ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _quoted(value: str) -> str:
    return _escaped(value).replace('"', '\\"')


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
