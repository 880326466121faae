"""Resolves settings: flag > environment variable > TOML file > preset > default. Refuses settings of the user's that
contradict each other, with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.config.presets import SERVER_PRESET, adjusted, from_preset
from twostep.config.settings import ENGINE_PARTS, Part, of_parts
from twostep.config.sources import Given, Layer, defaults, from_environment, from_file, from_flags, from_keywords
from twostep.config.values import AdmissionOrder, text_of
from twostep.core.policies import TokenBudget, Unchunked
from twostep.core.scheduler import least_step_tokens
from twostep.errors import InvalidParameterError


@dataclass(frozen=True)
class Resolution:
    """Every setting's value, and where it comes from."""

    said: Layer
    """By the user."""
    unsaid: Layer
    """All settings: what the preset and the defaults give, moved out of the way of `said`."""

    def __getitem__(self, name: str) -> Given:
        return self.said.get(name, self.unsaid[name])

    def values(self, *parts: Part) -> dict[str, Any]:
        """Keywords of a configuration."""
        return {setting.name: self[setting.name].value for setting in of_parts(*parts)}


def resolve_server(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Resolution:
    """For `twostep serve`. `flags` are those that were given, as argparse leaves them. Raises
    `InvalidParameterError`."""
    said = {**from_environment(environ), **from_flags(flags)}
    if "config" in said:
        said = {**from_file(said["config"].value), **said}
    return resolved(said, preset=SERVER_PRESET)


def resolve_engine(keywords: Mapping[str, Any]) -> Resolution:
    """For `LLM` and `EngineConfig`. Raises `InvalidParameterError`."""
    return resolved(from_keywords(keywords, *ENGINE_PARTS, also=["preset"]))


def resolved(said: Layer, preset: str | None = None) -> Resolution:
    """`preset` is what is taken if `said` names none. Raises `InvalidParameterError` for contradictions."""
    unsaid = defaults()
    unsaid["preset"] = unsaid["preset"]._replace(value=preset)
    name = said.get("preset", unsaid["preset"]).value
    if name is not None:
        unsaid |= from_preset(name)
    resolution = Resolution(said, adjusted(unsaid, said))
    _check_together(resolution)
    return resolution


def served_name(model: str) -> str:
    """What requests call a model that the user calls so."""
    return Path(model).name.removesuffix(".gguf")


def _check_together(resolution: Resolution) -> None:
    _check_preemption(resolution)
    _check_decodes(resolution)
    _check_chunks(resolution)


def _check_preemption(resolution: Resolution) -> None:
    preempts, admission = resolution["priority_preempts"], resolution["admission"]
    if preempts.value and admission.value is AdmissionOrder.FCFS:
        raise InvalidParameterError(
            f"{preempts.called} needs an order by priority, but {admission.called} is fcfs: "
            "the preempted requests would be admitted again first",
            "priority_preempts",
        )


def _check_decodes(resolution: Resolution) -> None:
    most, seqs = resolution["max_num_batched_tokens"], resolution["max_num_seqs"]
    least = least_step_tokens(seqs.value, resolution["chunking"].value)
    if most.value is not None and most.value < least:
        parts = f"{seqs.value} for decodes ({seqs.called}), {least - seqs.value} for prompts in prefill"
        raise InvalidParameterError(
            f"{most.called} is {most.value}; it has to be at least {least}: {parts}", "max_num_batched_tokens"
        )


def _check_chunks(resolution: Resolution) -> None:
    """Defaults never contradict what the user said, hence two said ones do."""
    names = ("chunking", "max_num_batched_tokens", "max_model_len")
    chunking, most, longest = (resolution[name] for name in names)
    if most.value is None:
        return
    what = f"{chunking.called} is {text_of(chunking.value)}"
    limit = f"{most.called} is {most.value}"
    if isinstance(chunking.value, TokenBudget) and chunking.value.budget_tokens > most.value:
        raise InvalidParameterError(f"{what}, but {limit}: no step holds such a chunk", "chunking")
    if isinstance(chunking.value, Unchunked) and longest.value is not None and longest.value > most.value:
        needed = f"{longest.called} is {longest.value}"
        raise InvalidParameterError(f"{what} and {needed}, but {limit}: no step holds the longest prompt", "chunking")
