"""Alarms: the recursion by hand, the stated run length by simulation, and changes that are found."""

import math

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_core.online.drift_detection import (
    ALARM_DIRECTIONS,
    DriftDetector,
    DriftMonitor,
    compute_lower_mean_bound,
)
from rl_core.settings import OnlineDriftSettings


def detector(direction="falls", **options):
    return DriftDetector(
        direction, **{"threshold": 1000.0, "reference": 4, "slack": 0.1, "error": 0.5, **options}
    )


@pytest.mark.parametrize("direction", ["falls", "rises"])
def test_the_detector_by_hand(direction):
    found = detector(direction)
    flip = (lambda x: x) if direction == "falls" else (lambda x: 1 - x)
    for value in (1.0, 0.5, 1.0, 1.0):
        assert not found.observe(flip(value))
    bound = found.bound
    q = bound + 0.1  # 4 kl(0.875, q) = log 2
    assert 4 * (0.875 * math.log(0.875 / q) + 0.125 * math.log(0.125 / (1 - q))) == pytest.approx(
        math.log(2)
    )
    assert q < 0.875
    stakes = 0.99 * (np.arange(1, 17) / 16) ** 2 / (1 - bound)
    expected = np.zeros(16)
    for value in (0.25, 1.0, 0.0):
        found.observe(flip(value))
        expected = (expected + 1) * (1 + stakes * (bound - value))
    assert np.exp(found.log_values) == pytest.approx(expected)
    assert math.exp(found.log_value) == pytest.approx(expected.mean())


def test_bounds_of_a_mean():
    # q^10 = 0.05, as Clopper and Pearson have it
    assert compute_lower_mean_bound(1.0, 10, 0.05) == pytest.approx(0.05**0.1)
    assert compute_lower_mean_bound(0.0, 10, 0.05) == 0.0
    rng = np.random.default_rng(0)
    missed = sum(
        compute_lower_mean_bound(float((rng.random(30) < 0.6).mean()), 30, 0.1) > 0.6
        for _ in range(500)
    )
    assert missed <= 50


def test_what_is_no_signal_is_refused():
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(DataError):
            detector().observe(value)
    low = detector(error=0.001)
    for value in [0.0] * 200:
        assert not low.observe(value)  # a mean of 0 cannot fall


def monitor(**options):
    return DriftMonitor(OnlineDriftSettings(**{"reference": 100, "run_length": 1000.0, **options}))


def test_a_change_is_found_and_stays_found_until_reset():
    rng = np.random.default_rng(0)
    found = monitor()
    for _ in range(1000):
        assert found.observe("success", float(rng.random() < 0.9)) is None
    alarms = [found.observe("success", float(rng.random() < 0.5)) for _ in range(200)]
    raised = [alarm for alarm in alarms if alarm is not None]
    assert len(raised) == 1 and "success falls" in str(raised[0]) and raised[0].usual > 0.8
    assert found.alarm == raised[0] and found.alarms == 1
    other = monitor()
    other.load_state_dict(found.state_dict())
    assert (
        other.state_dict() == found.state_dict()
        and other.compute_metrics() == found.compute_metrics()
    )
    other.reset()
    assert other.alarm is None and other.alarms == 1 and other.observe("success", 0.0) is None
    assert found.observe("nothing", 0.0) is None


@pytest.mark.parametrize("signal", sorted(ALARM_DIRECTIONS))
def test_each_signal_has_its_direction(signal):
    usual, changed = (0.8, 0.2) if ALARM_DIRECTIONS[signal] == "falls" else (0.2, 0.8)
    found = monitor()
    for value in [usual] * 500:
        assert found.observe(signal, value) is None
    assert any(found.observe(signal, changed) for _ in range(60))
    other = monitor()
    for value in [usual] * 100 + [
        2 * usual - changed if 0 <= 2 * usual - changed <= 1 else float(usual > 0.5)
    ] * 500:
        assert other.observe(signal, value) is None  # the other way is no alarm


def first_alarm(rng, share, length, run_length):
    """Observations after the reference until a false alarm, at most `length`."""
    found = DriftDetector("falls", threshold=run_length, reference=100, slack=0.0, error=0.05)
    values = (rng.random(100 + length) < share).astype(float)
    for number, value in enumerate(values.tolist()):
        if found.observe(value):
            return number - 99
    return length


def test_false_alarms_are_as_rare_as_stated():
    """At the very edge: the usual mean is the bound itself, so that every slack is used up."""
    rng = np.random.default_rng(1)
    times = []
    for _ in range(60):
        found = DriftDetector("falls", threshold=50.0, reference=1, slack=0.0, error=1.0 - 1e-12)
        found.count, found.total = 1, 0.7  # the reference, as if the mean were known
        times.append(
            next((n for n in range(1, 400) if found.observe(float(rng.random() < 0.7))), 400)
        )
    assert np.mean(times) >= 50  # on average at the earliest, cut off at 400


@pytest.mark.slow
def test_the_run_length_with_references_that_are_measured():
    rng = np.random.default_rng(2)
    times = [first_alarm(rng, 0.7, 2000, run_length=200.0) for _ in range(100)]
    assert np.mean(times) >= 200
