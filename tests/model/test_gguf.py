"""The GGUF reader: what a sound file holds comes out, what is unsound is refused in one line that names it."""

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from support.gguf_writer import EVERY_KIND, NewTensor, Raw, Value, f32, gguf_bytes, string

from twostep.errors import ModelFileError
from twostep.model.gguf import GgufFile, read_gguf
from twostep.model.tensor import TensorType

Opened = Callable[[bytes], GgufFile]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    def open_bytes(data: bytes) -> GgufFile:
        path = tmp_path / "file.gguf"
        path.write_bytes(data)
        return read_gguf(path)

    return open_bytes


def refusal(opened: Opened, data: bytes) -> str:
    """The error for a file, which is one line and begins with the file's path."""
    with pytest.raises(ModelFileError) as caught:
        opened(data)
    path, message = str(caught.value).split(": ", 1)
    assert Path(path).name == "file.gguf"
    assert "\n" not in message
    return message


def matrix(name: str, rows: int = 2, columns: int = 8) -> NewTensor:
    return f32(name, np.arange(rows * columns, dtype=np.float32).reshape(rows, columns))


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_kind_come_out(opened: Opened, version: int) -> None:
    file = opened(gguf_bytes(EVERY_KIND, version=version))
    assert file.version == version
    assert list(file.metadata) == list(EVERY_KIND)
    for key, expected in EVERY_KIND.items():
        found = file.metadata[key]
        if isinstance(expected, list):
            assert list(file.metadata.strings(key)) == expected
        elif isinstance(expected, np.ndarray):
            assert isinstance(found, np.ndarray)
            assert found.dtype == expected.dtype
            assert found.tolist() == expected.tolist()
        else:
            assert found == expected


def test_strings_are_a_sequence(opened: Opened) -> None:
    strings = opened(gguf_bytes({"s": ["one", "", "drei", "四"]})).metadata.strings("s")
    assert [strings[i] for i in range(4)] == list(strings) == ["one", "", "drei", "四"]
    assert strings[-1] == "四"
    assert strings[1:3] == ["", "drei"]
    with pytest.raises(IndexError):
        strings[4]


def test_tensors_are_views_in_numpy_order(opened: Opened) -> None:
    second = NewTensor("b", TensorType.Q8_0, (3, 64), bytes(range(204)))
    file = opened(gguf_bytes({}, [matrix("a", 2, 8), second]))
    assert list(file.tensors) == ["a", "b"]
    assert file.tensors["a"].shape == (2, 8)
    assert file.tensors["a"].data.view("<f4").tolist() == list(range(16))
    assert file.tensors["b"].type is TensorType.Q8_0
    assert bytes(file.tensors["b"].data) == bytes(range(204))
    assert file.tensors["b"].nbytes == 204
    assert not file.tensors["a"].data.flags.writeable


def test_alignment_of_the_file_is_kept_to(opened: Opened) -> None:
    file = opened(gguf_bytes({"general.alignment": 256}, [matrix("a"), matrix("b")]))
    assert file.tensors["b"].data.view("<f4").tolist() == list(range(16))


@pytest.mark.parametrize("alignment", [0, 24, 1 << 21])
def test_odd_alignment_is_refused(opened: Opened, alignment: int) -> None:
    pair = string("general.alignment") + struct.pack("<II", 4, alignment)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair
    assert "'general.alignment' is" in refusal(opened, data)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "empty"),
        (b"GG", "truncated"),
        (b"\x80\x04pickle", "not a GGUF file"),
        (gguf_bytes({}, version=1), "version 1; supported: versions 2 and 3"),
        (gguf_bytes({}, version=4), "version 4; supported: versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "1099511627776 keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + string("k") + struct.pack("<II", 4, 7), "the length of key 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63), "key 0 at offset 32"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 100) + b"short", "key 0 needs 100 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"\xff\xfe"), "key 0 before offset 34 is not UTF-8"),
    ],
)
def test_damaged_head_is_refused(opened: Opened, data: bytes, named: str) -> None:
    assert named in refusal(opened, data)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Raw(13, b""), "value type 13"),
        (Raw(7, b"\x02"), "neither 0 nor 1"),
        (Raw(8, struct.pack("<Q", 1 << 50)), "1125899906842624 bytes long"),
        (Raw(8, string(b"\xff")), "'k' before offset"),
        (Raw(9, struct.pack("<IQ", 4, 1 << 62)), "'k' needs 18446744073709551616 bytes"),
        (Raw(9, struct.pack("<IQ", 8, 1 << 62)), "4611686018427387904 strings"),
        (Raw(9, struct.pack("<IQQ", 8, 1, 1 << 62)), "string 0, runs past the end"),
        (Raw(9, struct.pack("<IQQQ", 8, 2, 8, 0)), "string 1, runs past the end"),
        (Raw(9, struct.pack("<IQ", 9, 0)), "array of arrays"),
        (Raw(9, struct.pack("<IQ", 77, 0)), "value type 77"),
    ],
)
def test_damaged_value_is_refused(opened: Opened, value: Raw, named: str) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k")
    message = refusal(opened, head + struct.pack("<I", value.kind) + value.data)
    assert named in message
    assert "'k'" in message


