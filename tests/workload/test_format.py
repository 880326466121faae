"""The file of a workload: what is written is read back, and whatever is wrong is named."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.errors import WorkloadError
from twostep.workload.definition import Workload, WorkloadRequest
from twostep.workload.format import BY_END, header_line, read_workload, request_line, write_workload
from twostep.workload.trace_formats import open_workload

HEADER = {"twostep_workload": 1, "block_tokens": 16}
ROW = {"arrival_s": 1.5, "input_tokens": 40, "output_tokens": 5}


def silent(line: str) -> None:
    raise AssertionError(line)


def write(folder: Path, *rows: object, end: str = "\n") -> Path:
    """Values become JSON, texts stay."""
    path = folder / "w.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)
    return path


def complaint(path: Path) -> str:
    with pytest.raises(WorkloadError) as caught:
        read_workload(path, silent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


texts = st.text(st.characters(), max_size=8)  # with surrogates


@st.composite
def requests_of(draw: st.DrawFn, number: int, last_s: float, block_tokens: int) -> WorkloadRequest:
    after = draw(st.none() | st.integers(0, number - 1)) if number else None
    tokens = draw(st.integers(1, 200))
    blocks = draw(st.lists(st.integers(0, 2**63 - 1), max_size=-(-tokens // block_tokens)))
    arrival_s = draw(st.floats(0 if after is not None else last_s, 1e12, allow_nan=False))
    return WorkloadRequest(
        arrival_s, tokens, draw(st.integers(1, 10**8)), tuple(blocks), after, draw(st.none() | texts)
    )  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    block_tokens, last_s = draw(st.integers(1, 600)), 0.0
    requests: list[WorkloadRequest] = []
    for number in range(draw(st.integers(0, 6))):
        request = draw(requests_of(number, last_s, block_tokens))
        requests.append(request)
        last_s = last_s if request.after is not None else request.arrival_s
    return Workload(requests, block_tokens, draw(texts), draw(texts))


@settings(deadline=None)
@given(workload=workloads())
def test_what_is_written_is_read_back(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    write_workload(path, workload)
    assert read_workload(path, silent) == workload


def test_a_last_line_without_its_end_is_read_if_it_is_whole(tmp_path: Path) -> None:
    assert len(read_workload(write(tmp_path, HEADER, ROW, "", ROW, end=""), silent).requests) == 2


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    """Wherever the process that wrote it was killed."""
    row = request_line(WorkloadRequest(2.0, 33, 7, (0, 1), text='}{"}'))
    whole = header_line(Workload(())) + row
    for length in range(1, len(row) - 1):
        path, said = tmp_path / "torn.jsonl", list[str]()
        path.write_text(whole + row[:length])
        assert len(read_workload(path, said.append).requests) == 1
        assert said == [f"{path}, line 3: the last line is incomplete and was skipped"]


def test_a_last_line_that_is_whole_and_wrong_is_no_torn_one(tmp_path: Path) -> None:
    for row, told in (
        ('{"arrival_s": 1, "arrival_s": 2}', "'arrival_s' appears more than once"),
        ('{"arrival_s": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit"),
    ):
        assert told in complaint(write(tmp_path, HEADER, ROW, row, end=""))


def test_a_byte_order_mark_is_no_part_of_a_workload(tmp_path: Path) -> None:
    """As some editors write one."""
    path = tmp_path / "w"
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(ROW) + "\n", encoding="utf-8-sig")
    assert len(read_workload(path, silent).requests) == len(open_workload(path, silent).requests) == 1


def test_rows_in_order_of_their_end_are_sorted_and_count_from_the_first(tmp_path: Path) -> None:
    rows = [{**ROW, "arrival_s": at_s} for at_s in (107.25, 100.5, 103.0)]
    read = read_workload(write(tmp_path, {**HEADER, "order": BY_END}, *rows), silent)
    assert [request.arrival_s for request in read.requests] == [0.0, 2.5, 6.75]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("[1]", "[1] is not an object with arrival_s, input_tokens, output_tokens"),
        ('{"arrival_s": 1.0 "input_tokens": 4}', "not JSON: Expecting ',' delimiter, at column 19"),
        ('{"arrival_s": ' + "[" * 100_000, "not JSON: nested too deeply"),
        ({"arrival_s": 1.0, "input_tokens": 4}, "output_tokens is missing"),
        ({**ROW, "block": [1]},
         "unknown field 'block'; known are arrival_s, input_tokens, output_tokens, blocks, after, text"),
        ({**ROW, "arrival_s": -0.1}, "arrival_s is -0.1; it must be a number of seconds, 0 or more"),
        ({**ROW, "arrival_s": True}, "arrival_s is True; it must be a number of seconds, 0 or more"),
        (
            '{"arrival_s": NaN, "input_tokens": 1, "output_tokens": 1}',
            "arrival_s is nan; it must be a number of seconds, 0 or more",
        ),
        ({**ROW, "arrival_s": 0.5}, "arrival_s is 0.5; it must be at least 1.5, as rows are in order"),
        ({**ROW, "input_tokens": 0}, "input_tokens is 0; it must be a whole number from 1 to 100000000"),
        ({**ROW, "output_tokens": 2.0}, "output_tokens is 2.0; it must be a whole number from 1 to 100000000"),
        ({**ROW, "blocks": [0, -1]},
         "blocks is [0, -1]; it must be a list of whole numbers from 0 to 9223372036854775807"),
        ({**ROW, "blocks": [1, 2, 3, 4]}, "blocks has 4 members; input_tokens and block_tokens allow at most 3"),
        ({**ROW, "after": 1}, "after is 1; it must be a whole number from 0 to 0"),
        ({**ROW, "after": None}, "after is None; it must be a whole number from 0 to 0"),
        ({**ROW, "text": 5}, "text is 5; it must be a string"),
        ('{"arrival_s": 2, "input_tokens": 1, "output_tokens": 1, "input_tokens": 9}',
         "'input_tokens' appears more than once"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(tmp_path: Path, row: object, told: str) -> None:
    path = write(tmp_path, HEADER, ROW, row)
    assert complaint(path) == f"{path}, line 3: {told}"


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"arrival_s": 1}, 'not a workload: the first line must be an object with "twostep_workload": 1'),
        ({**HEADER, "twostep_workload": 2},
         "twostep_workload is 2; it must be 1, the only version that this version of Twostep reads"),
        ({"twostep_workload": 1}, "block_tokens is missing"),
        ({**HEADER, "block_tokens": 0}, "block_tokens is 0; it must be a whole number from 1 to 100000000"),
        ({**HEADER, "licence": "x"},
         "unknown field 'licence'; known are twostep_workload, block_tokens, name, source, order"),
        ({**HEADER, "order": "any"}, "order is 'any'; it must be arrival or end"),
        ({**HEADER, "name": 1}, "name is 1; it must be a string"),
    ],
)  # fmt: skip
def test_a_wrong_header_is_named(tmp_path: Path, header: object, told: str) -> None:
    path = write(tmp_path, header, ROW)
    assert complaint(path) == f"{path}, line 1: {told}"


def test_the_first_request_comes_after_none(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, {**ROW, "after": 0})
    assert complaint(path) == f"{path}, line 2: after is 0; the first request has no earlier one"


def test_rows_in_order_of_their_end_come_after_none(tmp_path: Path) -> None:
    path = write(tmp_path, {**HEADER, "order": BY_END}, ROW, {**ROW, "after": 0})
    assert complaint(path) == f"{path}, line 3: after is 0; it is not allowed with order end"


def test_an_empty_file_is_no_workload(tmp_path: Path) -> None:
    assert "line 1: not JSON" in complaint(write(tmp_path))


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(40 << 20)  # zeros
    assert complaint(path) == f"{path}, line 1: longer than the maximum of 16 MiB"


def test_too_many_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.workload.checked_fields.MOST_LINES", 3)
    assert "has more than 3 lines" in complaint(write(tmp_path, HEADER, ROW, ROW, ROW))


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(json.dumps(HEADER).encode() + b'\n{"text": "\xff"}\n')
    assert complaint(path) == f"{path}, line 2: byte 10 is not UTF-8"


def test_the_documented_example_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "workloads.md"
    example = page.read_text().split("```json\n")[1].split("```")[0]
    path = tmp_path / "example.jsonl"
    path.write_text(example)
    read = read_workload(path, silent)
    assert [request.after for request in read.requests] == [None, None, 0]
    assert list(read.shared_tokens()) == [0, 16, 32]
