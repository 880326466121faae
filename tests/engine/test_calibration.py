"""Calibrating: the grid covers the edges of the kernels, the steps are the engine's own, disturbances are discarded or
said, and engines use the profile of their own machine only."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.calibrated import COSTS, LIMITS, TILES, SyntheticMachine, profile_for
from support.engines import engine, mixed_requests, run, stories, submit
from support.recorded_run import replays

from twostep.config.configs import EngineConfig
from twostep.core.cost import StepShape, decode_shape
from twostep.engine import build
from twostep.engine.calibration import calibrate as module
from twostep.engine.calibration.calibrate import calibrate, learn
from twostep.engine.calibration.grid import ROW_TILES, Limits, grid, held_out
from twostep.engine.calibration.trial import Trial, TrialRunner
from twostep.engine.profiles import cpu_name, find_profile, identity_of, model_digest, profile_folder, profile_path
from twostep.errors import CalibrationError, ProfileError
from twostep.kernels.native import usable_isas
from twostep.perf.linear import LinearCostModel
from twostep.perf.machine_profile import Identity, MachineProfile, read_profile, write_profile
from twostep.perf.step_time_fit import edges
from twostep.perf.step_time_model import StepTimeModel

NATIVE = Path(__file__).parents[2] / "native"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_PROFILES", str(tmp_path / "profiles"))


# --- the grid -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_tiles_are_those_of_the_kernels(isa: str) -> None:
    source = (NATIVE / f"simd_{isa}.h").read_text()
    rows = re.search(r"constexpr int kRows = (\d+)", source)
    tile = re.search(r"kTileRows = (\w+)", source)
    assert rows is not None
    assert tile is not None
    assert ROW_TILES[isa] == (int(rows[1]), int(rows[1] if tile[1] == "kRows" else tile[1]))


def test_there_are_tiles_for_every_instruction_set() -> None:
    assert set(usable_isas()) <= ROW_TILES.keys()


def test_the_grid_has_each_edge_and_one_past_it() -> None:
    alone = {trial.chunks[0][1] for trial in grid(TILES, LIMITS) if not trial.decodes and len(trial.chunks) == 1}
    assert {*edges(TILES, 2048), 2048} <= alone
    assert {rows + 1 for rows in edges(TILES, 96)} <= alone
    assert {TILES.few, TILES.few + 1, 2 * TILES.few + 1} <= alone


def test_the_grid_has_decodes_far_chunks_and_mixed_steps() -> None:
    trials = grid(TILES, LIMITS)
    assert len(set(trials)) == len(trials)
    assert {len(trial.decodes) for trial in trials} >= {1, 2, 4, 8, 12, 13, 16, 32, 64}
    assert {chunk[0] for trial in trials for chunk in trial.chunks} >= {0, 512, 2048, 4000}
    assert sum(bool(trial.decodes and trial.chunks) for trial in trials) >= 8


@pytest.mark.parametrize("limits", [LIMITS, Limits(256, 8, 300, 1024)])
def test_nothing_exceeds_what_the_engine_can_run(limits: Limits) -> None:
    for trial in (*grid(TILES, limits), *held_out(limits)):
        shape = trial.shape
        assert shape.tokens <= limits.tokens
        assert shape.sequences <= limits.sequences
        assert trial.kv_tokens <= limits.kv_tokens


def test_what_is_held_out_is_not_in_the_grid_and_mostly_mixed() -> None:
    seen, unseen = {trial.shape for trial in grid(TILES, LIMITS)}, held_out(LIMITS)
    assert len(unseen) == 40
    assert not seen & {trial.shape for trial in unseen}
    assert sum(bool(trial.decodes and trial.chunks) for trial in unseen) > 24


# --- measuring ----------------------------------------------------------------------------------------------------


def test_a_trial_is_a_step_of_the_kernels() -> None:
    """Its parts are measured, and the KV that it reads was computed."""
    config = EngineConfig(kv_memory="200 blocks", max_num_seqs=8, max_num_batched_tokens=512, threads=1)
    kernels = build.kernels(stories(), config, build.size(stories(), config))
    try:
        runner = TrialRunner(kernels, stories().network.shape.vocab)
        sample = runner.run(Trial(decodes=(40, 100), chunks=((64, 32, True),)))
        exported = {kernels.executor.export_block(block) for block in range(200)}
    finally:
        kernels.close()
    assert sample.shape == StepShape(34, 32 * 64 + 32 * 33 // 2, 96, 142, 3, 1, 2)
    assert sample.parts.keys() == {"linear", "attention", "head"}
    assert 0 < sum(sample.parts.values()) < sample.step_ns
    assert len(exported) < 40, "most blocks are copies of few that were computed"


def test_a_busy_machine_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"of \d+ steps had no core for part of their time: other programs"):
        SyntheticMachine(starves=0.98).learned()


def test_steps_that_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine a step of 385 tokens takes 0.17 s."""
    monkeypatch.setattr(module, "LONGEST_STEP_S", 0.15)
    machine = SyntheticMachine()
    learned = learn(machine.run, TILES, LIMITS)
    assert learned.left_out > 0
    assert max(point.shape.tokens for point in (*learned.seen, *learned.unseen)) < 500
    assert learned.held_out["mixed"].mean < 0.05


