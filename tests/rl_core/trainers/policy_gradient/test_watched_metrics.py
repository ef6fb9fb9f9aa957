"""Metrics that exits may watch are those that iterations log, under every algorithm; an evaluation counts once."""

from typing import get_args

import pytest
from helpers.letters import make_trainer

from rl_core.curriculum.watched_metrics import missing_because, watched_metrics
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.settings import Algorithm, CurriculumStage, ExitCondition, ReplaySettings

LOGGED_SOMETIMES = {"train/exploration_efficiency"}  # where rollouts had tool steps
BESIDE = ("perf/", "curriculum/", "reward/alarm", "reward/correlation/")  # what machines and watchers say
ELSEWHERE = {
    "train/empty_updates", "train/failed_episodes", "train/failed_rate", "train/skipped_steps",
    "train/trained_rollouts", "reward/task/answered", "value/clip_fraction", "value/grad_norm", "value/skipped_steps",
    "reward/overlong", "policy/numerics_difference",  # of some iterations alone
}  # fmt: skip

SETTINGS = {
    **{name: {"algorithm": name} for name in get_args(Algorithm)},
    "kl": {"kl_coef": 0.1},
    "kl_max": {"kl_max": 0.5},
    "replay": {"replay": ReplaySettings(iterations=2, share=0.5), "importance": "token"},
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.mark.parametrize("case", SETTINGS)
def test_the_table_is_what_an_iteration_logs(tokenizer, case):
    options = dict(SETTINGS[case])
    if "kl_coef" in options:
        options["reference"] = make_trainer(tokenizer).policy
    trainer = make_trainer(tokenizer, prompts_per_iteration=2, **options)
    logged = {name for name in trainer.step() if not name.startswith(BESIDE)}
    table = {name for name in watched_metrics(trainer.settings) if not name.startswith("eval/")}
    assert table - logged <= LOGGED_SOMETIMES
    missing = {name for name in logged - table - ELSEWHERE if "by_level" not in name}
    assert missing == set()
    for name in table:
        assert missing_because(name, trainer.settings) == ""


def test_an_exit_on_an_evaluation_is_observed_once_for_each(tokenizer):
    """Two evaluations of three iterations fill a window of two, and nothing between them does."""
    exits = (ExitCondition(metric="eval/success_rate", window=2, threshold=0.5),)
    stages = (
        CurriculumStage(name="one", levels={"low": 1.0}, exit_conditions=exits),
        CurriculumStage(name="two", levels={"low": 1.0}),
    )
    rates = iter([0.9, 0.8])
    trainer = make_trainer(tokenizer, curriculum=stages, eval_every=3, prompts_per_iteration=2)
    trainer.evaluator = lambda: {"eval/success_rate": next(rates)}
    places = []
    for iteration in range(1, 8):
        trainer.step()
        places.append(trainer.curriculum.index)
        if iteration in (3, 6):
            trainer.evaluate()
            other = make_trainer(tokenizer, curriculum=stages, eval_every=3, prompts_per_iteration=2)
            other.load_state_dict(trainer.state_dict())  # a kill between evaluation and iteration loses nothing
            assert other._evaluated == trainer._evaluated != {}
    assert places == [0, 0, 0, 0, 0, 0, 1]
    assert "eval/success_rate 0.85 >= 0.5 over 2" in trainer.curriculum.history[0]["why"]


def test_a_name_that_is_never_logged_is_refused_by_the_trainer_too(tokenizer):
    for metric, message in (("policy/reff_kl", "no metric of this stage"), ("success_rate_ma100", "window: 100")):
        early_stop = ExitCondition(metric=metric, window=1)
        trainer = make_trainer(tokenizer, early_stop=early_stop, prompts_per_iteration=2)
        with pytest.raises(SettingsError, match=message):
            trainer.step()
