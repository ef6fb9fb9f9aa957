"""A policy that learns in two environments at once: both improve, for three seeds."""

import pytest
from helpers.letters import Letters, make_trainer

from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.mixture import MixtureEnvironment, MixturePart
from rl_core.rewards.mixture_rewards import build_rewards

STEPS = 90


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def compute_mean(rows, name):
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_environments_improve(tokenizer, seed):
    mixture = MixtureEnvironment(
        [
            MixturePart(Letters(), label="first_half", levels={"low": 1.0}),
            MixturePart(Letters(), label="second_half", levels={"high": 1.0}),
        ]
    )
    rewards = build_rewards(mixture, {"task": 1.0})
    trainer = make_trainer(
        tokenizer, mixture, rewards=rewards, model_seed=seed, prompts_per_iteration=8
    )
    rows = [trainer.step() for _ in range(STEPS)]
    for label in ("first_half", "second_half"):
        name = f"train/success_rate_by_environment/{label}"
        first, last = compute_mean(rows[:5], name), compute_mean(rows[-5:], name)
        print(f"seed {seed} {label}: {first:.2f} -> {last:.2f}")
        assert last > first + 0.15
