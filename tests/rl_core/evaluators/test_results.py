"""Results of tasks: intervals by hand, names, and what is written and read back."""

import json
import math

import pytest

from rl_core.errors import DataError
from rl_core.evaluators.results import (
    TaskResult,
    build_metric,
    build_metric_name,
    read_sample_values,
    read_task_result,
    write_task_result,
)


def test_a_share_of_samples_has_wilsons_interval():
    """3 of 4: centre (.75 + z^2/8) / (1 + z^2/4), z = 1.96: .6504; half width 1.96 sqrt(.1875/4 + z^2/64) / 1.9604."""
    metric = build_metric(0.75, 0.25, [1.0, 0.0, 1.0, 1.0])
    assert (metric.value, metric.stderr, metric.samples) == (0.75, 0.25, 4)
    assert (metric.low, metric.high) == pytest.approx((0.3006, 0.9544), abs=1e-4)


def test_other_means_have_the_evaluators_standard_error():
    metric = build_metric(2.0, 0.5, [1.0, 3.0])
    assert (metric.low, metric.high) == pytest.approx((2 - 0.97998, 2 + 0.97998), abs=1e-4)
    corpus = build_metric(12.5, None)
    assert (corpus.low, corpus.high, corpus.format_value()) == (None, None, "12.5")
    # not the mean of its samples: a share of 0.5 that is none
    assert build_metric(0.5, 0.1, [1.0, 1.0]).low == pytest.approx(0.5 - 0.195996, abs=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, "N/A", None])
def test_what_is_no_number_has_no_value(value):
    metric = build_metric(value, 0.1, [1.0])
    assert metric.value is metric.low is None and metric.format_value() == "not a number"


def test_names_have_no_characters_that_a_store_refuses():
    assert build_metric_name("", "exact_match", "strict-match") == "exact_match.strict-match"
    assert build_metric_name("a/b", "acc@1", "") == "a_b.acc_1"


def test_results_are_read_as_they_were_written(tmp_path):
    result = TaskResult(
        "lm_eval/t", "lm-eval 1", "2.0", 2, 1.5, {"acc": build_metric(0.5, 0.1, [1.0, 0.0])}
    )
    rows = [
        {"id": "0", "metrics": {"acc": 1.0}, "sample": {"text": "grüße", "odd": {1}}},
        {"id": "1", "metrics": {}, "sample": None},
    ]
    assert read_task_result(tmp_path / "t") is None
    write_task_result(tmp_path / "t", result, rows)
    assert read_task_result(tmp_path / "t") == result
    assert list(result.list_metrics()) == ["lm_eval/t/acc"]
    assert read_sample_values(tmp_path / "t", "acc") == {"0": 1.0}
    (tmp_path / "t" / "result.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_task_result(tmp_path / "t")
    (tmp_path / "t" / "result.json").write_text(json.dumps({"metrics": {}}))
    with pytest.raises(DataError, match="not the result of a task"):
        read_task_result(tmp_path / "t")
