"""The bounded queue: how many sequences are taken on, running and waiting together."""

from collections.abc import Iterator
from contextlib import contextmanager

from twostep.openai_api.errors import ApiError


class Place:
    """What one request holds."""

    def __init__(self, places: "Places") -> None:
        self._places = places
        self.sequences = 1

    def widen(self, sequences: int) -> None:
        """The request has turned out to ask for so many. Raises `ApiError`."""
        self._places.check(sequences, holds=self.sequences)
        self._places.taken += sequences - self.sequences
        self.sequences = sequences


class Places:
    """`limit` of sequences: each prompt has as many as choices are asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def take(self) -> Iterator[Place]:
        """A place for one sequence, as long as the block lasts. Raises `ApiError` with status 429 if there is none."""
        self.check(1, holds=0)
        place = Place(self)
        self.taken += 1
        try:
            yield place
        finally:
            self.taken -= place.sequences

    def check(self, sequences: int, holds: int) -> None:
        """Whether somebody who holds some may have so many. Raises `ApiError`."""
        if sequences > self.limit:
            raise ApiError(f"prompts times n is {sequences}; at most {self.limit} are taken on at a time", param="n")
        if self.taken - holds + sequences > self.limit:
            problem = f"the queue is full: {self.taken - holds} of {self.limit} places are taken; try again later"
            raise ApiError(problem, status=429, code="queue_full")
