"""Imports go downwards only (the design's table of parts), read from the sources, not by importing them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "twostep"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "spec": set(),
    "errors": set(),
    "input_file": set(),
    "terminal": set(),
    "metrics": set(),
    "turns": set(),
    "background": set(),
    "processes": {"errors"},
    "workload": {"input_file", "errors"},
    "store": {"terminal", "processes", "errors"},
    "model": {"spec", "processes", "errors"},
    "kernels": {"model", "spec", "processes", "errors"},
    "perf": {"core", "spec", "errors"},
    "settings": {"core"},
    "recording": {"core", "settings", "background", "input_file", "errors"},
    "engine": {
        "core",
        "spec",
        "model",
        "kernels",
        "perf",
        "settings",
        "recording",
        "store",
        "terminal",
        "metrics",
        "turns",
        "background",
        "processes",
        "errors",
    },
    "llm": {"core", "model", "kernels", "engine", "store", "processes", "errors"},
    "openai_api": {"model", "kernels", "engine", "errors"},
    "batchfile": {"model", "engine", "llm", "openai_api", "input_file", "errors"},
    "bench": {"metrics", "workload", "terminal", "turns", "errors"},
    "sim": {"core", "spec", "perf", "settings", "recording", "metrics", "workload", "errors"},
    "planner": {"core", "spec", "perf", "metrics", "workload", "sim", "errors"},
    "disagg": {"core", "spec", "model", "kernels", "perf", "engine", "errors"},
    "server": {
        "core",
        "spec",
        "model",
        "kernels",
        "perf",
        "settings",
        "engine",
        "openai_api",
        "disagg",
        "store",
        "workload",
        "turns",
        "background",
        "processes",
        "errors",
    },
}
MAY_IMPORT["cli"] = MAY_IMPORT.keys() - {"core"}
"""A part may import itself and these, directly. Function-level and type-checking imports count like any other."""

NEVER_REACHES: dict[str, set[str]] = {"sim": {"model", "kernels", "engine", "server"}}
"""Also not through others, however the table above may come to read."""

UNFIT_FOR_CORE = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random",
    "secrets", "select", "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
"""Standard modules that bring a clock, I/O, threads, randomness or logging."""


def modules(source: Path) -> dict[str, Path]:
    """Dotted name of each module under `source`, the package's own folder."""
    found = {}
    for path in source.rglob("*.py"):
        parts = (source.name, *path.relative_to(source).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, module: str) -> Iterator[str]:
    """Every dotted name that the file imports; for `from a import b` both a and a.b, as b may be a module."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def with_parents(name: str) -> Iterator[str]:
    """Importing a.b.c runs a and a.b too."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def graph(source: Path) -> dict[str, set[str]]:
    """For each module of the package those of the package that importing it runs, directly."""
    known = modules(source)
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        names = {module, *imported(path, module)}
        edges[module] = {parent for name in names for parent in with_parents(name)} & known.keys() - {module}
    return edges


def part(module: str) -> str:
    """`twostep.sim.clock` belongs to `sim`; the package's own `__init__` to no part."""
    return module.split(".")[1] if "." in module else ""


def upward_imports(source: Path) -> list[str]:
    return [
        f"{module} imports {target}"
        for module, targets in graph(source).items()
        for target in sorted(targets)
        if part(target) not in MAY_IMPORT.get(part(module), set()) | {part(module), ""}
    ]


def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen, ahead = {start}, [start]
    while ahead:
        new = edges[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def forbidden_reaches(source: Path) -> list[str]:
    edges = graph(source)
    return [
        f"{module} reaches {target}"
        for module in edges
        for target in sorted(reached(module, edges))
        if part(target) in NEVER_REACHES.get(part(module), set())
    ]


def unfit_for_core(source: Path) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, path in modules(source).items()
        if part(module) == "core"
        for name in imported(path, module)
        if (top := name.split(".")[0]) != source.name and (top not in sys.stdlib_module_names or top in UNFIT_FOR_CORE)
    ]


def test_every_part_has_a_row_in_the_table() -> None:
    assert {part(module) for module in modules(SOURCE)} - {""} <= MAY_IMPORT.keys()


def test_the_table_itself_goes_downwards() -> None:
    """No two parts may import each other, also not through others."""
    for name, below in MAY_IMPORT.items():
        assert all(name not in reached(other, MAY_IMPORT) for other in below)


def test_imports_go_downwards_only() -> None:
    assert upward_imports(SOURCE) == []


def test_sim_never_reaches_what_computes() -> None:
    assert forbidden_reaches(SOURCE) == []


def test_core_uses_only_the_pure_standard_library() -> None:
    assert unfit_for_core(SOURCE) == []


def made_up(folder: Path, files: dict[str, str]) -> Path:
    """A package `house` with these modules; each folder gets an empty `__init__` unless one is given."""
    source = folder / "house"
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in (source, path.parent):
            (parent / "__init__.py").touch()
        path.write_text(text)
    return source


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("from house.core import plan", "house.spec.a imports house.core"),
        ("import house.core.plan", "house.spec.a imports house.core.plan"),
        ("from ..core import plan", "house.spec.a imports house.core.plan"),
        ("def late():\n    from house.core.plan import x", "house.spec.a imports house.core.plan"),
        ("from house import core", "house.spec.a imports house.core"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, text: str, complaint: str) -> None:
    source = made_up(tmp_path, {"core/plan.py": "", "spec/a.py": text})
    assert complaint in upward_imports(source)


def test_a_reach_through_others_is_found(tmp_path: Path) -> None:
    files = {"sim/a.py": "from ..perf import b", "perf/b.py": "from house import engine", "engine/c.py": ""}
    source = made_up(tmp_path, files)
    assert "house.sim.a reaches house.engine" in forbidden_reaches(source)


def test_a_reach_through_the_package_itself_is_found(tmp_path: Path) -> None:
    source = made_up(tmp_path, {"sim/a.py": "", "engine/c.py": "", "__init__.py": "from house.engine.c import LLM"})
    assert "house.sim.a reaches house.engine.c" in forbidden_reaches(source)


@pytest.mark.parametrize("module", ["numpy", "time", "threading", "os.path"])
def test_what_core_must_not_use_is_found(tmp_path: Path, module: str) -> None:
    source = made_up(tmp_path, {"core/a.py": f"import dataclasses\nimport {module}"})
    assert unfit_for_core(source) == [f"house.core.a imports {module}"]
