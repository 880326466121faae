"""The benchmark's arithmetic, its handling of other programs, and that the documents say what the result files say."""

import json
import re
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import counters, machine, model, report, results, tables
from benchmarks.engines import Decode, LlamaCpp, Measure, Prefill
from benchmarks.jobs import FIRST_TOKEN, LAST_TOKEN, prompt
from benchmarks.measurement import EngineError, Spread, spread
from benchmarks.model_driver import Driver, Part, Run, Seconds, Work, layer_weights, pairs, work
from benchmarks.model_points import decode_point, prefill_point, step_bytes
from benchmarks.openvino import OpenVino
from benchmarks.peers_model import take_turns
from twostep.kernels.machine_limits import Bandwidth, Limits, Peak, while_others_run
from twostep.model.loaded import open_model
from twostep.model.network import Network
from twostep.model.ops import Linear, Logits

STORIES = Path(__file__).parents[1] / "data" / "stories260k.gguf"


@pytest.fixture(scope="module")
def stories() -> Network:
    return open_model(STORIES).network


# -------------------------------------------------------------------------------------------------------- arithmetic


def test_operations_are_two_for_each_element_of_the_matrices_that_a_row_meets(stories: Network) -> None:
    def elements(kind: type[Linear] | type[Logits]) -> int:
        shapes = [stories.tensors[op.weight].shape for op in stories.ops if isinstance(op, kind)]
        return sum(rows * columns for rows, columns in shapes)

    assert stories.shape.layers * layer_weights(stories.shape) == elements(Linear)
    done = work(stories.shape, [Part(start=7, count=5, logits=3)])
    assert done.linear_ops == 2 * 5 * elements(Linear)
    assert done.head_ops == 2 * 3 * elements(Logits)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 9), (12, 1), (12, 7)])
def test_pairs_are_counted_under_the_causal_mask(start: int, count: int) -> None:
    assert pairs(start, count) == sum(1 for query in range(start, start + count) for key in range(query + 1))


def test_cutting_a_prompt_changes_no_operations(stories: Network) -> None:
    whole = work(stories.shape, [Part(0, 100, 1)])
    cut = work(stories.shape, [Part(0, 60, 0), Part(60, 40, 1)])
    assert (cut.linear_ops, cut.head_ops, cut.attention_flops) == (
        whole.linear_ops,
        whole.head_ops,
        whole.attention_flops,
    )


def test_a_decode_reads_the_kv_of_all_its_positions(stories: Network) -> None:
    two = work(stories.shape, [Part(10, 1, 1), Part(20, 1, 1)])
    assert two.kv_bytes == (11 + 21) * stories.shape.kv_bytes_per_token()


# ------------------------------------------------------------------------------------------------------ measurements


def test_runs_report_their_tokens_and_where_all_of_their_time_went(stories: Network) -> None:
    driver = Driver(stories, prompt=24, batch=2, positions=40, threads=1)
    driver.fill()
    before, after = driver.prefill(range(1, 25)), driver.decode(batch=2, context=24, steps=3)
    assert (before.tokens, after.tokens) == (24, 6)
    assert before.work == work(stories.shape, [Part(0, 24, 1)])
    assert after.work == work(stories.shape, [Part(24 + i, 1, 1) for i in range(3)] * 2)
    for seconds in (before.seconds, after.seconds):
        assert min(seconds.linear, seconds.attention, seconds.head, seconds.sampling, seconds.rest) > 0


LIMITS = Limits("test", 2, Peak(1e9, 2e9), Peak(1e9, 4e9), ())
SECONDS = Seconds(linear=0.5, attention=0.25, head=0.125, sampling=0.0625, rest=0.0625)
RUN = Run(8, SECONDS, Work(linear_ops=5 * 10**8, head_ops=10**7, attention_flops=10**8, kv_bytes=400))


def test_shares_are_of_the_limit_of_all_threads() -> None:
    point = prefill_point([RUN], LIMITS)
    assert point.tokens_per_s == Spread(8, 8, 8, 1)
    assert (point.linear.per_s, point.linear.share) == (1e9, 0.5)
    assert point.attention.share == pytest.approx(0.1)
    assert point.ms["total"] == 1000


