"""A recording's first line: what made the run, so that it can be repeated and told from others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostep.config.configs import SchedulerSettings
from twostep.config.settings import of_parts
from twostep.config.sources import value_of
from twostep.errors import InvalidParameterError, RecordingError
from twostep.recording.codec import FORMAT
from twostep.recording.values import many, named, text, whole

MARK = "twostep recording"
"""The key that only a recording's first line has; its value is the format."""


@dataclass(frozen=True)
class Header:
    """`twostep`: the version that recorded. `about`: what identifies the run, such as model and machine."""

    settings: SchedulerSettings
    twostep: str
    about: Mapping[str, str]
    costs: Mapping[str, Any] | None = None
    """Calibrated costs of steps that the run began with, as JSON, see `perf.step_time_model`; None: none."""


def new_header(settings: SchedulerSettings, about: Mapping[str, str], costs: Mapping[str, Any] | None = None) -> Header:
    """Of a run of this installation."""
    from importlib.metadata import PackageNotFoundError, version  # slow to load: for runs that are recorded alone

    try:
        installed = version("twostep")
    except PackageNotFoundError:
        installed = "not installed"
    return Header(settings, installed, about, costs)


def encode_header(header: Header) -> dict[str, object]:
    return {
        MARK: FORMAT, "twostep": header.twostep, "settings": header.settings.to_json(),
        "about": dict(header.about), "costs": header.costs,
    }  # fmt: skip


def decode_header(value: object) -> Header:
    """Raises `RecordingError` for the first line of something else, of another format, or with a wrong field."""
    if not isinstance(value, dict) or MARK not in value:
        raise RecordingError("not a recording of Twostep")
    if value[MARK] != FORMAT:
        by = f", written by Twostep {value['twostep']}" if isinstance(value.get("twostep"), str) else ""
        what = f"format {value[MARK]!r}{by}; this version of Twostep reads format {FORMAT}"
        raise RecordingError(f"{what}: replay it with the version that wrote it, or record again")
    about = named(value.get("about"), "about")
    return Header(
        _decode_settings(named(value.get("settings"), "settings")),
        text(value.get("twostep"), "twostep"),
        {key: text(item, f"about: {key}") for key, item in about.items()},
        None if value.get("costs") is None else named(value["costs"], "costs"),
    )


def _decode_settings(values: Mapping[str, object]) -> SchedulerSettings:
    """Needs every setting and allows nothing else."""
    rows = {row.name: row for row in of_parts("scheduler")}
    known = {"blocks", "windows", *rows}
    if unlike := known ^ values.keys():
        raise RecordingError(f"settings: {min(unlike)} is {'missing' if min(unlike) in known else 'unknown'}")
    try:
        decoded = {name: value_of(row, values[name]) for name, row in rows.items()}
    except InvalidParameterError as error:
        raise RecordingError(f"settings: {error}") from None
    if unset := [name for name, value in decoded.items() if value is None]:
        raise RecordingError(f"settings: {unset[0]} is None; a recording has a value for each setting")
    blocks = tuple(whole(item, "settings: blocks", 1) for item in many(values["blocks"], "settings: blocks"))
    windows = many(values["windows"], "settings: windows")
    tokens = tuple(None if item is None else whole(item, "settings: windows", 1) for item in windows)
    return SchedulerSettings(blocks, tokens, **decoded)
