"""How long a prompt can be, told before anybody works on it: tokenising what can never fit takes seconds."""

from dataclasses import dataclass

from twostep.errors import ContextLengthError
from twostep.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Room:
    """Bounds that no prompt which fits is beyond; what is within them may still not fit, which the engine finds.

    Text that has more bytes than its tokens, as a normalizer composes it or the vocabulary lacks some, is refused
    where it has too many bytes, not too many tokens.
    """

    tokens: int
    """Of prompt and answer together."""
    token_bytes: int
    """Of the longest token of the vocabulary."""

    @classmethod
    def of(cls, tokens: int, tokenizer: Tokenizer) -> "Room":
        return cls(tokens, tokenizer.longest_token_bytes)

    def check_ids(self, ids: list[object], param: str) -> None:
        """Raises `ContextLengthError`."""
        if len(ids) > self.tokens:
            problem = f"{param} has {len(ids)} tokens; prompt and answer have at most {self.tokens} together"
            raise ContextLengthError(problem)

    def check_text(self, text: str, param: str) -> None:
        """Raises `ContextLengthError`."""
        length, most = text_bytes(text), self.tokens * self.token_bytes
        if length > most:
            tokens = f"{self.tokens} tokens together, each of at most {self.token_bytes} bytes"
            problem = f"{param} has {length} bytes; prompt and answer have at most {tokens}, {most} in all"
            raise ContextLengthError(problem)


def text_bytes(text: str) -> int:
    """Length of `text`, which need not be Unicode, in UTF-8."""
    return len(text.encode(errors="surrogatepass"))
