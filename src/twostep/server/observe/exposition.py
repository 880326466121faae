"""Prometheus' text format, version 0.0.4: families of samples to lines.

Own code, since our histograms come as counts from the engine's process, where client libraries want every value again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from twostep.engine.timing.meter import Counted

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


def exposition(models: Iterable[tuple[str, Iterable[Family]]]) -> str:
    """The text: the families of each model by name, whose samples get its name as a label. What several models have
    is one family."""
    merged: dict[str, Family] = {}
    for model, families in models:
        for family in families:
            samples = [({"model_name": model, **labels}, value) for labels, value in family.samples]
            known = merged.get(family.name)
            merged[family.name] = family._replace(samples=[*known.samples, *samples] if known else samples)
    return "".join(f"{line}\n" for family in merged.values() for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.about)}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.samples:
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
