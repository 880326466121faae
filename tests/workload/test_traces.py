"""Traces of others become workloads; whatever their rows hold that cannot be is named."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.errors import WorkloadError
from twostep.workload.definition import Workload, WorkloadRequest, mean_rate
from twostep.workload.format import write_workload
from twostep.workload.trace_formats import EXCERPTS, excerpt_names, find_workload, open_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.2792970,201,24
"""
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 5999, "input_length": 600, "output_length": 12, "hash_ids": [0, 4]},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


@pytest.fixture
def said() -> list[str]:
    return []


def file(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def lengths(workload: Workload) -> list[tuple[float, int, int]]:
    return [(request.arrival_s, request.input_tokens, request.output_tokens) for request in workload.requests]


def test_azure(tmp_path: Path, said: list[str]) -> None:
    workload = open_workload(file(tmp_path, AZURE), said.append)
    assert lengths(workload) == [(0.0, 4808, 10), (0.052, 3180, 8), (1.299337, 201, 24)]
    assert workload.name == "trace"
    assert workload.source.startswith("trace.csv, Azure LLM inference trace: ")
    assert "CC-BY 4.0" in workload.source
    assert said == []


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_times_may_have_a_zone(tmp_path: Path, said: list[str], mark: str) -> None:
    """As in the traces of 2024, and as spreadsheets write files."""
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.009930+00:00,2162,5"]
    workload = open_workload(file(tmp_path, mark + "\r\n".join([*rows, "2024-05-10 00:00:01,7,5", ""])), said.append)
    assert lengths(workload) == [(0.0, 2162, 5), (0.99007, 7, 5)]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, said: list[str]) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n2024-05-10 00:00:00,1,2,3\n"
    with pytest.raises(WorkloadError, match=r"trace\.csv, line 1: 'ContextTokens' appears more than once"):
        open_workload(file(tmp_path, rows), said.append)


def test_mooncake_blocks_become_shared_prefixes(tmp_path: Path, said: list[str]) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in MOONCAKE)
    workload = open_workload(file(tmp_path, rows, "conversation.jsonl"), said.append)
    assert lengths(workload) == [(0.0, 1100, 500), (0.0, 1536, 4), (2.999, 600, 12)]
    assert workload.block_tokens == 512
    assert list(workload.shared_tokens()) == [0, 1024, 512]
    assert said == []


def test_burstgpt_failures_are_dropped_and_counted(tmp_path: Path, said: list[str]) -> None:
    path = file(tmp_path, BURSTGPT)
    assert lengths(open_workload(path, said.append)) == [(0.0, 472, 18), (113.5, 417, 276)]
    assert said == [f"{path}: 1 of 3 rows dropped because they have no prompt or no answer"]


def test_burstgpt_with_more_columns(tmp_path: Path, said: list[str]) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = file(tmp_path, f'{header}\n19440110.0,"a,b",43,GPT-4,906,446,1352,Conversation log\n')
    assert lengths(open_workload(path, said.append)) == [(0.0, 906, 446)]


def test_rows_out_of_order_are_sorted_and_that_is_said(tmp_path: Path, said: list[str]) -> None:
    path = file(tmp_path, "Timestamp,Request tokens,Response tokens\n9,1,1\n4,2,2\n")
    assert lengths(open_workload(path, said.append)) == [(0.0, 2, 2), (5.0, 1, 1)]
    assert said == [f"{path}: rows were not in order of arrival and have been sorted"]


def test_our_own_format_is_known_too(tmp_path: Path, said: list[str]) -> None:
    workload = Workload([WorkloadRequest(0.5, 3, 4)], name="x")
    write_workload(tmp_path / "w", workload)
    assert open_workload(tmp_path / "w", said.append) == workload


