"""Wrong promotions over repeated attempts on the same held-out episodes, and gains that the gate finds.

python tests/benchmarks/promotion_simulation.py [--repetitions 2000] [--power-repetitions 1000] [--episodes 500]

Episodes have difficulties p ~ Beta(2, 2) and every model tosses a separate coin on each, so challengers without a gain
have the
champion's success rate of 50% in the mean and win 20% of the episodes, as they lose 20%. Each repetition plays up to 50
such challengers against one champion on one set of episodes, one after the other, until one is promoted. `interval` is
the gate with the interval alone (lower bound above 0); the others are the gate of `tasks/stages/promotion_gate.py` with
its three settings of `repeated_attempts`. For `fresh` every attempt has new episodes.

Graded outcomes: how often the test rejects for models of equal mean, by the distribution of an episode's difference.

Power: share of single comparisons that are promoted where the challenger gains so many points.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import numpy as np

from rl_core.analysis.significance_tests import run_gain_test
from rl_core.evaluation import Evaluation, summarize_trajectories
from rl_core.types import Trajectory
from tasks.config import PromotionSettings
from tasks.stages.promotion_gate import decide_promotion

ATTEMPTS = (1, 5, 10, 50)
GRADED_SIZES = {50: 1000, 200: 1000, 1000: 300}  # episodes: comparisons
# Differences of an episode between two models of equal mean, as draws of so many.
GRADED = {
    "symmetric": lambda rng, n: rng.choice([-0.5, -0.25, 0, 0.25, 0.5], n),
    "beta": lambda rng, n: np.round(0.2 - rng.beta(0.5, 2, n), 2),
    "rare losses": lambda rng, n: np.where(rng.random(n) < 0.1, -0.9, 0.1),
    "rare gains": lambda rng, n: np.where(rng.random(n) < 0.1, 0.9, -0.1),
}
GATES = ("interval", "off", "spend", "fresh")
SIZES = (200, 500, 1000)
GAINS = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15)


def make_evaluation(successes: Sequence[int]) -> Evaluation:
    """Make an evaluation with these outcomes of episodes 0, 1, 2, ..."""
    return summarize_trajectories(
        Trajectory(
            environment="e",
            level="l",
            kind="k",
            seed=seed,
            prompt="",
            target="",
            success=bool(won),
            reward=float(won),
        )
        for seed, won in enumerate(successes)
    )


def is_promoted(gate: str, episodes: int, wins: int, losses: int, attempt: int) -> bool:
    """Return the gate's answer to so many better and worse episodes; it depends on nothing else."""
    promoted, low = _decide(episodes, wins, losses, 1)
    if gate == "interval":
        return low > 0
    # The level falls with the attempt: what does not pass the first would pass none.
    return promoted and (
        gate != "spend" or attempt == 1 or _decide(episodes, wins, losses, attempt)[0]
    )


@functools.cache
def _decide(episodes: int, wins: int, losses: int, attempt: int) -> tuple[bool, float]:
    """Return the decision of the gate with its defaults, and the interval's lower bound."""
    same = episodes - wins - losses
    ours = make_evaluation([1] * wins + [0] * losses + [0] * same)
    theirs = make_evaluation([0] * wins + [1] * losses + [0] * same)
    promoted, _, numbers = decide_promotion(
        ours, theirs, PromotionSettings(), 1, seed=0, attempt=attempt
    )
    return promoted, numbers["gain_low"]


def simulate_wrong_promotions(
    repetitions: int, episodes: int, seed: int, attempts: Sequence[int] = ATTEMPTS
) -> dict[str, dict[int, float]]:
    """Return the share of repetitions with a promotion within so many attempts, by gate."""
    rng = np.random.default_rng(seed)
    first = {gate: np.full(repetitions, max(attempts) + 1) for gate in GATES}
    for repetition in range(repetitions):
        difficulty = rng.beta(2, 2, episodes)
        champion = rng.random(episodes) < difficulty
        for attempt in range(1, max(attempts) + 1):
            counts = _play(rng, difficulty, difficulty, champion)
            difficulties = rng.beta(2, 2, episodes)
            fresh = _play(rng, difficulties, difficulties, rng.random(episodes) < difficulties)
            for gate in GATES:
                wins, losses = fresh if gate == "fresh" else counts
                number = 1 if gate == "fresh" else attempt
                if first[gate][repetition] > attempt and is_promoted(
                    gate, episodes, wins, losses, number
                ):
                    first[gate][repetition] = attempt
    return {
        gate: {k: float((attempts_needed <= k).mean()) for k in attempts}
        for gate, attempts_needed in first.items()
    }


def _play(
    rng: np.random.Generator, difficulty: np.ndarray, chances: np.ndarray, champion: np.ndarray
) -> tuple[int, int]:
    challenger = rng.random(len(difficulty)) < chances
    return int((challenger & ~champion).sum()), int((~challenger & champion).sum())


def simulate_power(repetitions: int, episodes: int, gain: float, seed: int) -> dict[str, float]:
    """Return the share of comparisons that find a gain of so many points, at the first, second and tenth attempt."""
    rng = np.random.default_rng([seed, episodes, round(1000 * gain)])
    counts = {"interval": 0, "1": 0, "2": 0, "10": 0}
    for _ in range(repetitions):
        difficulty = rng.beta(2, 2, episodes)
        raised = difficulty + 2 * gain * (1 - difficulty)  # in the mean 2 gain (1 - 1/2) = gain
        wins, losses = _play(rng, difficulty, raised, rng.random(episodes) < difficulty)
        counts["interval"] += is_promoted("interval", episodes, wins, losses, 1)
        for attempt in (1, 2, 10):
            counts[str(attempt)] += is_promoted("spend", episodes, wins, losses, attempt)
    return {name: count / repetitions for name, count in counts.items()}


def simulate_graded_level(kind: str, episodes: int, repetitions: int, seed: int) -> float:
    """Return the share of comparisons of models of equal mean that the test rejects at 2.5%."""
    rng = np.random.default_rng([seed, episodes])
    rejected = 0
    for _ in range(repetitions):
        differences = GRADED[kind](rng, episodes)
        rejected += run_gain_test(differences, level=0.025).p_value <= 0.025
    return rejected / repetitions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    for name, default in (
        ("repetitions", 2000),
        ("power-repetitions", 1000),
        ("episodes", 500),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("graded outcomes: level of the test at 2.5%, by episodes")
    for kind in GRADED:
        levels = [simulate_graded_level(kind, n, r, options.seed) for n, r in GRADED_SIZES.items()]
        print(f"| {kind} | " + " | ".join(f"{level:.1%}" for level in levels) + " |", flush=True)
    print(
        f"wrong promotions within so many attempts, {options.episodes} episodes, {options.repetitions} repetitions"
    )
    print("| gate | " + " | ".join(map(str, ATTEMPTS)) + " |")
    for gate, shares in simulate_wrong_promotions(
        options.repetitions, options.episodes, options.seed
    ).items():
        print(
            f"| {gate} | " + " | ".join(f"{share:.1%}" for share in shares.values()) + " |",
            flush=True,
        )
    print(f"\npower, {options.power_repetitions} repetitions: interval alone; attempt 1; 2; 10")
    for episodes in SIZES:
        for gain in GAINS:
            power_shares = simulate_power(options.power_repetitions, episodes, gain, options.seed)
            print(
                f"| {episodes} | {gain:.0%} | "
                + " | ".join(f"{share:.0%}" for share in power_shares.values())
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