def test_decode_reads_all_weights_once_a_step() -> None:
    assert step_bytes(RUN, steps=4, weight_bytes=1000) == 1100
    point = decode_point(2, 50, 4, [RUN], LIMITS, 1000, Bandwidth(1100, 8800))
    assert point.memory is not None
    assert (point.memory.per_s, point.memory.share) == (4400, 0.5)
    assert point.ms["linear"] == 125


def test_a_peak_is_measured_while_all_other_threads_do_the_same() -> None:
    running: set[int] = set()
    together = threading.Barrier(3)

    def measured() -> float:
        running.add(threading.get_ident())
        if not done.is_set():
            together.wait(timeout=10)
            done.set()
        return 1.5

    done = threading.Event()
    assert while_others_run(measured, others=2) == 1.5
    assert len(running) == 3


def test_prompts_are_the_same_each_time_and_share_no_prefix() -> None:
    prompts = [prompt(50, "test", i) for i in range(20)]
    assert prompts == [prompt(50, "test", i) for i in range(20)]
    assert len({tokens[0] for tokens in prompts}) == 20
    assert all(FIRST_TOKEN <= token < LAST_TOKEN for tokens in prompts for token in tokens)


def test_spread_is_median_least_and_greatest() -> None:
    assert spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0, 3)


# ----------------------------------------------------------------------------------------------------------- machine


def test_counters_that_a_machine_lacks_are_none() -> None:
    listing = "# started\n\n1234567,,instructions:u,100,100.00,1.2,insn per cycle\n<not supported>,,cycles,0,100.00,,\n"
    assert counters.parse(listing) == {"instructions": 1234567, "cycles": None}


def test_events_of_this_process_are_counted_only_during_the_run() -> None:
    events = ("task-clock",)
    if missing := counters.missing_counters(events):
        pytest.skip(missing)
    short = counters.count(lambda: None, events)["task-clock"]
    long = counters.count(lambda: sum(range(10**7)), events)["task-clock"]
    assert short is not None
    assert long is not None
    assert long > short + 20


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 25, model 1)"),
        ("model name\t: Neoverse\n", "Neoverse"),
    ],
)
def test_cpu_name_tells_models_apart(cpuinfo: str, name: str) -> None:
    assert machine.cpu_name(cpuinfo) == name


def test_flags_and_lists_of_the_kernel() -> None:
    assert machine.known_flags("flags\t\t: fpu avx2 fma sse\n") == ("avx2", "fma")
    assert machine.cpu_count("0-3,8") == 5
    assert machine.slug("AMD EPYC (family 25, model 1)") == "amd-epyc-family-25-model-1"


# ------------------------------------------------------------------------------------------------------------- peers


class Fake:
    """An engine whose rate tells its turn."""

    version, file = "1", "a.gguf"

    def __init__(self, name: str, turns: list[str]) -> None:
        self.name = name
        self._turns = turns

    def warm_up(self, measures: Sequence[Measure]) -> None:
        raise AssertionError("not this test's affair")

    def rate(self, measure: Measure, run: int) -> float:
        self._turns.append(self.name)
        return float(len(self._turns))

    def close(self) -> None:
        raise AssertionError("not this test's affair")


def test_engines_take_turns_at_every_measurement() -> None:
    turns: list[str] = []
    rates = take_turns([Fake("a", turns), Fake("b", turns)], [Prefill(8), Decode(1, 8, 4)], runs=3)
    assert all(before != after for before, after in pairwise(turns))
    assert rates["a"] == {
        "prefill 8": Spread(5, 1, 9, 3),
        "decode, batch 1, context 8": Spread(7, 3, 11, 3),
    }


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def llama(folder: Path) -> LlamaCpp:
    return LlamaCpp(folder, "test", 2, Path("m.gguf"), "Q4_0")


