"""A small seeded run of `tests/benchmarks/promotion_simulation.py`: repeated attempts of no-better challengers."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parent / "benchmarks" / "promotion_simulation.py"


def load_benchmark():
    spec = importlib.util.spec_from_file_location("promotion_simulation", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wrong_promotions_stay_below_alpha_over_all_attempts_on_the_same_episodes():
    """Check the bound of 5%, which holds for the chance itself; 100 plays lie within 4 deviations (2.2 points each)."""
    simulation = load_benchmark()
    shares = simulation.simulate_wrong_promotions(
        repetitions=100, episodes=60, seed=1, attempts=(1, 10)
    )
    assert shares["spend"][10] <= 0.05 + 4 * 0.022
    assert shares["interval"][10] > shares["spend"][10]  # what the interval alone lets through
    assert shares["interval"][1] <= 0.1 and shares["fresh"][1] <= 0.05 + 4 * 0.022


def test_a_real_gain_is_detected_on_enough_episodes_and_seldom_on_few():
    simulation = load_benchmark()
    few, many = (simulation.simulate_power(20, episodes, 0.15, seed=0) for episodes in (60, 400))
    assert many["1"] >= 0.9 and many["10"] >= 0.5
    assert few["1"] < many["1"] and many["10"] <= many["2"] <= many["1"]


@pytest.mark.slow
def test_the_level_of_graded_outcomes_is_as_documented():
    """Check docs/benchmarks/online.md: it holds for symmetric differences and many episodes, not for rare losses."""
    simulation = load_benchmark()
    error = (0.025 * 0.975 / 1000) ** 0.5
    assert simulation.simulate_graded_level("symmetric", 50, 1000, seed=1) <= 0.025 + 4 * error
    assert simulation.simulate_graded_level("rare gains", 50, 1000, seed=1) <= 0.025 + 4 * error
    assert 0.03 <= simulation.simulate_graded_level("beta", 50, 1000, seed=1) <= 0.06
    assert 0.06 <= simulation.simulate_graded_level("rare losses", 50, 1000, seed=1) <= 0.13
    many = simulation.simulate_graded_level("rare losses", 1000, 200, seed=1)
    assert many <= 0.025 + 4 * (0.025 * 0.975 / 200) ** 0.5
