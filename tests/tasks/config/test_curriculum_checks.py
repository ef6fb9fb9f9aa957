"""Curricula that cannot work: key and message of each problem; and similar ones that do work."""

import pytest
from helpers.config_problems import (
    build_condition,
    build_stage,
    list_policy_problems,
    list_problems,
)

from rl_core.curriculum.watched_metrics import ROLLOUT_METRICS
from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.rollout_metrics import compute_rollout_metrics
from rl_core.settings import ExitCondition
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn


@pytest.mark.parametrize(
    ("comparison", "threshold", "possible"),
    [
        (">=", 1.0, True),
        (">=", 1.2, False),
        (">", 1.0, False),
        (">", 0.99, True),
        ("<=", 0.0, True),
        ("<=", -0.1, False),
        ("<", 0.0, False),
        ("<", 0.01, True),
    ],
)
def test_threshold_that_can_never_be_met(comparison, threshold, possible):
    exits = [build_condition(comparison=comparison, threshold=threshold)]
    problems = list_policy_problems(
        curriculum=[build_stage("a", exit_conditions=exits), build_stage("b")]
    )
    if possible:
        assert problems == {}
    else:
        text = problems["curriculum.0.exit_conditions.0.threshold"]
        assert (
            f"success_rate {comparison} {threshold:g} can never hold: success_rate ranges from 0 to 1"
            in text
        )
    early = list_policy_problems(
        early_stop=build_condition(comparison=comparison, threshold=threshold)
    )
    assert list(early) == ([] if possible else ["early_stop.threshold"])


def test_metrics_by_full_name():
    for metric in (
        "train/success_rate",
        "reward/task",
        "reward/mean",
        "success_rate_by_level/easy",
        "turns",
    ):
        metric = f"train/{metric}" if metric.startswith("success_rate_by") else metric
        exits = [build_condition(metric=metric, threshold=0.5)]
        assert (
            list_policy_problems(
                curriculum=[build_stage("a", exit_conditions=exits), build_stage("b")]
            )
            == {}
        ), metric
    for metric, near in (
        ("sucess_rate", "success_rate"),
        ("reward/maen", "reward/mean"),
        ("reward/taks", "reward/task"),
    ):
        exits = [build_condition(metric=metric)]
        text = list_policy_problems(
            curriculum=[build_stage("a", exit_conditions=exits), build_stage("b")]
        )
        assert f"did you mean '{near}'?" in text["curriculum.0.exit_conditions.0.metric"]
    assert (
        "no such metric"
        in list_policy_problems(early_stop=build_condition(metric="zzz"))["early_stop.metric"]
    )
    for old in ("policy/kl", "kl"):  # of one update here, to the reference in TRL
        problem = list_policy_problems(early_stop=build_condition(metric=old))["early_stop.metric"]
        assert "policy/update_kl" in problem and "policy/ref_kl" in problem
    low = list_policy_problems(
        early_stop=build_condition(metric="policy/mean_logprob", threshold=0.5)
    )
    assert "can never hold" in low["early_stop.threshold"]


def test_known_metrics_are_those_that_an_iteration_has():
    trajectory = Trajectory(
        "pixel_grid", "easy", "colour", 0, "p", "t", turns=[Turn("answer x")], num_action_tokens=2
    )
    trajectory.rewards = {"task": 1.0}
    rollout = Rollout([1], [2, 3], [True, True], [-1.0, -1.0], trajectory)
    groups = [RolloutGroup([rollout])]
    emitted = set(RewardOrchestrator({"task": 1.0}).score(groups)) | set(
        compute_rollout_metrics(groups)
    )
    assert set(ROLLOUT_METRICS) <= emitted
    named_by_settings = {"reward/task", "reward/weighted/task", "train/success_rate_by_level/easy"}
    assert emitted - set(ROLLOUT_METRICS) == named_by_settings | {"reward/task/answered"}


