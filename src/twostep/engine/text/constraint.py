"""Restricts the next token to those that an answer's grammar allows. llguidance compiles and follows the grammars."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twostep.engine.text.literals import needed_characters, plain_gbnf
from twostep.engine.text.structured_output import StructuredOutput, with_json_options
from twostep.errors import InvalidParameterError
from twostep.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.uint32]

LIMITS = {
    "initial_lexer_fuel": 250_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 25_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 4_000,
}
"""Bounds the cost of a hostile grammar: about 0.2 s to compile and 50 MB, and 10 ms per mask (an ambiguous one took 400
ms with the library's own limits, while all requests waited). Ordinary schemas take 1 ms and 0.1 ms."""
CHECKED_STEPS = 3
"""Tokens of an answer that are tried before a grammar is accepted."""
CACHED_GRAMMARS = 16
LONGEST_LINE, LONGEST_REASON = 160, 480
"""Most characters of one line of an error of llguidance, and of the whole: it may quote a form of any length."""
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
_POINTS_OUT = re.compile(r"\s*(\d+ \|.*|\^+|<non-verbose/>|)\s*")
"""Lines that only point into the text, by number or with carets: useless once the lines are joined."""


class Constraint:
    """One answer under a grammar. The allowed tokens depend on the answer's tokens only.

    Safe for two threads: the planning thread asks while a step runs, the computing thread when the logits are ready;
    the first to ask does the work.
    """

    def __init__(self, matcher: "LLMatcher", rows: int, tokens: int) -> None:
        """`rows` of the head, of which the first `tokens` are tokens. `matcher` is this answer's own."""
        self.problem: str | None = None
        """Why no token is allowed any more, such as a limit that was exceeded."""
        self._matcher = matcher
        self._mask: Mask = np.zeros(-(-rows // 32), np.uint32)
        self._target = self._mask.ctypes.data, -(-tokens // 32) * self._mask.itemsize
        self._followed = 0
        self._masked: int | None = None
        self._lock = Lock()

    def mask(self, output: NDArray[np.int32], allowed: Mask | None) -> Mask:
        """A mask for `SampleRow`: the tokens that may follow `output`, all output tokens so far, and are `allowed`.

        Where the grammar leaves only the end, the end is allowed. Valid until asked about more output.
        """
        with self._lock:
            if self._masked != len(output):
                self._compute(output, allowed)
                self._masked = len(output)
            return self._mask

    def _compute(self, output: NDArray[np.int32], allowed: Mask | None) -> None:
        if len(output) > self._followed:
            self._matcher.consume_tokens(output[self._followed :].tolist())
            self._followed = len(output)
        self._matcher.unsafe_compute_mask_ptr(*self._target)
        if self._matcher.is_error():
            self.problem = f"the answer's grammar cannot be followed: {_one_line(self._matcher.get_error())}"
            self._mask.fill(0)
        elif allowed is not None and (self._mask & allowed).any():
            self._mask &= allowed


class Grammars:
    """Compiles the grammars of one model's requests and caches the latest."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer, self._rows = tokenizer, rows
        self._compiler = _Compiler(tokenizer)
        self._compiled = lru_cache(CACHED_GRAMMARS)(self._compiler.compile)

    def prepare(self) -> None:
        """Creates what all grammars need. If that fails, `check` raises the reason."""
        self._compiler.prepare()

    def check(self, structured: StructuredOutput) -> None:
        """Raises `InvalidParameterError` for what cannot be compiled within `LIMITS`, or if llguidance is missing."""
        self._compiled(structured)

    def constraint(self, structured: StructuredOutput) -> Constraint:
        """Returns the constraint of a new answer. Raises as `check` does."""
        matcher = self._compiled(structured).deep_copy()
        return Constraint(matcher, self._rows, self._tokenizer.vocab_size)


class _Compiler:
    """Separate from `Grammars`, whose cache would otherwise refer to its owner and keep both until a garbage
    collection."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._making = Lock()

    def prepare(self) -> None:
        with suppress(InvalidParameterError), self._making:
            _ = self._tokens if self._tokenizer.eos_ids else None

    def compile(self, structured: StructuredOutput) -> "LLMatcher":
        if not self._tokenizer.eos_ids:
            raise refused(structured, "the model has no token that ends an answer")
        return self._checked(structured)

    def _checked(self, structured: StructuredOutput) -> "LLMatcher":
        """Also tries the first steps, where some grammars prove too large or empty."""
        guidance = library()
        self._check_spellable(structured)
        with self._making:
            tokens = self._tokens
        try:
            grammar = guidance.grammar_from(structured.kind, grammar_text(structured))
        except ValueError as error:
            raise refused(structured, str(error)) from None
        limits = guidance.LLParserLimits(**LIMITS, verbose_errors=False)
        matcher: LLMatcher = guidance.LLMatcher(tokens, grammar, limits=limits, log_level=0)
        if problem := matcher.get_error() or _problem_ahead(matcher):
            raise refused(structured, problem)
        return matcher

    def _check_spellable(self, structured: StructuredOutput) -> None:
        """Refuses a form with a character whose bytes have no token: an answer could not continue there."""
        if not (missing := self._tokenizer.missing_bytes):
            return
        for characters in needed_characters(structured):
            if all(not missing.isdisjoint(one.encode(errors="surrogatepass")) for one in characters):
                problem = f"it spells out U+{ord(characters[0]):04X}, which no text of this model's vocabulary has"
                raise refused(structured, problem)

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        """The vocabulary in llguidance's form; created once, in some tenths of a second."""
        vocabulary = _TokenBytes(self._tokenizer)
        tokens: LLTokenizer = library().LLTokenizer(vocabulary, eos_token=sorted(self._tokenizer.eos_ids))
        return tokens


class _TokenBytes:
    """The tokenizer in the form that `LLTokenizer` needs. Control tokens are in no grammar's text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.vocabulary.control)

    def __call__(self, text: str) -> Sequence[int]:
        """Tokens whose bytes are exactly the text's: a normaliser would change them and break the grammar."""
        return self._tokenizer.encode_exact(text)


def _problem_ahead(matcher: "LLMatcher") -> str:
    """The error in the first tokens of some answer; empty if there is none."""
    probe = matcher.deep_copy()
    for _ in range(CHECKED_STEPS):
        mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
        if probe.is_error() or probe.is_stopped():
            break
        probe.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
    return probe.get_error()


def library() -> Any:
    """Returns llguidance. Raises `InvalidParameterError` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        problem = "structured output needs llguidance, beside twostep: pip install 'llguidance>=1.9'"
        raise InvalidParameterError(problem, "structured") from None
    return llguidance


def grammar_text(structured: StructuredOutput) -> str:
    """The text for llguidance: a schema gets default options that it does not set itself."""
    if structured.kind == "grammar" and not library().gbnf_to_lark.is_lark_syntax(structured.text):
        return plain_gbnf(structured.text)
    if structured.kind != "json_schema":
        return structured.text
    schema = json.loads(structured.text)
    return with_json_options(schema) if isinstance(schema, dict) else structured.text


def refused(structured: StructuredOutput, problem: str, field: str = "structured") -> InvalidParameterError:
    """The error for a form that cannot be used, asked for by `field`, with the whole reason in one line."""
    what = structured.kind.replace("json_schema", "JSON schema")
    if problem.startswith("NoExtension"):
        problem = "no text satisfies it"
    if structured.kind != "grammar" or field == "tools":
        problem = _PLACE.sub("", problem)  # in a grammar that llguidance made, which nobody wrote
    return InvalidParameterError(f"{field}: the {what} cannot be used: {_one_line(problem)}", field)


def _one_line(problem: str) -> str:
    """Joins the lines: the reason is often the last one, after lines that quote the text."""
    lines = [_shortened(line.strip(), LONGEST_LINE) for line in problem.splitlines() if not _POINTS_OUT.fullmatch(line)]
    return _shortened("; ".join(lines).replace(":; ", ": "), LONGEST_REASON)


def _shortened(text: str, longest: int) -> str:
    """Keeps both ends, where the reason is."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 + 5 :]}"
