"""The hardware table and users' own files: every row is usable, and a row that is not says where and why."""

from pathlib import Path

import pytest

from twostep.errors import InvalidParameterError
from twostep.perf.hardware import (
    ALIASES,
    CONFIDENCE,
    hardware_named,
    measured_hardware,
    read_hardware,
    shipped_hardware,
)

GOOD = "id,mem_gb,mem_bw_gbs,fp16_dense_tflops,confidence,source\nmine,24,500,100,low,measured at home\n"


def test_every_shipped_row_has_peaks_source_and_confidence() -> None:
    rows = shipped_hardware()
    assert len(rows) == 43
    for row in rows.values():
        assert row.memory_bytes > 1e9
        assert row.bandwidth > 1e10
        assert row.peaks
        assert row.source
        assert row.confidence in CONFIDENCE


def test_values_are_read_in_si_units_and_links_one_way() -> None:
    h100 = hardware_named("h100-sxm")
    assert (h100.memory_bytes, h100.bandwidth, h100.link_bandwidth) == (80e9, 3350e9, 450e9)
    assert h100.peaks == {"fp16": 989e12, "fp8": 1979e12, "int8": 1979e12}
    assert h100.tdp_w == 700


def test_short_names_stand_for_a_row() -> None:
    assert all(hardware_named(alias) is shipped_hardware()[name] for alias, name in ALIASES.items())
    assert hardware_named("A10").id == "a10"


def test_an_unknown_name_gets_the_nearest_and_all_known() -> None:
    with pytest.raises(InvalidParameterError, match="did you mean h100") as raised:
        hardware_named("h1000")
    assert all(name in str(raised.value) for name in ("a10,", "mi300x", "here"))


def test_here_needs_a_calibration() -> None:
    with pytest.raises(InvalidParameterError, match="twostep calibrate"):
        hardware_named("here")


@pytest.mark.parametrize(
    ("working_set", "bandwidth"), [(1, 80e9), (1 << 20, 80e9), (1 << 25, 45e9), (1 << 30, 10e9), (1 << 40, 10e9)]
)
def test_the_bandwidth_of_a_measured_machine_is_that_of_the_working_set(working_set: int, bandwidth: float) -> None:
    rates = [(1 << 30, 10e9), (1 << 20, 80e9)]
    found = measured_hardware("EPYC", {"int8": 1e12, "fp32": 2e11}, rates, 8e9, working_set)
    assert found.bandwidth == pytest.approx(bandwidth)
    assert (found.id, found.measured, found.peak("int8")) == ("here", True, 1e12)


# --- users' files -----------------------------------------------------------------------------------------------------


def written(folder: Path, text: str, name: str = "own.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_own_rows_come_from_csv_and_toml_alike(tmp_path: Path) -> None:
    toml = '# mine\n\n[[hardware]]\nid = "mine"\nmem_gb = 24\nmem_bw_gbs = 500\nfp16_dense_tflops = 100.0\n'
    toml += 'confidence = "low"\nsource = "measured at home"\n'
    from_csv = read_hardware(written(tmp_path, GOOD))
    assert from_csv == read_hardware(written(tmp_path, toml, "own.toml"))
    assert hardware_named("mine", from_csv).bandwidth == 500e9


def test_an_own_row_replaces_a_shipped_one(tmp_path: Path) -> None:
    own = read_hardware(written(tmp_path, GOOD.replace("mine", "a10")))
    assert hardware_named("a10", own).bandwidth == 500e9
    assert hardware_named("a10").bandwidth == 600e9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD + "b,x,1,1,low,\n", r"own.csv: line 3: field 'mem_gb' is 'x'; it has to be a number above 0"),
        (GOOD + "b,1,-5,1,low,\n", r"line 3: field 'mem_bw_gbs' is '-5'"),
        (GOOD + "b,1,nan,1,low,\n", r"line 3: field 'mem_bw_gbs' is 'nan'"),
        (GOOD + "b,1,,1,low,\n", r"line 3: field 'mem_bw_gbs' is missing"),
        (GOOD + "b,1,1,,low,\n", r"line 3: needs a peak, one of fp32_dense_tflops"),
        (GOOD + "b,1,1,1,sure,\n", r"line 3: field 'confidence' is 'sure'; it has to be high, medium, low"),
        (GOOD + "b,1,1\n", r"line 3: has not as many fields"),
        (GOOD + ",1,1,1,low,\n", r"line 3: field 'id' is missing"),
        (GOOD + "here,1,1,1,low,\n", r"line 3: field 'id' is 'here'"),
        (GOOD + "mine,1,1,1,low,\n", r"two rows have the id 'mine'"),
        (GOOD.replace("mem_gb", "memgb"), r"line 2: unknown field 'memgb'; did you mean mem_gb"),
        ("id\n", r"has no hardware"),
    ],
)
def test_a_refused_csv_row_names_line_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidParameterError, match=complaint):
        read_hardware(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = ", "is not TOML"),
        ("[hardware]\nid = 1\n", r"has to consist of \[\[hardware\]\] tables"),
        ('\n[[hardware]]\nid = "a"\nmem_gb = true\nmem_bw_gbs = 1\n', r"own.toml: line 2: field 'mem_gb' is True"),
        ("[[hardware]]\nid = 3\n", r"line 1: field 'id' is 3; it has to be text"),
    ],
)
def test_a_refused_toml_table_names_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidParameterError, match=complaint):
        read_hardware(written(tmp_path, text, "own.toml"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"ends in \.toml or \.csv"):
        read_hardware(written(tmp_path, GOOD, "own.json"))
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_hardware(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidParameterError, match="is not UTF-8"):
        read_hardware(tmp_path / "bytes.csv")
