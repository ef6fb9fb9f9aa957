"""Token budgets, padding, and an order of rows that continues where it was stopped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.batches import (
    DataOrder,
    attention_mask,
    pack_sequences,
    pad_rows,
    plan_micro_batches,
    resolve_padding_id,
)
from rl_core.errors import DataError


def test_micro_batches_worked_by_hand() -> None:
    # longest first: 10 alone fills 10; 5 + 5 pad to 10; 4, 3 pad to 8 and a third row of 4 would make 12
    assert plan_micro_batches([5, 10, 3, 5, 4, 1], 10) == [[1], [0, 3], [4, 2], [5]]
    assert plan_micro_batches([7, 3], 5) == [[0], [1]], "a row above the budget stands alone"
    assert plan_micro_batches([], 5) == []


def test_a_missing_padding_token_is_refused_and_not_taken_for_0() -> None:
    class Padded:
        pad_id: int | None = 7

    class Bare:
        pass

    assert (
        resolve_padding_id(Padded()) == 7
        and resolve_padding_id(Padded(), 0) == 0
        and resolve_padding_id(Bare(), 3) == 3
    )
    unset = Padded()
    unset.pad_id = None
    for renderer in (Bare(), unset):
        with pytest.raises(
            DataError, match=rf"^pad_id: the renderer \({type(renderer).__name__}\) has no padding"
        ):
            resolve_padding_id(renderer)
    with pytest.raises(DataError, match="pad_id: -1 is not a token id"):
        resolve_padding_id(Bare(), -1)


def test_packs_worked_by_hand() -> None:
    # 7 | 6 | 4 fits neither: a separate bin; 3 goes to 4 + 3; 1 to 6 + 1
    assert pack_sequences([4, 7, 1, 6, 3]) == [[1], [3, 2], [0, 4]]
    assert pack_sequences([2, 2, 2], 4) == [[0, 1], [2]], "ties in order"
    assert pack_sequences([]) == []
    with pytest.raises(DataError, match="sequence 1 has 5 tokens; a bin takes 1 to 4"):
        pack_sequences([4, 5], 4)
    with pytest.raises(DataError, match="sequence 0 has 0 tokens"):
        pack_sequences([0, 2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_packs_hold_every_sequence_once_within_the_width(lengths: list[int]) -> None:
    bins = pack_sequences(lengths)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in indices) for indices in bins]
    assert max(filled) == max(lengths)
    # no two bins can be merged: each sequence goes into an open bin if it fits
    assert len(bins) < 2 or sum(sorted(filled)[:2]) > max(lengths)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    groups = plan_micro_batches(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= budget


@pytest.mark.parametrize(("lengths", "budget"), [([3, 0], 5), ([3], 0)])
def test_micro_batches_refuse_nonsense(lengths: list[int], budget: int) -> None:
    with pytest.raises(DataError):
        plan_micro_batches(lengths, budget)


def test_padding_is_on_the_right() -> None:
    rows = [[1, 2, 3], [4], []]
    assert pad_rows(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert attention_mask([3, 1, 0]).tolist() == [
        [True, True, True],
        [True, False, False],
        [False, False, False],
    ]
    assert pad_rows([[True], [False]], False, dtype=torch.bool, width=2).tolist() == [
        [True, False],
        [False, False],
    ]
    padded = pad_rows([[0.5], [1.5, 2.5]], dtype=torch.float32)
    assert padded.dtype == torch.float32 and padded.tolist() == [[0.5, 0.0], [1.5, 2.5]]
    assert pad_rows([], 0).shape == (0, 0)
    with pytest.raises(DataError, match="width 2 is below the longest row, 3 tokens"):
        pad_rows(rows, 0, width=2)


def test_every_epoch_shows_every_row_once_in_a_new_order() -> None:
    order = DataOrder(10, 4, seed=3)
    assert order.batches_per_epoch == 3
    epochs = [[order.next_batch() for _ in range(3)] for _ in range(2)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [4, 4, 2]
        assert sorted(row for batch in epoch for row in batch) == list(range(10))
    assert epochs[0] != epochs[1]
    assert DataOrder(10, 4, seed=3).next_batch() == epochs[0][0]
    assert DataOrder(10, 4, seed=4).next_batch() != epochs[0][0]


@pytest.mark.parametrize("done", range(8))
def test_order_continues_from_its_state_wherever_it_was_taken(done: int) -> None:
    order = DataOrder(7, 3, seed=0)
    for _ in range(done):
        order.next_batch()
    restored = DataOrder(7, 3, seed=0)
    restored.load_state_dict(order.state_dict())
    assert [restored.next_batch() for _ in range(5)] == [order.next_batch() for _ in range(5)]


def test_a_batch_that_was_handed_out_is_the_callers() -> None:
    order, same = DataOrder(4, 2, seed=0), DataOrder(4, 2, seed=0)
    order.next_batch().clear()
    same.next_batch()
    assert order.next_batch() == same.next_batch()


@pytest.mark.parametrize("other", [DataOrder(8, 3, 0), DataOrder(7, 2, 0), DataOrder(7, 3, 1)])
def test_a_state_of_another_order_is_refused(other: DataOrder) -> None:
    with pytest.raises(DataError, match="data order was saved with"):
        DataOrder(7, 3, seed=0).load_state_dict(other.state_dict())


@pytest.mark.parametrize("arguments", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_an_order_of_nothing_is_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(DataError):
        DataOrder(*arguments)
