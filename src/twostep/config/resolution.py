"""Resolves settings: flag > environment variable > TOML file > preset > default. Refuses settings of the user's that
contradict each other, with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.config.settings import ENGINE_PARTS, PRESETS, SERVER_PRESET, Part, of_parts
from twostep.config.sources import Layer, SettingValue, defaults, from_environment, from_file, from_flags, from_keywords
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

    def __getitem__(self, name: str) -> SettingValue:
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
        unsaid |= _from_preset(name)
    resolution = Resolution(said, _adjusted(unsaid, said))
    _check_together(resolution)
    return resolution


def served_name(model: str) -> str:
    """What requests call a model that the user calls so."""
    return Path(model).name.removesuffix(".gguf")


# --- defaults -----------------------------------------------------------------------------------------------------


def _from_preset(name: str) -> Layer:
    """The preset's settings; `name` has been checked."""
    by = f"preset {name}"
    return {setting: SettingValue(value, by, f"{setting} ({by})") for setting, value in PRESETS[name].items()}


def _adjusted(defaults: Layer, said: Layer) -> Layer:
    """The defaults, changed where what the user said needs it; each changed one names its cause.

    The user's own settings stay as they are: if they contradict each other, they are refused. None for
    `max_num_batched_tokens` means as many as the longest request has, which is known when the model is loaded.
    """
    adjusting = _Adjusting(defaults, said)
    adjusting.fit_chunks()
    adjusting.fit_decodes()
    return adjusting.defaults


class _Adjusting:
    def __init__(self, defaults: Layer, said: Layer) -> None:
        self.defaults, self._said = dict(defaults), said
        self._by = {name: given.by for name, given in defaults.items()}

    def _value(self, name: str) -> Any:
        return self._said.get(name, self.defaults[name]).value

    def _move(self, name: str, value: object, because: str) -> None:
        by = f"{self._by[name]}, moved by {self._said[because].called}"
        self.defaults[name] = SettingValue(value, by, f"{name} ({by})")

    def fit_chunks(self) -> None:
        """A step has to hold a chunk; if prompts are not cut, it has to hold the longest prompt."""
        chunking, widest = self._value("chunking"), self._value("max_num_batched_tokens")
        chunk_tokens = chunking.budget_tokens if isinstance(chunking, TokenBudget) else None
        if "max_num_batched_tokens" in self._said:
            if "chunking" not in self._said and chunk_tokens and widest and chunk_tokens > widest:
                self._move("chunking", TokenBudget(widest), "max_num_batched_tokens")
        elif isinstance(chunking, Unchunked):
            longest = self._value("max_model_len")
            self._move("max_num_batched_tokens", longest, "chunking")
        elif chunk_tokens and chunk_tokens > widest:
            self._move("max_num_batched_tokens", chunk_tokens, "chunking")

    def fit_decodes(self) -> None:
        """A step has to hold a token of each sequence, beside what prompts need."""
        max_num_seqs, widest = self._value("max_num_seqs"), self._value("max_num_batched_tokens")
        least = least_step_tokens(max_num_seqs, self._value("chunking"))
        if widest is None or widest >= least:
            return
        if "max_num_batched_tokens" not in self._said:
            because = "max_num_seqs" if "max_num_seqs" in self._said else "chunking"
            self._move("max_num_batched_tokens", least, because)
        elif "max_num_seqs" not in self._said:
            self._move("max_num_seqs", max(1, widest - (least - max_num_seqs)), "max_num_batched_tokens")


# --- contradictions -----------------------------------------------------------------------------------------------


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
