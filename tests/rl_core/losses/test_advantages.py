import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError
from rl_core.losses.advantages import (
    batch_advantages,
    gae,
    group_advantages,
    overlong_penalty,
    returns,
)


def compute_reference_gae(rewards, values, mask, gamma, lam, bootstrap):
    """Run a backward loop over one row; (V', A') pass masked tokens unchanged."""
    advantages = [0.0] * len(mask)
    next_value, next_advantage = bootstrap, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t] = next_advantage
    return advantages


def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    scaled = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # unbiased std of 1 0 0 1
    assert group_advantages(rewards).tolist() == [pytest.approx([scaled, -scaled, -scaled, scaled])]
    assert group_advantages(rewards, method="dr_grpo").tolist() == [[0.5, -0.5, -0.5, 0.5]]
    assert group_advantages(rewards, method="rloo").tolist() == [
        pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    ]


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_have_no_advantage(method):
    assert group_advantages(torch.tensor([[3.0], [-1.0]]), method=method).tolist() == [[0.0], [0.0]]


def test_std_floor_is_per_group():
    rewards = torch.tensor([[0.5, 0.5 + 1e-4, 0.5, 0.5], [0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == [0, 0, 0, 0]
    assert advantages[1].tolist() == pytest.approx(
        [-1 / 2.0001] * 3 + [3 / 2.0001]
    )  # mean 1, std 2
    assert group_advantages(rewards, method="dr_grpo")[0].abs().max() > 0


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    rewards = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = group_advantages(rewards, method="rloo")
    for p in range(3):
        for g in range(5):
            others = [rewards[p, i].item() for i in range(5) if i != g]
            assert advantages[p, g].item() == pytest.approx(rewards[p, g].item() - sum(others) / 4)


def test_batch_advantages_by_hand():
    rewards = torch.tensor([[1.0, 3.0], [5.0, 7.0]], dtype=torch.float64)
    std = math.sqrt(20 / 3)  # of 1 3 5 7
    assert batch_advantages(rewards).flatten().tolist() == pytest.approx(
        [x / (std + 1e-4) for x in (-3, -1, 1, 3)]
    )
    std = math.sqrt(4 / 3)  # of -1 1 -1 1
    centered = batch_advantages(rewards, subtract_group_mean=True)
    assert centered.flatten().tolist() == pytest.approx([x / (std + 1e-4) for x in (-1, 1, -1, 1)])
    assert batch_advantages(torch.full((2, 2), 0.7)).tolist() == [[0, 0], [0, 0]]
    assert batch_advantages(torch.tensor([[9.0]])).tolist() == [[0]]


def test_group_errors_name_the_tensor():
    with pytest.raises(DataError, match=r"rewards: shape \(3,\)"):
        group_advantages(torch.zeros(3))
    with pytest.raises(DataError, match=r"rewards: inf at \(0, 1\)"):
        group_advantages(torch.tensor([[0.0, math.inf]]))
    with pytest.raises(DataError, match="rewards: dtype"):
        batch_advantages(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(DataError, match="method: 'ppo'"):
        group_advantages(torch.zeros(2, 2), method="ppo")


def test_gae_steps_over_observations_as_in_the_formulae():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]]).bool()
    rewards = torch.tensor([[0, 0, 0, 0, 0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.6, 9, math.nan, 0.7, 0.8]], dtype=torch.float64)
    advantages, targets = gae(rewards, values, mask)
    # deltas .1 .1 .1 .2: A = .2, .1 + .95 .2 = .29, .1 + .95 .29 = .3755, .1 + .95 .3755 = .456725
    assert advantages.tolist() == [pytest.approx([0.456725, 0.3755, 0, 0, 0.29, 0.2])]
    assert targets.tolist() == [pytest.approx([0.956725, 0.9755, 0, 0, 0.99, 1.0])]


def test_gae_bootstraps_truncated_episodes_only():
    mask = torch.ones(2, 2).bool()
    rewards = torch.tensor([[0.0, -1.0], [0.0, -1.0]], dtype=torch.float64)
    values = torch.full((2, 2), 0.5, dtype=torch.float64)
    advantages, _ = gae(
        rewards,
        values,
        mask,
        gamma=0.9,
        gae_lambda=0.5,
        bootstrap_B=torch.tensor([0.0, 2.0]).double(),
    )
    # terminated: -1 - .5 = -1.5, then .45 - .5 + .45 (-1.5) = -.725; truncated: -1 + 1.8 - .5 = .3, -.05 + .135 = .085
    assert advantages.tolist() == [pytest.approx([-0.725, -1.5]), pytest.approx([0.085, 0.3])]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 12),
    seed=st.integers(0, 9999),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_equals_a_reference_loop_on_ragged_masks(rows, width, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64) * mask
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    advantages, targets = gae(
        rewards, values, mask, gamma=gamma, gae_lambda=lam, bootstrap_B=bootstrap
    )
    for b in range(rows):
        expected = compute_reference_gae(
            rewards[b].tolist(),
            values[b].tolist(),
            mask[b].tolist(),
            gamma,
            lam,
            bootstrap[b].item(),
        )
        assert advantages[b].tolist() == pytest.approx(expected, abs=1e-10)
    assert torch.allclose(targets, (advantages + values) * mask)


