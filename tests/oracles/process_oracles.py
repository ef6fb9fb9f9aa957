"""Process advantages written out step by step in numpy float64, from DeepSeekMath and PURE."""

import numpy as np


def draw_scores(seed: int) -> list[np.ndarray]:
    """Draw the scores of a group of completions with different numbers of steps; some are all equal."""
    rng = np.random.default_rng([20261130, seed])
    rows = [rng.standard_normal(rng.integers(1, 6)) for _ in range(rng.integers(1, 6))]
    return [row.round(1) * (seed % 7 != 0) for row in rows]


def process_advantages(scores: list[np.ndarray], aggregate: str, method: str) -> list[np.ndarray]:
    """Compute the advantage of every step of a group."""
    flat = [float(score) for row in scores for score in row]
    count, mean = len(flat), sum(flat) / len(flat)
    deviation = 0.0
    if count > 1:
        deviation = np.sqrt(sum((score - mean) ** 2 for score in flat) / (count - 1))

    def normalise(score: float) -> float:
        if count == 1:
            return 0.0
        if method == "dr_grpo":
            return score - mean
        if method == "rloo":
            return score - (sum(flat) - score) / (count - 1)
        return 0.0 if deviation < 1e-3 else (score - mean) / (deviation + 1e-4)

    result = []
    for row in scores:
        values = [normalise(float(score)) for score in row]
        following = [values[n:] for n in range(len(values))]
        reduce = {"sum": sum, "min": min, "mean": lambda part: sum(part) / len(part)}[aggregate]
        result.append(np.array([reduce(part) for part in following]))
    return result
