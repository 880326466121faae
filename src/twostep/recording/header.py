"""A recording's first line: what made the run, so that it can be repeated and told from others."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from twostep.errors import RecordingError
from twostep.recording.codec import FORMAT
from twostep.recording.values import many, named, text, whole, wrong
from twostep.settings import Settings

MARK = "twostep recording"
"""The key that only a recording's first line has; its value is the format."""


@dataclass(frozen=True)
class Header:
    """`twostep`: the version that recorded. `about`: whatever names the run: model, machine."""

    settings: Settings
    twostep: str
    about: Mapping[str, str]


def new_header(settings: Settings, about: Mapping[str, str]) -> Header:
    """Of a run of this installation."""
    from importlib.metadata import PackageNotFoundError, version  # slow to load: for runs that are recorded alone

    try:
        installed = version("twostep")
    except PackageNotFoundError:
        installed = "not installed"
    return Header(settings, installed, about)


def encode_header(header: Header) -> dict[str, object]:
    return {
        MARK: FORMAT, "twostep": header.twostep, "settings": asdict(header.settings), "about": dict(header.about)
    }  # fmt: skip


def decode_header(value: object) -> Header:
    """Raises `RecordingError` for the first line of something else, of another format, or with a wrong field."""
    if not isinstance(value, dict) or MARK not in value:
        raise RecordingError("not a recording of Twostep")
    if value[MARK] != FORMAT:
        raise RecordingError(f"format {value[MARK]!r}; this version of Twostep reads format {FORMAT}")
    about = named(value.get("about"), "about")
    return Header(
        _decode_settings(named(value.get("settings"), "settings")),
        text(value.get("twostep"), "twostep"),
        {key: text(item, f"about: {key}") for key, item in about.items()},
    )


def _decode_settings(values: Mapping[str, object]) -> Settings:
    """Every field, nothing else, each of the type of its default."""
    known = {field.name: None if field.default is MISSING else field.default for field in fields(Settings)}
    if unlike := known.keys() ^ values.keys():
        raise RecordingError(f"settings: {min(unlike)} is {'missing' if min(unlike) in known else 'unknown'}")
    decoded = {name: _decode_setting(value, f"settings: {name}", known[name]) for name, value in values.items()}
    return Settings(**decoded)


def _decode_setting(value: object, name: str, default: object) -> Any:
    if default is None or isinstance(default, tuple):
        return tuple(None if item is None and default else whole(item, name, 1) for item in many(value, name))
    if type(value) is not type(default):
        wrong(name, value, f"like {default!r}")
    return value
