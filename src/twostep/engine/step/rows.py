"""The standing set as arrays: the tokens, positions and block tables of a step, kept from step to step."""

from collections.abc import Iterable, Sequence

import numpy as np

from twostep.core.kv_cache import Granted
from twostep.kernels.step import Ints, StepArrays


class BlockTables:
    """Block tables of the sequences that run: by group a 2-D array, with the same row for a sequence in each."""

    def __init__(self, sequences: int, blocks: int, groups: int = 1) -> None:
        """`blocks`: of the longest sequence."""
        self._blocks = blocks
        self._arrays: Ints = np.zeros((groups, sequences, blocks), np.int32)
        self.flat: tuple[Ints, ...] = tuple(array.reshape(-1) for array in self._arrays)
        """By group, all tables; see `StepArrays.tables`."""
        self._free = list(range(sequences - 1, -1, -1))
        self._row_of: dict[int, int] = {}

    def grant(self, granted: Granted) -> None:
        """Writes entries of a sequence's table; the first ones give it a row."""
        row = self._row_of.get(granted.number)
        if row is None:
            row = self._row_of[granted.number] = self._free.pop()
        self._arrays[granted.group, row, granted.first : granted.first + len(granted.blocks)] = granted.blocks

    def start(self, number: int) -> int:
        """Where the table of `number` begins in each array of `flat`."""
        return self._row_of[number] * self._blocks

    def drop(self, number: int) -> None:
        """Frees the row of a sequence; does nothing if it has none."""
        row = self._row_of.pop(number, None)
        if row is not None:
            self._free.append(row)


class DecodeRows:
    """The sequences that decode, in slots 0 .. count - 1: who leaves is replaced by the last."""

    def __init__(self, slots: int) -> None:
        self.numbers: list[int] = []
        self._slot_of: dict[int, int] = {}
        self._tokens: Ints = np.zeros(slots, np.int32)
        self._starts: Ints = np.zeros(slots, np.int32)
        self._tables: Ints = np.zeros(slots, np.int32)
        self._ones: Ints = np.ones(slots, np.int32)
        self._in_order: Ints = np.arange(slots, dtype=np.int32)

    def leave(self, number: int) -> None:
        slot, last = self._slot_of.pop(number), self.numbers.pop()
        if last == number:
            return
        self.numbers[slot] = last
        self._slot_of[last] = slot
        for array in (self._tokens, self._starts, self._tables):
            array[slot] = array[len(self.numbers)]

    def join(self, number: int, token: int, position: int, table_start: int) -> None:
        slot = self._slot_of[number] = len(self.numbers)
        self.numbers.append(number)
        self._tokens[slot], self._starts[slot], self._tables[slot] = token, position, table_start

    def advance(self, tokens: Sequence[int]) -> None:
        """The step has computed one token of each and chosen these to follow."""
        count = len(self.numbers)
        self._starts[:count] += 1
        self._tokens[:count] = tokens

    def step(self, tables: tuple[Ints, ...], pieces: Iterable[tuple[Ints, int, int, bool]]) -> StepArrays:
        """The step that computes one token of each, then `pieces`: tokens, start, where the table begins, whether the
        last row's logits are wanted."""
        count = len(self.numbers)
        tokens, starts, table_starts = self._tokens[:count], self._starts[:count], self._tables[:count]
        counts, wanted = self._ones[:count], self._in_order[:count]
        pieces = tuple(pieces)
        if not pieces:
            return StepArrays(tokens, starts, counts, tables, table_starts, wanted)
        lengths = _ints([len(piece) for piece, *_ in pieces])
        last_rows = count - 1 + np.cumsum(lengths, dtype=np.int32)
        return StepArrays(
            tokens=np.concatenate((tokens, *(piece for piece, *_ in pieces))),
            starts=np.concatenate((starts, _ints([start for _, start, _, _ in pieces]))),
            counts=np.concatenate((counts, lengths)),
            tables=tables,
            table_starts=np.concatenate((table_starts, _ints([table for _, _, table, _ in pieces]))),
            logit_rows=np.concatenate((wanted, last_rows[[samples for *_, samples in pieces]])),
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)
