"""The documents: links resolve, names exist, and the server's page lists exactly what the server has."""

import argparse
import re
import shlex
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from scripts.settings_page import PAGE, filled
from twostep.cli.main import main
from twostep.cli.parser import parser
from twostep.config.configs import serve_settings
from twostep.config.values import MemoryBytes
from twostep.openai_api.fields import KNOWN, ORIGINS
from twostep.server.api.openapi import document
from twostep.server.app import routes

ROOT = Path(__file__).parent.parent
[_SUBPARSERS] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
COMMANDS = set(_SUBPARSERS.choices)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Those of its headings, as GitHub makes them, and former ones that are kept as `<a id=...>`."""
    text = FENCED.sub("", document.read_text())
    kept = re.findall(r'<a id="([^"]+)"></a>', text)
    return {*kept, *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text))}


def broken(document: Path) -> list[str]:
    """Links to files or anchors that do not exist."""
    links = [link for link in LINK.findall(FENCED.sub("", document.read_text())) if not re.match(r"[a-z]+:", link)]
    return [link for link in links if not _resolves(document, *link.partition("#")[::2])]


def _resolves(document: Path, path: str, anchor: str) -> bool:
    target = document.parent / path if path else document
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    assert broken(document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A part\n[one](#a-part) [two](#no-part) [three](none.md) [four](page.md#a-part)\n[w](https://x.y)\n"
        '<a id="old"></a>\n[five](#old) [six](#older)\n'
    )
    assert broken(page) == ["#no-part", "none.md", "#older"]


def test_the_log_is_newest_first() -> None:
    headings = HEADING.findall((ROOT / "docs" / "LOG.md").read_text())[1:]
    dates = [re.match(r"\d{4}-\d\d-\d\d: ", heading) for heading in headings]
    assert all(dates)
    assert headings == sorted(headings, key=lambda heading: heading[:10], reverse=True)


# --- names of files and classes -----------------------------------------------------------------------------------

GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/scheduling.md")]
"""Pages that describe the sources. A renamed file or class has to be renamed there too."""

PAGES = [*GUIDES[:2], *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "LOG.md")]
"""All that describe how things are now; log and decisions name what there was."""

FILE_NAME = re.compile(r"[\w.*-]+(?:/[\w.@*-]+)*\.(?:py|pyi|cpp|h|toml|txt|md|json)")
PATH = re.compile(rf"{FILE_NAME.pattern}|[\w.-]+(?:/[\w.@*-]+)+/?")
CLASS_NAME = re.compile(r"([A-Z][a-z]+\w*)(?:\.(\w+))?(?:\(.*\))?")


def quoted(page: str) -> list[str]:
    """What stands in backticks, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", FENCED.sub("", page))


def named_paths(page: str) -> set[str]:
    """Files and folders of the repository: in backticks, and in the labels of diagrams."""
    diagrams = re.findall(r"^```mermaid$.*?^```$", page, re.DOTALL | re.MULTILINE)
    in_diagrams = re.split(r'["\[\]<>,\s]+', " ".join(diagrams).replace("<br/>", " "))
    return {text for text in [*quoted(page), *in_diagrams] if PATH.fullmatch(text)}


def named_classes(page: str) -> set[tuple[str, str]]:
    """Class names in backticks, each with the member that is named, or an empty text."""
    found = map(CLASS_NAME.fullmatch, quoted(page))
    return {(match[1], match[2] or "") for match in found if match}


def exists(path: str) -> bool:
    """From the root of the repository, of the package or of the documents; `*` stands for any name."""
    roots = ROOT, ROOT / "src" / "twostep", ROOT / "docs"
    return any(next(root.glob(path.rstrip("/")), None) for root in roots)


def words_of_sources() -> set[str]:
    files = chain(*((ROOT / folder).rglob("*.*") for folder in ("src", "native", "tests/support")))
    texts = (file.read_text() for file in files if file.suffix in {".py", ".pyi", ".cpp", ".h"})
    return set(chain.from_iterable(re.findall(r"\w+", text) for text in texts))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_named_files_exist(page: Path) -> None:
    assert {path for path in named_paths(page.read_text()) if not exists(path)} == set()


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.name)
def test_guides_name_files(page: Path) -> None:
    assert len(named_paths(page.read_text())) >= 5


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.name)
def test_named_classes_exist(page: Path) -> None:
    words = words_of_sources()
    assert {
        (name, member) for name, member in named_classes(page.read_text()) if {name, member} - words - {""}
    } == set()


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_part_of_the_package_is_named(page: str) -> None:
    parts = {path.parent.name for path in (ROOT / "src" / "twostep").glob("*/__init__.py")}
    assert {f"src/twostep/{part}" for part in parts} <= named_paths((ROOT / page).read_text())


def test_names_that_do_not_exist_are_found() -> None:
    page = (
        "`core/nothing.py` `core/loop.py` `nowhere/sub/` `core/*.py` `EngineLoop.begin` `Unheard.of` `n=1` `/v1/models`"
    )
    diagram = '```mermaid\na["core/lost.py, core/plan.py<br/>old/folder"] <--> b\n```\n'
    assert {path for path in named_paths(f"{page}\n{diagram}") if not exists(path)} == {
        "core/nothing.py",
        "nowhere/sub/",
        "core/lost.py",
        "old/folder",
    }
    assert named_classes(page) == {("EngineLoop", "begin"), ("Unheard", "of")}


