"""`twostep generate --file REQUESTS --out ANSWERS`: many requests in one run, which can be resumed."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.cli.options import engine_keywords
from twostep.errors import InvalidParameterError, TwostepError

if TYPE_CHECKING:
    from twostep.batchfile.answer_file import AnswerFile
    from twostep.batchfile.batch_run import Engine
    from twostep.input_file import InputFile

SAID_BY_BODIES = (
    "prompt", "system", "raw", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
"""Options of `generate` that each line of the file sets."""


class UnansweredError(TwostepError):
    """Some requests of the file were answered with an error."""


def run(options: argparse.Namespace, defaults: Callable[[str], object]) -> None:
    """`defaults` returns the default of an option; an option with another value was given by the user."""
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
    """Answers the requests that no earlier run has answered. Calls `load` only if there are any.

    With `retry_errors`, requests whose answer is an error are repeated. `again` names the command that resumes a
    stopped run. `requests` may be a pipe, or - for standard input.

    Raises `BatchFileError` for unusable files before anything is computed, and `UnansweredError` at the end if
    requests of this or an earlier run were answered with an error.
    """
    from twostep.batchfile.answer_file import AnswerFile
    from twostep.batchfile.request_lines import check_lines
    from twostep.input_file import InputFile
    from twostep.terminal import StatusLine

    given = InputFile(requests)
    lines = check_lines(given)
    if given.is_file_at(out):
        raise InvalidParameterError(f"--out is {out}, the file that --file reads; give another file")
    with AnswerFile(out, lines, without_errors=retry_errors) as answers:
        if len(answers.answered) == len(lines):
            StatusLine().say(f"{out} already has answers to all {len(lines)} requests")
        else:
            with closing(load()) as engine:
                _answer_rest(given, answers, engine, names, len(lines), f"{again} resumes with the answers in {out}")
        _check_errors(answers.errors, lines, out)


def _check_errors(errors: Mapping[str, str], lines: Mapping[str, int], out: Path) -> None:
    if not errors:
        return
    custom_id, problem = next(iter(errors.items()))
    first = f"line {lines[custom_id]}: {problem}"
    raise UnansweredError(
        f"{len(errors)} of {len(lines)} answers in {out} are errors; first: {first} (--retry-errors repeats them)"
    )


def _answer_rest(
    requests: "InputFile", answers: "AnswerFile", engine: "Engine", names: Sequence[str], total: int, how_to_resume: str
) -> None:
    from twostep.batchfile.batch_run import BatchRun
    from twostep.batchfile.request_lines import read_lines
    from twostep.engine.request_progress import RequestProgress

    progress = RequestProgress(total, before=len(answers.answered))
    batch = BatchRun(engine, names, answers.write, progress.finished)
    try:
        batch.run(line for line in read_lines(requests) if line.custom_id not in answers.answered)
    except (KeyboardInterrupt, SystemExit):
        progress.say(f"stopped at {progress.summary()}; {how_to_resume}")
        raise
    finally:
        progress.clear()
    progress.say(progress.summary())


def names(options: argparse.Namespace) -> list[str]:
    """Model names that requests may use: --model as given, or the file name without its suffix."""
    if options.served_model_name is not None:
        return [options.served_model_name]
    return list(dict.fromkeys([options.model, Path(options.model).name.removesuffix(".gguf")]))


def _load(options: argparse.Namespace, settings: Mapping[str, Any]) -> "Engine":
    """Prints the effective settings and the memory calculation."""
    from twostep.llm import LLM
    from twostep.terminal import StatusLine

    llm = LLM(options.model, **settings)
    for line in llm.engine.describe():
        StatusLine().say(line)
    return llm


def _check_options(options: argparse.Namespace, defaults: Callable[[str], object]) -> None:
    from twostep.input_file import STANDARD_INPUT

    for name in SAID_BY_BODIES:
        if getattr(options, name) != defaults(name):
            shown = "PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}"
            raise InvalidParameterError(f"{shown} cannot be used with --file: each line of the file sets it")
    if options.executor != "native" or options.stats:
        raise InvalidParameterError("--executor and --stats cannot be used with --file")
    if str(options.out) == STANDARD_INPUT:  # a file of that name would surprise everybody
        problem = "--out is -; answers go into a file, from which an interrupted run continues: give its name"
        raise InvalidParameterError(problem)