def test_quick_runs_fewer_steps() -> None:
    whole, quick = SyntheticMachine(), SyntheticMachine()
    whole.learned()
    assert quick.learned(quick=True).held_out["mixed"].mean < 0.1
    assert quick.runs < whole.runs / 2


def test_progress_goes_up_to_the_end() -> None:
    shares = list[float]()
    learn(SyntheticMachine().run, TILES, LIMITS, progress=lambda what, share: shares.append(share))
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] <= 1


def test_a_real_model_is_calibrated_and_its_profile_survives_the_file(tmp_path: Path) -> None:
    """On the tiny model; how long steps take is not asserted, as other programs may run."""
    tried = []
    try:
        profile = calibrate(stories(), threads=1, quick=True, progress=lambda what, share: tried.append(what))
    except CalibrationError:
        pytest.skip("other programs leave no core")
    assert profile.identity == identity_of(stories(), EngineConfig(threads=1))
    assert profile.roofs.int8_ops_per_s > 0
    assert all(rate > 0 for _, rate in profile.roofs.read)
    assert profile.held_out
    assert profile.grid
    assert tried
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert [file.name for file in tmp_path.glob("*") if file.is_file()] == ["profile.json"]


# --- files --------------------------------------------------------------------------------------------------------


def own_identity() -> Identity:
    return identity_of(stories(), EngineConfig(threads=1))


def saved(profile: MachineProfile, path: Path | None = None) -> Path:
    path = path or profile_path(profile.identity, "stories260k.gguf")
    write_profile(profile, path)
    return path


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(profile_for(own_identity()), tmp_path / "p.json")
    before = path.read_bytes()

    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_profile(replace(profile_for(own_identity()), seconds=9.0), path)
    assert path.read_bytes() == before
    assert list(tmp_path.glob(".p.json*")) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "not a profile"),
        ('{"twostep profile": 99}', "format 99; this version of Twostep reads format 1: calibrate again"),
        ('{"twostep profile": 1}', "is missing"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=f"{path}.*{problem}"):
        find_profile(path, own_identity(), "stories260k.gguf")


