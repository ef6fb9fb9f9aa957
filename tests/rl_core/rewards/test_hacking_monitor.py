"""Reward-hacking monitor: correlation with success, the alarm, and the record on disk."""

import json
import logging
import math
import statistics

import pytest
from helpers.reward_rollouts import group, rollout
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rewards.hacking_monitor import HackingMonitor, compute_point_biserial, compute_rise
from rl_core.rewards.rollout_log import RewardRecord
from rl_core.rewards.running_stats import RunningNorm


def build_scored_rollout(success, total, part=None):
    scored_rollout = rollout(task=part if part is not None else total, success=success)
    scored_rollout.trajectory.reward = total
    return scored_rollout


def test_point_biserial_by_hand():
    # failures 1 and 3, successes 4 and 8: means 2 and 6, over all mean 4 and squares 9 + 1 + 0 + 16 = 26
    expected = 4 / math.sqrt(26 / 4) * 0.5
    assert compute_point_biserial(RunningNorm([1, 3]), RunningNorm([4, 8])) == pytest.approx(
        expected
    )
    assert compute_point_biserial(RunningNorm([4, 8]), RunningNorm([1, 3])) == pytest.approx(
        -expected
    )
    assert compute_point_biserial(RunningNorm([1]), RunningNorm([2])) == 1.0
    assert compute_point_biserial(RunningNorm(), RunningNorm([1, 2])) is None
    assert compute_point_biserial(RunningNorm([5, 5]), RunningNorm([5])) is None


@given(st.lists(st.tuples(st.integers(-50, 50), st.booleans()), min_size=2, max_size=20))
def test_point_biserial_is_the_correlation_of_numbers(pairs):
    values, won = [float(v) for v, _ in pairs], [float(w) for _, w in pairs]
    correlation = compute_point_biserial(
        RunningNorm([v for v, w in zip(values, won, strict=True) if not w]),
        RunningNorm([v for v, w in zip(values, won, strict=True) if w]),
    )
    if len(set(values)) == 1 or len(set(won)) == 1:
        assert correlation is None
    else:
        assert correlation == pytest.approx(statistics.correlation(values, won), abs=1e-9)


def test_rise_by_hand():
    assert compute_rise([1.0, 3.0, 5.0]) == pytest.approx(4.0)
    assert compute_rise([0.0, 1.0, 0.0]) == pytest.approx(0.0)
    assert compute_rise([2.0, 0.0, 0.0, 0.0]) == pytest.approx(-1.8)  # slope -3/5
    assert compute_rise([3.0]) == 0.0


def test_correlations_over_the_window():
    watch = HackingMonitor(window=3, margin=0.05)
    assert "reward/correlation/task" not in watch.record_iteration(
        [build_scored_rollout(True, 1.0)], ["task"]
    )  # no failure yet
    metrics = watch.record_iteration(
        [build_scored_rollout(False, 3.0, part=-1.0), build_scored_rollout(True, 2.0, part=2.0)],
        ["task"],
    )
    # task: success 1 and 2, failure -1; total: success 1 and 2, failure 3
    assert metrics["reward/correlation/task"] == pytest.approx(
        statistics.correlation([1, 2, -1], [1, 1, 0])
    )
    assert metrics["reward/correlation/total"] == pytest.approx(
        statistics.correlation([1, 2, 3], [1, 1, 0])
    )
    for _ in range(3):
        metrics = watch.record_iteration(
            [build_scored_rollout(True, 1.0), build_scored_rollout(True, 2.0)], ["task"]
        )
    assert "reward/correlation/task" not in metrics  # the failure has left the window
    masked = build_scored_rollout(False, 9.0)
    masked.is_masked = True
    assert "reward/correlation/task" not in watch.record_iteration(
        [masked, build_scored_rollout(True, 1.0)], ["task"]
    )


def build_iteration(successes, reward):
    """Build ten rollouts whose total is `reward` on average, with a spread of 1."""
    return [
        build_scored_rollout(n < successes, reward + (0.5 if n % 2 else -0.5)) for n in range(10)
    ]


