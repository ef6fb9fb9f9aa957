"""Drift alarms: the recursion by hand, the stated run length by simulation, and detected changes."""

import math

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_core.online.drift_detection import (
    DriftDetector,
    DriftMonitor,
    compute_lower_mean_bound,
)
from rl_core.settings import OnlineDriftSettings


def make_detector(direction="falls", **options):
    return DriftDetector(
        direction, **{"threshold": 1000.0, "reference": 4, "slack": 0.1, "error": 0.5, **options}
    )


@pytest.mark.parametrize("direction", ["falls", "rises"])
def test_the_detector_by_hand(direction):
    detector = make_detector(direction)
    flip = (lambda x: x) if direction == "falls" else (lambda x: 1 - x)
    for value in (1.0, 0.5, 1.0, 1.0):
        assert not detector.observe(flip(value))
    bound = detector.bound
    upper = bound + 0.1  # 4 kl(0.875, q) = log 2
    assert 4 * (
        0.875 * math.log(0.875 / upper) + 0.125 * math.log(0.125 / (1 - upper))
    ) == pytest.approx(math.log(2))
    assert upper < 0.875
    stakes = 0.99 * (np.arange(1, 17) / 16) ** 2 / (1 - bound)
    expected = np.zeros(16)
    for value in (0.25, 1.0, 0.0):
        detector.observe(flip(value))
        expected = (expected + 1) * (1 + stakes * (bound - value))
    assert np.exp(detector.log_values) == pytest.approx(expected)
    assert math.exp(detector.log_value) == pytest.approx(expected.mean())


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


def test_values_that_are_not_signals_are_refused():
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(DataError):
            make_detector().observe(value)
    # A mean of 0 cannot fall. Without that rule the detector would grow by 1 per observation, to 50 after 50.
    low = make_detector(error=0.001, slack=0.0, threshold=50.0)
    for _ in range(200):
        assert not low.observe(0.0)


def make_monitor(**options):
    return DriftMonitor(OnlineDriftSettings(**{"reference": 100, "run_length": 1000.0, **options}))


def test_a_change_is_detected_and_stays_detected_until_reset():
    rng = np.random.default_rng(0)
    monitor = make_monitor()
    for _ in range(1000):
        assert monitor.observe("success", float(rng.random() < 0.9)) is None
    alarms = [monitor.observe("success", float(rng.random() < 0.5)) for _ in range(200)]
    raised = [alarm for alarm in alarms if alarm is not None]
    assert len(raised) == 1 and "success falls" in str(raised[0]) and raised[0].usual > 0.8
    assert monitor.alarm == raised[0] and monitor.alarms == 1
    other = make_monitor()
    other.load_state_dict(monitor.state_dict())
    assert (
        other.state_dict() == monitor.state_dict()
        and other.compute_metrics() == monitor.compute_metrics()
    )
    other.reset()
    assert other.alarm is None and other.alarms == 1 and other.observe("success", 0.0) is None
    assert monitor.observe("nothing", 0.0) is None


@pytest.mark.parametrize(
    ("signal", "direction"),
    [
        ("confidence", "falls"),
        ("success", "falls"),
        ("length", "rises"),
        ("refusals", "rises"),
        ("kl", "rises"),
        ("champion_kl", "rises"),
        ("components", "rises"),
    ],
)
def test_each_signal_has_its_direction(signal, direction):
    usual, changed = (0.8, 0.2) if direction == "falls" else (0.2, 0.8)
    monitor = make_monitor()
    for value in [usual] * 500:
        assert monitor.observe(signal, value) is None
    assert any(monitor.observe(signal, changed) for _ in range(60))
    other = make_monitor()
    opposite = 2 * usual - changed
    if not 0 <= opposite <= 1:
        opposite = float(usual > 0.5)
    for value in [usual] * 100 + [opposite] * 500:
        assert other.observe(signal, value) is None  # a change in the opposite direction


def count_until_alarm(rng, share, length, run_length):
    """Count the observations between the reference and a false alarm, at most `length`."""
    detector = DriftDetector("falls", threshold=run_length, reference=100, slack=0.0, error=0.05)
    values = (rng.random(100 + length) < share).astype(float)
    for number, value in enumerate(values.tolist()):
        if detector.observe(value):
            return number - 99
    return length


