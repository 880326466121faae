"""core stays small enough to be read: its budget of lines, docstrings and blank lines not counted."""

import ast
from pathlib import Path

import twostep.core

CORE = Path(twostep.core.__file__).parent


def documentation(source: str) -> set[int]:
    """Lines that belong to strings standing by themselves: docstrings of modules, classes, functions, attributes."""
    strings = (
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for string in strings for line in range(string.lineno, (string.end_lineno or string.lineno) + 1)}


def lines(path: Path) -> int:
    source = path.read_text()
    said = documentation(source)
    return sum(1 for number, line in enumerate(source.splitlines(), 1) if line.strip() and number not in said)


def functions(path: Path) -> dict[str, int]:
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {f"{path.name}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes}


def test_core_has_at_most_1200_lines_and_its_scheduler_300() -> None:
    assert sum(lines(path) for path in CORE.glob("*.py")) <= 1200
    assert lines(CORE / "scheduler.py") <= 300


def test_functions_are_short() -> None:
    lengths = [length for path in CORE.glob("*.py") for length in functions(path).values()]
    assert max(lengths) <= 40
    assert sorted(lengths)[len(lengths) // 2] <= 8


def test_what_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    said = '"""Two\nlines."""\n\nX = 1\n"""Of X."""\n\n\ndef f():\n    """Of f."""\n'
    path.write_text(said + '    # why\n    return "x"\n')
    assert lines(path) == 4
