"""Messages about parameters, in the words of the command line."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from twostep.errors import InvalidParameterError


@contextmanager
def naming_flags(parser: argparse.ArgumentParser, more: Mapping[str, str] | None = None) -> Iterator[None]:
    """An `InvalidParameterError` from inside names flags of `parser` in place of the parameters that they set.

    `more`: flags of parameters that are called otherwise in the code.
    """
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    try:
        yield
    except InvalidParameterError as error:
        raise InvalidParameterError(_with_flags(str(error), flags | dict(more or {})), error.param) from None


def _with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A name of one word may be a word of the sentence, but for the first."""

    def shown(word: re.Match[str]) -> str:
        is_name = word[0] in flags and (word.start() == 0 or "_" in word[0])
        return flags[word[0]] if is_name else word[0]

    return re.sub(r"\w+", shown, message)
