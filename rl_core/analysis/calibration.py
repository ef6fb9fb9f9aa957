"""Reward model calibration: reliability, ranking, correlation with true success.

Suffixes: N scored trajectories, B pairs of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rl_core.analysis.statistics import Rate, wilson_interval
from rl_core.errors import DataError

__all__ = ["Bin", "Calibration", "calibrate", "correlation", "ranking", "reliability"]

BINS = 10  # maximum; fewer if there are fewer than PAIRS_OF_BIN pairs per bin
PAIRS_OF_BIN = 15
PAIRS_OF_EPISODE = 64  # maximum, so that one episode with many samples does not dominate the result


class Bin(NamedTuple):
    """Pairs of similar confidence."""

    confidence: float  # mean, in [0.5, 1]
    right: Rate  # share ranked correctly (a tie counts half)


@dataclass(frozen=True)
class Calibration:
    """Calibration of a reward model on trajectories with known success.

    Bradley-Terry scores are defined up to an offset: only differences on the same episode are meaningful,
    p(a beats b) = sigmoid(s_a - s_b). Calibration is therefore measured on (success, failure) pairs of one episode.
    """

    scores: list[float]  # [N]
    successes: list[bool]  # [N]
    bins: list[Bin]  # [] without pairs
    ece: float | None  # expected calibration error; None without pairs
    accuracy: Rate | None  # of all pairs
    correlation: float | None  # of score and success; None if either is constant
    auc: float | None  # P(random success outscores random failure), over all episodes
    pairs: int

    def metrics(self) -> dict[str, float]:
        """Scalars for tracking, without undefined ones."""
        values = {
            "ece": self.ece,
            "accuracy": self.accuracy.rate if self.accuracy else None,
            "correlation": self.correlation,
            "auc": self.auc,
            "pairs": float(self.pairs),
            "trajectories": float(len(self.scores)),
        }
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Plain dict, without the individual scores."""
        row = {name: value for name, value in asdict(self).items() if name not in ("scores", "successes", "bins")}
        row["accuracy"] = self.accuracy._asdict() if self.accuracy else None
        row["bins"] = [{"confidence": b.confidence, "right": b.right._asdict()} for b in self.bins]
        return row | {"trajectories": len(self.scores)}


def calibrate(scores: Sequence[float], successes: Sequence[bool], episodes: Sequence[Hashable]) -> Calibration:
    """Calibration of one reward model.

    Args:
        scores: [N], raw. successes: [N], true. episodes: [N], within which pairs are formed.
    Raises: DataError if lengths differ, the input is empty, or a score is not finite.
    """
    if not len(scores) == len(successes) == len(episodes) or not len(scores):
        raise DataError(f"calibrate: {len(scores)} scores, {len(successes)} successes, {len(episodes)} episodes")
    scores_N = np.asarray(scores, dtype=np.float64)
    if not np.isfinite(scores_N).all():
        raise DataError("calibrate: scores must be finite")
    margins_B = _margins(scores, successes, episodes)
    num_bins = max(1, min(BINS, len(margins_B) // PAIRS_OF_BIN))
    bins, ece = reliability(margins_B, num_bins) if margins_B else ([], None)
    right = sum(1.0 if margin > 0 else 0.5 * (margin == 0) for margin in margins_B)
    accuracy = None
    if margins_B:
        accuracy = Rate(right / len(margins_B), *wilson_interval(right, len(margins_B)), len(margins_B))
    flags_N = np.asarray(successes, dtype=bool)
    return Calibration(
        scores=[float(score) for score in scores],
        successes=[bool(success) for success in successes],
        bins=bins,
        ece=ece,
        accuracy=accuracy,
        correlation=correlation(scores_N, flags_N),
        auc=ranking(scores_N[flags_N], scores_N[~flags_N]),
        pairs=len(margins_B),
    )


def reliability(margins_B: ArrayLike, num_bins: int) -> tuple[list[Bin], float]:
    """Reliability bins and expected calibration error, from margins (score of the success - of the failure).

    Confidence in the predicted order is c = sigmoid(|margin|); equal-width bins over [0.5, 1], empty ones omitted.
    ECE = sum over bins of n_b / B |mean c - accuracy|. A tie counts half.
    Returns: bins in order of confidence; ECE in [0, 1].
    Raises: DataError without margins.
    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    margins = np.asarray(margins_B, dtype=np.float64)
    if not margins.size or num_bins < 1:
        raise DataError(f"reliability: {margins.size} pairs in {num_bins} bins; at least one of each is needed")
    sure = 1 / (1 + np.exp(-np.abs(margins)))
    right = (margins > 0) + 0.5 * (margins == 0)
    place = np.minimum(((sure - 0.5) * 2 * num_bins).astype(int), num_bins - 1)
    bins, ece = [], 0.0
    for number in range(num_bins):
        inside = place == number
        count = int(inside.sum())
        if not count:
            continue
        confidence, share = float(sure[inside].mean()), float(right[inside].mean())
        low, high = wilson_interval(share * count, count)
        bins.append(Bin(confidence, Rate(share, low, high, count)))
        ece += count / margins.size * abs(confidence - share)
    return bins, ece


def correlation(values_N: ArrayLike, flags_N: ArrayLike) -> float | None:
    """Point-biserial correlation (Pearson's with a binary variable); None if either is constant."""
    values, flags = np.asarray(values_N, dtype=np.float64), np.asarray(flags_N, dtype=np.float64)
    a, b = values - values.mean(), flags - flags.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-12 * max(1.0, float(np.abs(values).max())) else None


def ranking(successes_N: ArrayLike, failures_N: ArrayLike) -> float | None:
    """P(score of a random success > that of a random failure), ties half: the area under the ROC curve.

    Returns: None without a success or without a failure.
    Source: Mann and Whitney 1947, doi:10.1214/aoms/1177730491.
    """
    high, low = np.asarray(successes_N, dtype=np.float64), np.sort(np.asarray(failures_N, dtype=np.float64))
    if not high.size or not low.size:
        return None
    below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
    return float((below + upto).sum() / 2 / (high.size * low.size))


def _margins(scores: Sequence[float], successes: Sequence[bool], episodes: Sequence[Hashable]) -> list[float]:
    """Score of the success minus score of the failure, for pairs on the same episode."""
    groups: dict[Hashable, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for score, success, episode in zip(scores, successes, episodes, strict=True):
        groups[episode][bool(success)].append(float(score))
    margins: list[float] = []
    for failures, wins in groups.values():
        margins += [win - failure for win in wins for failure in failures][:PAIRS_OF_EPISODE]
    return margins
