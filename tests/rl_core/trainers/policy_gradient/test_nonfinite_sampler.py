"""Tokens without a finite sampler log-probability: they carry no loss and are counted."""

import math

import torch
from helpers.letters import make_trainer, weights

from rl_core.data.tokenizer import train_tokenizer
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
