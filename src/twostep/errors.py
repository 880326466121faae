"""Errors for users: one line that names the problem and what is allowed."""


class TwostepError(Exception):
    """Base class of all errors that Twostep raises for bad input or a bad environment."""


class ModelFileError(TwostepError):
    """A weight file, tokenizer or template cannot be used: names the file and the tensor, key or offset."""


class FetchError(TwostepError):
    """A model could not be fetched: no network, no space, wrong hash, unknown name."""


class InvalidParameterError(TwostepError):
    """A parameter has an invalid value: names it, its value and what is allowed."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: the name of the parameter, for callers that report it separately, as OpenAI's error object does."""
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidParameterError):
    """Prompt and answer exceed the context of the model: gives the numbers."""


class MemoryPlanError(TwostepError):
    """Weights, activations and KV cache do not fit into memory: shows the calculation."""


class UnsupportedError(InvalidParameterError):
    """A setting or request needs what the executor cannot do: names both."""


class BlockImportError(TwostepError):
    """A block of KV from elsewhere that cannot be used: says what is wrong with it."""


class SamplingError(TwostepError):
    """No token can be sampled for a row: says whether logits, mask, penalties or a token id are the cause."""


class RecordingError(TwostepError):
    """A recording cannot be read or replayed: names the file, the line and the field."""


class ProfileError(TwostepError):
    """A profile of this machine cannot be read: names the file and what is wrong."""


class CalibrationError(TwostepError):
    """This machine could not be calibrated: says what disturbed it."""


class WorkloadError(TwostepError):
    """A workload cannot be read or changed: names the file, the line and the field."""


class ResultError(TwostepError):
    """A benchmark result cannot be read or written: names the file and the field."""


class EngineDiedError(TwostepError):
    """The engine process ended while it was in use."""


class WorkerFailedError(TwostepError):
    """A helper process on this machine did not start or failed; not caused by the request."""


class TargetError(TwostepError):
    """A server cannot be measured: names its URL and its message, or what is missing."""
