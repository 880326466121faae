"""The folder of result files: one JSON file a machine and measurement, from which the tables are made."""

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
    """Before minutes of measuring. Raises `ResultError`."""
    if out is not None and not out.parent.is_dir():
        raise ResultError(f"--out {out}: no folder {out.parent}")


def write(result: "DataclassInstance", name: str, out: Path | None, *, quick: bool) -> None:
    """To `out` if given, else to standard output if `quick`, else to the folder as `name`."""
    text = json.dumps(rounded(asdict(result)), indent=1) + "\n"
    if out is None and quick:
        print(text, end="")
        return
    path = out or FOLDER / name
    path.write_text(text)
    say(f"wrote {path}")


def rounded(value: Any) -> Any:
    """The same with every float cut to five digits: no measurement here has more."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {name: rounded(item) for name, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
    return value


def read(kind: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The results of one kind (`model`, `peers-model`), by name of their files."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))]
