"""Names of blocks: equal just where all that decides the KV is equal."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.core.blocks import HASH_BYTES, block_hash, prompt_hashes, root_hash
from twostep.core.request import BLOCK_TOKENS

ROOT = root_hash("model", "f16")
tokens_of_any_length = st.lists(st.integers(0, 2**31 - 1), max_size=70)


@given(tokens=tokens_of_any_length)
def test_a_prompt_has_a_hash_for_each_full_block(tokens: list[int]) -> None:
    hashes = prompt_hashes(ROOT, tokens)
    assert len(hashes) == len(tokens) // BLOCK_TOKENS
    assert {len(name) for name in hashes} <= {HASH_BYTES}


@given(tokens=tokens_of_any_length, more=tokens_of_any_length)
def test_hashes_of_a_prefix_are_the_first_hashes_of_the_whole(tokens: list[int], more: list[int]) -> None:
    shared = prompt_hashes(ROOT, tokens)
    assert prompt_hashes(ROOT, [*tokens, *more])[: len(shared)] == shared


@given(tokens=st.lists(st.integers(0, 9), min_size=64, max_size=64), at=st.integers(0, 63))
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], at: int) -> None:
    changed = [*tokens[:at], 10, *tokens[at + 1 :]]
    same = [a == b for a, b in zip(prompt_hashes(ROOT, tokens), prompt_hashes(ROOT, changed), strict=True)]
    assert same == [block < at // BLOCK_TOKENS for block in range(4)]


def test_equal_blocks_at_other_positions_have_other_names() -> None:
    assert len(set(prompt_hashes(ROOT, [5] * 160))) == 10


@pytest.mark.parametrize(
    "other",
    [
        root_hash("other model", "f16"),
        root_hash("model", "q8"),
        root_hash("model", "f16", salt="tenant"),
        root_hash("model", "f16", key=b"secret"),
        root_hash("mode", "lf16"),
    ],
)
def test_model_format_salt_and_key_each_change_all_names(other: bytes) -> None:
    assert set(prompt_hashes(ROOT, range(64))).isdisjoint(prompt_hashes(other, range(64)))


def test_a_block_after_another_is_the_prompts_next() -> None:
    first, second = prompt_hashes(ROOT, range(32))
    assert block_hash(block_hash(ROOT, range(16)), range(16, 32)) == second
    assert block_hash(ROOT, range(16)) == first


def test_names_are_the_same_in_every_process() -> None:
    """Never Python's `hash`, which differs from process to process."""
    program = "from twostep.core.blocks import *; print(prompt_hashes(root_hash('model', 'f16'), range(32))[-1].hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {prompt_hashes(ROOT, range(32))[-1].hex()}