def test_any_logged_metric_may_be_watched_and_others_say_what_they_need():
    def describe_problem(metric, **policy):
        return list_policy_problems(
            early_stop=build_condition(metric=metric, threshold=0.1), **policy
        ).get("early_stop.metric", "")

    assert (
        describe_problem("policy/entropy")
        == describe_problem("policy/update_kl")
        == describe_problem("train/right_action_rate")
        == ""
    )
    assert "never logged with these settings; it needs eval_every above 0" in describe_problem(
        "eval/success_rate"
    )
    assert describe_problem("eval/success_rate", eval_every=2) == ""
    assert (
        "it needs kl_coef above 0" in describe_problem("policy/ref_kl")
        and describe_problem("policy/ref_kl", kl_coef=0.1) == ""
    )
    assert (
        "it needs a critic" in describe_problem("value/loss")
        and describe_problem("value/loss", algorithm="ppo") == ""
    )
    weighted = {"rewards": {"task": 1.0, "tool_use": 0.1, "mine.py:score": 0.5}}
    for metric in (
        "reward/tool_use/misused_turns",
        "reward/mine.py.score/parts",
        "reward/masked_rate",
    ):
        assert describe_problem(metric, **weighted) == "" and describe_problem(metric) != "", metric
    assert "has no tool 'zom'; did you mean 'zoom'?" in describe_problem("tool/share/zom")
    early_stop = build_condition(metric="tool/rapr", threshold=0.1)
    reported = list_problems(
        stages={"sft": {}, "policy": {"early_stop": early_stop}},
        environment={"name": "arithmetic"},
    )
    text = reported["stages.policy.early_stop.metric"]
    assert "'tool/rapr': the environment has no visual tool" in text
    assert "did you mean 'tool/rapr'?" in describe_problem("tool/raper")
    for metric in (
        "tool/rapr",
        "tool/share/zoom",
        "reward/alarm",
        "reward/correlation/total",
        "train/failed_rate",
    ):
        assert describe_problem(metric) == "", metric
    assert (
        describe_problem("eval/success_rate_by_level/easy", eval_every=2)
        == ""
        != describe_problem("eval/success_rate_by_level/easy")
    )
    assert "measured by a clock" in describe_problem("perf/rollout_seconds")
    text = describe_problem("success_rate_ma100")
    assert "write metric: success_rate and window: 100" in text
    late = list_policy_problems(
        early_stop=build_condition(metric="eval/success_rate", window=30), eval_every=20
    )
    assert "30 evaluations never fit into" in late["early_stop.window"]


def test_comparisons_by_name_are_written_as_signs():
    for word, sign in (("greater", ">"), ("at least", ">="), ("less_than", "<"), ("LTE", "<=")):
        text = list_policy_problems(early_stop={"metric": "success_rate", "comparison": word})[
            "early_stop.comparison"
        ]
        assert text.endswith(f"'{word}' is written '{sign}'")
    with pytest.raises(SettingsError, match="'greater' is written '>'"):
        ExitCondition(comparison="greater")


def test_stage_without_a_way_out():
    problems = list_policy_problems(curriculum=[build_stage("a"), build_stage("b", ["hard"])])
    assert problems == {
        "curriculum.0": "stage 'a' never ends, so 'b' is never reached; add exit_conditions or max_iterations"
    }
    assert (
        list_policy_problems(curriculum=[build_stage("a", max_iterations=3), build_stage("b")])
        == {}
    )


def test_stage_names():
    problems = list_policy_problems(
        curriculum=[build_stage("a", max_iterations=3), build_stage("a")]
    )
    assert problems == {"curriculum": "2 stages are named 'a'; give each a different name"}
    assert (
        "cannot be named '(end)'"
        in list_policy_problems(curriculum=[build_stage("(end)")])["curriculum"]
    )


def test_window_longer_than_its_stage():
    exits = [build_condition(window=10)]
    problems = list_policy_problems(
        curriculum=[build_stage("a", exit_conditions=exits, max_iterations=9), build_stage("b")]
    )
    assert "never fit into the 9" in problems["curriculum.0.exit_conditions.0.window"]
    assert (
        list_policy_problems(
            curriculum=[
                build_stage("a", exit_conditions=exits, max_iterations=10),
                build_stage("b"),
            ]
        )
        == {}
    )
    assert (
        "into the 5"
        in list_policy_problems(iterations=5, early_stop=build_condition(window=6))[
            "early_stop.window"
        ]
    )


def test_last_stage_out_of_reach():
    stages = [
        build_stage(
            "a", exit_conditions=[build_condition(window=4), build_condition(window=6)]
        ),  # at least 6
        build_stage(
            "b",
            exit_conditions=[build_condition(window=3), build_condition(window=5)],
            require="any",
            min_iterations=4,
        ),  # 4
        build_stage("c"),
    ]
    assert (
        "take at least 10" in list_policy_problems(iterations=10, curriculum=stages)["iterations"]
    )
    assert list_policy_problems(iterations=11, curriculum=stages) == {}


def test_nothing_is_reported_that_rests_on_a_broken_value():
    # The context is mistyped: whether a completion fits it cannot be said.
    problems = list_problems(
        model={"context": "long"}, stages={"policy": {"sampling": {"max_completion_tokens": 500}}}
    )
    assert list(problems) == ["model.context"]
    # The unknown key comes first: mended, it may be what the block lacks.
    problems = list_problems(stages={"evaluate": {"episods": 3}})
    assert list(problems) == ["stages.evaluate.episods"]