@pytest.mark.parametrize("text", ["hello\n", "a,b\n1,2\n", '{"prompt": "x"}\n', "[1]\n", "", "\x00\n"])
def test_what_is_not_known_is_refused_with_what_is(tmp_path: Path, said: list[str], text: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(WorkloadError) as caught:
        open_workload(path, said.append)
    assert str(caught.value).startswith(f"{path}")
    assert "TIMESTAMP, ContextTokens" in str(caught.value) or "neither JSON nor CSV" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'; it must be a time such as 2023-11-16 18:17:03.9799600"),
        ("2023-11-16 18:17:05,-1,1", "ContextTokens is '-1'; it must be a whole number from 0 to 100000000"),
        ("2023-11-16 18:17:05,1,1e3", "GeneratedTokens is '1e3'; it must be a whole number from 0 to 100000000"),
        ("2023-11-16 18:17:05,1,\u0661",
         "GeneratedTokens is '\u0661'; it must be a whole number from 0 to 100000000"),
        ("2023-11-16 18:17:05,1", "2 fields; the header has 3"),
    ],
)  # fmt: skip
def test_wrong_rows_of_csv_are_named(tmp_path: Path, said: list[str], row: str, told: str) -> None:
    path = file(tmp_path, f"{AZURE}{row}\n")
    with pytest.raises(WorkloadError) as caught:
        open_workload(path, said.append)
    assert str(caught.value) == f"{path}, line 5: {told}"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"timestamp": -1}, "timestamp is -1; it must be a whole number from 0 to 1000000000000000"),
        ({"input_length": 1.5}, "input_length is 1.5; it must be a whole number from 0 to 100000000"),
        ({"hash_ids": [1, 2, 3, 4]},
         "hash_ids is [1, 2, 3, 4]; it must be a list of at most 3 whole numbers, one for 512 tokens"),
        ({"hash_ids": ["a"]}, "hash_ids is ['a']; it must be a list of at most 3 whole numbers, one for 512 tokens"),
    ],
)  # fmt: skip
def test_wrong_rows_of_json_are_named(tmp_path: Path, said: list[str], changed: dict[str, object], told: str) -> None:
    path = file(tmp_path, f"{json.dumps(MOONCAKE[0])}\n{json.dumps(MOONCAKE[0] | changed)}\n")
    with pytest.raises(WorkloadError) as caught:
        open_workload(path, said.append)
    assert str(caught.value) == f"{path}, line 2: {told}"


def test_a_number_that_is_none_is_named(tmp_path: Path, said: list[str]) -> None:
    path = file(tmp_path, "Timestamp,Request tokens,Response tokens\nnan,1,1\n")
    with pytest.raises(WorkloadError, match="line 2: Timestamp is 'nan'; it must be a finite number"):
        open_workload(path, said.append)


FIELDS = [*MOONCAKE[0], "arrival_s", "input_tokens", "output_tokens", "blocks", "after", "text", "order"]
any_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
)
cells = st.sampled_from(["1", "0", "-1", "nan", "1e999", "2023-11-16 18:17:05", "0001-01-01 00:00+23:59", "x", "", '"'])
any_row = (
    st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(FIELDS), any_value).map(lambda row: json.dumps(row).encode())
    | st.lists(cells, min_size=2, max_size=7).map(lambda row: ",".join(row).encode())
)


@settings(deadline=None)
@given(data=any_row)
@pytest.mark.parametrize(
    "begin", ["", AZURE, BURSTGPT, json.dumps(MOONCAKE[0]) + "\n", '{"twostep_workload":1,"block_tokens":16}\n']
)
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_line(
    begin: str, data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(begin.encode() + data + b"\n")
    told = ""
    try:
        open_workload(path, lambda line: None)
    except WorkloadError as error:
        told = str(error)
    assert told == "" or (told.startswith(str(path)) and "\n" not in told)


# --- by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["azure-code", "azure-conv", "mooncake-conversation"])
def test_excerpts_come_with_the_package(name: str, said: list[str]) -> None:
    workload = find_workload(name, said.append)
    assert workload.name == name
    assert 100 <= len(workload.requests) <= 1000
    assert mean_rate(workload)
    assert "CC-BY 4.0" in workload.source or "Apache-2.0" in workload.source
    assert (EXCERPTS / f"{name}.jsonl").stat().st_size < 60_000
    assert said == []


def test_every_excerpt_says_where_it_comes_from() -> None:
    sources = (EXCERPTS / "SOURCES.md").read_text()
    assert all(f"`{name}`" in sources for name in excerpt_names())


def test_prompts_of_the_excerpt_with_blocks_begin_alike(said: list[str]) -> None:
    workload = find_workload("mooncake-conversation", said.append)
    assert 0.05 < sum(workload.shared_tokens()) / sum(request.input_tokens for request in workload.requests) < 0.9


def test_a_file_goes_by_its_path(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path, AZURE, "azure-code")
    monkeypatch.chdir(tmp_path)
    assert len(find_workload("./azure-code", said.append).requests) == 3
    assert len(find_workload("azure-code", said.append).requests) > 3


def test_what_is_neither_is_refused_with_what_there_is(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(WorkloadError) as caught:
        find_workload("azure-con", said.append)
    excerpts = "azure-code, azure-conv, mooncake-conversation"
    assert str(caught.value) == f"azure-con: No such file or directory; give a file, or one of {excerpts}"
