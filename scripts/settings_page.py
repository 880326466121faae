"""`python -m scripts.settings_page`: writes the tables of settings, presets and fields of docs/server.md from the code.

The text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` is generated; everything around it is written by hand.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import fill
from twostep.cli.options import default_text
from twostep.config.settings import BY_NAME, PRESETS, SETTINGS, Setting
from twostep.openai_api.fields import KNOWN, ORIGINS, Hint, Refused

PAGE = Path(__file__).parent.parent / "docs" / "server.md"


def filled(text: str) -> str:
    """The page with all tables as they have to be."""
    tables = {"settings": settings_table, "presets": presets_table, "refused": refused_table, "hints": hints_table}
    for name, table in tables.items():
        text = fill(text, name, table())
    return text


def settings_table() -> str:
    """A row for each setting, in the order of `--help`; the last ones have no flag."""
    rows = ((f"`{_flag(one)}`", one.kind.allowed, default_text(one), one.help) for one in SETTINGS)
    return _table(("flag", "value", "default", "meaning"), rows)


def presets_table() -> str:
    """A row for each setting that some preset sets."""
    names = dict.fromkeys(name for preset in PRESETS.values() for name in preset)
    rows = ((f"`{name}`", *(_shown(BY_NAME[name], preset) for preset in PRESETS.values())) for name in names)
    return _table(("", *PRESETS), rows)


def refused_table() -> str:
    """A row for each field that is refused, in the order of `ORIGINS`."""
    rows = (
        (f"`{name}`", origin, " or ".join(f"`{json.dumps(value)}`" for value in field.allowed), field.instead)
        for origin, fields in ORIGINS.items()
        for name, field in fields.items()
        if isinstance(field, Refused)
    )
    return _table(("field", "of", "allowed", "instead"), rows)


def hints_table() -> str:
    """A row for each reason for which fields are accepted without effect."""
    hints = [(name, field.why) for name, field in KNOWN.items() if isinstance(field, Hint)]
    reasons = dict.fromkeys(why for _, why in hints)
    return _table(
        ("fields", "why"), ((", ".join(f"`{name}`" for name, why in hints if why == one), one) for one in reasons)
    )


def _flag(setting: Setting) -> str:
    """The model is the argument of the command; some settings are only keywords of `LLM`."""
    if setting.name == "model":
        return setting.metavar
    if setting.python_only:
        return f"LLM({setting.name}=...)"
    return f"--[no-]{setting.flag[2:]}" if setting.is_switch else setting.flag


def _shown(setting: Setting, preset: Mapping[str, Any]) -> str:
    value = setting.show(preset.get(setting.name))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = tuple(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