def test_gae_over_many_chunks_equals_the_loop_and_padding_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    width = 700  # several chunks of the scan, the last of them ragged
    mask = torch.rand(2, width, generator=generator) < 0.7
    values = torch.randn(2, width, generator=generator, dtype=torch.float64)
    rewards = torch.randn(2, width, generator=generator, dtype=torch.float64) * mask
    advantages, _ = gae(rewards, values, mask, gamma=0.999, gae_lambda=0.97)
    for b in range(2):
        expected = compute_reference_gae(
            rewards[b].tolist(), values[b].tolist(), mask[b].tolist(), 0.999, 0.97, 0.0
        )
        assert advantages[b].tolist() == pytest.approx(expected, abs=1e-9)
    padded = [torch.nn.functional.pad(x, (0, 300)) for x in (rewards, values, mask)]
    assert torch.allclose(
        gae(*padded, gamma=0.999, gae_lambda=0.97)[0][:, :width], advantages, atol=1e-12
    )


def test_lambda_1_is_the_discounted_return_minus_the_value():
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(3, 9, generator=generator) < 0.7
    values = torch.randn(3, 9, generator=generator, dtype=torch.float64)
    rewards = torch.randn(3, 9, generator=generator, dtype=torch.float64) * mask
    advantages, _ = gae(rewards, values, mask, gamma=0.9, gae_lambda=1.0)
    assert torch.allclose(advantages, (returns(rewards, mask, gamma=0.9) - values) * mask)


def test_returns_by_hand():
    mask = torch.tensor([[1, 0, 1, 1]]).bool()
    rewards = torch.tensor([[1.0, 0.0, 2.0, -4.0]])
    assert returns(rewards, mask, gamma=0.5).tolist() == [[1.0, 0.0, 0.0, -4.0]]  # 2 - 2 = 0; 1 + 0
    assert returns(rewards, mask).tolist() == [[-1.0, 0.0, -2.0, -4.0]]


def test_gae_refuses_what_it_cannot_use():
    mask, zeros = torch.tensor([[True, False]]), torch.zeros(1, 2)
    with pytest.raises(DataError, match="non-zero at a masked token"):
        gae(torch.tensor([[0.0, 1.0]]), zeros, mask)
    with pytest.raises(DataError, match="values: nan"):
        gae(zeros, torch.full((1, 2), math.nan), mask)
    with pytest.raises(DataError, match="bootstrap: shape"):
        gae(zeros, zeros, mask, bootstrap_B=torch.zeros(2))
    with pytest.raises(DataError, match="gamma"):
        gae(zeros, zeros, mask, gamma=1.1)
    with pytest.raises(DataError, match="values: shape"):
        gae(zeros, torch.zeros(2, 2), mask)


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([10, 80, 90, 100, 120])
    assert overlong_penalty(lengths, max_tokens=100, buffer=20).tolist() == pytest.approx(
        [0, 0, -0.5, -1, -1]
    )
    with pytest.raises(DataError):
        overlong_penalty(lengths, max_tokens=100, buffer=0)
