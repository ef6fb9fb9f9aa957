"""Watched metrics: exits may watch what iterations log, under every algorithm; an evaluation counts once."""

from typing import get_args

import pytest
from helpers.letters import Letters, make_trainer

from rl_core.analysis.metric_reference import METRIC_GROUPS
from rl_core.curriculum.watched_metrics import (
    COMPONENT_METRICS,
    find_missing_setting,
    list_watchable_metrics,
)
from rl_core.data.tokenizer import train_tokenizer
from rl_core.environments.tools import Tool, Toolset
from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import REWARD_COMPONENTS
from rl_core.settings import (
    Algorithm,
    CriticSettings,
    CurriculumStage,
    ExitCondition,
    ReplaySettings,
)

# Where the environment has visual tools, where rollouts had tool steps, where some succeeded and some failed.
LOGGED_SOMETIMES = (
    "tool/rapr",
    "train/exploration_efficiency",
    "reward/correlation/",
    "policy/numerics_difference",
)
IGNORED = ("perf/", "curriculum/")  # clocks, on which nothing may depend, and the curriculum

SETTINGS = {
    **{name: {"algorithm": name} for name in get_args(Algorithm)},
    "kl": {"kl_coef": 0.1},
    "kl_max": {"kl_max": 0.5},
    "replay": {"replay": ReplaySettings(iterations=2, share=0.5), "importance": "token"},
    "shared critic": {"algorithm": "ppo", "critic": CriticSettings(kind="shared")},
    "vtrace": {"algorithm": "ppo", "importance": "vtrace"},
    "geometric": {"importance": "geometric", "importance_mask": "geometric", "dual_clip": 3.0},
    "grokfast": {"grokfast_lambda": 0.5, "mask_truncated": True},
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
    logged = {name for name in trainer.step() if not name.startswith(IGNORED)}
    table = {
        name for name in list_watchable_metrics(trainer.settings) if not name.startswith("eval/")
    }
    assert [name for name in table - logged if not name.startswith(LOGGED_SOMETIMES)] == []
    missing = {name for name in logged - table if "by_level" not in name}
    assert missing == set()
    for name in table:
        assert find_missing_setting(name, trainer.settings) == ""


def test_metrics_of_components_are_those_of_the_reference():
    """Compare two tables written by hand; another test holds the reference to the code."""
    (rewards,) = [group for group in METRIC_GROUPS if group.title.startswith("Reward:")]
    documented = {metric.name for metric in rewards.metrics if metric.name.count("/") == 2}
    generic = {name.rpartition("/")[2] for name in documented if "{component}" in name}
    named = {
        name
        for name in documented
        if "{" not in name and not name.startswith(("reward/weighted", "reward/corr"))
    }
    actual = {
        f"reward/{part}/{name}" for part, names in COMPONENT_METRICS.items() for name in names
    }
    assert named <= actual
    assert {name.rpartition("/")[2] for name in actual - named} <= generic
    assert set(COMPONENT_METRICS) == set(REWARD_COMPONENTS)


class OneTool(Letters):
    @property
    def tools(self):
        return Toolset(
            [Tool("look", "Look.", {}, lambda: "a"), Tool("touch", "Touch.", {}, lambda: "b")]
        )


class VisualTools(Letters):
    @property
    def tools(self):
        return Toolset([Tool("look", "Look.", {}, lambda: "a", is_visual=True)])


@pytest.mark.parametrize("options", [{"algorithm": "ppo"}, {"algorithm": "grpo"}])
def test_a_curriculum_advances_on_the_rate_of_visual_tools(tokenizer, options):
    """Check that a stage ends when the rate, 0 without a call, has been in its range for its window."""

    def build_trainer(environment, comparison, threshold):
        exits = (
            ExitCondition(metric="tool/rapr", window=2, comparison=comparison, threshold=threshold),
        )
        stages = (
            CurriculumStage(name="look", levels={"low": 1.0}, exit_conditions=exits),
            CurriculumStage(name="answer", levels={"low": 1.0}),
        )
        return make_trainer(
            tokenizer, environment, curriculum=stages, prompts_per_iteration=2, **options
        )

    def list_stages(*condition):
        trainer = build_trainer(VisualTools(), *condition)
        logged = [trainer.step() for _ in range(3)]
        assert [metrics["tool/rapr"] for metrics in logged] == [0.0] * 3
        return trainer.curriculum.index, [step["why"] for step in trainer.curriculum.history]

    assert list_stages(">=", 0.5) == (0, [])
    index, (reason,) = list_stages("<=", 0.5)
    assert index == 1 and "tool/rapr 0 <= 0.5 over 2" in reason
    with pytest.raises(SettingsError, match="'tool/rapr': the environment has no visual tool"):
        build_trainer(OneTool(), ">=", 0.5)


def test_the_share_of_a_tool_is_watched_and_of_a_tool_that_is_none_refused(tokenizer):
    def build_trainer(tool):
        early_stop = ExitCondition(metric=f"tool/share/{tool}", window=1, threshold=0.5)
        return make_trainer(tokenizer, OneTool(), early_stop=early_stop, prompts_per_iteration=2)

    calm = build_trainer("look")
    assert (
        "tool/share/look" not in calm.step() and calm.finished is None
    )  # no call yet, and no error
    with pytest.raises(
        SettingsError,
        match="'tool/share/lok': the environment has no tool 'lok'; did you mean 'look'",
    ):
        build_trainer("lok")


def test_an_exit_on_a_metric_of_a_component_holds(tokenizer):
    early_stop = ExitCondition(
        metric="reward/task/answered", window=1, comparison="<=", threshold=1.0
    )
    trainer = make_trainer(tokenizer, early_stop=early_stop, prompts_per_iteration=2)
    trainer.step()
    assert trainer.finished.startswith("curriculum finished: early_stop: reward/task/answered")


def test_an_exit_on_an_evaluation_is_observed_once_for_each(tokenizer):
    """Check that two evaluations in three iterations fill a window of two, and nothing between them does."""
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
            other = make_trainer(
                tokenizer, curriculum=stages, eval_every=3, prompts_per_iteration=2
            )
            other.load_state_dict(
                trainer.state_dict()
            )  # a kill between evaluation and iteration loses nothing
            assert other._latest_evaluation == trainer._latest_evaluation != {}
    assert places == [0, 0, 0, 0, 0, 0, 1]
    assert "eval/success_rate 0.85 >= 0.5 over 2" in trainer.curriculum.history[0]["why"]


def test_a_name_that_is_never_logged_is_refused_by_the_trainer_too(tokenizer):
    for metric, message in (
        ("policy/reff_kl", "not a metric of this stage"),
        ("success_rate_ma100", "window: 100"),
    ):
        early_stop = ExitCondition(metric=metric, window=1)
        trainer = make_trainer(tokenizer, early_stop=early_stop, prompts_per_iteration=2)
        with pytest.raises(SettingsError, match=message):
            trainer.step()
