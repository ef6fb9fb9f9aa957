"""A reward model's uncertainty about pairs: the posterior of a linear head over the difference of their states.

N pairs, D features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError

__all__ = ["MOST_FEATURES", "RewardPosterior", "head_on_axes", "principal_axes"]

MOST_FEATURES = 128
Array = NDArray[np.float64]


def principal_axes(states_ND: NDArray[np.floating], most: int = MOST_FEATURES) -> Array:
    """Projection [D, K] of differences of states onto at most `most` principal axes, with a mean square length of 1.

    No mean is taken off: a pair the other way round has the negative features.
    Raises: DataError for states that are no finite matrix.
    """
    states = np.asarray(states_ND, dtype=np.float64)
    if states.ndim != 2 or not np.isfinite(states).all():
        raise DataError(f"states: shape {states.shape}, expected finite [N, D]")
    axes_DK = np.eye(states.shape[1])
    if states.shape[1] > most:
        axes_DK = np.linalg.eigh(states.T @ states)[1][:, -most:]
    length = math.sqrt(float(((states @ axes_DK) ** 2).sum(1).mean())) if len(states) else 1.0
    return np.asarray(axes_DK / (length or 1.0))


def head_on_axes(head_D: NDArray[np.floating], axes_DK: Array) -> Array:
    """The linear head [K] on the projected features that scores as `head_D` does, as far as the axes hold it."""
    return np.asarray(np.linalg.lstsq(axes_DK, np.asarray(head_D, np.float64), rcond=None)[0])


class RewardPosterior:
    """Gaussian posterior of the head w under p(first better) = sigmoid(w . x), updated label by label.

    The update is one Newton step on the new label (an extended Kalman filter on the logistic likelihood); a tie counts
    as a label of 1/2. Pairs are chosen by the mutual information of label and head (BALD).
    Source: MacKay 1992, Neural Computation 4(4), sec. 3 (the probit scaling); Houlsby et al. 2011, arXiv:1112.5745,
        eq. 3 (the closed form); West et al. 1985, JASA 80(389) (dynamic generalised linear models).
    """

    def __init__(self, features_ND: Array, *, prior_variance: float = 4.0, mean_D: Array | None = None) -> None:
        """`features_ND`: of the pairs, first minus second answer, on their axes; `mean_D`: the head so far."""
        self._x_ND = np.asarray(features_ND, dtype=np.float64)
        self._prior_variance = prior_variance
        self._prior_D = np.zeros(self._x_ND.shape[1]) if mean_D is None else np.array(mean_D, dtype=np.float64)
        self.relearn(())

    def __len__(self) -> int:
        return len(self._x_ND)

    def update(self, pair: int, label: float) -> None:
        """Learn that the first answer of a pair is better (1), the second (0), or neither (1/2)."""
        scale, gain_D = self._learn(pair, label)
        self._variance_N -= scale * (self._x_ND @ gain_D) ** 2
        np.maximum(self._variance_N, 0, out=self._variance_N)

    def relearn(self, labels: Iterable[tuple[int, float]]) -> None:
        """Learn these pairs and labels, in order, and nothing else: as after a label was taken back."""
        self.mean_D = self._prior_D.copy()
        self._covariance_DD = np.eye(len(self.mean_D)) * self._prior_variance
        for pair, label in labels:
            self._learn(pair, label)
        self._variance_N = np.maximum(((self._x_ND @ self._covariance_DD) * self._x_ND).sum(1), 0)

    def _learn(self, pair: int, label: float) -> tuple[float, Array]:
        """Mean and covariance after a label; the covariance became smaller by the scale times the gain's square."""
        x_D = self._x_ND[pair]
        gain_D = self._covariance_DD @ x_D
        probability = 1 / (1 + math.exp(-float(np.clip(self.mean_D @ x_D, -30, 30))))
        curvature = probability * (1 - probability)
        scale = curvature / (1 + curvature * float(x_D @ gain_D))
        self._covariance_DD -= scale * np.outer(gain_D, gain_D)
        self.mean_D += (self._covariance_DD @ x_D) * (label - probability)
        return scale, gain_D

    def information(self) -> Array:
        """Mutual information [N], in bits, between each pair's label and the head."""
        # Sigmoid as a probit: sigmoid(a) ~ Phi(sqrt(pi / 8) a)
        mean_N, variance_N = self._x_ND @ self.mean_D * math.sqrt(math.pi / 8), self._variance_N * math.pi / 8
        whole_N = _entropy(_normal_cdf(mean_N / np.sqrt(variance_N + 1)))
        c2 = math.pi * math.log(2) / 2
        expected_N = math.sqrt(c2) * np.exp(-(mean_N**2) / (2 * (variance_N + c2))) / np.sqrt(variance_N + c2)
        return np.asarray(whole_N - expected_N)

    def probabilities(self, features_ND: Array | None = None) -> Array:
        """Probability [N] that the first answer is better, of the pairs or of others, at the posterior's mean."""
        x_ND = self._x_ND if features_ND is None else features_ND
        return np.asarray(1 / (1 + np.exp(-np.clip(x_ND @ self.mean_D, -30, 30))))


def _entropy(p_N: Array) -> Array:
    p_N = np.clip(p_N, 1e-12, 1 - 1e-12)
    return np.asarray(-(p_N * np.log2(p_N) + (1 - p_N) * np.log2(1 - p_N)))


def _normal_cdf(z_N: Array) -> Array:
    return np.asarray([0.5 * math.erfc(-value / math.sqrt(2)) for value in z_N.tolist()])
