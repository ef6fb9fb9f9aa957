"""Reward models on scores and on ties: first losses by hand, learning, metrics, resume, refusals."""

import math

import pytest
import torch
from helpers.library import small_policy

import rl_core
from rl_core.errors import DataError
from rl_core.settings import RewardModelSettings
from rl_core.trainers.reward_model import RewardRegressionTrainer, ScoredRow

WORDS = ["bad", "so so", "fine", "very good"]
SCORED = [
    {"prompt": f"{n} ?", "completion": WORDS[n % 4], "score": float(n % 4 + 1)} for n in range(24)
]
PAIRS = [
    {
        "prompt": f"{n} ?",
        "chosen": "yes",
        "rejected": "no no",
        **({"tie": True} if n % 3 == 0 else {}),
    }
    for n in range(24)
]


def build_settings(**options):
    arguments = {
        "epochs": 12,
        "batch_size": 6,
        "eval_every": 1000,
        "warmup_steps": 0,
        "learning_rate": 3e-3,
        **options,
    }
    return RewardModelSettings(**arguments)


@pytest.mark.parametrize("layers", [1, 2])
def test_regression_learns_scores(layers):
    options = build_settings(loss="mse", head_layers=layers, head_width=16, epochs=40)
    training = rl_core.reward_model(small_policy(), SCORED, heldout=0.25, settings=options)
    trainer = training.recipe.trainer
    assert isinstance(trainer, RewardRegressionTrainer)
    scores = torch.tensor([row.score for row in trainer._train], dtype=torch.float64)
    assert trainer.mean == pytest.approx(float(scores.mean())) and trainer.std == pytest.approx(
        float(scores.std(correction=0))
    )
    first = trainer.evaluate()
    training.run()
    last = trainer.evaluate()
    assert last["eval/loss"] < 0.3 * first["eval/loss"] and last["eval/accuracy"] > 0.9
    assert last["eval/explained_variance"] > 0.6 and math.isfinite(last["eval/absolute_error"])


def test_the_first_loss_is_that_of_the_standardised_scores():
    options = build_settings(loss="mse", batch_size=64)
    trainer = rl_core.reward_model(
        small_policy(), SCORED, heldout=0.25, settings=options
    ).recipe.trainer
    from rl_core.models import heads

    actual = heads.score_rows(
        trainer.model, [row.ids for row in trainer._train], pad_id=trainer._pad_id
    )
    targets = [(row.score - trainer.mean) / trainer.std for row in trainer._train]
    expected = sum((a - b) ** 2 for a, b in zip(actual, targets, strict=True)) / len(actual)
    assert trainer.step()["train/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model", ["rao_kupper", "davidson"])
def test_ties_are_learned_as_ties(model):
    training = rl_core.reward_model(
        small_policy(), PAIRS, heldout=0.25, settings=build_settings(ties=model, center_coef=0.0)
    )
    trainer = training.recipe.trainer
    assert trainer._has_ties
    pairs = list(trainer._train)
    scores = [trainer._score_rows([pair.chosen_ids, pair.rejected_ids]) for pair in pairs]
    expected = 0.0
    for (good, bad), pair in zip(scores, pairs, strict=True):
        d = good - bad
        if model == "davidson":
            z = math.log(1 + math.exp(-d) + 2 * math.exp(-d / 2))
            expected += z - math.log(2) + d / 2 if pair.tie else z
        else:
            win, loss = math.log1p(3 * math.exp(-d)), math.log1p(3 * math.exp(d))
            expected += win + loss - math.log(8) if pair.tie else win
    trainer.settings = build_settings(ties=model, center_coef=0.0)
    full = trainer._evaluate_examples(pairs)
    assert full["loss"] == pytest.approx(expected / len(pairs), rel=1e-4)
    training.run()
    metrics = trainer.evaluate()
    assert {"eval/accuracy", "eval/margin", "eval/tie_gap", "eval/ece"} <= set(metrics)
    assert metrics["eval/accuracy"] == 1


def test_ties_in_dpo_and_ipo_and_refusals_elsewhere():
    for loss in ("dpo", "ipo"):
        options = rl_core.PreferenceSettings(loss=loss, epochs=1, batch_size=64, warmup_steps=0)
        training = rl_core.dpo(small_policy(), PAIRS, heldout=0.25, settings=options)
        ties = sum(example.pair.tie for example in training.recipe.trainer._train)
        count = len(training.recipe.trainer._train)
        actual = training.recipe.trainer.step()["train/loss"]
        # at the start every difference is 0: rao_kupper with n = 3 gives -log 1/4 for an order, -log 1/2 for a tie
        expected = {
            "dpo": (ties * math.log(2) + (count - ties) * math.log(4)) / count,
            "ipo": (count - ties) * 25 / count,
        }
        assert actual == pytest.approx(expected[loss], rel=1e-4)
    for loss in ("simpo", "orpo", "kto"):
        with pytest.raises(
            DataError, match=f"is a tie, which only reward_model, dpo, ipo learn from, not {loss}"
        ):
            rl_core.dpo(small_policy(), PAIRS, loss=loss, heldout=0.25)
    smooth = rl_core.PreferenceSettings(label_smoothing=0.1, epochs=1)
    with pytest.raises(DataError, match="is a tie, which label_smoothing does not take"):
        rl_core.dpo(small_policy(), PAIRS, heldout=0.25, settings=smooth)


def test_rows_that_do_not_go_with_the_loss():
    with pytest.raises(
        DataError, match="has a score, which only a reward model with `loss: mse` takes"
    ):
        rl_core.reward_model(small_policy(), SCORED, heldout=0.25)
    with pytest.raises(
        DataError, match="has no score; a reward model with `loss: mse` needs prompt, completion"
    ):
        rl_core.reward_model(
            small_policy(), PAIRS, heldout=0.25, settings=build_settings(loss="mse")
        )
    model = torch.nn.Linear(1, 1)
    same = [ScoredRow([1], 3.0), ScoredRow([2], 3.0)]
    with pytest.raises(DataError, match="all 2 scores are 3"):
        RewardRegressionTrainer(model, 0, same, [], build_settings(loss="mse"), 0)
    with pytest.raises(DataError, match=r"rows_train\[1\]: score nan must be finite"):
        RewardRegressionTrainer(
            model, 0, [same[0], ScoredRow([1], math.nan)], [], build_settings(loss="mse"), 0
        )
    all_ties = [{**row, "tie": True} for row in PAIRS]
    with pytest.raises(DataError, match="are ties, so no order can be checked"):
        rl_core.reward_model(small_policy(), all_ties, heldout=0.25)
