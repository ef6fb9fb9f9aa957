"""Metric history: windows, slopes, quantiles, summaries, threads."""

import json
import math
import threading

import pytest

from rl_core.errors import DataError
from rl_core.metric_history import MetricHistory


def make_history(*values, limit=1000, start=0):
    history = MetricHistory(limit)
    for step, value in enumerate(values, start):
        history.record_values({"x": value}, step)
    return history


def test_moving_average_and_full_windows():
    history = make_history(1.0, 2.0, 6.0)
    assert history.compute_mean("x", 2) == 4.0 and history.compute_mean("x", 3) == 3.0
    assert history.compute_mean("x", 5) == 3.0  # over the available values
    assert history.is_full("x", 3) and not history.is_full("x", 4)
    assert history.compute_mean("y", 2) is None and not history.is_full("y", 1)
    assert history.list_values("x", 2) == [2.0, 6.0]


def test_windows_are_bounded():
    history = make_history(*range(10), limit=3)
    assert history.list_values("x") == [7.0, 8.0, 9.0] and history.count_points("x") == 3
    for window in (0, 4):
        with pytest.raises(DataError, match="window"):
            history.is_full("x", window)


def test_names_are_bounded_too(caplog):
    history = MetricHistory(3, max_metrics=2)
    for step in range(4):
        history.record_values({"x": 1.0, f"seed/{step}": 2.0}, step)
    assert history.names == ["seed/0", "x"] and history.count_points("x") == 3
    assert [record.getMessage() for record in caplog.records] == [
        "more than 2 metrics: 'seed/1' and later ones are not stored"
    ]
    with pytest.raises(DataError, match="max_metrics 0"):
        MetricHistory(3, max_metrics=0)


def test_slope_by_hand_up_and_down():
    assert make_history(1.0, 3.0, 5.0, start=7).compute_slope("x", 3) == pytest.approx(2.0)
    # the 9 is outside the window
    assert make_history(9.0, 1.0, 0.0, -1.0).compute_slope("x", 3) == pytest.approx(-1.0)
    assert make_history(0.0, 1.0, 0.0, 5.0).compute_slope("x", 4) == pytest.approx(
        (-1.5 * -1.5 - 0.5 * -0.5 + 0.5 * -1.5 + 1.5 * 3.5) / 5
    )
    assert (
        make_history(4.0).compute_slope("x", 3) is None
        and make_history().compute_slope("x", 3) is None
    )
    uneven = MetricHistory()
    for step, value in ((0, 0.0), (10, 5.0), (30, 15.0)):
        uneven.record_values({"x": value}, step)
    assert uneven.compute_slope("x", 3) == pytest.approx(0.5)  # per step, not per observation


def test_quantiles_are_linear_between_neighbours():
    history = make_history(4.0, 1.0, 3.0, 2.0)
    assert (
        history.compute_quantile("x", 0.5, 4) == 2.5
        and history.compute_quantile("x", 0.0, 4) == 1.0
        and history.compute_quantile("x", 1.0, 2) == 3.0
    )
    assert history.compute_quantile("y", 0.5, 4) is None
    with pytest.raises(DataError):
        history.compute_quantile("x", 1.5, 4)


def test_values_that_are_not_finite_are_skipped():
    history = MetricHistory()
    history.record_values({"x": math.nan, "y": 1.0}, 0)
    history.record_values({"x": math.inf, "y": 2.0}, 1)
    assert history.names == ["y"] and history.count_points("x") == 0


def test_clear_forgets():
    history = make_history(1.0, 2.0)
    history.record_values({"y": 1.0}, 3)
    history.clear_metrics(["x"])
    assert history.names == ["y"] and not history.is_full("x", 1)
    history.clear_metrics()
    assert history.names == []


def test_a_state_restored_from_json_continues_identically():
    history = make_history(1.0, 2.0, 3.0, 4.0, limit=3)
    restored = MetricHistory(3)
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for each in (history, restored):
        each.record_values({"x": 0.1}, 4)
    assert restored.state_dict() == history.state_dict()
    assert (
        restored.compute_mean("x", 3) == history.compute_mean("x", 3)
        and restored.count_points("x") == 3
    )


def test_json_for_a_dashboard():
    assert json.loads(make_history(1.0, 2.5).to_json()) == {
        "window": 10,
        "summary": {
            "x": {
                "last": 2.5,
                "mean": 1.75,
                "slope": 1.5,
                "p10": 1.15,
                "p50": 1.75,
                "p90": 2.35,
                "is_full": False,
            }
        },
        "metrics": {"x": [[0.0, 1.0], [1.0, 2.5]]},
    }


def test_the_summary_covers_the_newest_window():
    history = make_history(100.0, 1.0, 2.0, 6.0)
    history.record_values({"y": 5.0}, 9)
    summary = history.summarize_window(3)
    # (-1 1 + 0 2 + 1 6) / 2 = 2.5; a quantile q lies at 2 q of the three in order
    assert summary["x"] == {
        "last": 6.0,
        "mean": 3.0,
        "slope": 2.5,
        "p10": pytest.approx(1.2),
        "p50": 2.0,
        "p90": pytest.approx(5.2),
        "is_full": True,
    }
    assert summary["y"]["slope"] is None and summary["y"]["is_full"] is False


def test_threads_lose_nothing():
    history = MetricHistory(3000)

    def work():
        for step in range(500):
            history.record_values({"x": 1.0}, step)
            history.compute_mean("x", 50)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert history.count_points("x") == 2000 and history.compute_mean("x", 100) == 1.0


def test_the_json_is_consistent():
    history = MetricHistory(50)
    history.record_values({f"m{number}": 0.0 for number in range(40)}, 0)
    done = threading.Event()

    def train():
        for step in range(1, 60):
            history.record_values({f"m{number}": float(step) for number in range(40)}, step)
        done.set()

    writer = threading.Thread(target=train)
    writer.start()
    lasts = []
    while not done.is_set():
        row = json.loads(history.to_json())
        # all metrics are from the same step
        assert len({summary["last"] for summary in row["summary"].values()}) == 1
        lasts.append(row["summary"]["m0"]["last"])
    writer.join()
    assert (
        lasts == sorted(lasts) and json.loads(history.to_json())["summary"]["m39"]["last"] == 59.0
    )