def test_false_alarms_are_as_rare_as_stated():
    """Use the worst case: the usual mean is exactly the bound, so nothing of the slack is left."""
    rng = np.random.default_rng(1)
    times = []
    for _ in range(60):
        detector = DriftDetector("falls", threshold=50.0, reference=1, slack=0.0, error=1.0 - 1e-12)
        detector.count, detector.total = 1, 0.7  # the reference, as if the mean were known
        alarms = (n for n in range(1, 400) if detector.observe(float(rng.random() < 0.7)))
        times.append(next(alarms, 400))
    assert np.mean(times) >= 50  # a lower bound of the average, because times are capped at 400


@pytest.mark.slow
def test_the_run_length_with_measured_references():
    rng = np.random.default_rng(2)
    times = [count_until_alarm(rng, 0.7, 2000, run_length=200.0) for _ in range(100)]
    assert np.mean(times) >= 200


def test_the_limit_of_a_signal_is_its_bound_in_its_direction():
    falls, rises = (
        DriftDetector(direction, threshold=7e4, reference=200, slack=0.02, error=0.001)
        for direction in ("falls", "rises")
    )
    for number in range(200):
        falls.observe(float(number % 5 != 0))  # mean 0.8
        rises.observe(float(number % 5 == 0))  # mean 0.2
    # 200 kl(0.8, q) = log 1000 at q = 0.683
    assert falls.limit == pytest.approx(0.683 - 0.02, abs=1e-3)
    assert rises.limit == pytest.approx(1 - falls.limit)


@pytest.mark.parametrize(
    ("mean", "delay"), [(0.69, None), (0.6, 684), (0.5, 153), (0.4, 66), (0.2, 27)]
)
def test_delays_are_as_documented(mean, delay):
    """Check docs/online.md, Alarms: a signal of mean 0.8 with the default settings."""
    settings = OnlineDriftSettings()
    delays = []
    for seed in range(15):
        rng = np.random.default_rng(seed)
        monitor = DriftMonitor(settings)
        for number in range(200):
            monitor.observe("success", float(number % 5 != 0))
        values = (rng.random(1500) < mean).astype(float)
        alarms = (n for n, value in enumerate(values, 1) if monitor.observe("success", value))
        delays.append(next(alarms, math.inf))
    if delay is None:  # within the limit
        assert min(delays) == math.inf
    else:
        assert float(np.median(delays)) == pytest.approx(delay, rel=0.25)


def test_another_temperature_is_no_change():
    monitor = make_monitor(watched=("confidence", "length"))
    for number in range(3000):
        if number % 3 == 0:  # from the start on
            assert monitor.observe("confidence", 0.1, temperature=5.0) is None
        assert monitor.observe("confidence", 0.9, temperature=0.7) is None
    assert monitor.alarm is None and monitor.detectors["confidence"].count == 3000
    assert monitor.compute_metrics()["online/drift_left_out"] == 1000 - 34
    assert 0.6 < monitor.compute_metrics()["online/drift/confidence_limit"] < 0.9
    other = make_monitor(watched=("confidence", "length"))
    other.load_state_dict(monitor.state_dict())
    assert other.state_dict() == monitor.state_dict()
    assert any(other.observe("confidence", 0.1, temperature=0.7) for _ in range(100))


def test_many_temperatures_do_not_hide_the_usual_one():
    monitor = make_monitor(watched=("confidence",))
    for number in range(200):
        monitor.observe("confidence", 0.9)
        for other in range(3):
            monitor.observe("confidence", 0.1, temperature=2.0 + 3 * number + other)
    assert monitor.detectors["confidence"].total == pytest.approx(90)
    assert any(monitor.observe("confidence", 0.1) for _ in range(100))


def test_the_state_of_an_earlier_release_has_one_detector_for_all_temperatures():
    monitor = make_monitor(watched=("confidence",))
    for _ in range(150):
        monitor.observe("confidence", 0.9)
    state = monitor.state_dict()
    old = {
        "alarms": 0,
        "alarm": None,
        "detectors": {"confidence": state["detectors"]["confidence"][0][1]},
    }
    other = make_monitor(watched=("confidence",))
    other.load_state_dict(old)
    assert other.state_dict() == state
