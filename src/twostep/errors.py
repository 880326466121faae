"""The errors a user is meant to read: one line that names the thing and what is allowed."""


class TwostepError(Exception):
    """Base of every error that Twostep raises for bad input or surroundings."""


class ModelFileError(TwostepError):
    """A weight file, tokenizer or template that cannot be used: names the file and the tensor, key or offset in it."""


class FetchError(TwostepError):
    """A model could not be brought here: no network, no space, wrong hash, unknown name."""


class InvalidParameterError(TwostepError):
    """A parameter outside what is allowed: names it, its value and what is allowed."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param` is the parameter's bare name, for callers that report it apart, as OpenAI's error object does."""
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidParameterError):
    """Prompt and answer exceed the model's context: gives the numbers."""


class MemoryPlanError(TwostepError):
    """Weights, activations and KV cache do not fit into memory, or too little is left: shows the arithmetic."""


class UnsupportedError(InvalidParameterError):
    """A setting or request needs what the executor cannot do: names both."""


class BlockImportError(TwostepError):
    """A block of KV from elsewhere that cannot be used: says what is wrong with it."""


class SamplingError(TwostepError):
    """No token can be chosen for one row: says whether logits, mask, penalties or a token id forbid it."""


class RecordingError(TwostepError):
    """A recording that cannot be read or carried out: names the file, the line and the field."""


class WorkloadError(TwostepError):
    """A workload that cannot be read or changed as asked: names the file, the line and the field."""


class ResultError(TwostepError):
    """A result of a benchmark that cannot be read or written: names the file and the field."""


class EngineDiedError(TwostepError):
    """The engine's process ended while somebody needed it."""


class WorkerFailedError(TwostepError):
    """A helper process of this machine did not start or broke: no fault of the request that needed it."""


class TargetError(TwostepError):
    """A server that cannot be measured: names its URL and what it said, or what is missing."""
