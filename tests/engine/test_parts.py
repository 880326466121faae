"""The engine's small parts by themselves: arrays that are kept from step to step, answers, the thread beside."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.core.blocks import prompt_hashes, root_hash
from twostep.core.kv_cache import Granted
from twostep.engine.params import SamplingParams
from twostep.engine.step.executor import CoreStarvationMeter
from twostep.engine.step.rows import BlockTables, DecodeRows
from twostep.engine.step.worker import Worker
from twostep.engine.text.answer import Answer, Vocabulary
from twostep.kernels.step import BLOCK_TOKENS, StepArrays

ROOT = root_hash("a model", "a format")

# --- rows ---------------------------------------------------------------------------------------------------------


def listed(step: StepArrays) -> list[tuple[int, int, int, int]]:
    """Of steps without pieces, whatever the order: token, position, tokens, where the table begins."""
    assert step.logit_rows.tolist() == list(range(len(step.tokens)))
    arrays = (step.tokens, step.starts, step.counts, step.table_starts)
    return sorted(zip(*(array.tolist() for array in arrays), strict=True))


@given(st.data())
def test_standing_rows_are_those_of_a_plain_dict(data: st.DataObject) -> None:
    seats = 6
    rows, plain = DecodeRows(seats), dict[int, tuple[int, int, int]]()
    tables = np.zeros(0, np.int32)
    for number in range(data.draw(st.integers(1, 30))):
        if plain and (len(plain) == seats or data.draw(st.booleans())):
            gone = data.draw(st.sampled_from(sorted(plain)))
            rows.leave(gone)
            del plain[gone]
        rows.join(number, number + 100, number + 7, number * 40)
        plain[number] = number + 100, number + 7, number * 40
        assert sorted(rows.numbers) == sorted(plain)
        step = rows.step(tables, ())
        assert listed(step) == sorted((token, start, 1, table) for token, start, table in plain.values())
        chosen = data.draw(st.lists(st.integers(0, 99), min_size=len(plain), max_size=len(plain)))
        rows.advance(chosen)
        for n, token in zip(rows.numbers, chosen, strict=True):
            plain[n] = token, plain[n][1] + 1, plain[n][2]


def test_a_step_of_nobody_is_empty() -> None:
    step = DecodeRows(3).step(np.zeros(4, np.int32), ())
    assert [len(array) for array in (step.tokens, step.starts, step.counts, step.logit_rows)] == [0] * 4


def test_pieces_follow_the_standing_and_only_some_are_sampled() -> None:
    rows, tables = DecodeRows(4), np.arange(80, dtype=np.int32)
    rows.join(5, 50, 9, 0)
    rows.join(6, 60, 19, 16)
    pieces = [
        (np.array([1, 2, 3], np.int32), 0, 32, False),
        (np.array([4], np.int32), 16, 48, True),
        (np.array([7, 8], np.int32), 0, 64, True),
    ]
    step = rows.step(tables, iter(pieces))
    assert step.tokens.tolist() == [50, 60, 1, 2, 3, 4, 7, 8]
    assert step.starts.tolist() == [9, 19, 0, 16, 0]
    assert step.counts.tolist() == [1, 1, 3, 1, 2]
    assert step.table_starts.tolist() == [0, 16, 32, 48, 64]
    assert step.logit_rows.tolist() == [0, 1, 5, 7]
    assert step.tables is tables
    assert {array.dtype for array in vars(step).values()} == {np.dtype(np.int32)}
    assert all(array.flags.c_contiguous for array in vars(step).values())


def test_arrays_of_a_step_without_pieces_are_views_of_those_that_are_kept() -> None:
    rows, tables = DecodeRows(4), np.zeros(4, np.int32)
    rows.join(1, 10, 0, 0)
    assert np.shares_memory(rows.step(tables, ()).tokens, rows.step(tables, ()).tokens)


# --- block tables -------------------------------------------------------------------------------------------------


def table(tables: BlockTables, number: int, blocks: int, group: int = 0) -> list[int]:
    start = tables.start(number)
    return tables.flat[group][start : start + blocks].tolist()


def test_tables_grow_where_they_are_told_and_keep_apart() -> None:
    tables = BlockTables(2, 4)
    tables.grant(Granted(10, 0, 0, (7, 8)))
    tables.grant(Granted(20, 0, 0, (1,)))
    tables.grant(Granted(10, 0, 2, (9,)))
    tables.grant(Granted(20, 0, 1, (2, 3, 4)))
    assert (table(tables, 10, 3), table(tables, 20, 4)) == ([7, 8, 9], [1, 2, 3, 4])


def test_groups_of_blocks_have_tables_of_their_own() -> None:
    tables = BlockTables(2, 4, groups=2)
    tables.grant(Granted(10, 0, 0, (7, 8)))
    tables.grant(Granted(10, 1, 0, (1, 2)))
    tables.grant(Granted(20, 1, 0, (3,)))
    tables.grant(Granted(10, 1, 2, (5,)))
    assert table(tables, 10, 2) == [7, 8]
    assert table(tables, 10, 3, group=1) == [1, 2, 5]
    assert table(tables, 20, 1, group=1) == [3]


def test_a_dropped_table_makes_room_for_another() -> None:
    tables = BlockTables(1, 4)
    for number in range(5):
        tables.grant(Granted(number, 0, 0, (number, number + 1)))
        assert table(tables, number, 2) == [number, number + 1]
        tables.drop(number)
        tables.drop(number)
    with pytest.raises(KeyError):
        tables.start(4)


# --- answers ------------------------------------------------------------------------------------------------------


def answer(prompt: list[int], *, hashes: bool = True, max_tokens: int = 40, rows: int = 64, **params: object) -> Answer:
    known = prompt_hashes(ROOT, prompt) if hashes else None
    asked = SamplingParams(**{"seed": 1, **params})  # type: ignore[arg-type]
    return Answer(prompt, asked, 2, max_tokens, Vocabulary(rows, None), known, ROOT)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 40])
@pytest.mark.parametrize("every", [1, 2, 5, 16, 33])
def test_hashes_of_output_blocks_are_those_of_a_prompt_that_long(length: int, every: int) -> None:
    """Whenever it is asked, none twice, and none of a block whose last token has not been computed."""
    tokens = [i * 7 % 60 for i in range(length + 40)]
    mine, hashes = answer(tokens[:length]), list(prompt_hashes(ROOT, tokens[:length]))
    for i, token in enumerate(tokens[length:], 1):
        mine.append(token)
        if i % every == 0:
            hashes += mine.new_hashes()
            assert hashes == list(prompt_hashes(ROOT, tokens[: mine.known]))[: (mine.known - 1) // BLOCK_TOKENS]
            assert mine.new_hashes() == ()


def test_without_reuse_there_are_no_hashes() -> None:
    mine = answer([1] * 20, hashes=False)
    for _ in range(40):
        mine.append(1)
    assert mine.new_hashes() == ()


def test_an_answer_ends_with_a_stop_token_and_counts_it() -> None:
    mine = answer([1, 2], stop_token_ids=[9])
    assert [mine.append(token) for token in (3, 4, 9)] == [False, False, True]
    assert mine.output.tolist() == [3, 4, 9]


def allowed(mine: Answer) -> set[int]:
    mask = mine.row().mask
    return {i for i in range(64) if mask is None or mask[i // 32] >> np.uint32(i % 32) & 1}


def test_what_would_end_it_is_masked_until_min_tokens() -> None:
    mine = answer([1], stop_token_ids=[9, 40], min_tokens=2)
    for _ in range(2):
        assert allowed(mine) == set(range(64)) - {9, 40}
        mine.append(3)
    assert mine.row().mask is None


def test_rows_of_the_head_beyond_the_vocabulary_are_never_chosen() -> None:
    tokenizer = SimpleNamespace(vocab_size=50, eos_ids=[2])
    mine = Answer([1], SamplingParams(seed=1), 0, 5, Vocabulary(64, tokenizer), None, ROOT)  # type: ignore[arg-type]
    assert allowed(mine) == set(range(50))
    assert mine.stop_ids == {2}


def test_a_row_names_choice_and_position_and_has_history_only_where_it_is_read() -> None:
    plain, penalised = answer([1, 2, 3]), answer([1, 2, 3], presence_penalty=1.0)
    for mine in (plain, penalised):
        mine.append(5)
        assert (mine.row().choice, mine.row().position) == (2, 4)
    assert plain.row().prompt is plain.row().output is None
    row = penalised.row()
    assert row.prompt is not None
    assert row.output is not None
    assert (row.prompt.tolist(), row.output.tolist()) == ([1, 2, 3], [5])


# --- the thread beside --------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


@BOTH
def test_a_worker_computes_one_task_after_another(overlap: bool) -> None:
    worker = Worker(lambda task: task * 2, overlap=overlap)
    for task in (1, 2, 3):
        worker.start(task)
        assert worker.result() == 2 * task
    worker.close()
    worker.close()


@BOTH
def test_nothing_waits_for_the_task_but_who_wants_its_result(overlap: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compute(task: int) -> str:
        begun.set()
        assert may_end.wait(10)
        return threading.current_thread().name

    worker = Worker(compute, overlap=overlap)
    worker.start(1)
    assert begun.wait(10) if overlap else not begun.is_set()
    may_end.set()
    assert worker.result() == ("twostep-step" if overlap else threading.current_thread().name)
    worker.close()


def fails_first(times: int) -> Callable[[int], int]:
    failures = iter([ValueError("no"), KeyboardInterrupt(), SystemExit(2)][:times])

    def compute(task: int) -> int:
        for error in failures:
            raise error
        return task

    return compute


@BOTH
def test_what_compute_raises_is_raised_and_asking_again_computes_again(overlap: bool) -> None:
    worker = Worker(fails_first(3), overlap=overlap)
    worker.start(7)
    for kind in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            worker.result()
    assert worker.result() == 7
    worker.start(8)
    assert worker.result() == 8
    worker.close()


@BOTH
def test_a_worker_may_be_closed_with_a_task_that_nobody_asked_about(overlap: bool) -> None:
    worker = Worker(fails_first(1), overlap=overlap)
    thread = worker._thread
    worker.start(1)
    worker.close()
    assert (thread is not None) == overlap
    assert thread is None or not thread.is_alive()


# --- cores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "lacked_ns", "starved_ns"),
    [(4, 0, 0), (4, 300, 75), (4, 400, 100), (1, 60, 60), (2, 3, 1), (0, 500, 0)],
    ids=["all ran", "one of four", "none", "the only one", "rounded down", "number unknown"],
)
def test_starved_time_is_what_a_thread_lacked_on_average(threads: int, lacked_ns: int, starved_ns: int) -> None:
    """During this call; the threads have lacked 7000 ns before."""
    total = SimpleNamespace(lacked=7000)

    def compute(asked: str) -> str:
        total.lacked += lacked_ns
        return asked.upper()

    assert CoreStarvationMeter(threads, lambda: total.lacked).measure(compute, "logits") == ("LOGITS", starved_ns)
