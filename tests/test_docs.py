"""What the documents say: links lead somewhere, and the server's page names what there is and nothing else."""

import re
from itertools import chain
from pathlib import Path

import pytest

from scripts.settings_page import PAGE, filled
from twostep.config.configs import serve_settings
from twostep.config.values import MemoryBytes
from twostep.openai_api.known_fields import KNOWN, ORIGINS
from twostep.server.api.openapi import document

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = HEADING.findall(FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document: Path) -> list[str]:
    """Links that lead nowhere in this checkout."""
    links = [link for link in LINK.findall(FENCED.sub("", document.read_text())) if not re.match(r"[a-z]+:", link)]
    return [link for link in links if not _leads_somewhere(document, *link.partition("#")[::2])]


def _leads_somewhere(document: Path, path: str, anchor: str) -> bool:
    target = document.parent / path if path else document
    return target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A part\n[one](#a-part) [two](#no-part) [three](none.md) [four](page.md#a-part)\n[w](https://x.y)\n"
    )
    assert broken(page) == ["#no-part", "none.md"]


# --- cases --------------------------------------------------------------------------------------------------------


def named_cases() -> dict[str, set[int]]:
    """By test file, the numbers behind `CASES`: lists and ranges, such as "CASES 7, 11 to 14"."""
    found: dict[str, set[int]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for words in re.findall(r"\bCASES (\d+(?:(?:, | to )\d+)*)", path.read_text()):
            for first, last in re.findall(r"(\d+)(?: to (\d+))?", words):
                found.setdefault(path.name, set()).update(range(int(first), int(last or first) + 1))
    return found


def test_cases_that_tests_name_are_on_their_page() -> None:
    described = {
        int(number) for number in re.findall(r"^(\d+)\. ", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
    }
    cases = named_cases()
    assert described == set(range(1, len(described) + 1))
    assert len(cases) >= 5
    assert {path: numbers - described for path, numbers in cases.items() if numbers - described} == {}


# --- the server's page --------------------------------------------------------------------------------------------


def named(part: str) -> set[str]:
    """What stands in backticks between the marks of this part."""
    [text] = re.findall(rf"<!-- {part} -->(.*?)<!-- {part} end -->", PAGE.read_text(), re.DOTALL)
    return set(re.findall("`([^`]+)`", text))


def described(*paths: str) -> set[str]:
    """Fields that the API's own description has for these paths."""
    bodies = [document()["paths"][path]["post"]["requestBody"]["content"]["application/json"] for path in paths]
    return set(chain.from_iterable(body["schema"]["properties"] for body in bodies))


def test_tables_are_those_of_the_server() -> None:
    assert PAGE.read_text() == filled(PAGE.read_text()), "run: python -m scripts.settings_page"


def test_fields_are_those_that_are_described() -> None:
    assert named("fields") == described("/v1/chat/completions", "/v1/completions")


def test_no_field_is_both_served_and_refused() -> None:
    """But where only one of the two endpoints serves it."""
    served = described("/v1/chat/completions") & described("/v1/completions")
    assert not served & KNOWN.keys()
    assert sum(map(len, ORIGINS.values())) == len(KNOWN), "a field is in two tables"


def test_paths_are_those_that_are_described() -> None:
    rows = re.findall(r"^\| (`(?:GET|POST) .*?) \|", PAGE.read_text(), re.MULTILINE)
    told = set(re.findall(r"`(GET|POST) ([^`]+)`", "".join(rows)))
    paths = {(method.upper(), path) for path, by in document()["paths"].items() for method in by}
    page = {(method, re.sub("[A-Z]+$", "{name}", path)) for method, path in told}
    assert page == paths | {("GET", "/docs"), ("GET", "/openapi.json")}


def test_the_example_of_a_file_is_taken(tmp_path: Path) -> None:
    [example] = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    file = tmp_path / "server.toml"
    file.write_text(example)
    settings = serve_settings({"config": str(file)}, {})
    assert (settings.server.port, settings.server.max_queue) == (8080, 64)
    assert settings.engine.kv_memory == MemoryBytes(1 << 30)
