"""`twostep generate --file REQUESTS --out ANSWERS`: many requests at once, taken up again where a run ended."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.cli.options import engine_keywords
from twostep.errors import InvalidParameterError, TwostepError

if TYPE_CHECKING:
    from twostep.batchfile.answers import AnswerFile
    from twostep.batchfile.run import Engine
    from twostep.input_file import InputFile

SAID_BY_BODIES = (
    "prompt", "system", "raw", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
"""Options of `generate` that each line of a file says for itself."""


class UnansweredError(TwostepError):
    """Some requests of a file got an error for an answer."""


def run(options: argparse.Namespace, defaults: Callable[[str], object]) -> None:
    """`defaults` gives the default of an option: one that differs was given."""
    _check_options(options, defaults)
    settings = engine_keywords(options)
    again = "the same command" if options.record is None else "the same command with another --record"
    answer_file(
        options.file, options.out, lambda: _load(options, settings), names(options),
        retry_errors=options.retry_errors, again=again,
    )  # fmt: skip


def answer_file(
    requests: Path,
    out: Path,
    load: Callable[[], "Engine"],
    names: Sequence[str],
    *,
    retry_errors: bool = False,
    again: str = "the same command",
) -> None:
    """Answers what no earlier run has answered; `load` is called once it is known that there is something.

    With `retry_errors` an error is no answer. `again` is how a run that is stopped goes on. Raises `BatchFileError` for
    files that cannot be used, before anything is computed; `UnansweredError` at the end, if there are requests, also of
    earlier runs, that could not be answered. `requests` may be a pipe, or - for standard input.
    """
    from twostep.batchfile.answers import AnswerFile
    from twostep.batchfile.lines import check_lines
    from twostep.input_file import InputFile
    from twostep.terminal import StatusLine

    given = InputFile(requests)
    lines = check_lines(given)
    if given.is_file_at(out):
        raise InvalidParameterError(f"--out is {out}, which is the file of requests")
    with AnswerFile(out, lines, without_errors=retry_errors) as answers:
        if len(answers.answered) == len(lines):
            StatusLine().say(f"all {len(lines)} requests have their answers in {out}")
        else:
            with closing(load()) as engine:
                _answer_rest(given, answers, engine, names, len(lines), f"{again} goes on from what {out} has")
        _check_errors(answers.errors, lines, out)


def _check_errors(errors: Mapping[str, str], lines: Mapping[str, int], out: Path) -> None:
    if not errors:
        return
    custom_id, problem = next(iter(errors.items()))
    first = f"line {lines[custom_id]}: {problem}"
    raise UnansweredError(
        f"{len(errors)} of {len(lines)} answers are errors, see {out}; the first: {first} (--retry-errors asks again)"
    )


def _answer_rest(
    requests: "InputFile", answers: "AnswerFile", engine: "Engine", names: Sequence[str], total: int, how_to_go_on: str
) -> None:
    from twostep.batchfile.lines import read_lines
    from twostep.batchfile.run import BatchRun
    from twostep.engine.progress import RequestProgress

    progress = RequestProgress(total, before=len(answers.answered))
    batch = BatchRun(engine, names, answers.write, progress.finished)
    try:
        batch.run(line for line in read_lines(requests) if line.custom_id not in answers.answered)
    except (KeyboardInterrupt, SystemExit):
        progress.say(f"stopped at {progress.summary()}; {how_to_go_on}")
        raise
    finally:
        progress.clear()
    progress.say(progress.summary())


def names(options: argparse.Namespace) -> list[str]:
    """What bodies may call the model: what the command line calls it, or a file's name without its ending."""
    if options.served_model_name is not None:
        return [options.served_model_name]
    return list(dict.fromkeys([options.model, Path(options.model).name.removesuffix(".gguf")]))


def _load(options: argparse.Namespace, settings: Mapping[str, Any]) -> "Engine":
    """Says which settings are in effect, and the arithmetic of the memory."""
    from twostep.llm import LLM
    from twostep.terminal import StatusLine

    llm = LLM(options.model, **settings)
    for line in llm.engine.describe():
        StatusLine().say(line)
    return llm


def _check_options(options: argparse.Namespace, defaults: Callable[[str], object]) -> None:
    for name in SAID_BY_BODIES:
        if getattr(options, name) != defaults(name):
            shown = "PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}"
            raise InvalidParameterError(f"{shown} has no meaning with --file: its lines say what they ask for")
    if options.executor != "native" or options.stats:
        raise InvalidParameterError("--executor and --stats are for a single prompt, not for --file")
