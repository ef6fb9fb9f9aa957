"""Tokens without a finite sampler log-probability: they carry no loss and are counted."""

import math

import pytest
import torch
from helpers.letters import make_trainer, weights

from rl_core.data.tokenizer import train_tokenizer
from rl_core.settings import CriticSettings
from rl_core.trainers.policy_gradient.samples import build_sample_groups


def test_they_are_left_out_and_counted():
    tokenizer = train_tokenizer(["abc xyz"], 300)
    trainer, clean = make_trainer(tokenizer), make_trainer(tokenizer)
    play = trainer._play_groups
    broken = []

    def with_broken(*arguments, **options):
        groups = play(*arguments, **options)
        for group, value in zip(groups, (math.nan, -math.inf), strict=False):
            row = group.rollouts[0]
            row.sampler_logprobs[-1] = value
            broken.append(row)
        return groups

    trainer._play_groups = with_broken
    metrics = trainer.step()
    assert metrics["train/nonfinite_sampler_tokens"] == 2 and metrics["train/skipped_steps"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.isfinite(weights(trainer)).all()
    assert "train/nonfinite_sampler_tokens" not in clean.step()
    assert not torch.equal(
        weights(trainer), weights(clean)
    )  # there the two tokens are learned from
    for group in trainer.groups[:2]:
        ((sample, *_),) = build_sample_groups([group])
        assert sample.row.loss_mask[-1] is False and sample.row.sampler_logprobs[-1] == 0.0
        assert sum(sample.row.loss_mask) == sum(group.rollouts[0].loss_mask) - 1


ALGORITHMS = {
    "grpo": {},
    "reinforce": {},
    "ppo": {},
    "shared": {"critic": CriticSettings(kind="shared")},
    "vtrace": {"importance": "vtrace"},
    "kl": {"kl_in": "reward", "kl_coef": 0.1},
}


def build_broken_trainer(tokenizer, name, is_broken):
    """Build a trainer to whose sampler all log-probs of the chosen rollouts, by position, are NaN."""
    algorithm = name if name in ("grpo", "reinforce") else "ppo"
    options = {"algorithm": algorithm, **ALGORITHMS[name]}
    trainer = make_trainer(tokenizer, reference=make_trainer(tokenizer).policy, **options)
    play = trainer._play_groups

    def play_broken(*arguments, **play_options):
        groups = play(*arguments, **play_options)
        for number, rollout in enumerate(r for group in groups for r in group.rollouts):
            if is_broken(number):
                rollout.sampler_logprobs[:] = [math.nan] * len(rollout.sampler_logprobs)
        return groups

    trainer._play_groups = play_broken
    return trainer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_without_any_finite_log_prob_leaves_the_others_to_learn_from(name):
    tokenizer = train_tokenizer(["abc xyz"], 300)
    trainer = build_broken_trainer(tokenizer, name, lambda number: number == 0)
    before = weights(trainer).clone()
    metrics = trainer.step()
    assert metrics["train/nonfinite_sampler_tokens"] > 0 and metrics["train/skipped_steps"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert not torch.equal(weights(trainer), before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_iteration_without_any_finite_log_prob_is_an_empty_update(name):
    tokenizer = train_tokenizer(["abc xyz"], 300)
    trainer = build_broken_trainer(tokenizer, name, lambda number: True)
    before = weights(trainer).clone()
    metrics = trainer.step()
    assert metrics["train/empty_updates"] == 1 and metrics["train/skipped_steps"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(weights(trainer), before)
