"""Bradley-Terry training: the loss by hand, micro-batches of whole pairs, held-out figures, resume, the baseline."""

import math

import pytest
import torch
from helpers.tiny import PAD, VOCABULARY, logged_bits, nano, weights_digest
from transformers import LlamaForSequenceClassification

from rl_core.errors import DataError
from rl_core.out_of_memory import halve_batch
from rl_core.settings import RewardModelSettings
from rl_core.storage import faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import InjectedFault
from rl_core.tracking import MemoryTracker
from rl_core.trainers.reward_model import (
    RewardModelTrainer,
    _count_pairs,
    compute_longer_answer_baseline,
)
from rl_core.trainers.supervised_trainer import build_pair_batches
from rl_core.training.loop import run_loop


def build_scorer(seed=0, dropout=0.0):
    model = nano(seed, dropout, LlamaForSequenceClassification, num_labels=1)
    model.score.weight.data.mul_(20)  # scores far enough from 0 for the figures below to differ
    return model


def build_pairs(count, seed=0):
    """Build pairs ragged on both sides; the chosen sequence ends in a larger token than the rejected one."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for index in range(count):
        prompt = torch.randint(1, VOCABULARY, (2 + index % 3,), generator=generator).tolist()
        low, high = sorted(torch.randperm(VOCABULARY - 1, generator=generator)[:2].tolist())
        pairs.append(
            (prompt + [1] * (index % 2) + [high + 1], prompt + [1] * (index % 3) + [low + 1])
        )
    return pairs


def build_trainer(model=None, train=14, heldout=9, **changes):
    options = {"learning_rate": 5e-3, "warmup_steps": 2, "batch_size": 4, "epochs": 2.0, **changes}
    settings = RewardModelSettings(**options)
    return RewardModelTrainer(
        model or build_scorer(), PAD, build_pairs(train), build_pairs(heldout, seed=1), settings, 7
    )


def compute_scores(model, pairs):
    """Compute [(chosen, rejected)] one row at a time, with transformers' head."""
    with torch.no_grad():
        return [tuple(float(model(torch.tensor([ids])).logits) for ids in pair) for pair in pairs]


def compute_expected_figures(model, pairs, center_coef):
    scores = compute_scores(model, pairs)
    losses = [math.log1p(math.exp(-(c - r))) + center_coef * (c + r) ** 2 for c, r in scores]
    count = len(pairs)
    return (
        sum(losses) / count,
        sum(c > r for c, r in scores) / count,
        sum(c - r for c, r in scores) / count,
    )


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 10_000])
def test_loss_accuracy_and_margin_by_hand(micro_batch_tokens):
    trainer = build_trainer(
        train=8, batch_size=8, micro_batch_tokens=micro_batch_tokens, center_coef=0.05
    )
    loss, accuracy, margin = compute_expected_figures(trainer.model, build_pairs(8), 0.05)
    assert 0 < accuracy < 1  # both signs occur
    metrics = trainer.step()
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["train/accuracy"] == pytest.approx(accuracy)
    assert metrics["train/margin"] == pytest.approx(margin, rel=1e-3)
    assert metrics["train/tokens"] == sum(len(row) for pair in build_pairs(8) for row in pair)


def test_micro_batches_do_not_change_the_gradient():
    gradients = []
    for budget in (10_000, 1):
        trainer = build_trainer(train=8, batch_size=8, micro_batch_tokens=budget, max_grad_norm=1e9)
        trainer.optimizer_step.optimizer.step = lambda t=trainer: gradients.append(
            [weight.grad.clone() for weight in t.model.parameters()]
        )
        trainer.step()
    for full_gradient, cut_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(full_gradient, cut_gradient, rtol=1e-5, atol=1e-6)


def test_a_batch_that_does_not_fit_is_cut_between_pairs_and_gives_the_same_loss():
    trainer = build_trainer(train=8, batch_size=8)
    (batch,) = trainer._build_local_batches(trainer._train)
    counts = _count_pairs(trainer._train)
    uninterrupted = float(trainer._compute_loss(batch, counts)[0].detach())
    halves = halve_batch(batch)
    assert [len(half.chosen_lengths_B) for half in halves] == [4, 4]
    assert sum(
        float(trainer._compute_loss(half, counts)[0].detach()) for half in halves
    ) == pytest.approx(uninterrupted, rel=1e-5)