def test_slopes_that_can_never_be_met():
    # Two values in [0, 1] differ by 1 at most; of three, (v3 - v1) / 2 is at most .5; of four, (0, 0, 1, 1) gives .4.
    for window, threshold, possible in (
        (2, 1.0, True),
        (2, 1.01, False),
        (3, 0.5, True),
        (3, 0.51, False),
        (4, 0.41, False),
    ):
        exits = [
            build_condition(statistic="slope", window=window, comparison=">=", threshold=threshold)
        ]
        problems = list_policy_problems(
            curriculum=[build_stage("a", exit_conditions=exits), build_stage("b")]
        )
        assert (problems == {}) is possible, (window, threshold)
    assert problems["curriculum.0.exit_conditions.0.threshold"] == (
        "the slope of success_rate >= 0.41 can never hold: the slope of success_rate ranges from -0.4 to 0.4; "
        "choose a threshold inside"
    )
    flat = build_condition(statistic="slope", comparison="<=", threshold=0.001)
    assert (
        list_policy_problems(
            curriculum=[build_stage("a", exit_conditions=[flat]), build_stage("b")]
        )
        == {}
    )
    one = list_policy_problems(
        curriculum=[build_stage("a", exit_conditions=[{**flat, "window": 1}]), build_stage("b")]
    )
    assert one["curriculum.0.exit_conditions.0.window"] == "1 point has no slope; use at least 2"


def test_patience_counts_for_what_can_be_reached():
    exits = [build_condition(window=4, patience=3)]  # holds in the 6th iteration at the earliest
    problems = list_policy_problems(
        curriculum=[build_stage("a", exit_conditions=exits, max_iterations=5), build_stage("b")]
    )
    text = problems["curriculum.0.exit_conditions.0.window"]
    assert text.startswith("4 iterations with a patience of 3 never fit into the 5")
    assert (
        list_policy_problems(
            curriculum=[build_stage("a", exit_conditions=exits, max_iterations=6), build_stage("b")]
        )
        == {}
    )
    stages = [build_stage("a", exit_conditions=exits), build_stage("b")]
    assert "take at least 6" in list_policy_problems(iterations=6, curriculum=stages)["iterations"]
    assert list_policy_problems(iterations=7, curriculum=stages) == {}


def test_what_a_stage_overrides():
    override = {"task": 0.5, "tool_use": 0.1}
    problems = list_policy_problems(curriculum=[build_stage("a", rewards=override)])
    assert list(problems) == ["curriculum.0.rewards.tool_use"]
    assert (
        "a component that only later stages use with weight 0"
        in problems["curriculum.0.rewards.tool_use"]
    )
    assert (
        list_policy_problems(
            rewards={"task": 1.0, "tool_use": 0}, curriculum=[build_stage("a", rewards=override)]
        )
        == {}
    )
    assert (
        "stage 'a': group_size: 1 leaves grpo"
        in list_policy_problems(curriculum=[build_stage("a", group_size=1)])["curriculum"]
    )
    assert (
        "greater than 0"
        in list_policy_problems(curriculum=[build_stage("a", temperature=0)])[
            "curriculum.0.temperature"
        ]
    )


@pytest.mark.parametrize(
    ("rollback", "key", "expected"),
    [
        ({"metric": "sucess_rate"}, "metric", "did you mean 'success_rate'?"),
        (
            {"margin": 1.0, "window": 5},
            "margin",
            "success_rate can never fall by more than 1: it ranges from 0 to 1",
        ),
        (
            {"margin": 1.0, "metric": "loop_rate", "better": "lower", "window": 5},
            "margin",
            "can never rise by more",
        ),
        (
            {"window": 6, "patience": 5},
            "window",
            "within the 10 iterations of its stage: a window of 6 and a patience",
        ),
        ({"window": 7, "patience": 5, "level": "before"}, "window", "take at least 11"),
        (
            {"to": "previous", "window": 5},
            "to",
            "there is no stage before the first one; use entry",
        ),
        ({"learning_rate_factor": 2, "window": 5}, "learning_rate_factor", "at most 1"),
    ],
)
def test_a_rollback_that_never_happens(rollback, key, expected):
    problems = list_policy_problems(curriculum=[build_stage("a", rollback=rollback)], iterations=10)
    assert list(problems) == [f"curriculum.0.rollback.{key}"]
    assert expected in problems[f"curriculum.0.rollback.{key}"]


def test_rollbacks_that_may_happen():
    for rollback in (
        {"window": 5},
        {"window": 6, "level": "before"},
        {"window": 5, "metric": "reward/mean", "margin": 9},
    ):
        assert (
            list_policy_problems(iterations=10, curriculum=[build_stage("a", rollback=rollback)])
            == {}
        )
        assert list_policy_problems(iterations=10, rollback=rollback) == {}
    one = list_policy_problems(rollback={"to": "previous"})
    assert "there is only one curriculum stage" in one["rollback.to"]
    two = [build_stage("a", max_iterations=20), build_stage("b", rollback={"to": "previous"})]
    assert list_policy_problems(rollback={"to": "previous"}, curriculum=two) == {}
