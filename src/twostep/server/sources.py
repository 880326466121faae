"""Those who may set something: flags, environment variables, a TOML file, a preset. Each gives a layer of settings."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from twostep.errors import InvalidParameterError
from twostep.server.options import BY_NAME, LIST, PREFIX, SETTINGS, Setting
from twostep.server.presets import PRESETS

OTHER_VARIABLES = ("TWOSTEP_MODELS", "TWOSTEP_ISA")
"""Environment variables that are no settings of the server: where models lie, and which instructions kernels use."""

_SERVICE_LINKS = (
    (r"_SERVICE_HOST", r"[0-9a-fA-F.:]+"),
    (r"_SERVICE_PORT(_[A-Z0-9_]+)?", r"\d+"),
    (r"_PORT(_\d+_(TCP|UDP|SCTP))?", r"(tcp|udp|sctp)://.+"),
    (r"_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)", r"(tcp|udp|sctp)|\d+|[0-9a-fA-F.:]+"),
)
"""Ends of names, and values, of the variables that Kubernetes makes of each service of a pod's namespace."""


class Given(NamedTuple):
    """A value, and who set it."""

    value: Any
    by: str


Layer = dict[str, Given]
"""What one of those who may set something has set, by the name of the setting."""


def from_flags(flags: Mapping[str, Any]) -> Layer:
    """A switch is a bool already; a list is of the texts of each time that the flag was given."""
    layer = {}
    for name, value in flags.items():
        setting = BY_NAME[name]
        by = setting.metavar if name == "model" else setting.flag
        texts = value if isinstance(value, list) else [str(value)]
        values = [_read(setting.kind.from_text, text, setting, by) for text in texts]
        layer[name] = Given(sum(values, ()) if setting.kind is LIST else values[0], by)
    return _without_aliases(layer)


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Ignores `service_links`. Refuses other variables with our prefix that are no settings."""
    ignored = {*OTHER_VARIABLES, *service_links(environ)}
    by_variable = {setting.variable: setting for setting in SETTINGS}
    layer = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in ignored:
            continue
        if (setting := by_variable.get(variable)) is None:
            raise _unknown(f"environment variable {variable}", variable, [*by_variable, *OTHER_VARIABLES], PREFIX)
        layer[setting.name] = Given(_read(setting.kind.from_text, text, setting, variable), variable)
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
    known = [setting.name for setting in SETTINGS if setting.name != "config"]
    layer = {}
    for key, value in _parsed(path).items():
        if key not in known:
            raise _unknown(f"{path}: {key!r}", key, known)
        setting = BY_NAME[key]
        layer[key] = Given(_read(setting.kind.from_toml, value, setting, f"{path}: {key}"), str(path))
    return _without_aliases(layer)


def from_preset(name: str) -> Layer:
    """Raises `InvalidParameterError` for a name that is none."""
    if name not in PRESETS:
        raise InvalidParameterError(f"preset is {name!r}; it has to be one of {', '.join(PRESETS)}", "preset")
    return {setting: Given(value, f"preset {name}") for setting, value in PRESETS[name].items()}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameterError(f"config: {path}: {error.strerror}", "config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidParameterError(f"config: {path} is not TOML: {error}", "config") from None


def _read(read: Callable[[Any], Any], value: object, setting: Setting, by: str) -> Any:
    try:
        return read(value)
    except ValueError:
        shown = "not shown" if setting.secret else repr(value)
        raise InvalidParameterError(f"{by} is {shown}; it has to be {setting.kind.allowed}", setting.name) from None


def _unknown(what: str, name: str, known: Iterable[str], prefix: str = "") -> InvalidParameterError:
    """All names begin with `prefix`, which says nothing of how alike they are."""
    near = get_close_matches(name.removeprefix(prefix), [other.removeprefix(prefix) for other in known], n=2)
    hint = f"did you mean {' or '.join(prefix + other for other in near)}?" if near else "see `twostep serve --help`"
    return InvalidParameterError(f"{what} is no setting; {hint}", name)


def _without_aliases(layer: Layer) -> Layer:
    """`itl_budget` is another way to say `chunking`: who says both in one place contradicts himself."""
    if (budget := layer.pop("itl_budget", None)) is None:
        return layer
    if other := layer.get("chunking"):
        problem = f"itl_budget and chunking ({budget.by}, {other.by}) both say how prompts are cut; give one"
        raise InvalidParameterError(problem, "itl_budget")
    if not 0.001 <= budget.value < inf:
        problem = f"itl_budget is {budget.value}; it has to be milliseconds above 0 (set: itl_budget by {budget.by})"
        raise InvalidParameterError(problem, "itl_budget")
    milliseconds = f"{budget.value:.3f}".rstrip("0").rstrip(".")
    return layer | {"chunking": Given(f"time={milliseconds}", budget.by)}
