"""Tables of a calibration say what the result says."""

from dataclasses import replace
from typing import Any

from support.calibrated import COSTS, SyntheticMachine, profile_for
from support.engines import stories

from benchmarks import calibration_tables
from twostep.config.configs import EngineConfig
from twostep.engine.profiles import identity_of
from twostep.perf.typical_steps import TERMS, typical_steps


def result() -> dict[str, Any]:
    learned = SyntheticMachine(noise=0.03).learned()
    profile = replace(
        profile_for(identity_of(stories(), EngineConfig(threads=1))), grid=learned.grid, held_out=learned.held_out
    )
    machine = {
        "cpu": "Test CPU", "cores": 2, "flags": ["avx2"], "kernel": "6.1", "commit": "0123456789", "modified": False,
        "busy": 0.0, "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    typical = [step._asdict() for step in typical_steps(COSTS)]
    return {"command": "x", "machine": machine, "model": "tiny", "typical": typical, "profile": profile.to_json()}


def test_the_table_has_errors_beside_noise_and_typical_steps() -> None:
    made = result()
    table = calibration_tables.calibration(made)
    mixed = made["profile"]["held_out"]["mixed"]
    shares = " | ".join(f"{mixed[name]:.1%}" for name in ("mean", "p95", "noise_mean", "noise_p95"))
    assert f"| not seen, mixed | {mixed['steps']} | {shares} |" in table
    for title in ("not seen", "fitted"):
        for region in ("mixed", "decode", "prefill"):
            assert f"| {title}, {region} |" in table
    for step in made["typical"]:
        assert f"| {step['name']} |" in table
    assert "tiny" in table


def test_the_sentence_names_the_error_of_steps_that_were_not_seen() -> None:
    made = result()
    sentence = calibration_tables.readme(made)
    assert f"{made['profile']['held_out']['mixed']['p95']:.1%} at the 95th percentile" in sentence
    assert "tiny, Test CPU" in sentence


def test_terms_of_typical_steps_add_up() -> None:
    for step in typical_steps(COSTS):
        assert abs(sum(getattr(step, term) for term in TERMS) - step.expected) < 1e-5
        assert step.bound > step.expected
