"""Role-conditioned advantages: by hand with both signs, and against a closed form in float64."""

import numpy as np
import pytest
import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import role_advantages


def test_by_hand_with_both_signs():
    # role 0: b = 0 -> A = +1, b = 0.25; A = 1 - 0.25 = 0.75, b = 0.4375; A = -2 - 0.4375
    # role 1: b = 0 -> A = -1, b = -0.25; A = 2 + 0.25
    rewards = torch.tensor([1.0, -1.0, 1.0, 2.0, -2.0])
    roles = ["a/0", "a/1", "a/0", "a/1", "a/0"]
    advantages, baselines = role_advantages(rewards, roles, {}, decay=0.75)
    assert advantages.tolist() == [1.0, -1.0, 0.75, 2.25, -2.4375]
    assert advantages.dtype == torch.float64
    assert baselines == {"a/0": 0.75 * 0.4375 + 0.25 * -2, "a/1": 0.75 * -0.25 + 0.25 * 2}


def test_baselines_continue_and_other_roles_stay():
    advantages, baselines = role_advantages(
        torch.tensor([1.0]), ["b"], {"a": 0.5, "b": -0.5}, decay=0.9
    )
    assert advantages.tolist() == [1.5]
    assert baselines == pytest.approx({"a": 0.5, "b": -0.35})


def test_the_input_is_not_changed():
    given = {"a": 0.5}
    role_advantages(torch.tensor([1.0]), ["a"], given, decay=0.5)
    assert given == {"a": 0.5}


@pytest.mark.parametrize("seed", range(4))
def test_against_the_closed_form(seed):
    """b before rollout n of a role = sum over its earlier rollouts i of (1 - alpha) alpha^(n - 1 - i) R_i."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=200)
    roles = [f"game/{number}" for number in rng.integers(0, 3, size=200)]
    alpha = float(rng.uniform(0, 0.99))
    advantages, baselines = role_advantages(torch.tensor(rewards), roles, {}, decay=alpha)
    for role in set(roles):
        places = [place for place, name in enumerate(roles) if name == role]
        values = rewards[places]
        for n, place in enumerate(places):
            baseline = sum((1 - alpha) * alpha ** (n - 1 - i) * values[i] for i in range(n))
            assert advantages[place].item() == pytest.approx(rewards[place] - baseline, abs=1e-12)
        last = sum(
            (1 - alpha) * alpha ** (len(values) - 1 - i) * value for i, value in enumerate(values)
        )
        assert baselines[role] == pytest.approx(last, abs=1e-12)


def test_a_decay_of_0_takes_the_last_reward():
    advantages, baselines = role_advantages(torch.tensor([3.0, 1.0]), ["a", "a"], {}, decay=0.0)
    assert advantages.tolist() == [3.0, -2.0] and baselines == {"a": 1.0}


@pytest.mark.parametrize(
    ("rewards", "roles", "decay", "message"),
    [
        ([1.0, 2.0], ["a"], 0.5, "1 for rewards of shape"),
        ([float("nan")], ["a"], 0.5, "not finite"),
        ([1.0], ["a"], 1.0, "below 1"),
        ([1.0], ["a"], -0.1, "at least 0"),
    ],
)
def test_bad_input_is_refused(rewards, roles, decay, message):
    with pytest.raises(DataError, match=message):
        role_advantages(torch.tensor(rewards), roles, {}, decay=decay)


def test_no_rollouts_change_nothing():
    advantages, baselines = role_advantages(torch.zeros(0), [], {"a": 1.0}, decay=0.5)
    assert advantages.shape == (0,) and baselines == {"a": 1.0}
