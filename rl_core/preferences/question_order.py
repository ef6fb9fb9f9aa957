"""Question order: repeat an earlier item, show one that others rated, or ask the most informative new one.

Information is measured with a reward model's uncertainty about pairs: the posterior of a linear head over the
difference of their states. N pairs, D features, G points of a grid.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import DataError
from rl_core.preferences.items import RatedItem
from rl_core.preferences.rating_journal import Rating, RatingJournal

MAX_FEATURES = 128
CHOICE_LABELS = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}
MIN_QUESTIONS_BEFORE_REPEAT = 10  # between an item and its repetition
# A rater's next pair is drawn from this many of the most informative ones, so that raters do not collide.
NUM_CANDIDATES = 16
FloatArray = NDArray[np.float64]
_GRID_G = np.linspace(-8.0, 8.0, 321)  # in standard deviations
_LEAST_VARIANCE = 1e-12


def compute_principal_axes(
    states_ND: NDArray[np.floating], max_features: int = MAX_FEATURES
) -> FloatArray:
    """Return the projection [D, K] of differences of states onto at most `max_features` principal axes.

    Projected features have a mean square length of 1. The mean is not subtracted: a swapped pair has negated features.
    Raises: DataError unless the states are a finite matrix.
    """
    states = np.asarray(states_ND, dtype=np.float64)
    if states.ndim != 2 or not np.isfinite(states).all():
        raise DataError(f"states: shape {states.shape}, expected finite [N, D]")
    axes_DK = np.eye(states.shape[1])
    if states.shape[1] > max_features:
        axes_DK = np.linalg.eigh(states.T @ states)[1][:, -max_features:]
    length = math.sqrt(float(((states @ axes_DK) ** 2).sum(1).mean())) if len(states) else 1.0
    return np.asarray(axes_DK / (length or 1.0))


def project_head_on_axes(head_D: NDArray[np.floating], axes_DK: FloatArray) -> FloatArray:
    """Return the linear head [K] on the projected features that scores as `head_D` does, up to the projection error."""
    return np.asarray(np.linalg.lstsq(axes_DK, np.asarray(head_D, np.float64), rcond=None)[0])


def compute_label_moments(mean: float, variance: float, label: float) -> tuple[float, float]:
    """Return mean and variance of N(a; mean, variance) sigmoid(a)^label sigmoid(-a)^(1 - label), normalised.

    By a sum over a grid that spans 8 standard deviations on each side.
    """
    a_G = mean + math.sqrt(variance) * _GRID_G
    log_weight_G = label * a_G - np.logaddexp(0.0, a_G) - 0.5 * _GRID_G**2
    weight_G = np.exp(log_weight_G - log_weight_G.max())
    weight_G /= weight_G.sum()
    new_mean = float(weight_G @ a_G)
    return new_mean, float(weight_G @ (a_G - new_mean) ** 2)


class RewardPosterior:
    """Gaussian posterior of the head w under p(first better) = sigmoid(w . x), updated label by label.

    An update takes mean and variance of w . x from the exact posterior of one label (assumed density filtering, by
    numerical integration): exact after one label; after several, at a prior variance of 4, the mean is within 0.1
    posterior standard deviations and the variance within 30% (tested on labels of one direction). A tie counts as a
    label of 1/2. Pairs are chosen by the mutual information of label and head (BALD).
    Source: MacKay 1992, Neural Computation 4(4), sec. 3 (the probit scaling); Houlsby et al. 2011, arXiv:1112.5745,
        eq. 3 (the closed form); Opper 1998, "A Bayesian approach to on-line learning" (assumed density filtering).
    """

    def __init__(
        self,
        features_ND: FloatArray,
        *,
        prior_variance: float = 4.0,
        mean_D: FloatArray | None = None,
    ) -> None:
        """Start from the prior.

        Args:
            features_ND: of the pairs, first minus second answer, projected on their axes.
            mean_D: prior mean of the head; None = 0.
        """
        self._x_ND = np.asarray(features_ND, dtype=np.float64)
        self._prior_variance = prior_variance
        if mean_D is None:
            mean_D = np.zeros(self._x_ND.shape[1])
        self._prior_D = np.array(mean_D, dtype=np.float64)
        self.refit(())

    def __len__(self) -> int:
        return len(self._x_ND)

    def update(self, pair: int, label: float) -> None:
        """Learn that the first answer of a pair is better (1), the second (0), or neither (1/2)."""
        scale, gain_D = self._update_mean_and_covariance(pair, label)
        self._variance_N -= scale * (self._x_ND @ gain_D) ** 2
        np.maximum(self._variance_N, 0, out=self._variance_N)

    def refit(self, labels: Iterable[tuple[int, float]]) -> None:
        """Restart from the prior and learn these pairs and labels in order, as after an undo."""
        self.mean_D = self._prior_D.copy()
        self._covariance_DD = np.eye(len(self.mean_D)) * self._prior_variance
        for pair, label in labels:
            self._update_mean_and_covariance(pair, label)
        self._variance_N = np.maximum(((self._x_ND @ self._covariance_DD) * self._x_ND).sum(1), 0)

    def _update_mean_and_covariance(self, pair: int, label: float) -> tuple[float, FloatArray]:
        """Update mean and covariance by a label; return scale and gain.

        The covariance decreases by scale gain gain^T.
        """
        x_D = self._x_ND[pair]
        gain_D = self._covariance_DD @ x_D
        mean, variance = float(self.mean_D @ x_D), float(x_D @ gain_D)
        if variance <= _LEAST_VARIANCE:  # equal answers, or a direction that is known
            return 0.0, gain_D
        new_mean, new_variance = compute_label_moments(mean, variance, label)
        scale = (variance - new_variance) / variance**2
        self._covariance_DD -= scale * np.outer(gain_D, gain_D)
        self.mean_D += gain_D * ((new_mean - mean) / variance)
        return scale, gain_D

    def compute_information(self) -> FloatArray:
        """Return the mutual information [N], in bits, between each pair's label and the head."""
        # Sigmoid as a probit: sigmoid(a) ~ Phi(sqrt(pi / 8) a).
        mean_N = self._x_ND @ self.mean_D * math.sqrt(math.pi / 8)
        variance_N = self._variance_N * math.pi / 8
        marginal_N = _compute_normal_cdf(mean_N / np.sqrt(variance_N + 1))
        c2 = math.pi * math.log(2) / 2
        exponential_N = np.exp(-(mean_N**2) / (2 * (variance_N + c2)))
        expected_N = math.sqrt(c2) * exponential_N / np.sqrt(variance_N + c2)
        return np.asarray(_compute_binary_entropy(marginal_N) - expected_N)

    def compute_probabilities(self, features_ND: FloatArray | None = None) -> FloatArray:
        """Return the probability [N], at the posterior's mean, that the first answer is better.

        Args:
            features_ND: of other pairs; None = those of the posterior.
        """
        x_ND = self._x_ND if features_ND is None else features_ND
        return np.asarray(1 / (1 + np.exp(-np.clip(x_ND @ self.mean_D, -30, 30))))


