"""A small seeded run of `tests/benchmarks/promotion_simulation.py`: repeated attempts of no-better challengers."""

import importlib.util
from pathlib import Path

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
