"""Fixed-size buffer: truncation against termination by hand, GAE and V-trace against a plain loop over the steps."""

import numpy as np
import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import vtrace
from rl_core.networks.actor_critic import ActionSpace, ActorCritic, NetworkShape
from rl_core.networks.step_buffer import RewardStatistics, StepBuffer
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


def add_by_hand(**changes):
    """Add the two steps of `test_steps_added_by_hand_give_a_batch`, with changes to the second."""
    buffer = StepBuffer(2, 2, 1, ActionSpace("discrete", 2))
    step = {
        "observations_ND": [[1.0], [2.0]],
        "actions": [0, 1],
        "rewards_N": [1.0, 1.0],
        "terminated_N": [False, True],
        "truncated_N": [False, True],
        "after_ND": [[4.0], [9.0]],
    }
    buffer.add(**step)
    second = {
        "observations_ND": torch.tensor([[4.0], [3.0]]),
        "actions": np.array([1, 0]),
        "rewards_N": np.array([2.0, 0.0]),
        "terminated_N": [False, False],
        "truncated_N": [True, False],
        "after_ND": np.array([[6.0], [8.0]]),  # float64
    }
    buffer.add(**{**second, **changes})
    return buffer


class FirstNumber(ActorCritic):
    """The value of an observation is its first number."""

    def values(self, observations_BD):
        return compute_value(observations_BD)


def test_steps_added_by_hand_give_a_batch():
    # gamma 0.5, lambda 1. Environment 0: V = 1, 4, then truncated at 6: 2 + 3 - 4 = 1; 1 + 2 - 1 + 0.5 x 1 = 2.5.
    # Environment 1: terminated (and truncated, which does not matter): 1 - 2 = -1; then 0 + 4 - 3 = 1
    model = FirstNumber(NetworkShape(1, ActionSpace("discrete", 2)), 0)
    buffer = add_by_hand()
    assert buffer.truncated.tolist() == [[False, False], [True, False]]
    batch = buffer.build_batch(model, gamma=0.5, gae_lambda=1.0)
    assert batch.observations_MD[:, 0].tolist() == [1.0, 4.0, 2.0, 3.0]
    assert batch.advantages_M1[:, 0].tolist() == [2.5, 1.0, -1.0, 1.0]
    assert batch.targets_M1[:, 0].tolist() == [3.5, 5.0, 1.0, 4.0]
    assert batch.values_M1[:, 0].tolist() == [1.0, 4.0, 2.0, 3.0]
    assert batch.actions.tolist() == [0, 1, 1, 0]
    expected = model.evaluate_actions(batch.observations_MD, batch.actions)[1]
    assert torch.equal(batch.old_logprobs_M1[:, 0], expected)
    assert not batch.old_logprobs_M1.requires_grad


def test_every_row_is_in_one_minibatch():
    model = FirstNumber(NetworkShape(1, ActionSpace("discrete", 2)), 0)
    batch = add_by_hand().build_batch(model, gamma=0.5, gae_lambda=1.0)
    parts = batch.split_into_minibatches(3, np.random.default_rng(2))
    assert [len(part.actions) for part in parts] == [2, 1, 1]
    pairs = [torch.cat([p.observations_MD, p.advantages_M1], 1).tolist() for p in parts]
    rows = [tuple(pair) for part in pairs for pair in part]
    assert rows != [(1.0, 2.5), (4.0, 1.0), (2.0, -1.0), (3.0, 1.0)]
    assert sorted(rows) == [(1.0, 2.5), (2.0, -1.0), (3.0, 1.0), (4.0, 1.0)]
    again = batch.split_into_minibatches(3, np.random.default_rng(2))
    assert all(torch.equal(a.actions, b.actions) for a, b in zip(parts, again, strict=True))
    assert batch.split_into_minibatches(1, np.random.default_rng(1))[0] is batch
    for count in (0, 5):
        with pytest.raises(DataError, match=f"count: {count} minibatches of 4 rows"):
            batch.split_into_minibatches(count, np.random.default_rng(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards_N": [1.0]}, r"rewards: shape \(1,\), expected \(2,\)"),
        ({"rewards_N": [1.0, np.nan]}, "rewards: a number is not finite"),
        ({"after_ND": [[1.0], [np.inf]]}, "after: a number is not finite"),
        ({"observations_ND": [[1e300], [0.0]]}, "observations: a number is not finite"),
        ({"actions": [[0], [1]]}, r"actions: shape \(2, 1\), expected \(2,\)"),
        ({"actions": [0.5, 1.0]}, "actions: float64, expected integers"),
        ({"actions": [0, 2]}, "actions: 2 is not one of 0 to 1"),
    ],
)
def test_a_step_that_cannot_be_added_leaves_the_buffer_as_it_was(change, words):
    with pytest.raises(DataError, match=words):
        add_by_hand(**change)


def test_a_buffer_that_is_not_full_is_not_read():
    buffer = StepBuffer(2, 1, 1, ActionSpace("discrete", 2))
    buffer.add([[1.0]], [0], [1.0], [False], [False], [[2.0]])
    model = FirstNumber(NetworkShape(1, ActionSpace("discrete", 2)), 0)
    with pytest.raises(DataError, match="the buffer contains 1 of 2 steps"):
        buffer.build_batch(model, gamma=0.5, gae_lambda=1.0)
    with pytest.raises(DataError, match="must all be at least 1"):
        StepBuffer(0, 1, 1, ActionSpace("discrete", 2))


def test_rewards_are_scaled_by_the_deviation_of_their_discounted_sums():
    # gamma 0.5, one environment: r = 2, 4 (ends), 6, 8: sums 2, 5, 6, 11; mean 6, variance (16 + 1 + 0 + 25) / 4 = 10.5
    statistics = RewardStatistics(1, 0.5)
    parts = ([[2.0], [4.0]], [[False], [True]]), ([[6.0], [8.0]], [[False], [False]])
    rewards = torch.tensor([2.0, -4.0, 1e9])
    assert statistics.normalise(rewards) is rewards
    for values, truncated in parts:
        shape = np.shape(values)
        statistics.update(
            fill_buffer(np.zeros(shape), values, np.zeros(shape), truncated, np.zeros(shape))
        )
    assert (statistics.count, statistics.mean) == (4, 6.0)
    assert statistics.squares / 4 == pytest.approx(10.5)
    scaled = statistics.normalise(rewards).tolist()
    assert scaled == pytest.approx([2 / 10.5**0.5, -4 / 10.5**0.5, 10.0])
    # r = 1 continues the episode: 1 + 0.5 x 11
    statistics.update(fill_buffer([[0.0]], [[1.0]], [[False]], [[False]], [[0.0]]))
    assert statistics.sums_N.tolist() == [6.5]
    other = RewardStatistics(1, 0.5)
    other.load_state_dict(statistics.state_dict())
    assert other.state_dict() == statistics.state_dict()
    statistics.reset_sums()
    assert statistics.sums_N.tolist() == [0.0] and other.sums_N.tolist() == [6.5]


def test_a_step_that_only_resets_is_no_reward():
    statistics = RewardStatistics(1, 0.5)
    columns = [[0.0]] * 3
    ends = {"terminated": [[True], [False], [False]], "truncated": [[False]] * 3}
    is_action = [[True], [False], [True]]
    buffer = fill_buffer(columns, [[4.0], [9.0], [2.0]], **ends, after=columns, is_action=is_action)
    statistics.update(buffer)
    assert (statistics.count, statistics.mean) == (2, 3.0)  # sums 4 and 2