def _compute_binary_entropy(p_N: FloatArray) -> FloatArray:
    p_N = np.clip(p_N, 1e-12, 1 - 1e-12)
    return np.asarray(-(p_N * np.log2(p_N) + (1 - p_N) * np.log2(1 - p_N)))


def _compute_normal_cdf(z_N: FloatArray) -> FloatArray:
    return np.asarray([0.5 * math.erfc(-value / math.sqrt(2)) for value in z_N.tolist()])


@dataclass(frozen=True, slots=True)
class RatingQuestion:
    """Item shown to one rater."""

    item_index: int
    left: int  # answer shown on the left: 0 = the item's first
    times_asked: int  # to this rater about this item, including now


class QuestionOrder:
    """Order of the items for each rater.

    Equal ratings give equal questions: a reloaded page shows the same one. A fixed share `overlap` of the items, chosen
    by
    their ids, is for all raters; each other item is for one rater. Skipped items are offered to others.
    """

    def __init__(
        self,
        items: Sequence[RatedItem],
        journal: RatingJournal,
        *,
        overlap: float,
        repeat: float,
        seed: int,
        posterior: RewardPosterior | None = None,
    ) -> None:
        """Restore the order from the journal.

        Args:
            posterior: over the items in their order; None = random order.
        """
        self.items, self._journal, self._posterior = items, journal, posterior
        self._repeat, self._seed = repeat, seed
        self._item_indices = {item.id: index for index, item in enumerate(items)}
        shuffled = list(range(len(items)))
        random.Random(seed).shuffle(shuffled)
        self._shared = [
            index for index in shuffled if self._draw_uniform("shared", items[index].id) < overlap
        ]
        is_shared = set(self._shared)
        self._unshared = [index for index in shuffled if index not in is_shared]
        self._num_opinions: Counter[int] = Counter()  # by item, of all raters
        self._answered: dict[str, Counter[int]] = {}  # by rater and item, including skipped ones
        # By rater, with the number of the rater's ratings before the question.
        self._open_questions: dict[str, tuple[int, RatingQuestion]] = {}
        self._lock = threading.Lock()
        for rating in journal:
            self._count_rating(rating)
        self._refit_posterior()

    def record_rating(self, rating: Rating) -> None:
        """Record a rating that is in the journal."""
        with self._lock:
            index, label = self._count_rating(rating), CHOICE_LABELS.get(rating.choice)
            if self._posterior is not None and index is not None and label is not None:
                self._posterior.update(index, label)

    def _count_rating(self, rating: Rating) -> int | None:
        """Count a rating; return the index of its item, or None if the item is unknown."""
        index = self._item_indices.get(rating.item)
        self._open_questions.pop(rating.rater, None)
        if index is not None:
            self._answered.setdefault(rating.rater, Counter())[index] += 1
            self._num_opinions[index] += rating.is_opinion
        return index

    def _refit_posterior(self) -> None:
        """Refit the posterior to the journal's ratings."""
        if self._posterior is None:
            return
        labels = []
        for rating in self._journal:
            index, label = self._item_indices.get(rating.item), CHOICE_LABELS.get(rating.choice)
            if index is not None and label is not None:
                labels.append((index, label))
        self._posterior.refit(labels)

    def undo_rating(self, rating: Rating) -> RatingQuestion | None:
        """Undo a rating that was removed from the journal; its question becomes the rater's next one.

        Return None if its item is unknown; the rater's next question is then another one.
        """
        index = self._item_indices.get(rating.item)
        with self._lock:
            if index is None:
                self._open_questions.pop(rating.rater, None)
                return None
            self._answered[rating.rater][index] -= 1
            if rating.is_opinion:
                self._num_opinions[index] -= 1
            self._refit_posterior()
            question = RatingQuestion(index, rating.left, rating.asked)
            count = self._journal.count_ratings_of(rating.rater)
            self._open_questions[rating.rater] = (count, question)
        return question

    def choose_next_question(self, rater: str) -> RatingQuestion | None:
        """Return the rater's open question, or a new one; None if nothing is left."""
        with self._lock:
            count = self._journal.count_ratings_of(rater)
            open_count, open_question = self._open_questions.get(rater, (None, None))
            if open_question is not None and open_count == count:
                return open_question
            index = self._choose_item(rater, count)
            if index is None:
                return None
            item, left = self.items[index], 0
            times_asked = self._answered.get(rater, Counter())[index] + 1
            if len(item.answers) > 1:
                left = int(self._draw_uniform("side", rater, item.id, times_asked) < 0.5)
            question = RatingQuestion(index, left, times_asked)
            self._open_questions[rater] = (count, question)
            return question

    def _choose_item(self, rater: str, count: int) -> int | None:
        answered = self._answered.get(rater, Counter())
        rng = random.Random(f"{self._seed} {rater} {count}")
        if rng.random() < self._repeat:
            repeated = self._choose_repeated_item(rater, rng)
            if repeated is not None:
                return repeated
        shared = next((index for index in self._shared if not answered[index]), None)
        unshared = self._choose_unshared_item(rater, answered, rng)
        if shared is None or unshared is None:
            return unshared if shared is None else shared
        # Shared items are spread evenly, so that agreement is known over the complete period.
        share = len(self._shared) / len(self.items)
        return shared if rng.random() < share else unshared

    def _choose_repeated_item(self, rater: str, rng: random.Random) -> int | None:
        """Choose an item that this rater rated once, a while ago."""
        answered = self._answered.get(rater, Counter())
        earlier = self._journal.list_ratings_of(rater)[:-MIN_QUESTIONS_BEFORE_REPEAT]
        indices = [
            self._item_indices[rating.item]
            for rating in earlier
            if rating.is_opinion and rating.item in self._item_indices
        ]
        answered_once = [index for index in indices if answered[index] == 1]
        return rng.choice(answered_once) if answered_once else None

    def _choose_unshared_item(
        self, rater: str, answered: Counter[int], rng: random.Random
    ) -> int | None:
        """Choose an item that nobody has rated or is being asked about, and that this rater has not skipped."""
        asked_others = {
            question.item_index
            for name, (_, question) in self._open_questions.items()
            if name != rater
        }
        free = [
            index
            for index in self._unshared
            if not (self._num_opinions[index] or answered[index] or index in asked_others)
        ]
        if not free:
            return None
        if self._posterior is None:
            return free[0]
        information = self._posterior.compute_information()[free]
        num_candidates = min(NUM_CANDIDATES, max(1, len(free) // 20))
        candidates = information.argsort()[::-1][:num_candidates]
        return free[int(candidates[rng.randrange(len(candidates))])]

    def _draw_uniform(self, *key: object) -> float:
        """Return a pseudo-random number in [0, 1) determined by the key."""
        text = " ".join(map(str, (self._seed, *key)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
