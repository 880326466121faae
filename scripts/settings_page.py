"""`python -m scripts.settings_page`: writes the tables of settings and presets of docs/server.md from the server's own.

The text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` is generated; everything around it is written by hand.
"""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import fill
from twostep.server.options import SETTINGS, SWITCH, Setting
from twostep.server.presets import PRESETS

PAGE = Path(__file__).parent.parent / "docs" / "server.md"


def filled(text: str) -> str:
    """The page with both tables as they have to be."""
    return fill(fill(text, "settings", settings_table()), "presets", presets_table())


def settings_table() -> str:
    """A row for each setting, in the order of `--help`."""
    return _table(("flag", "value", "meaning"), ((f"`{_flag(one)}`", one.kind.allowed, one.help) for one in SETTINGS))


def presets_table() -> str:
    """A row for each setting that some preset sets."""
    names = dict.fromkeys(name for preset in PRESETS.values() for name in preset)
    rows = ((f"`{name}`", *(_shown(preset.get(name)) for preset in PRESETS.values())) for name in names)
    return _table(("", *PRESETS), rows)


def _flag(setting: Setting) -> str:
    """The model is no flag but the argument of the command."""
    if setting.name == "model":
        return setting.metavar
    return f"--[no-]{setting.flag[2:]}" if setting.kind is SWITCH else setting.flag


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = tuple(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ("---",) * len(columns), *rows))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
