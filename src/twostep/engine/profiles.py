"""Finds the profile of this machine with this model, which `twostep calibrate` made, and says why one is not used."""

import platform
import re
from functools import cache
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import NamedTuple

from twostep.config.configs import EngineConfig
from twostep.config.values import AUTO, NONE
from twostep.core.cost import CostModel
from twostep.errors import FetchError, ProfileError
from twostep.kernels import _native
from twostep.kernels.native import chosen_isa
from twostep.kernels.threads import default_threads
from twostep.model.loaded import LoadedModel
from twostep.perf.linear import LinearCostModel
from twostep.perf.machine_limits import MachineLimits
from twostep.perf.machine_profile import Identity, MachineProfile, read_profile
from twostep.perf.step_time_model import StepTimeModel
from twostep.spec.model_spec import ModelSpec
from twostep.store.catalogue import user_folder


class Found(NamedTuple):
    """`profile`: the one to use, at `path`. `line`: what a user wants to know about it."""

    profile: MachineProfile | None
    path: Path | None
    line: str

    def cost_model(self) -> CostModel:
        """Calibrated, or one that learns from the first step on."""
        return LinearCostModel() if self.profile is None else StepTimeModel(self.profile.costs)

    def limits(self, model: ModelSpec) -> MachineLimits | None:
        """What steps of `model` take at least on this machine; None where it is not calibrated."""
        return None if self.profile is None else MachineLimits(model, self.profile)


LEARNED = "step times: learned while running"
HINT = "`twostep calibrate` measures this machine in about a minute"


def profile_for(model: LoadedModel, config: EngineConfig) -> Found:
    """The profile that an engine of this configuration uses. Raises `ProfileError` for a path without a profile.

    Where there is none to consider, what identifies the machine is not looked up: that takes a few ms of every start.
    """
    name = model.path.name
    if config.profile == NONE:
        return Found(None, None, LEARNED)
    if config.profile == AUTO and not _of_model(name):
        return Found(None, None, f"{LEARNED}; {HINT}")
    return find_profile(config.profile, identity_of(model, config), name)


def find_profile(setting: str | Path, identity: Identity, model_name: str) -> Found:
    """The profile that `setting` says: a path, or that of this machine and model in the folder (auto).

    One that was made elsewhere, for another model or by another version is not used; the line names it and the
    difference. Raises `ProfileError` for a path without a profile.
    """
    if isinstance(setting, Path):
        return _checked(setting, read_profile(setting), identity)
    others = _of_model(model_name)
    if not others:
        return Found(None, None, f"{LEARNED}; {HINT}")
    own = profile_path(identity, model_name)
    return _automatic(own if own in others else others[0], identity)


def machine_profile() -> MachineProfile | None:
    """The latest profile in the folder that was made on this CPU with these kernels, whatever the model: its roofs are
    those of this machine. None if there is none; files that cannot be read are passed over."""
    found = [profile for path in _in_folder("*.json") if (profile := _readable(path)) is not None]
    own = [p for p in found if (p.identity.cpu, p.identity.kernels) == (cpu_name(), _kernels_digest())]
    return max(own, key=lambda profile: profile.date, default=None)


def _readable(path: Path) -> MachineProfile | None:
    try:
        return read_profile(path)
    except ProfileError:
        return None


def _of_model(model_name: str) -> list[Path]:
    """Profiles of a model in the folder, of any machine."""
    return _in_folder(f"{_stem(model_name)}-*.json")


def _in_folder(pattern: str) -> list[Path]:
    """None if there is no home folder."""
    try:
        return sorted(profile_folder().glob(pattern))
    except FetchError:
        return []


def _automatic(path: Path, identity: Identity) -> Found:
    """A damaged file that nobody asked for is named, and stops nothing."""
    try:
        return _checked(path, read_profile(path), identity)
    except ProfileError as error:
        return Found(None, None, f"{LEARNED}; {error}")


def _checked(path: Path, profile: MachineProfile, identity: Identity) -> Found:
    if differences := identity.differences(profile.identity):
        return Found(None, None, f"{LEARNED}; {path} is not used: it is for {', '.join(differences)}; {HINT}")
    return Found(profile, path, f"step times: calibrated on {profile.date[:10]} ({path})")


# --- names --------------------------------------------------------------------------------------------------------


def profile_folder() -> Path:
    """`$TWOSTEP_PROFILES` if set and not empty, otherwise `twostep/profiles` in the user's cache folder. It may not
    exist. Raises `FetchError` if there is no home folder."""
    return user_folder("profiles", "TWOSTEP_PROFILES", "give the path of a profile")


def profile_path(identity: Identity, model_name: str) -> Path:
    """Where the profile of this machine and model belongs. A newer version of Twostep replaces an older one's."""
    which = "|".join((identity.cpu, identity.isa, str(identity.threads), identity.model, identity.kv))
    key = blake2b(which.encode(), digest_size=4).hexdigest()
    return profile_folder() / f"{_stem(model_name)}-{identity.isa}-{identity.threads}-threads-{key}.json"


def _stem(model_name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", model_name.removesuffix(".gguf"))


# --- identity -----------------------------------------------------------------------------------------------------


def identity_of(model: LoadedModel, config: EngineConfig) -> Identity:
    """Of the engine that this configuration makes."""
    from importlib.metadata import PackageNotFoundError, version

    reference = config.executor == "reference"
    try:
        installed = version("twostep")
    except PackageNotFoundError:
        installed = "not installed"
    return Identity(
        cpu=cpu_name(),
        isa="numpy" if reference else chosen_isa(),
        threads=1 if reference else config.threads or default_threads(),
        model=model_digest(model),
        kv=model.network.kv_layout.element,
        twostep=installed,
        kernels=_kernels_digest(),
    )


def model_digest(model: LoadedModel) -> str:
    """Of what step times depend on: the shape, the KV layout, and name, type and shape of each tensor."""
    network = model.network
    tensors = [f"{name} {tensor.type.name} {tensor.shape}" for name, tensor in sorted(network.tensors.items())]
    text = "\n".join((repr(network.shape), network.kv_layout.name, *tensors))
    return blake2b(text.encode(), digest_size=8).hexdigest()


@cache
def _kernels_digest() -> str:
    with open(_native.__file__, "rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=8)).hexdigest()


def cpu_name(cpuinfo: str | None = None) -> str:
    """CPU name with family and model, as virtual machines use the same name for different CPUs. `cpuinfo`: the text of
    /proc/cpuinfo, if it is not this machine's."""
    text = _cpuinfo() if cpuinfo is None else cpuinfo
    found = {
        key: re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE) for key in ("model name", "cpu family", "model")
    }
    name, family, model = found.values()
    if name is None:
        return platform.machine()
    return f"{name[1]} (family {family[1]}, model {model[1]})" if family and model else name[1]


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
