"""Where settings come from: flags, environment variables, a TOML file, keywords of Python, a preset, the table's
defaults. Each source gives a layer of typed values."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from twostep.config.settings import BY_NAME, FLAGGED, PREFIX, SETTINGS, Part, Setting
from twostep.errors import InvalidParameterError

OTHER_VARIABLES = ("TWOSTEP_MODELS", "TWOSTEP_PROFILES", "TWOSTEP_ISA")
"""Environment variables that are not settings of the server: where models are, and which instructions kernels use."""

_SERVICE_LINKS = (
    (r"_SERVICE_HOST", r"[0-9a-fA-F.:]+"),
    (r"_SERVICE_PORT(_[A-Z0-9_]+)?", r"\d+"),
    (r"_PORT(_\d+_(TCP|UDP|SCTP))?", r"(tcp|udp|sctp)://.+"),
    (r"_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)", r"(tcp|udp|sctp)|\d+|[0-9a-fA-F.:]+"),
)
"""Endings of names, and values, of the variables that Kubernetes sets for each service of a pod's namespace."""

MOST_SHOWN = 60
"""Characters of a value in an error."""


class SettingValue(NamedTuple):
    """A setting's value and where it comes from."""

    value: Any
    """Typed; None: unset, or decided when the model is loaded."""
    by: str
    """A flag, a variable, a file, `argument`, a preset or the default: what `/v1/config` shows."""
    called: str
    """What an error calls the setting: as the user wrote it, or its name and where its value comes from."""


Layer = Mapping[str, SettingValue]
"""The settings of one source, by name. An alias is under the name of the setting that it sets."""


def from_flags(flags: Mapping[str, Any]) -> Layer:
    """Flags as argparse leaves them: a text, a bool for a switch, a list of texts for a flag that may be repeated."""
    layer = {}
    for name, value in flags.items():
        setting = BY_NAME[name]
        called = setting.metavar if name == "model" else setting.flag
        text = ",".join(value) if isinstance(value, list) else str(value)
        layer[name] = SettingValue(_read(setting.kind.from_text, text, setting, called), called, called)
    return _without_aliases(layer)


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Ignores `service_links`. Refuses other variables with our prefix that are not settings."""
    ignored = {*OTHER_VARIABLES, *service_links(environ)}
    by_variable = {setting.variable: setting for setting in FLAGGED}
    layer = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in ignored:
            continue
        if (setting := by_variable.get(variable)) is None:
            raise _unknown(f"environment variable {variable}", variable, [*by_variable, *OTHER_VARIABLES], PREFIX)
        layer[setting.name] = SettingValue(_read(setting.kind.from_text, text, setting, variable), variable, variable)
    return _without_aliases(layer)


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that Kubernetes has set: the addresses of services whose names begin with `twostep`."""
    return [name for name, value in environ.items() if name.startswith(PREFIX) and _is_service_link(name, value)]


def _is_service_link(name: str, value: str) -> bool:
    service = PREFIX.removesuffix("_")
    return any(
        re.fullmatch(rf"{service}(_[A-Z0-9_]+)?{end}", name) and re.fullmatch(values, value)
        for end, values in _SERVICE_LINKS
    )


def from_file(path: Path) -> Layer:
    """Keys are the names of settings, at the top of the file. Raises `InvalidParameterError` that names the file."""
    known = [setting.name for setting in FLAGGED if setting.name != "config"]
    layer = {}
    for key, value in _parsed(path).items():
        if key not in known:
            raise _unknown(f"{path}: {key!r}", key, known)
        called = f"{path}: {key}"
        layer[key] = SettingValue(_read(BY_NAME[key].kind.from_toml, value, BY_NAME[key], called), str(path), called)
    return _without_aliases(layer)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"config: {path}: {error.strerror}", "config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"config: {path} is not TOML: {error}", "config") from None


def from_keywords(keywords: Mapping[str, Any], *parts: Part, also: Iterable[str] = ()) -> Layer:
    """Keywords of Python: typed values, or their texts for policies and sizes. Allows the settings of `parts` and
    those named in `also`. None leaves a setting open that may be."""
    known = [setting.name for setting in SETTINGS if setting.part in parts or setting.name in also]
    layer = {}
    for name, value in keywords.items():
        if name not in known:
            raise _unknown(repr(name), name, known)
        layer[name] = SettingValue(value_of(BY_NAME[name], value), "argument", name)
    return _without_aliases({name: given for name, given in layer.items() if not _is_unset_alias(name, given)})


def value_of(setting: Setting, value: object) -> Any:
    """The typed value of a keyword or of JSON. Raises `InvalidParameterError`."""
    if value is None and (setting.nullable or setting.default is None):
        return None
    return _read(setting.kind.from_python, value, setting, setting.name)


def _is_unset_alias(name: str, given: SettingValue) -> bool:
    return bool(BY_NAME[name].alias_of) and given.value is None


def defaults() -> dict[str, SettingValue]:
    """The table's."""
    return {s.name: SettingValue(s.default, "default", f"{s.name} (default)") for s in SETTINGS if not s.alias_of}


def _read(read: Callable[[Any], Any], value: Any, setting: Setting, called: str) -> Any:
    try:
        return read(value)
    except (ValueError, OverflowError):
        shown = "not shown" if setting.secret else repr(value)
        shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."
        allowed = f"{setting.kind.allowed}{setting.kind.note}"
        raise InvalidParameterError(f"{called} is {shown}; it has to be {allowed}", setting.name) from None


def _unknown(what: str, name: str, known: Iterable[str], prefix: str = "") -> InvalidParameterError:
    """All names begin with `prefix`, which does not count for how alike they are."""
    names = [other.removeprefix(prefix) for other in known]
    bare = name.removeprefix(prefix)
    near = _renamed(bare, names) or get_close_matches(bare, names, n=2)
    if near:
        hint = f"did you mean {' or '.join(prefix + other for other in near)}?"
    elif prefix:
        hint = "see `twostep serve --help`"
    else:
        hint = f"settings are {', '.join(names)}"
    return InvalidParameterError(f"{what} is not a setting; {hint}", name)


def _renamed(name: str, known: Iterable[str]) -> list[str]:
    """The present name of a setting that was called `name` once."""
    return [other for other in known if other in BY_NAME and name.lower() in BY_NAME[other].former]


def _without_aliases(layer: Mapping[str, SettingValue]) -> Layer:
    """Puts each alias under the name of the setting that it sets. Refuses both in one source."""
    plain = dict(layer)
    for name in [name for name in layer if BY_NAME[name].alias_of]:
        target = BY_NAME[name].alias_of
        alias = plain.pop(name)
        if other := plain.get(target):
            both = f"{alias.called} and {other.called}"
            raise InvalidParameterError(f"{both} set the same thing; give one of the two", name)
        plain[target] = alias
    return plain
