"""Exported metric names: one for each row of the reference, base units, labels."""

import re

import pytest

from rl_core.analysis.metric_reference import METRIC_GROUPS, resolve_exported_metric


@pytest.mark.parametrize(
    ("inside", "outside", "labels", "scale"),
    [
        ("train/loss", "train/loss", {}, 1.0),
        ("train/success_rate_by_level/3", "train/success_rate_by_level", {"level": "3"}, 1.0),
        (
            "system/gpu_1_memory_usage_megabytes",
            "system/gpu_memory_usage_bytes",
            {"gpu": "1"},
            1048576.0,
        ),
        ("system/gpu_1_utilization_percentage", "system/gpu_utilization_ratio", {"gpu": "1"}, 0.01),
        ("eval/sft/success_rate", "eval/success_rate_by_model", {"model": "sft"}, 1.0),
        ("eval/success_rate", "eval/success_rate", {}, 1.0),
        ("reward/mean", "reward/mean", {}, 1.0),
        ("reward/my.module.function", "reward", {"component": "my.module.function"}, 1.0),
        ("reward/correlation/total", "reward/correlation", {"component": "total"}, 1.0),
        (
            "curriculum/average/train/success_rate",
            "curriculum/average",
            {"metric": "train/success_rate"},
            1.0,
        ),
        ("analysis/a_minus_b/wins", "analysis/minus/wins", {"second": "a", "first": "b"}, 1.0),
        ("my/own metric", "my/own metric", {}, 1.0),
    ],
)
def test_labels_and_units(inside, outside, labels, scale):
    metric = resolve_exported_metric(inside)
    assert (metric.name, dict(metric.labels), metric.scale) == (outside, labels, scale)


def test_no_two_rows_leave_under_one_name():
    rows = [
        re.sub(r"\{(\w+)\}", r"x_\1", row.name) for group in METRIC_GROUPS for row in group.metrics
    ]
    names = [re.sub(r"[^a-z0-9_]", "_", resolve_exported_metric(row).name) for row in rows]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert all(resolve_exported_metric(row).help for row in rows)


def test_the_unit_in_the_help_is_that_of_the_number():
    assert (
        resolve_exported_metric("system/process_memory_megabytes").help
        == "Resident memory of the process. Unit: bytes."
    )
    assert resolve_exported_metric("train/grad_norm").help.endswith("`max_grad_norm`.")
