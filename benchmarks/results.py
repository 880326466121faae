"""Result files: one JSON file per machine and measurement, from which tables are generated."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import say
from twostep.errors import ResultError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = Path(__file__).parent / "results"


def check_writable(out: Path | None) -> None:
    """Checks `out` before the measurement. Raises `ResultError`."""
    if out is not None and not out.parent.is_dir():
        raise ResultError(f"--out {out}: no folder {out.parent}")


def write(result: "DataclassInstance", name: str, out: Path | None, *, quick: bool) -> None:
    """Writes to `out` if given, otherwise to standard output if `quick`, otherwise to `name` in the folder."""
    text = json.dumps(rounded(asdict(result)), indent=1) + "\n"
    if out is None and quick:
        print(text, end="")
        return
    path = out or FOLDER / name
    path.write_text(text)
    say(f"wrote {path}")


def rounded(value: Any) -> Any:
    """The value with every float rounded to five significant digits, the precision of the measurements."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {name: rounded(item) for name, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
    return value


def read(kind: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The results of one kind (`model`, `peers-model`), sorted by file name."""
    return [read_file(path) for path in sorted(folder.glob(f"{kind}-*.json"))]


def read_file(path: Path) -> dict[str, Any]:
    """One result."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
