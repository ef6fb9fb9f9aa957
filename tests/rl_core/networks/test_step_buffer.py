"""Fixed-size buffer: truncation against termination by hand, GAE and V-trace against a plain loop over the steps."""

import numpy as np
import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import vtrace
from rl_core.networks.actor_critic import ActionSpace
from rl_core.networks.step_buffer import StepBuffer
from rl_core.networks.vector_environment import VectorStep


def compute_value(observations):
    """Return the value of an observation: its first number."""
    return observations[:, 0].clone()


def fill_buffer(values, rewards, terminated, truncated, after, is_action=None):
    """Fill a buffer of T x N steps with the values of observations and of those that the actions led to."""
    shape = np.shape(values)
    buffer = StepBuffer(*shape, 1, ActionSpace("discrete", 2))
    is_action = np.ones(shape, bool) if is_action is None else np.asarray(is_action, bool)
    for t in range(shape[0]):
        step = VectorStep(
            np.zeros((shape[1], 1), np.float32),
            np.asarray(rewards[t], np.float32),
            np.asarray(terminated[t], bool),
            np.asarray(truncated[t], bool),
            np.asarray(after[t], np.float32)[:, None],
            is_action[t],
        )
        buffer.add_step(
            np.asarray(values[t], np.float32)[:, None], np.zeros(shape[1], np.int64), step
        )
    return buffer


def test_a_truncated_episode_is_bootstrapped_and_a_terminated_one_is_not():
    # two environments, one step each, V = 1, r = 2, the value afterwards 10, gamma 0.5
    ends = {"terminated": [[True, False]], "truncated": [[False, True]]}
    buffer = fill_buffer([[1.0, 1.0]], [[2.0, 2.0]], **ends, after=[[10.0, 10.0]])
    advantages, targets, values = buffer.estimate_advantages(
        compute_value, gamma=0.5, trace_lambda=0.9
    )
    assert advantages.tolist() == [1.0, 6.0]  # 2 - 1; 2 + 0.5 x 10 - 1
    assert targets.tolist() == [2.0, 7.0] and values.tolist() == [1.0, 1.0]


def test_nothing_flows_over_the_end_of_an_episode_and_the_last_step_bootstraps():
    # V = 1, 2, 4; r = 1, 1, 1; the first step ends in a truncation worth 3; gamma = lambda = 1
    ends = {"terminated": [[False]] * 3, "truncated": [[True], [False], [False]]}
    buffer = fill_buffer([[1.0], [2.0], [4.0]], [[1.0]] * 3, **ends, after=[[3.0], [99.0], [8.0]])
    advantages, targets, _ = buffer.estimate_advantages(compute_value, gamma=1.0, trace_lambda=1.0)
    # the first: 1 + 3 - 1 = 3; the last: 1 + 8 - 4 = 5; the one before: 1 + 4 - 2 + 5 = 8 (its `after` is not used)
    assert advantages.tolist() == [3.0, 8.0, 5.0]
    assert targets.tolist() == [4.0, 10.0, 9.0]


def run_reference_loop(rows, gamma, lam, rho_cap=1.0, c_cap=1.0):
    """Compute advantages and targets of one environment's steps by recursion, in float64."""
    results, error, next_value = [], 0.0, None
    for value, reward, terminated, truncated, after, ratio in reversed(rows):
        if next_value is None or terminated or truncated:
            error, next_value = 0.0, 0.0 if terminated else after
        rho, c = min(ratio, rho_cap), min(ratio, c_cap)
        delta = reward + gamma * next_value - value
        results.append((rho * (delta + gamma * lam * error), None))
        error = rho * delta + gamma * lam * c * error
        results[-1] = (results[-1][0], value + error)
        next_value = value
    return results[::-1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("off_policy", [False, True])
def test_estimates_equal_a_reference_loop(seed, off_policy):
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 40)), int(rng.integers(1, 5)))
    values, rewards, after = (rng.normal(size=shape) for _ in range(3))
    terminated = rng.random(shape) < 0.2
    truncated = (rng.random(shape) < 0.2) & ~terminated
    is_action = rng.random(shape) < 0.9
    is_action[0] = True
    terminated &= is_action
    truncated &= is_action
    buffer = fill_buffer(values, rewards, terminated, truncated, after, is_action)
    ratios = np.exp(rng.normal(size=shape)) if off_policy else np.ones(shape)
    gamma, lam = 0.97, 0.8
    arguments = (
        torch.from_numpy(ratios.swapaxes(0, 1)[is_action.swapaxes(0, 1)]).float()
        if off_policy
        else None
    )
    actual = buffer.estimate_advantages(
        compute_value,
        gamma=gamma,
        trace_lambda=lam,
        reward_scale=0.5,
        ratios_M=arguments,
        rho_cap=1.4,
        c_cap=0.9,
    )
    caps = (1.4, 0.9) if off_policy else (1.0, 1.0)
    expected = []
    for n in range(shape[1]):
        columns = (values, 0.5 * rewards, terminated, truncated, after, ratios)
        expected += run_reference_loop(
            [[c[t, n] for c in columns] for t in range(shape[0]) if is_action[t, n]],
            gamma,
            lam,
            *caps,
        )
    assert buffer.num_steps == len(expected) == len(actual[0])
    np.testing.assert_allclose(
        actual[0], [advantage for advantage, _ in expected], rtol=2e-4, atol=2e-5
    )
    np.testing.assert_allclose(actual[1], [target for _, target in expected], rtol=2e-4, atol=2e-5)


def test_vtrace_by_hand():
    # two steps, V = 1, 1, r = 1, 3, the second terminates; gamma 0.5, lambda 1; ratios 3 and 0.5; rho_cap 2, c_cap 1
    # delta2 = 3 - 1 = 2, rho2 = 0.5: e2 = 1; delta1 = 1 + 0.5 - 1 = 0.5, rho1 = 2, c1 = 1: e1 = 1 + 0.5 x 1 = 1.5
    ones = torch.ones(1, 2, dtype=torch.float64)
    arguments = (
        torch.tensor([[1.0, 3.0]]).double(),
        ones,
        torch.tensor([[3.0, 0.5]]).double(),
        ones.bool(),
    )
    advantages, targets = vtrace(*arguments, gamma=0.5, rho_cap=2.0, c_cap=1.0)
    assert targets.tolist() == [[2.5, 2.0]]
    # as published: rho1 (r1 + gamma v2 - V1) = 2 (1 + 0.5 x 2 - 1) = 2; rho2 (3 - 1) = 1
    assert advantages.tolist() == [[2.0, 1.0]]


def test_the_buffer_has_one_size_and_keeps_its_memory():
    buffer = fill_buffer([[1.0]], [[1.0]], [[False]], [[False]], [[1.0]])
    memory = buffer.observations.ctypes.data
    with pytest.raises(DataError, match="the buffer already contains 1 steps"):
        buffer.add_step(*[None] * 3)
    buffer.clear_steps()
    assert buffer.num_filled == 0 and buffer.observations.ctypes.data == memory


def test_what_is_read_does_not_change_when_the_buffer_is_filled_again():
    buffer = fill_buffer([[1.0], [2.0]], [[1.0]] * 2, [[False]] * 2, [[False]] * 2, [[1.0]] * 2)
    read = buffer.read_real_steps("observations")
    buffer.observations[:] = 7.0
    assert read.flatten().tolist() == [1.0, 2.0]
