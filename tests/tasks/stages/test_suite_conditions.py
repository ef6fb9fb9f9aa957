"""Conditions of the gate on metrics of suites: numbers worked by hand, both ways."""

import pytest

from rl_core.errors import SettingsError
from rl_core.evaluators.results import SuiteMetrics, TaskMetric, build_metric
from rl_core.settings import MetricCondition
from tasks.config.settings import PromotionSettings
from tasks.stages.promotion_gate import check_suite_metrics

ACC = "lm_eval/arc/acc"


def build_metrics(values, name=ACC, **options):
    """Build the metrics of a model whose samples have these numbers."""
    metric = build_metric(sum(values) / len(values), 0.05, values, **options)
    samples = {str(number): float(value) for number, value in enumerate(values)}
    return SuiteMetrics({name: metric}, lambda metric: samples)


def check(challenger, champion, level=0.025, name=ACC, **condition):
    settings = PromotionSettings(metrics={name: MetricCondition(**condition)})
    return check_suite_metrics(challenger, champion, settings, level, seed=0)


@pytest.mark.parametrize(
    ("condition", "passed", "text"),
    [
        ({"min": 0.5}, True, f"{ACC} 0.5 [0.4038, 0.5962]"),
        ({"min": 0.51}, False, f"{ACC} 0.5 [0.4038, 0.5962] is below 0.51"),
        ({"max": 0.5}, True, f"{ACC} 0.5 [0.4038, 0.5962]"),
        ({"max": 0.49}, False, f"{ACC} 0.5 [0.4038, 0.5962] is above 0.49"),
    ],
)
def test_minimum_and_maximum(condition, passed, text):
    result = check(build_metrics([1, 0] * 50), None, **condition)
    assert (result.passed, result.text) == (passed, text)
    assert result.numbers == {f"metrics/{ACC}": 0.5}


def test_a_worse_candidate_is_refused_and_a_better_one_passes():
    weak, strong = build_metrics([1, 0] * 100), build_metrics([1, 1, 1, 0] * 50)
    down = check(weak, strong, max_loss=0.05)
    assert not down.passed and "not shown to have lost less than 0.05: -0.25 [" in down.text
    # 50 of 200 worse and none better: -.25 -+ 1.96 sqrt(.25 * .75 / 200) = .06
    assert down.numbers[f"metrics/{ACC}/gain_low"] == pytest.approx(-0.31, abs=0.015)
    up = check(strong, weak, max_loss=0.05)
    assert up.passed and "+0.25 [" in up.text and "on 200 samples, betting test p" in up.text
    assert up.numbers[f"metrics/{ACC}/gain"] == 0.25


def test_the_same_answers_pass_if_there_are_enough_of_them():
    """At a margin of 5 points the betting test needs about 120 equal outcomes for a p-value of .025."""
    equal = [1, 0] * 100
    assert check(build_metrics(equal), build_metrics(equal), max_loss=0.05).passed
    few = [1, 0] * 10
    result = check(build_metrics(few), build_metrics(few), max_loss=0.05)
    assert not result.passed and "+0 [+0, +0] on 20 samples" in result.text
    assert not check(build_metrics(equal), build_metrics(equal), max_loss=0.0).passed


def test_the_level_is_that_of_the_attempt():
    """100 equal outcomes show a loss below 10 points at the level of the first attempt, not at one of 1e-6."""
    equal = build_metrics([1, 0] * 50)
    assert check(equal, equal, max_loss=0.1).passed
    assert not check(equal, equal, level=1e-6, max_loss=0.1).passed


def test_less_is_better_where_the_evaluator_says_so():
    low = build_metrics([1.0, 1.5] * 50, higher_is_better=False)
    high = build_metrics([2.0, 2.5] * 50, higher_is_better=False)
    assert check(low, high, max_loss=0.1).numbers[f"metrics/{ACC}/gain"] == 1.0
    assert check(low, high, max_loss=0.1).passed and not check(high, low, max_loss=0.1).passed


def test_metrics_of_a_corpus_are_compared_by_their_standard_errors():
    """11 - 10 with errors .3 and .4: -1 -+ 1.96 * .5, a gain of 1 for a metric of which less is better."""
    name = "lm_eval/text/perplexity"

    def build(value, stderr):
        metric = TaskMetric(value, stderr, higher_is_better=False)
        return SuiteMetrics({name: metric}, lambda metric: {})

    up = check(build(10.0, 0.3), build(11.0, 0.4), name=name, max_loss=0.1)
    assert up.numbers[f"metrics/{name}/gain_low"] == pytest.approx(1 - 1.96 * 0.5, abs=1e-4)
    assert up.passed and "by the standard errors of both" in up.text
    assert not check(build(11.0, 0.3), build(10.0, 0.4), name=name, max_loss=0.1).passed
    unknown = check(build(10.0, None), build(10.0, 0.4), name=name, max_loss=0.1)
    assert not unknown.passed and "neither numbers of samples nor a standard error" in unknown.text


def test_without_a_champion_a_loss_is_no_condition():
    assert check(build_metrics([0, 0]), None, max_loss=0.1).passed
    absent = SuiteMetrics({}, lambda metric: {})
    result = check(build_metrics([1, 0] * 50), absent, max_loss=0.1)
    assert not result.passed and "the champion has no such number" in result.text


def test_a_metric_that_is_no_number_is_refused():
    odd = SuiteMetrics({ACC: build_metric(float("nan"))}, lambda metric: {})
    assert check(odd, None, min=0.0).text == f"{ACC} is not a number"
    assert not check(odd, None, min=0.0).passed
    assert not check(build_metrics([1, 0] * 50), odd, max_loss=0.5).passed


def test_a_metric_that_does_not_exist_is_an_error_with_the_nearest_name():
    with pytest.raises(
        SettingsError, match=r"no suite gave a metric 'lm_eval/arc/ac'; did you mean"
    ):
        check(build_metrics([1]), None, name="lm_eval/arc/ac", min=0.1)


def test_all_conditions_must_hold():
    metrics = SuiteMetrics({"a/b/c": TaskMetric(0.5), "a/b/d": TaskMetric(0.1)}, lambda metric: {})
    settings = PromotionSettings(
        metrics={"a/b/c": MetricCondition(min=0.4), "a/b/d": MetricCondition(min=0.4)}
    )
    result = check_suite_metrics(metrics, None, settings, 0.025, seed=0)
    assert (result.passed, result.text) == (False, "a/b/d 0.1 is below 0.4")
