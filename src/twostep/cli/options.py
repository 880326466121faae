"""Options that commands share: those of the table of settings, numbers with bounds, and errors that name flags."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from twostep.config.settings import BY_NAME, ENGINE_PARTS, FLAGGED, PRESETS, Setting
from twostep.errors import InvalidParameterError

# --- settings -----------------------------------------------------------------------------------------------------

ENGINE_SETTINGS = (BY_NAME["preset"], *(setting for setting in FLAGGED if setting.part in ENGINE_PARTS))
"""What every command takes that runs an engine for many requests."""
ENGINE_NAMES = tuple(setting.name for setting in ENGINE_SETTINGS)


def add_settings(
    group: "argparse._ActionsContainer", settings: Iterable[Setting] = ENGINE_SETTINGS, preset: str | None = None
) -> None:
    """An option for each, None if it is not given. `preset`: what the command takes if the user names none."""
    for setting in settings:
        _add_setting(group, setting, setting.help + _defaults(setting, preset))


def _add_setting(group: "argparse._ActionsContainer", setting: Setting, help_: str) -> None:
    """Texts are read where those of variables are, so that errors have the same words."""
    if setting.name == "model":
        group.add_argument("model", nargs="?", metavar="MODEL", help=help_)
    elif setting.is_switch:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=help_)
    else:
        how = "append" if setting.is_list else "store"
        group.add_argument(setting.flag, action=how, metavar=setting.metavar, help=help_)


def _defaults(setting: Setting, preset: str | None) -> str:
    """In parentheses: the default, and what presets set instead if they differ."""
    default = preset or "none" if setting.name == "preset" else default_text(setting)
    values = preset_values(setting)
    if len(set(values.values())) < 2:
        return f" (default: {default})" if default else ""
    shown = ", ".join(f"{name}: {value}" for name, value in values.items())
    return f" ({shown})" if preset else f" (default: {default}; {shown})"


def default_text(setting: Setting) -> str:
    """The default as help and documentation show it; empty if there is none."""
    value = setting.default
    if setting.default_note or value is None or value in ((), ""):
        return setting.default_note
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(setting.show(value))


def preset_values(setting: Setting) -> dict[str, str]:
    """What each preset sets, as text."""
    return {name: str(setting.show(preset[setting.name])) for name, preset in PRESETS.items() if setting.name in preset}


def given_settings(options: argparse.Namespace, settings: Iterable[Setting] = ENGINE_SETTINGS) -> dict[str, Any]:
    """What the user gave, by name, for `twostep.config.sources.from_flags`."""
    names = [setting.name for setting in settings]
    return {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}


def engine_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `LLM`: the engine's settings by the flags that were given. Raises `InvalidParameterError`."""
    from twostep.config.resolution import resolved
    from twostep.config.sources import from_flags

    return resolved(from_flags(given_settings(options))).values(*ENGINE_PARTS)


# --- numbers ------------------------------------------------------------------------------------------------------


def within(low: float, high: float) -> Callable[[str], float]:
    """For argparse: a number from `low` to `high`."""
    return lambda text: _bounded(text, float, low, high, f"a number from {low:.12g} to {high:.12g}")


def whole_within(low: int, high: int) -> Callable[[str], int]:
    """For argparse: a whole number from `low` to `high`."""
    return lambda text: int(_bounded(text, int, low, high, f"a whole number from {low} to {high}"))


def list_within(low: float, high: float) -> Callable[[str], tuple[float, ...]]:
    """For argparse: such numbers with commas between them, as `2,4,8`."""
    allowed = f"a list of numbers from {low:.12g} to {high:.12g}, such as 1,2,4"
    return lambda text: tuple(_bounded(word, float, low, high, allowed) for word in text.split(","))


def _bounded(text: str, kind: Callable[[str], float], low: float, high: float, allowed: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:  # false for NaN
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value


# --- errors -------------------------------------------------------------------------------------------------------


@contextmanager
def naming_flags(parser: argparse.ArgumentParser, more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Within it, an `InvalidParameterError` names flags of `parser` instead of the parameters that they set.

    `more`: flags of parameters that have another name in the code.
    """
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    try:
        yield
    except InvalidParameterError as error:
        raise InvalidParameterError(_with_flags(str(error), flags | dict(more or {})), error.param) from None


def _with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A name of one word may be an ordinary word of the sentence, unless it comes first."""

    def shown(word: re.Match[str]) -> str:
        is_name = word[0] in flags and (word.start() == 0 or "_" in word[0])
        return flags[word[0]] if is_name else word[0]

    return re.sub(r"\w+", shown, message)