def test_both_rows_of_a_pair_are_in_one_micro_batch():
    # 20 tokens are 10 a side: the pair of 8 alone; 5 and 3 at a width of 5; 12 does not fit, hence alone
    pairs = [([1] * length, [2] * 2) for length in (3, 8, 5, 12)]
    expected = [([3], 12), ([1], 8), ([2, 0], 5)]
    assert build_pair_batches(pairs, 20, shares_prefixes=False) == expected


def test_evaluation_by_hand():
    trainer = build_trainer(center_coef=0.05, micro_batch_tokens=20)
    pairs = build_pairs(9, seed=1)
    loss, accuracy, margin = compute_expected_figures(trainer.model.eval(), pairs, 0.05)
    metrics = trainer.evaluate()
    assert metrics.keys() == {"eval/loss", "eval/accuracy", "eval/margin", "eval/ece"}
    assert metrics["eval/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["eval/accuracy"] == pytest.approx(accuracy)
    assert metrics["eval/margin"] == pytest.approx(margin, rel=1e-3)
    assert 0 <= metrics["eval/ece"] <= 1


def test_it_learns_an_order_that_it_can_see():
    trainer = build_trainer(train=200, heldout=100, batch_size=50, epochs=15.0, learning_rate=1e-2)
    before = trainer.evaluate()
    outcome = run_loop(trainer, trainer.settings, iterations=trainer.total_steps)
    assert outcome.steps == 60
    assert before["eval/accuracy"] < 0.7
    assert outcome.metrics["eval/accuracy"] > 0.85
    assert outcome.metrics["eval/loss"] < before["eval/loss"]


def test_longer_answer_baseline():
    # longer chosen, shorter chosen, equal: 1 + 0 + 0.5 of 3
    assert compute_longer_answer_baseline([(2, 1), (1, 2), (1, 1)]) == 0.5
    assert compute_longer_answer_baseline([(2, 1), (1, 1)]) == 0.75
    assert compute_longer_answer_baseline([(11, 5)]) == 1.0
    with pytest.raises(DataError, match="no pair"):
        compute_longer_answer_baseline([])


def test_bad_pairs_are_named():
    with pytest.raises(DataError, match=r"pairs_train\[1\]"):
        RewardModelTrainer(
            build_scorer(), PAD, [([1], [2]), ([], [2])], [], RewardModelSettings(), 0
        )
    with pytest.raises(DataError, match=r"pairs_heldout\[0\]"):
        RewardModelTrainer(build_scorer(), PAD, [([1], [2])], [([1], [])], RewardModelSettings(), 0)
    with pytest.raises(DataError, match="no pair to train on"):
        RewardModelTrainer(build_scorer(), PAD, [], [], RewardModelSettings(), 0)
    assert (
        RewardModelTrainer(
            build_scorer(), PAD, [([1], [2])], [], RewardModelSettings(), 0
        ).evaluate()
        == {}
    )


def run_training(folder, tracker):
    torch.manual_seed(3)
    trainer = build_trainer(build_scorer(dropout=0.2), eval_every=3, checkpoint_every=1)
    run_loop(
        trainer,
        trainer.settings,
        iterations=trainer.total_steps,
        tracker=tracker,
        checkpoints=CheckpointStore(folder) if folder else None,
        best_metric="eval/accuracy",
    )
    return weights_digest(trainer.model), logged_bits(tracker)


@pytest.mark.parametrize("hit", [1, 4, 8])
def test_killed_and_resumed_the_numbers_are_the_same(tmp_path, hit):
    expected = run_training(None, MemoryTracker())
    tracker = MemoryTracker()
    faults.configure_faults(f"loop.stepped:{hit}:raise")
    with pytest.raises(InjectedFault):
        run_training(tmp_path, tracker)
    faults.configure_faults(None)
    assert run_training(tmp_path, tracker) == expected
