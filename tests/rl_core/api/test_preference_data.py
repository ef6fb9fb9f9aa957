"""Preference rows, labelled completions and margins through the Python API and the stage's pairs."""

import math

import pytest
import torch
from helpers.library import small_policy

import rl_core
from rl_core.api.data import load_preference_pairs
from rl_core.api.policy import load_policy
from rl_core.data.records import read_preferences
from rl_core.errors import DataError, RecordsError
from rl_core.settings import RewardModelSettings
from rl_core.trainers.reward_model import RewardModelTrainer, ScoredPair
from tasks.stages.preference import _describe_accuracy

PAIRS = [{"prompt": f"{n} ?", "chosen": "yes", "rejected": "no no"} for n in range(12)]
LABELLED = [
    {"prompt": f"{n} ?", "completion": "yes" if n % 3 else "no", "label": bool(n % 3)}
    for n in range(12)
]


def build_settings(**options):
    arguments = {"epochs": 1, "batch_size": 4, "eval_every": 1, "warmup_steps": 0, **options}
    return rl_core.PreferenceSettings(**arguments)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_every_loss_trains_on_pairs(loss):
    training = rl_core.dpo(
        small_policy(), PAIRS, loss=loss, heldout=0.25, settings=build_settings()
    )
    training.run()
    rows = training.metrics()
    first = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}
    if loss in first:
        assert rows["train/loss"].dropna().iloc[0] == pytest.approx(first[loss], rel=1e-4)
    assert training.settings.loss == loss and math.isfinite(rows["eval/loss"].dropna().iloc[-1])
    # kto: both sides of the 9 pairs that are not held out
    assert len(training.recipe.trainer._train) == (18 if loss == "kto" else 9)


def test_kto_learns_from_labels():
    training = rl_core.dpo(
        small_policy(), LABELLED, loss="kto", heldout=0.25, settings=build_settings(epochs=8)
    )
    training.run()
    rows = training.metrics()
    assert rows["train/loss"].dropna().iloc[-1] < 0.5 - 1e-3
    labels = [example.pair.desirable for example in training.recipe.trainer._train]
    assert len(labels) == 9 and set(labels) == {True, False}


def test_rows_that_do_not_go_with_the_loss_are_named():
    with pytest.raises(
        DataError, match=r"row 1: has a label, which only the loss kto takes; simpo needs pairs"
    ):
        rl_core.dpo(small_policy(), LABELLED, loss="simpo", heldout=0.25, settings=build_settings())
    with pytest.raises(
        DataError, match="has a label, which only the loss kto takes; reward_model needs pairs"
    ):
        rl_core.reward_model(small_policy(), LABELLED, heldout=0.25)
    rows = [{**row, "margin": 0.5} for row in PAIRS]
    for loss in ("dpo", "kto"):
        with pytest.raises(
            DataError, match=f"margin: only a reward model takes margins, not the loss {loss}"
        ):
            rl_core.dpo(small_policy(), rows, loss=loss, heldout=0.25, settings=build_settings())
    with pytest.raises(
        RecordsError, match=r"data\[0\]: margin: must be finite and at least 0, found nan"
    ):
        rl_core.reward_model(small_policy(), [{**PAIRS[0], "margin": math.nan}, *PAIRS[1:]])


def test_margins_reach_the_reward_model_s_loss():
    """Check a `margin` column, which was ignored once."""
    rows = [{**row, "margin": float(n)} for n, row in enumerate(PAIRS)]
    options = RewardModelSettings(
        epochs=1, batch_size=64, eval_every=1, warmup_steps=0, center_coef=0.0
    )
    training = rl_core.reward_model(small_policy(), rows, heldout=0.25, settings=options)
    trainer = training.recipe.trainer
    margins = sorted(pair.margin for part in (trainer._train, trainer._heldout) for pair in part)
    assert margins == [float(n) for n in range(12)]
    scores = [trainer._score_rows([pair.chosen_ids, pair.rejected_ids]) for pair in trainer._train]
    expected = [
        math.log1p(math.exp(-(good - bad - pair.margin)))
        for (good, bad), pair in zip(scores, trainer._train, strict=True)
    ]
    heldout = [
        trainer._score_rows([pair.chosen_ids, pair.rejected_ids]) for pair in trainer._heldout
    ]
    of_heldout = [
        math.log1p(math.exp(-(good - bad - pair.margin)))
        for (good, bad), pair in zip(heldout, trainer._heldout, strict=True)
    ]
    assert trainer.evaluate()["eval/loss"] == pytest.approx(
        sum(of_heldout) / len(of_heldout), rel=1e-5
    )
    assert trainer.step()["train/loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert max(expected) > 5  # a margin of about 10 that no score meets


def test_bad_margins_are_refused_by_the_trainer():
    model = torch.nn.Linear(1, 1)
    for margin in (-1.0, math.nan, math.inf):
        with pytest.raises(
            DataError, match=r"pairs_train\[1\]: margin .* must be finite and at least 0"
        ):
            pairs = [([1], [2]), ScoredPair([1], [2], margin)]
            RewardModelTrainer(model, 0, pairs, [], RewardModelSettings(), 0)


def test_files_of_labelled_completions(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "label": false, "level": "easy"}\n')
    assert read_preferences(path).rows == [
        {"prompt": "a", "completion": "b", "label": False, "level": "easy"}
    ]


def test_held_out_partners_come_from_training_where_all_prompts_are_the_same():
    renderer = load_policy(small_policy()).renderer
    rows = [{"prompt": "z ?", "completion": "c", "label": True}]
    split = load_preference_pairs(LABELLED, rows, renderer, 64, 0, "kto")
    heldout = split.heldout
    assert (
        len(split.train) == 12 and heldout[0].desirable and heldout[0].rejected.completion_ids != []
    )
    assert heldout[0].rejected.prompt_ids == heldout[0].chosen.prompt_ids
    with pytest.raises(DataError, match="all rows have the same prompt"):
        load_preference_pairs([LABELLED[0]], 0, renderer, 64, 0, "kto")


def test_the_stage_s_finding_says_what_was_compared():
    assert "more than the initial policy did" in _describe_accuracy("dpo", 0.5, 4)
    assert "more than the rejected one" in _describe_accuracy("orpo", 0.5, 4)
    assert "label's side of the reference point" in _describe_accuracy("kto", 0.5, 4)
