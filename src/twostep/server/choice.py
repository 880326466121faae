"""Brings together who set what: a flag goes before an environment variable, that before the TOML file, that before the
preset, that before the default. Settings that contradict each other are refused with the reason."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from twostep.core.request import BLOCK_TOKENS
from twostep.engine.build import DEFAULT_SHARE, naming_settings
from twostep.engine.config import EngineConfig
from twostep.engine.kv_memory import kv_memory
from twostep.errors import InvalidParameterError
from twostep.server.config import Effective, ServerConfig
from twostep.server.moved_defaults import moved
from twostep.server.options import SETTINGS, Setting
from twostep.server.presets import DEFAULT_PRESET
from twostep.server.sources import Given, from_environment, from_file, from_flags, from_preset
from twostep.settings import Settings
from twostep.store.catalogue import DEFAULT_MODEL

SCHEDULED = {
    "max_num_seqs": "seats", "max_step_tokens": "step_tokens", "chunking": "chunking", "batching": "batching",
    "admission": "admission", "priority_preempts": "priority_preempts",
}  # fmt: skip
"""Fields of `EngineConfig` that the scheduler checks together, and what `Settings` calls them."""

JOINED = ("host", "served_model_name")
"""Lists that /v1/config tells as one text, as there was only one of each once and programs read it."""


def choose(flags: Mapping[str, Any], environ: Mapping[str, str]) -> "Choice":
    """`flags` are those that were given, as argparse leaves them. Raises `InvalidParameterError`."""
    said = from_environment(environ) | from_flags(flags)
    if "config" in said:
        said = from_file(Path(said["config"].value)) | said
    said = {"model": Given(DEFAULT_MODEL, "default"), "preset": Given(DEFAULT_PRESET, "default")} | said
    return Choice(said, moved(from_preset(said["preset"].value), said))


@dataclass(frozen=True)
class Choice:
    """What a user said and what the preset sets beside it, by the name of the setting. What is in neither has its
    default."""

    said: Mapping[str, Given]
    preset: Mapping[str, Given]

    @property
    def given(self) -> Mapping[str, Given]:
        """A preset only sets defaults."""
        return {**self.preset, **self.said}

    @property
    def model(self) -> str:
        """As the user calls it."""
        return str(self.given["model"].value)

    def configs(self) -> tuple[ServerConfig, EngineConfig]:
        """Raises `InvalidParameterError` for what is out of range or contradicts itself, with who set it."""
        try:
            self._check_together()
            engine = EngineConfig(**self._fields("engine"))
            _check_schedule(engine)
            name = Path(self.model).name.removesuffix(".gguf")
            server = ServerConfig(**{"served_model_names": (name,)} | self._fields("server"))
            return replace(server, effective=tuple(self._rows(server, engine))), engine
        except InvalidParameterError as error:
            raise self._refusal(str(error)) from None

    def _fields(self, part: Literal["server", "engine"]) -> dict[str, Any]:
        """Keywords of a configuration."""
        values = {s.target: self.given[s.name].value for s in SETTINGS if s.part == part and s.name in self.given}
        if "kv_memory" in values:
            values |= kv_memory(values.pop("kv_memory"))
        values.pop("block_size", None)
        return values

    # --- contradictions -------------------------------------------------------------------------------------------

    def _check_together(self) -> None:
        """What single values do not show. Raises `InvalidParameterError`."""
        size = self.given.get("block_size")
        if size and size.value != BLOCK_TOKENS:
            raise InvalidParameterError(f"block_size is {size.value}; only {BLOCK_TOKENS} is supported")
        self._check_uncut()
        chunking, most = self.said.get("chunking"), self.said.get("max_num_batched_tokens")
        if chunking and most and (cut := re.fullmatch(r"tokens=(\d+)", chunking.value)) and int(cut[1]) > most.value:
            problem = f"chunking is {chunking.value}, but max_num_batched_tokens {most.value}: no step is so wide"
            raise InvalidParameterError(problem)

    def _check_uncut(self) -> None:
        """Without chunks the widest step is the longest request."""
        most, longest = self.said.get("max_num_batched_tokens"), self.said.get("max_model_len")
        if self.given["chunking"].value == "none" and most and longest and longest.value > most.value:
            problem = f"chunking is none, max_model_len {longest.value} and max_num_batched_tokens {most.value}"
            raise InvalidParameterError(f"{problem}: no step would hold the longest prompt")

    def _refusal(self, problem: str) -> InvalidParameterError:
        """In the words of the table, with who set what the problem names."""
        for setting in SETTINGS:
            if setting.field:
                problem = re.sub(rf"\b{setting.field}\b", setting.name, problem)
        named = [s for s in SETTINGS if s.name in self.given and re.search(rf"\b({_words(s.name)})\b", problem)]
        who = ", ".join(f"{setting.name} by {self.given[setting.name].by}" for setting in named)
        return InvalidParameterError(f"{problem} (set: {who})" if who else problem)

    # --- what is in effect ----------------------------------------------------------------------------------------

    def _rows(self, server: ServerConfig, engine: EngineConfig) -> Iterator[Effective]:
        parts: dict[str, ServerConfig | EngineConfig] = {"server": server, "engine": engine}
        for setting in SETTINGS:
            source = self.given.get("chunking" if setting.name == "itl_budget" else setting.name)
            value = self._value(setting, parts.get(setting.part))
            yield Effective(setting.name, value, source.by if source else "default")

    def _value(self, setting: Setting, config: ServerConfig | EngineConfig | None) -> Any:
        """As JSON has it."""
        if setting.name == "itl_budget":
            cut = re.fullmatch(r"time=(.+)", self.given["chunking"].value)
            return float(cut[1]) if cut else None
        if setting.name in self.given:
            value = self.given[setting.name].value
        else:
            fixed = {"kv_memory": str(DEFAULT_SHARE), "block_size": BLOCK_TOKENS}
            value = fixed.get(setting.name, getattr(config, setting.target, None))
        if setting.secret:
            return f"{len(value)} given, not shown" if value else None
        if setting.name in JOINED:
            return ",".join(value)
        return list(value) if isinstance(value, tuple) else value


def _words(name: str) -> str:
    """What a setting is called where something is wrong with it; the scheduler has words of its own."""
    return {"max_num_batched_tokens": rf"{name}|step of \d+ tokens", "max_num_seqs": rf"{name}|seats"}.get(name, name)


def _check_schedule(engine: EngineConfig) -> None:
    """What the scheduler will refuse, before a model is loaded. Raises `InvalidParameterError`."""
    values = {ours: getattr(engine, name) for name, ours in SCHEDULED.items()}
    with naming_settings():
        if engine.max_step_tokens is None:
            values["step_tokens"] = Settings((1,), seats=engine.max_num_seqs).least_step_tokens  # or more, by the model
        Settings((1,), **values).config()