def test_llama_cpp_is_asked_with_its_own_programs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program(tmp_path / "llama-bench", f"""echo "$0 $*" >> {log}; echo 'chatter'; echo '{{"avg_ts": 12.5}}'""")
    program(tmp_path / "llama-batched-bench", f"""echo "$0 $*" >> {log}; echo '{{"speed_tg": 40.5}}'""")
    engine = llama(tmp_path)
    measures = (Prefill(512), Prefill(2048), Decode(1, 128, 64), Decode(4, 128, 64))
    assert [engine.rate(measure, 0) for measure in measures] == [12.5, 12.5, 12.5, 40.5]
    common = "-m m.gguf -t 2"
    assert [line.rpartition("/")[2] for line in log.read_text().splitlines()] == [
        f"llama-bench {common} -r 1 -o jsonl -p 512 -n 0",
        f"llama-bench {common} -r 1 -o jsonl -p 2048 -n 0 --no-warmup",
        f"llama-bench {common} -r 1 -o jsonl -p 0 -n 64 -d 128",
        f"llama-batched-bench {common} -tb 2 -npp 128 -ntg 64 -npl 4 -c 768 --output-format jsonl",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("echo first >&2; echo 'cannot load' >&2; exit 3", "exit code 3: cannot load"),
        ("echo nothing of use", "printed 0 results instead of one"),
    ],
)
def test_an_engine_that_fails_is_named_with_its_last_words(tmp_path: Path, text: str, complaint: str) -> None:
    program(tmp_path / "llama-bench", text)
    with pytest.raises(EngineError, match=rf"llama-bench: {re.escape(complaint)}$"):
        llama(tmp_path).rate(Prefill(8), 0)


def test_an_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="llama-bench: No such file"):
        llama(tmp_path).rate(Prefill(8), 0)


def test_openvino_is_asked_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    answer = f"""echo "$line" >> {log}; echo chatter; echo '{{"rate": 3}}'"""
    python = program(tmp_path / "python", f"""echo '{{"version": "7"}}'; while read -r line; do {answer}; done""")
    engine = OpenVino(python, 2, Path("m.gguf"), "Q4_1")
    assert engine.version == "7"
    assert [engine.rate(Prefill(8), 0), engine.rate(Decode(2, 8, 4), 0)] == [3, 3]
    engine.close()
    prefill, decode = map(json.loads, log.read_text().splitlines())
    assert (prefill["what"], prefill["tokens"], list(map(len, prefill["prompts"]))) == ("prefill", 1, [8])
    assert (decode["what"], decode["tokens"], list(map(len, decode["prompts"]))) == ("decode", 5, [8, 8])


def test_an_openvino_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exit code 4"):
        OpenVino(program(tmp_path / "python", "exit 4"), 2, Path("m.gguf"), "Q4_1")


# ------------------------------------------------------------------------------------------------------------ report


def test_documents_say_what_the_result_files_say() -> None:
    """`make report` brings them up to date."""
    for path, text in report.render().items():
        assert (machine.ROOT / path).read_text() == text, f"{path} is not what `make report` makes of the results"


def test_only_the_marked_part_is_replaced() -> None:
    text = "before\n<!-- a:begin -->\nold\n<!-- a:end -->\nafter <!-- b:begin --><!-- b:end -->"
    assert report.fill(text, "a", "new \\1") == text.replace("old", "new \\1")


@pytest.mark.parametrize("text", ["", "<!-- a:begin -->", "<!-- a:end --><!-- a:begin -->"])
def test_a_document_without_the_marks_is_an_error(text: str) -> None:
    with pytest.raises(report.ReportError, match="a:begin"):
        report.fill(text, "a", "new")


def test_ratio_is_to_the_best_of_the_others() -> None:
    rates = {"Twostep": 30.0, "b": 10.0, "c": 20.0}
    engines = [{"engine": name, "tokens_per_s": {"prefill 8": vars(spread([rate]))}} for name, rate in rates.items()]
    last = tables.peers({"model": "m", "engines": engines}, spreads=False).splitlines()[-1]
    assert last == "| prefill 8 | 30 | 10 | 20 | **1.50 \N{MULTIPLICATION SIGN}** |"


def test_a_quick_measurement_yields_a_result_that_all_tables_can_be_made_of(
    default_model_path: Path, tmp_path: Path
) -> None:
    assert model.main(["--quick", "--model", str(default_model_path), "--out", str(tmp_path / "model-x.json")]) == 0
    [result] = results.read("model", tmp_path)
    assert [point["context"] for point in result["prefill"]] == list(model.QUICK.prefills)
    assert all(point["linear"]["share"] > 0 for point in result["prefill"] + result["decode"])
    text = report.performance_model(tmp_path)
    assert default_model_path.name in text
    assert result["machine"]["cpu"] in report.readme(tmp_path)


def test_a_folder_that_is_not_there_is_found_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert model.main(["--quick", "--out", str(tmp_path / "none" / "x.json")]) == 1
    assert capsys.readouterr().err.startswith("benchmarks.model: --out ")


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--quick", "--model", "nope"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("benchmarks.model: unknown model 'nope'")
