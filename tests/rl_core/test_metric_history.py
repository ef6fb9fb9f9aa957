import json
import math
import threading

import pytest

from rl_core.errors import DataError
from rl_core.metric_history import MetricHistory


def build_history(*values, limit=1000, start=0):
    history = MetricHistory(limit)
    for step, value in enumerate(values, start):
        history.record_values({"x": value}, step)
    return history


def test_moving_average_and_full_windows():
    metric_history = build_history(1.0, 2.0, 6.0)
    assert metric_history.compute_mean("x", 2) == 4.0 and metric_history.compute_mean("x", 3) == 3.0
    assert metric_history.compute_mean("x", 5) == 3.0  # of the available values
    assert metric_history.is_full("x", 3) and not metric_history.is_full("x", 4)
    assert metric_history.compute_mean("y", 2) is None and not metric_history.is_full("y", 1)
    assert metric_history.list_values("x", 2) == [2.0, 6.0]


def test_windows_are_bounded():
    metric_history = build_history(*range(10), limit=3)
    assert (
        metric_history.list_values("x") == [7.0, 8.0, 9.0] and metric_history.count_points("x") == 3
    )
    for window in (0, 4):
        with pytest.raises(DataError, match="window"):
            metric_history.is_full("x", window)


def test_names_are_bounded_too(caplog):
    metric_history = MetricHistory(3, max_metrics=2)
    for step in range(4):
        metric_history.record_values({"x": 1.0, f"seed/{step}": 2.0}, step)
    assert metric_history.names == ["seed/0", "x"] and metric_history.count_points("x") == 3
    assert [record.getMessage() for record in caplog.records] == [
        "more than 2 metrics: 'seed/1' and later ones are not kept"
    ]
    with pytest.raises(DataError, match="max_metrics 0"):
        MetricHistory(3, max_metrics=0)


def test_slope_by_hand_up_and_down():
    assert build_history(1.0, 3.0, 5.0, start=7).compute_slope("x", 3) == pytest.approx(2.0)
    # the 9 is outside the window
    assert build_history(9.0, 1.0, 0.0, -1.0).compute_slope("x", 3) == pytest.approx(-1.0)
    assert build_history(0.0, 1.0, 0.0, 5.0).compute_slope("x", 4) == pytest.approx(
        (-1.5 * -1.5 - 0.5 * -0.5 + 0.5 * -1.5 + 1.5 * 3.5) / 5
    )
    assert (
        build_history(4.0).compute_slope("x", 3) is None
        and build_history().compute_slope("x", 3) is None
    )
    uneven = MetricHistory()
    for step, value in ((0, 0.0), (10, 5.0), (30, 15.0)):
        uneven.record_values({"x": value}, step)
    assert uneven.compute_slope("x", 3) == pytest.approx(0.5)  # per step, not per observation


def test_quantiles_are_linear_between_neighbours():
    metric_history = build_history(4.0, 1.0, 3.0, 2.0)
    assert (
        metric_history.compute_quantile("x", 0.5, 4) == 2.5
        and metric_history.compute_quantile("x", 0.0, 4) == 1.0
        and metric_history.compute_quantile("x", 1.0, 2) == 3.0
    )
    assert metric_history.compute_quantile("y", 0.5, 4) is None
    with pytest.raises(DataError):
        metric_history.compute_quantile("x", 1.5, 4)


def test_what_is_not_finite_is_left_out():
    metric_history = MetricHistory()
    metric_history.record_values({"x": math.nan, "y": 1.0}, 0)
    metric_history.record_values({"x": math.inf, "y": 2.0}, 1)
    assert metric_history.names == ["y"] and metric_history.count_points("x") == 0


def test_clear_forgets():
    metric_history = build_history(1.0, 2.0)
    metric_history.record_values({"y": 1.0}, 3)
    metric_history.clear_metrics(["x"])
    assert metric_history.names == ["y"] and not metric_history.is_full("x", 1)
    metric_history.clear_metrics()
    assert metric_history.names == []


def test_state_goes_through_json_and_continues_equally():
    metric_history = build_history(1.0, 2.0, 3.0, 4.0, limit=3)
    other = MetricHistory(3)
    other.load_state_dict(json.loads(json.dumps(metric_history.state_dict())))
    for each in (metric_history, other):
        each.record_values({"x": 0.1}, 4)
    assert other.state_dict() == metric_history.state_dict()
    assert (
        other.compute_mean("x", 3) == metric_history.compute_mean("x", 3)
        and other.count_points("x") == 3
    )


def test_json_for_a_dashboard():
    assert json.loads(build_history(1.0, 2.5).to_json()) == {
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


def test_the_summary_is_of_the_newest_window():
    metric_history = build_history(100.0, 1.0, 2.0, 6.0)
    metric_history.record_values({"y": 5.0}, 9)
    summary = metric_history.summarize_window(3)
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
    metric_history = MetricHistory(3000)

    def record_steps():
        for step in range(500):
            metric_history.record_values({"x": 1.0}, step)
            metric_history.compute_mean("x", 50)

    threads = [threading.Thread(target=record_steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric_history.count_points("x") == 2000 and metric_history.compute_mean("x", 100) == 1.0


def test_the_json_is_of_one_moment():
    metric_history = MetricHistory(50)
    metric_history.record_values({f"m{number}": 0.0 for number in range(40)}, 0)
    done = threading.Event()

    def record_steps():
        for step in range(1, 60):
            metric_history.record_values({f"m{number}": float(step) for number in range(40)}, step)
        done.set()

    writer = threading.Thread(target=record_steps)
    writer.start()
    lasts = []
    while not done.is_set():
        row = json.loads(metric_history.to_json())
        # all values are from the same moment
        assert len({summary["last"] for summary in row["summary"].values()}) == 1
        lasts.append(row["summary"]["m0"]["last"])
    writer.join()
    assert (
        lasts == sorted(lasts)
        and json.loads(metric_history.to_json())["summary"]["m39"]["last"] == 59.0
    )