# --- commands -----------------------------------------------------------------------------------------------------

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def example_commands(page: str) -> list[list[str]]:
    """Arguments of each `twostep` command in a block of shell commands."""
    lines = chain.from_iterable(block.splitlines() for block in SHELL.findall(page))
    found = (re.search(r"(?:^|/| )twostep ([a-z].*)$", line) for line in lines if not line.startswith("#"))
    return [words for match in found if match and (words := shlex.split(match[1], comments=True))[0] in COMMANDS]


def mentioned_commands(page: str) -> list[list[str]]:
    """Words of each command in backticks that begins with `twostep`."""
    return [text.split()[1:] for text in quoted(page) if text.startswith("twostep ")]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The help of this command, or of its subcommand. Kinds of workloads are taken to have the same options."""
    subcommand = words[1:2] if words[0] == "workload" else []
    subcommand += ["chat"] if subcommand == ["make"] else []
    with pytest.raises(SystemExit) as end:
        main([words[0], *subcommand, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def unknown_flags(page: str, capsys: pytest.CaptureFixture[str]) -> set[tuple[str, str]]:
    commands = mentioned_commands(page)
    flags = ((words, flag) for words in commands for flag in words if re.fullmatch(r"--[a-z-]+", flag))
    return {(words[0], flag) for words, flag in flags if flag not in help_of(words, capsys)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_example_commands_are_understood(page: Path) -> None:
    for words in example_commands(page.read_text()):
        parser().parse_args(words)


def test_there_are_example_commands() -> None:
    commands = {words[0] for words in example_commands((ROOT / "README.md").read_text())}
    assert commands >= {"serve", "chat", "explain", "bench", "generate"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_mentioned_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text()
    assert {words[0] for words in mentioned_commands(text)} <= COMMANDS
    assert unknown_flags(text, capsys) == set()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=lambda path: path.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`|^# +|[A-Z_]+=\d+ )make ([a-z][a-z0-9-]*)\b(?!\.)", page.read_text(), re.MULTILINE)
    assert set(named) <= targets


def test_wrong_commands_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    page = "```sh\n.venv/bin/twostep serve --no-such-flag 1  # it is not there\n```\n`twostep bench --nothing`"
    assert unknown_flags(page, capsys) == {("bench", "--nothing")}
    [words] = example_commands(page)
    with pytest.raises(SystemExit):
        parser().parse_args(words)


# --- cases --------------------------------------------------------------------------------------------------------


def named_cases() -> dict[str, set[int]]:
    """By test file, the numbers behind `CASES`: lists and ranges, such as "CASES 7, 11 to 14"."""
    found: dict[str, set[int]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for words in re.findall(r"\bCASES (\d+(?:(?:, | to )\d+)*)", path.read_text()):
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", words):
                found.setdefault(path.name, set()).update(range(int(first), int(last or first) + 1))
    return found


def test_cases_named_in_tests_are_on_their_page() -> None:
    described = {
        int(number) for number in re.findall(r"^(\d+)\. ", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    }
    cases = named_cases()
    assert described == set(range(1, len(described) + 1))
    assert len(cases) >= 5
    assert {path: numbers - described for path, numbers in cases.items() if numbers - described} == {}


# --- the server's page --------------------------------------------------------------------------------------------


def named(part: str) -> set[str]:
    """The texts in backticks between the marks of this part."""
    [text] = re.findall(rf"<!-- {part} -->(.*?)<!-- {part} end -->", PAGE.read_text(), re.DOTALL)
    return set(re.findall("`([^`]+)`", text))


def described(*paths: str) -> set[str]:
    """The fields of these paths in the OpenAPI document."""
    bodies = [document()["paths"][path]["post"]["requestBody"]["content"]["application/json"] for path in paths]
    return set(chain.from_iterable(body["schema"]["properties"] for body in bodies))


def test_generated_tables_are_current() -> None:
    assert PAGE.read_text() == filled(PAGE.read_text()), "run: python -m scripts.settings_page"


def test_fields_are_those_of_the_api_description() -> None:
    assert named("fields") == described("/v1/chat/completions", "/v1/completions")


def test_no_field_is_both_served_and_refused() -> None:
    """Unless only one of the two endpoints supports it."""
    served = described("/v1/chat/completions") & described("/v1/completions")
    assert not served & KNOWN.keys()
    assert sum(map(len, ORIGINS.values())) == len(KNOWN), "a field is in two tables"


def test_paths_are_those_of_the_api_description() -> None:
    rows = re.findall(r"^\| (`(?:GET|POST) .*?) \|", PAGE.read_text(), re.MULTILINE)
    told = set(re.findall(r"`(GET|POST) ([^`]+)`", "".join(rows)))
    paths = {(method.upper(), path) for path, by in document()["paths"].items() for method in by}
    page = {(method, re.sub("[A-Z]+$", "{name}", path)) for method, path in told}
    assert page == paths | {("GET", "/docs"), ("GET", "/openapi.json")}


def test_the_api_description_has_all_routes() -> None:
    """Those of the description itself and of its page are left out."""
    state = MagicMock()
    state.config.root_path = ""
    described_paths = {(method.upper(), path) for path, by in document()["paths"].items() for method in by}
    served = {
        (method, re.sub(r":path\}", "}", route.path))
        for route in routes(state)
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert served == described_paths | {("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/")}


def test_the_example_configuration_is_accepted(tmp_path: Path) -> None:
    [example] = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    file = tmp_path / "server.toml"
    file.write_text(example)
    settings = serve_settings({"config": str(file)}, {})
    assert (settings.server.port, settings.server.max_queue) == (8080, 64)
    assert settings.engine.kv_memory == MemoryBytes(1 << 30)
