"""Metrics of results under the names of trackers."""

import numpy as np
import pytest

from rl_core.analysis.metric_reference import resolve_exported_metric
from rl_core.service import results
from rl_core.service.loss_registry import LOSSES
from rl_core.service.results import rename_metrics_for_trackers

METRICS = {
    "advantage:mean": 1.0,
    "advantage_square:mean": 5.0,
    "loss:sum": 6.0,
    "loss_per_token:mean": 2.0,
    "ratio:mean": 1.5,
    "update_kl:mean": 0.25,
    "my_own:mean": 3.0,
}


def test_names_of_trainers():
    assert rename_metrics_for_trackers(METRICS) == {
        "train/advantages_mean": 1.0,
        "train/advantages_std": 2.0,
        "train/loss_sum": 6.0,
        "train/loss": 2.0,
        "policy/ratio_mean": 1.5,
        "policy/update_kl": 0.25,
        "policy/loss": 2.0,
    }
    assert "policy/loss" not in rename_metrics_for_trackers(
        {"loss_per_token:mean": 2.0, "nll:mean": 2.0}
    )


def test_every_name_is_in_the_reference():
    assert [
        name for name in results._TRACKER_NAMES.values() if not resolve_exported_metric(name).help
    ] == []


@pytest.mark.parametrize("name", ["enhanced_ppo", "ppo"])
def test_advantages_and_rewards_of_a_request(name):
    """Use two sequences of two tokens; the third token has advantage 0 and does not count."""
    ones = np.ones(4)
    table = {
        "rows": np.array([0, 0, 1, 1]),
        "logprobs": -ones,
        "old_logprobs": -ones,
        "entropy": ones,
        "advantages": np.array([1.0, -2.0, 0.0, 3.0]),
        "clip_low_threshold": 0.8 * ones,
        "clip_high_threshold": 1.2 * ones,
        "rewards": np.array([0.5, 0.5, 0.0, 2.0]),
        "new_values": 0 * ones,
        "old_values": 0 * ones,
        "returns": ones,
    }
    metrics = rename_metrics_for_trackers(LOSSES[name].metrics(table, {"value_clip": 0.0}))
    values = np.array([1.0, -2.0, 3.0])
    assert metrics["train/advantages_mean"] == pytest.approx(values.mean())
    assert metrics["train/advantages_std"] == pytest.approx(values.std())
    assert metrics.get("reward/mean") == (1.5 if name == "enhanced_ppo" else None)