def test_alarm_when_the_reward_rises_while_success_falls(caplog):
    watch = HackingMonitor(window=4, margin=0.05)
    course = [(8, 0.0), (7, 0.2), (6, 0.4), (5, 0.6), (4, 0.8)]
    with caplog.at_level(logging.WARNING, logger="rl_core.rewards.hacking_monitor"):
        alarms = [watch.record_iteration(build_iteration(*at), [])["reward/alarm"] for at in course]
        assert alarms == [0, 0, 0, 1, 1]
        assert len(caplog.records) == 1 and "success fell by 0.3 over 4 iterations" in caplog.text
        recovered = [
            watch.record_iteration(build_iteration(8, 0.8), [])["reward/alarm"] for _ in range(4)
        ]
        assert recovered[-1] == 0
        alarms = [watch.record_iteration(build_iteration(*at), [])["reward/alarm"] for at in course]
        assert alarms[-1] == 1 and len(caplog.records) == 2  # a new alarm period


@pytest.mark.parametrize(
    ("course", "why"),
    [
        ([(4, 0.0), (5, 0.2), (6, 0.4), (7, 0.6)], "both rise"),
        ([(8, 0.6), (7, 0.4), (6, 0.2), (5, 0.0)], "both fall"),
        ([(8, 0.0), (8, 0.2), (8, 0.4), (8, 0.6)], "success stays"),
        ([(8, 0.0), (8, 0.2), (7, 0.4), (8, 0.6)], "success falls by 0.03 alone"),
        ([(8, 0.0), (7, 0.0), (6, 0.0), (5, 0.0)], "the reward stays"),
        (
            [(8, 0.0), (7, 0.01), (6, 0.02), (5, 0.02)],
            "the reward rises by less than 0.05 of its deviation",
        ),
    ],
)
def test_no_alarm(course, why):
    watch = HackingMonitor(window=4, margin=0.05)
    assert [watch.record_iteration(build_iteration(*at), [])["reward/alarm"] for at in course] == [
        0
    ] * 4, why


def test_another_phase_starts_afresh_and_state_resumes():
    course = [(8, 0.0), (7, 0.2), (6, 0.4), (5, 0.6), (4, 0.8)]
    changed, uninterrupted, resumed = (HackingMonitor(window=4, margin=0.05) for _ in range(3))
    for number, at in enumerate(course):
        late = changed.record_iteration(
            build_iteration(*at), ["task"], "one" if number < 2 else "two"
        )
        expected = uninterrupted.record_iteration(build_iteration(*at), ["task"], "one")
        if number == 2:
            resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
        elif number > 2:
            assert resumed.record_iteration(build_iteration(*at), ["task"], "one") == expected
    assert late["reward/alarm"] == 0 and expected["reward/alarm"] == 1
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_the_record_continues_where_the_run_continues(tmp_path):
    path = tmp_path / "rewards.jsonl"

    def record_rollouts(record, number):
        record(
            number,
            group(
                build_scored_rollout(True, float(number)), build_scored_rollout(False, 0.5)
            ).rollouts,
        )

    first = RewardRecord(path)
    for number in range(3):
        record_rollouts(first, number)
    content = path.read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    assert [row["iteration"] for row in rows] == [0, 0, 1, 1, 2, 2]
    rows[2].pop("crc")
    assert len(rows[2].pop("turns")) == 1 + 2 * len(
        group(build_scored_rollout(True, 1.0)).rollouts[0].trajectory.turns
    )
    assert rows[2] == {
        "iteration": 1,
        "level": "easy",
        "seed": 0,
        "sample": 0,
        "success": True,
        "reward": 1.0,
        "masked": False,
        "rewards": {"task": 1.0},
    }
    path.write_bytes(content[:-7])  # torn in iteration 2
    second = RewardRecord(path)
    record_rollouts(second, 1)  # the checkpoint was saved after the first iteration
    record_rollouts(second, 2)
    assert path.read_bytes() == content
    record_rollouts(RewardRecord(path), 0)  # no checkpoint at all
    assert len(path.read_bytes().splitlines()) == 2
