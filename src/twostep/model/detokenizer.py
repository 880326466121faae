"""Text of tokens as they come, one piece a token, never half a character."""

from codecs import getincrementaldecoder

from twostep.model.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of token ids into text. All pieces together are what `Tokenizer.decode` gives for all ids.

    A character that spans tokens comes with its last one. Bytes that can no longer become a character come as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def push(self, id_: int) -> str:
        """The text that `id_` completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.token_bytes(id_, skip_special=self._skip_special))

    def flush(self) -> str:
        """What the end of the stream leaves of an unfinished character: U+FFFD, or nothing. Ready for a new stream."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
