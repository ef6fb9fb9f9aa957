"""Rollouts as padded batches, by hand."""

from __future__ import annotations

import pytest
import torch

from rl_core.errors import DataError
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.types import Rollout, Trajectory


def build_rollout(prompt: list[int], completion: list[int], mask: list[bool]) -> Rollout:
    trajectory = Trajectory(environment="e", level="l", kind="k", seed=0, prompt="p", target="t")
    return Rollout(prompt, completion, mask, [-0.5 * m for m in mask], trajectory)


def test_a_batch_by_hand() -> None:
    long = build_rollout([5, 6], [7, 8, 9], [True, False, True])  # 8 is an observation
    short = build_rollout([4], [3], [True])
    (batch,) = build_batches([short, long], max_tokens=10, pad_id=0)
    assert batch.rows == [1, 0]  # longest first
    assert batch.input_ids_BS.tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch.attention_mask_BS.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch.loss_mask_BS.tolist() == [
        [False, False, True, False, True],
        [False, True, False, False, False],
    ]
    assert batch.sampler_logprobs_BS is not None
    assert batch.sampler_logprobs_BS.tolist() == [[0, 0, -0.5, 0, -0.5], [0, -0.5, 0, 0, 0]]
    assert (batch.input_ids_BS.dtype, batch.sampler_logprobs_BS.dtype) == (
        torch.int64,
        torch.float32,
    )
    assert batch.num_loss_tokens == 3


def test_the_budget_counts_padding_and_every_row_comes_once() -> None:
    rows = [TrainRow([1], [2] * n, [True] * n) for n in (3, 9, 1, 4, 30, 2, 9)]
    batches = build_batches(rows, max_tokens=20, pad_id=0)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(7))
    assert [batch.input_ids_BS.shape for batch in batches] == [(1, 31), (2, 10), (4, 5)]
    for batch in batches:
        for position, row in enumerate(batch.rows):
            assert batch.attention_mask_BS[position].sum() == 1 + len(rows[row].completion_ids)


def test_sampler_logprobs_are_0_off_the_loss_and_absent_if_no_row_has_them() -> None:
    (batch,) = build_batches([TrainRow([1], [2, 3], [False, True], [-9.0, -4.0])], 10, 0)
    assert batch.sampler_logprobs_BS is not None
    assert batch.sampler_logprobs_BS.tolist() == [[0, 0, -4]]
    (batch,) = build_batches([TrainRow([1], [2, 3], [False, True])], 10, 0)
    assert batch.sampler_logprobs_BS is None


def test_every_row_keeps_its_temperature() -> None:
    """A greedy row counts as 1, like its sampler's log-probs; packed rows keep theirs per token."""
    rows = [
        TrainRow([1], [2] * n, [True] * n, temperature=t) for n, t in ((3, 1.0), (2, 0.5), (1, 0.0))
    ]
    (batch,) = build_batches(rows, 100, 0)
    assert batch.temperatures_BS is not None and batch.temperatures_BS.dtype == torch.float32
    assert batch.temperatures_BS.tolist() == [[1, 1, 1, 1], [0.5, 0.5, 0.5, 1], [1, 1, 1, 1]]
    rows = [
        TrainRow([1], [2] * n, [True] * n, temperature=t) for n, t in ((4, 1.0), (2, 0.5), (1, 2.0))
    ]
    (packed,) = build_batches(rows, 100, 0, packing=True)
    assert packed.temperatures_BS is not None
    assert packed.temperatures_BS.tolist() == [[1, 1, 1, 1, 1], [0.5, 0.5, 0.5, 2, 2]]
    for temperatures in ((1.0,), (0.0, 1.0)):
        (batch_at_1,) = build_batches(
            [TrainRow([1], [2], [True], temperature=t) for t in temperatures], 100, 0
        )
        assert batch_at_1.temperatures_BS is None
    hot = build_rollout([1], [2], [True])
    hot.trajectory.temperature = 2.0
    (batch,) = build_batches([hot], 10, 0)
    assert batch.temperatures_BS is not None and batch.temperatures_BS.tolist() == [[2, 2]]
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DataError, match="row 1: temperature"):
            build_batches([rows[0], TrainRow([1], [2], [True], temperature=bad)], 100, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([TrainRow([], [2], [True])], "row 0 has no prompt"),
        ([TrainRow([1], [2], [True, True])], "row 0: loss_mask has 2 entries, its completion 1"),
        (
            [TrainRow([1], [2], [True], [-1.0]), TrainRow([1], [2], [True])],
            "row 1: sampler_logprobs must be set for",
        ),
        ([TrainRow([1], [2], [True], sampler_logprobs=[])], "sampler_logprobs has 0 entries"),
    ],
)
def test_bad_rows(rows: list[TrainRow], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_batches(rows, 10, 0)