def test_key_that_appears_twice_is_refused(opened: Opened) -> None:
    pair = string("k") + struct.pack("<II", 4, 1)
    assert "'k' appears twice" in refusal(opened, b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair * 2)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (NewTensor("t", 13, (1, 256), bytes(176)), "of type Q5_K (13); supported: F32, F16, Q4_0"),
        (NewTensor("t", 99, (1, 256), bytes(176)), "of type unknown (99)"),
        (NewTensor("t", 0, (), b""), "has 0 dimensions"),
        (NewTensor("t", 0, (1,) * 5, bytes(4)), "has 5 dimensions"),
        (NewTensor("t", 0, (0, 8), b""), "a dimension of 0"),
        (NewTensor("t", 2, (1, 33), bytes(36)), "rows of 33, not whole Q4_0 blocks of 32"),
        (NewTensor("t", 0, (2, 8), bytes(64), offset=8), "offset 8, not a multiple of 32"),
        (NewTensor("t", 0, (2, 8), bytes(64), offset=32), "needs bytes 32 to 96 of the data, which has 64"),
        (NewTensor("t", 0, (2, 8), bytes(64), offset=1 << 63), "needs bytes 9223372036854775808"),
        (NewTensor("t", 0, (1 << 62, 1 << 62), bytes(64)), "of the data, which has 64"),
        (NewTensor("t" * 65, 0, (1,), bytes(4)), "the name of tensor 0"),
        (NewTensor("evil\nname", 0, (0,), b""), "'evil\\nname'"),
    ],
)
def test_damaged_tensor_is_refused(opened: Opened, tensor: NewTensor, named: str) -> None:
    assert named in refusal(opened, gguf_bytes({}, [tensor]))


def test_tensors_that_overlap_are_refused(opened: Opened) -> None:
    tensors = [matrix("a"), NewTensor("b", 0, (1, 8), bytes(32), offset=32)]
    assert "'a' and 'b' overlap at offset 32" in refusal(opened, gguf_bytes({}, tensors))


def test_tensor_that_appears_twice_is_refused(opened: Opened) -> None:
    assert "tensor 'a' appears twice" in refusal(opened, gguf_bytes({}, [matrix("a"), matrix("a")]))


def test_string_that_is_not_utf8_is_refused_when_read(opened: Opened) -> None:
    raw = struct.pack("<IQ", 8, 2) + string("fine") + string(b"\xff\xfe")
    strings = opened(gguf_bytes({"k": Raw(9, raw)})).metadata.strings("k")
    assert strings[0] == "fine"
    for read in (lambda: strings[1], strings.decoded):
        with pytest.raises(ModelFileError, match="'k': string 1 is not UTF-8"):
            read()


@pytest.mark.parametrize(
    ("metadata", "ask", "named"),
    [
        ({}, "count", "is missing"),
        ({"k": "x"}, "count", "is 'x', needs a whole number"),
        ({"k": True}, "count", "is True, needs a whole number"),
        ({"k": np.int32(-1)}, "count", "is -1, needs a whole number"),
        ({"k": 0}, "positive", "is 0, needs a whole number of 1 or more"),
        ({"k": float("nan")}, "number", "is nan, needs a finite number"),
        ({"k": 1}, "flag", "is 1, needs true or false"),
        ({"k": ["a", "b"]}, "text", "is an array of 2 strings, needs a string"),
        ({"k": np.zeros(3, np.float32)}, "strings", "is an array of 3 float32, needs an array of strings"),
        ({"k": np.zeros(3, np.float32)}, "integers", "is an array of 3 float32, needs an array of whole numbers"),
    ],
)
def test_value_of_another_kind_is_refused(opened: Opened, metadata: Mapping[str, Value], ask: str, named: str) -> None:
    file = opened(gguf_bytes(metadata))
    with pytest.raises(ModelFileError) as caught:
        getattr(file.metadata, ask)("k")
    assert f"file.gguf: key 'k' {named}" in str(caught.value)


def test_default_stands_in_for_a_missing_key_only(opened: Opened) -> None:
    metadata = opened(gguf_bytes({"here": 5})).metadata
    assert metadata.count("absent", 3) == 3
    assert metadata.count("here", 3) == 5


def test_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"absent.gguf: cannot be opened: No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_folder_or_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ModelFileError, match="is not a regular file"):
            read_gguf(path)


def test_default_model_opens_fast(default_model_path: Path) -> None:
    """A vocabulary of 49k strings and as many merges must not be decoded to open the file."""
    fastest = min(seconds(lambda: read_gguf(default_model_path)) for _ in range(5))
    assert fastest < 0.04


def seconds(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start
