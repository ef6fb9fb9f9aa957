"""No prompt is on both sides of a split, and what the sides share is counted."""

from __future__ import annotations

import random

import pytest

from rl_core.data.splits import count_duplicates, count_overlap, normalize_prompt, split_by_prompt
from rl_core.errors import DataError

Row = tuple[str, int]
ROWS: list[Row] = [(f"prompt {n // 3}", n) for n in range(60)]  # 20 prompts, 3 rows each


def get_prompt(row: Row) -> str:
    return row[0]


def test_prompts_stay_whole_and_rows_keep_their_order() -> None:
    train, heldout, report = split_by_prompt(ROWS, get_prompt, 0.2, seed=1)
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in heldout}
    assert sorted(train + heldout, key=lambda row: row[1]) == ROWS
    assert train == sorted(train, key=lambda row: row[1])
    assert report == {
        "num_rows": 60,
        "num_duplicate_rows": 0,
        "num_prompts": 20,
        "num_repeated_prompts": 40,
        "num_train_rows": 48,
        "num_train_prompts": 16,
        "num_heldout_rows": 12,
        "num_heldout_prompts": 4,
        "num_overlap_prompts": 0,
        "num_overlap_rows": 0,
    }


def test_split_depends_on_the_seed_and_not_on_the_order() -> None:
    heldout = {row for row in split_by_prompt(ROWS, get_prompt, 0.2, seed=1)[1]}
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    assert {row for row in split_by_prompt(shuffled, get_prompt, 0.2, seed=1)[1]} == heldout
    assert {row for row in split_by_prompt(ROWS, get_prompt, 0.2, seed=2)[1]} != heldout


def test_nearly_equal_prompts_are_the_same_prompt() -> None:
    assert (
        normalize_prompt("  What  is\nthis? ")
        == normalize_prompt("what IS this?")
        != normalize_prompt("what is that?")
    )
    rows = [("A b", 0), ("a  B", 1), ("c", 2)]
    for seed in range(5):
        train, heldout, _ = split_by_prompt(rows, get_prompt, 0.5, seed)
        assert sorted([len(train), len(heldout)]) == [1, 2]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_side_gets_a_prompt(fraction: float) -> None:
    train, heldout, _ = split_by_prompt([("a", 0), ("b", 1)], get_prompt, fraction, seed=0)
    assert len(train) == len(heldout) == 1


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(DataError, match="1 distinct prompt cannot"):
        split_by_prompt([("a", 0), ("a", 1)], get_prompt, 0.5, seed=0)
    for fraction in (0.0, 1.0):
        with pytest.raises(DataError, match="between 0 and 1"):
            split_by_prompt(ROWS, get_prompt, fraction, seed=0)


def test_duplicates_and_overlap_are_counted() -> None:
    rows = [("a", 0), ("a", 0), ("A", 1), ("b", 2)]
    assert count_duplicates(rows, get_prompt) == {
        "num_rows": 4,
        "num_duplicate_rows": 1,
        "num_prompts": 2,
        "num_repeated_prompts": 2,
    }
    report = count_overlap(rows, [("B ", 7), ("b", 8), ("c", 9)], get_prompt)
    assert report["num_overlap_prompts"] == 1 and report["num_overlap_rows"] == 2
    assert report["num_heldout_prompts"] == 2 and report["num_train_prompts"] == 2
