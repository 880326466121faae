"""The error of an engine that is compared."""

from twostep.errors import TwostepError


class EngineError(TwostepError):
    """Another engine could not be started or measured: names the program and what it said."""
