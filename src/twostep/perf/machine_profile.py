"""What a calibration learned about one machine with one model, as a JSON file with its provenance."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from twostep.core.cost import StepShape
from twostep.errors import ProfileError
from twostep.perf.step_time_fit import Errors
from twostep.perf.step_time_model import REGIONS, ModelDataError, Region, StepCosts

MARK = "twostep profile"
"""The key that only a profile has; its value is the format."""
FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """What step times depend on. A profile is used where all of it is the same."""

    cpu: str
    isa: str
    threads: int
    model: str
    """Digest of the shape, and of name, type and shape of each tensor: weights of equal form take equal time."""
    kv: str
    """Element type of the KV cache."""
    twostep: str
    """Version."""
    kernels: str
    """Digest of the compiled kernels."""

    def differences(self, other: "Identity") -> list[str]:
        """What `other` has instead, in words."""
        names = {"cpu": "CPU", "isa": "instruction set", "kv": "KV type", "twostep": "Twostep version"}
        unlike = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        return [f"{names.get(name, name)} {getattr(other, name)} instead of {getattr(self, name)}" for name in unlike]


class Roofs(NamedTuple):
    """Measured limits of the machine, all threads together."""

    int8_ops_per_s: float
    """A multiplication and an addition count as two."""
    fp32_flops_per_s: float
    read: tuple[tuple[int, float], ...]
    """Bytes of a working set, and bytes per second at which it is read again and again."""


class MeasuredStep(NamedTuple):
    """One step of the calibration: median and number of the runs that had their cores."""

    shape: StepShape
    ns: float
    runs: int
    held_out: bool


@dataclass(frozen=True)
class MachineProfile:
    """Costs of steps, and how they were learned."""

    identity: Identity
    model_name: str
    date: str
    system: str
    """Kernel of the operating system."""
    seconds: float
    """That the calibration took."""
    costs: StepCosts
    roofs: Roofs
    weight_bytes: int
    """Of the repacked weights: what a decode step reads besides KV."""
    kv_bytes_per_token: int
    grid: Mapping[Region, Errors]
    """By region: how far the fit is from the steps that it was made from."""
    held_out: Mapping[Region, Errors]
    """By region: how far it is from steps that it did not see."""
    runs: int
    starved_runs: int
    """Of them, discarded because the kernels had no core for part of the time."""
    left_out: int
    """Steps of the grid that were not run, or never had their cores."""
    steps: tuple[MeasuredStep, ...]

    @property
    def starved_share(self) -> float:
        return self.starved_runs / max(1, self.runs)

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            MARK: FORMAT,
            **values,
            "identity": asdict(self.identity),
            "costs": self.costs.to_json(),
            "roofs": self.roofs._asdict(),
            "grid": {region: errors._asdict() for region, errors in self.grid.items()},
            "held_out": {region: errors._asdict() for region, errors in self.held_out.items()},
            "steps": [[*step.shape, step.ns, step.runs, int(step.held_out)] for step in self.steps],
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Raises `ProfileError` that names what is wrong."""
        if not isinstance(value, dict) or MARK not in value:
            raise ProfileError("not a profile of Twostep; `twostep calibrate` makes one")
        if value[MARK] != FORMAT:
            raise ProfileError(
                f"format {value[MARK]!r}; this version of Twostep reads format {FORMAT}: calibrate again"
            )
        names = {field.name for field in fields(cls)}
        if unlike := names ^ (value.keys() - {MARK}):
            raise ProfileError(f"{min(unlike)} is {'missing' if min(unlike) in names else 'unknown'}")
        try:
            return cls(**{name: value[name] for name in names} | _decoded(value))
        except ModelDataError as error:
            raise ProfileError(f"costs: {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"a field has a wrong value: {error}") from None


def _decoded(value: Mapping[str, Any]) -> dict[str, Any]:
    roofs = value["roofs"]
    numbers = len(StepShape._fields)
    return {
        "identity": Identity(**value["identity"]),
        "costs": StepCosts.from_json(value["costs"]),
        "roofs": Roofs(**{**roofs, "read": tuple((int(size), float(rate)) for size, rate in roofs["read"])}),
        "grid": _errors(value["grid"]),
        "held_out": _errors(value["held_out"]),
        "steps": tuple(
            MeasuredStep(StepShape(*step[:numbers]), float(step[numbers]), int(step[numbers + 1]), bool(step[-1]))
            for step in value["steps"]
        ),
    }


def _errors(value: Mapping[str, Any]) -> dict[Region, Errors]:
    return {region: Errors(**value[region]) for region in REGIONS if region in value}


def read_profile(path: Path) -> MachineProfile:
    """Raises `ProfileError` that names the file."""
    try:
        return MachineProfile.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file; `twostep calibrate --out {path}` makes it") from None
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ProfileError(f"{path}: not JSON, hence not a profile of Twostep") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def write_profile(profile: MachineProfile, path: Path) -> None:
    """Replaces the file as a whole: nobody ever reads half of one. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(profile.to_json(), separators=(",", ":")) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