@pytest.mark.parametrize(
    "change", [{"costs": 3}, {"roofs": {}}, {"identity": {}}, {"steps": [[1]]}, {"held_out": {"mixed": {"mean": 1}}}]
)
def test_a_damaged_field_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile_for(own_identity()).to_json() | change))
    with pytest.raises(ProfileError, match=str(path)):
        read_profile(path)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no such file; `twostep calibrate --out"):
        find_profile(tmp_path / "none.json", own_identity(), "stories260k.gguf")


def test_without_a_profile_the_line_says_what_to_do() -> None:
    found = find_profile("auto", own_identity(), "stories260k.gguf")
    assert found.profile is None
    assert "`twostep calibrate` measures this machine" in found.line


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cpu": "Other CPU"}, "CPU Other CPU instead of"),
        ({"threads": 77}, "threads 77 instead of 1"),
        ({"isa": "neon"}, "instruction set neon instead of"),
        ({"kv": "int8"}, "KV type int8 instead of float16"),
        ({"model": "abc"}, "model abc instead of"),
        ({"twostep": "0.0.0"}, "Twostep version 0.0.0 instead of"),
        ({"kernels": "old"}, "kernels old instead of"),
    ],
)
@pytest.mark.parametrize("named", [True, False], ids=["by path", "found"])
def test_a_foreign_or_stale_profile_is_named_and_not_used(
    tmp_path: Path, changed: dict[str, object], said: str, named: bool
) -> None:
    profile = profile_for(own_identity(), **changed)
    path = saved(profile, tmp_path / "given.json" if named else None)
    found = find_profile(path if named else "auto", own_identity(), "stories260k.gguf")
    assert found.profile is None
    assert f"{path} is not used: it is for {said}" in found.line
    assert isinstance(found.cost_model(), LinearCostModel)


def test_a_damaged_profile_that_nobody_asked_for_stops_nothing() -> None:
    path = saved(profile_for(own_identity()))
    path.write_text("{")
    found = find_profile("auto", own_identity(), "stories260k.gguf")
    assert found.profile is None
    assert str(path) in found.line


def test_profiles_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TWOSTEP_PROFILES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_folder() == tmp_path / "twostep" / "profiles"


def test_without_a_home_there_are_no_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.delenv("TWOSTEP_PROFILES")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with engine() as made:
        assert made.profile.profile is None


def test_the_models_digest_is_of_its_form() -> None:
    assert re.fullmatch("[0-9a-f]{16}", model_digest(stories()))
    assert model_digest(stories()) == own_identity().model


def test_the_cpu_has_a_name() -> None:
    assert cpu_name("model name\t: Fast\ncpu family\t: 25\nmodel\t\t: 17\n") == "Fast (family 25, model 17)"
    assert cpu_name("model name\t: Fast\n") == "Fast"
    assert cpu_name("")


# --- engines use it -----------------------------------------------------------------------------------------------


def test_an_engine_plans_with_the_profile_of_its_machine() -> None:
    path = saved(profile_for(own_identity()))
    with engine() as made:
        assert isinstance(made.scheduler.cost, StepTimeModel)
        assert made.scheduler.cost is made.cost
        assert made.scheduler.cost.costs == COSTS
        assert any(str(path) in line for line in made.describe())
    with engine(profile="none") as made:
        assert isinstance(made.scheduler.cost, LinearCostModel)
    with engine(executor="reference") as made:
        assert isinstance(made.scheduler.cost, LinearCostModel), "another executor"


def test_a_recorded_run_with_a_profile_replays_byte_for_byte(tmp_path: Path) -> None:
    saved(profile_for(own_identity()))
    path = tmp_path / "run"
    with engine(record=path, chunking="time=0.5") as made:
        for asked in mixed_requests(25, seed=4):
            submit(made, asked)
        run(made)
        assert isinstance(made.cost, StepTimeModel)
        assert made.cost.correction != (1.0, 1.0, 1.0, 1.0), "steps have corrected it"
    assert replays(path).prediction_errors
    header = json.loads(path.read_text().splitlines()[0])
    assert header["costs"] == COSTS.to_json()


def test_a_recording_with_damaged_costs_is_refused(tmp_path: Path) -> None:
    from twostep.errors import RecordingError

    saved(profile_for(own_identity()))
    path, damaged = tmp_path / "run", tmp_path / "damaged"
    with engine(record=path) as made:
        submit(made, mixed_requests(1, seed=4)[0])
        run(made)
    text = path.read_text()
    damaged.write_text(text.replace('"pair":400.0', '"pair":-1'))
    with pytest.raises(RecordingError, match="costs in line 1: pair is -1"):
        replays(damaged)


def test_a_calibrated_estimate_differs_from_the_first_guess() -> None:
    shape = decode_shape(4, 2000)
    assert StepTimeModel(COSTS).estimate(shape) != LinearCostModel().estimate(shape)
