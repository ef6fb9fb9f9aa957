"""A reward model's uncertainty about pairs: the posterior of a linear head over the difference of their states.

N pairs, D features.

The next item that a person is asked about: again, one that others have rated, or the most informative new one.
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
FloatArray = NDArray[np.float64]


def compute_principal_axes(
    states_ND: NDArray[np.floating], max_features: int = MAX_FEATURES
) -> FloatArray:
    """Projection [D, K] of differences of states onto at most `most` principal axes, with a mean square length of 1.

    No mean is taken off: a pair the other way round has the negative features.
    Raises: DataError for states that are no finite matrix.
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
    """The linear head [K] on the projected features that scores as `head_D` does, as far as the axes hold it."""
    return np.asarray(np.linalg.lstsq(axes_DK, np.asarray(head_D, np.float64), rcond=None)[0])


class RewardPosterior:
    """Gaussian posterior of the head w under p(first better) = sigmoid(w . x), updated label by label.

    The update is one Newton step on the new label (an extended Kalman filter on the logistic likelihood); a tie counts
    as a label of 1/2. Pairs are chosen by the mutual information of label and head (BALD).
    Source: MacKay 1992, Neural Computation 4(4), sec. 3 (the probit scaling); Houlsby et al. 2011, arXiv:1112.5745,
        eq. 3 (the closed form); West et al. 1985, JASA 80(389) (dynamic generalised linear models).
    """

    def __init__(
        self,
        features_ND: FloatArray,
        *,
        prior_variance: float = 4.0,
        mean_D: FloatArray | None = None,
    ) -> None:
        """`features_ND`: of the pairs, first minus second answer, on their axes; `mean_D`: the head so far."""
        self._x_ND = np.asarray(features_ND, dtype=np.float64)
        self._prior_variance = prior_variance
        self._prior_D = (
            np.zeros(self._x_ND.shape[1]) if mean_D is None else np.array(mean_D, dtype=np.float64)
        )
        self.refit(())

    def __len__(self) -> int:
        return len(self._x_ND)

    def update(self, pair: int, label: float) -> None:
        """Learn that the first answer of a pair is better (1), the second (0), or neither (1/2)."""
        scale, gain_D = self._update_mean_and_covariance(pair, label)
        self._variance_N -= scale * (self._x_ND @ gain_D) ** 2
        np.maximum(self._variance_N, 0, out=self._variance_N)

    def refit(self, labels: Iterable[tuple[int, float]]) -> None:
        """Learn these pairs and labels, in order, and nothing else: as after a label was taken back."""
        self.mean_D = self._prior_D.copy()
        self._covariance_DD = np.eye(len(self.mean_D)) * self._prior_variance
        for pair, label in labels:
            self._update_mean_and_covariance(pair, label)
        self._variance_N = np.maximum(((self._x_ND @ self._covariance_DD) * self._x_ND).sum(1), 0)

    def _update_mean_and_covariance(self, pair: int, label: float) -> tuple[float, FloatArray]:
        """Mean and covariance after a label; the covariance became smaller by the scale times the gain's square."""
        x_D = self._x_ND[pair]
        gain_D = self._covariance_DD @ x_D
        probability = 1 / (1 + math.exp(-float(np.clip(self.mean_D @ x_D, -30, 30))))
        curvature = probability * (1 - probability)
        scale = curvature / (1 + curvature * float(x_D @ gain_D))
        self._covariance_DD -= scale * np.outer(gain_D, gain_D)
        self.mean_D += (self._covariance_DD @ x_D) * (label - probability)
        return scale, gain_D

    def compute_information(self) -> FloatArray:
        """Mutual information [N], in bits, between each pair's label and the head."""
        # Sigmoid as a probit: sigmoid(a) ~ Phi(sqrt(pi / 8) a)
        mean_N, variance_N = (
            self._x_ND @ self.mean_D * math.sqrt(math.pi / 8),
            self._variance_N * math.pi / 8,
        )
        whole_N = _compute_binary_entropy(_compute_normal_cdf(mean_N / np.sqrt(variance_N + 1)))
        c2 = math.pi * math.log(2) / 2
        expected_N = (
            math.sqrt(c2)
            * np.exp(-(mean_N**2) / (2 * (variance_N + c2)))
            / np.sqrt(variance_N + c2)
        )
        return np.asarray(whole_N - expected_N)

    def compute_probabilities(self, features_ND: FloatArray | None = None) -> FloatArray:
        """Probability [N] that the first answer is better, of the pairs or of others, at the posterior's mean."""
        x_ND = self._x_ND if features_ND is None else features_ND
        return np.asarray(1 / (1 + np.exp(-np.clip(x_ND @ self.mean_D, -30, 30))))


def _compute_binary_entropy(p_N: FloatArray) -> FloatArray:
    p_N = np.clip(p_N, 1e-12, 1 - 1e-12)
    return np.asarray(-(p_N * np.log2(p_N) + (1 - p_N) * np.log2(1 - p_N)))


def _compute_normal_cdf(z_N: FloatArray) -> FloatArray:
    return np.asarray([0.5 * math.erfc(-value / math.sqrt(2)) for value in z_N.tolist()])


CHOICE_LABELS = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}
MIN_QUESTIONS_BEFORE_REPEAT = 10  # questions between an item and its repetition, at least
NUM_CANDIDATES = 16  # most informative pairs among which a person's next one is drawn, so that raters do not collide


@dataclass(frozen=True, slots=True)
class RatingQuestion:
    """An item for one person, now."""

    item_index: int  # of the item
    left: int  # answer that stands left: 0 = the item's first
    times_asked: int  # how often this person is asked about it, this time included


class QuestionOrder:
    """Order of the items for each person.

    The same ratings give the same questions: a page that is loaded again shows the same one.

    A fixed share `overlap` of the items, by their ids, is for everybody; the others are for one person each. Skipped
    items are for others.
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
        """`posterior`: over the items, in their order; None = the order is random."""
        self.items, self._journal, self._posterior = items, journal, posterior
        self._repeat, self._seed = repeat, seed
        self._item_indices = {item.id: place for place, item in enumerate(items)}
        shuffled = list(range(len(items)))
        random.Random(seed).shuffle(shuffled)
        self._shared = [
            place for place in shuffled if self._draw_uniform("shared", items[place].id) < overlap
        ]
        is_shared = set(self._shared)
        self._unshared = [place for place in shuffled if place not in is_shared]
        self._rated: Counter[int] = Counter()  # opinions of each item, of whomever
        self._by_rater: dict[str, Counter[int]] = {}  # questions answered, skipped ones included
        # with the number of ratings before it
        self._open_questions: dict[str, tuple[int, RatingQuestion]] = {}
        self._lock = threading.Lock()
        for rating in journal:
            self._count_rating(rating)
        self._refit_posterior()

    def record_rating(self, rating: Rating) -> None:
        """Note a rating that the journal has."""
        with self._lock:
            place = self._count_rating(rating)
            if self._posterior is not None and place is not None and rating.choice in CHOICE_LABELS:
                self._posterior.update(place, CHOICE_LABELS[rating.choice])

    def _count_rating(self, rating: Rating) -> int | None:
        """Count a rating; place of its item, None = it is not among the items."""
        place = self._item_indices.get(rating.item)
        self._open_questions.pop(rating.rater, None)
        if place is not None:
            self._by_rater.setdefault(rating.rater, Counter())[place] += 1
            self._rated[place] += rating.is_opinion
        return place

    def _refit_posterior(self) -> None:
        """Have the posterior learn from the journal's ratings alone."""
        if self._posterior is not None:
            known = [
                (self._item_indices.get(rating.item), CHOICE_LABELS.get(rating.choice))
                for rating in self._journal
            ]
            self._posterior.refit(
                (place, label) for place, label in known if place is not None and label is not None
            )

    def undo_rating(self, rating: Rating) -> RatingQuestion | None:
        """Undo a rating that the journal no longer has: its question is the person's next one.

        None = its item is no longer among the items; the person's next question is another one.
        """
        place = self._item_indices.get(rating.item)
        with self._lock:
            if place is None:
                self._open_questions.pop(rating.rater, None)
                return None
            self._by_rater[rating.rater][place] -= 1
            if rating.is_opinion:
                self._rated[place] -= 1
            self._refit_posterior()
            question = RatingQuestion(place, rating.left, rating.asked)
            self._open_questions[rating.rater] = (
                self._journal.count_ratings_of(rating.rater),
                question,
            )
        return question

    def choose_next_question(self, rater: str) -> RatingQuestion | None:
        """The person's question: the open one, or a new one; None = nothing is left."""
        with self._lock:
            count = self._journal.count_ratings_of(rater)
            known = self._open_questions.get(rater)
            if known is not None and known[0] == count:
                return known[1]
            place = self._choose_item(rater, count)
            if place is None:
                return None
            asked = self._by_rater.get(rater, Counter())[place] + 1
            left = (
                int(self._draw_uniform("side", rater, self.items[place].id, asked) < 0.5)
                if self._count_answers(place) > 1
                else 0
            )
            question = RatingQuestion(place, left, asked)
            self._open_questions[rater] = (count, question)
            return question

    def _choose_item(self, rater: str, count: int) -> int | None:
        mine = self._by_rater.get(rater, Counter())
        rng = random.Random(f"{self._seed} {rater} {count}")
        if (
            rng.random() < self._repeat
            and (again := self._choose_repeated_item(rater, rng)) is not None
        ):
            return again
        shared = next((place for place in self._shared if not mine[place]), None)
        own = self._choose_unshared_item(rater, mine, rng)
        if shared is None or own is None:
            return own if shared is None else shared
        # Shared items come at their share of what is left, so that agreement is known over the whole time.
        share = len(self._shared) / len(self.items)
        return shared if rng.random() < share else own

    def _choose_repeated_item(self, rater: str, rng: random.Random) -> int | None:
        """An item that this person rated a while ago, once."""
        mine = self._by_rater.get(rater, Counter())
        earlier = self._journal.list_ratings_of(rater)[:-MIN_QUESTIONS_BEFORE_REPEAT]
        known = [
            self._item_indices[r.item]
            for r in earlier
            if r.is_opinion and r.item in self._item_indices
        ]
        once = [place for place in known if mine[place] == 1]
        return rng.choice(once) if once else None

    def _choose_unshared_item(
        self, rater: str, mine: Counter[int], rng: random.Random
    ) -> int | None:
        """An item that nobody has rated, is asked about, or that this person skipped."""
        asked = {
            question.item_index
            for name, (_, question) in self._open_questions.items()
            if name != rater
        }
        if self._posterior is None:
            return next(
                (p for p in self._unshared if not (self._rated[p] or mine[p] or p in asked)), None
            )
        free = [
            place
            for place in self._unshared
            if not (self._rated[place] or mine[place] or place in asked)
        ]
        if not free:
            return None
        information = self._posterior.compute_information()[free]
        best = information.argsort()[::-1][: min(NUM_CANDIDATES, max(1, len(free) // 20))]
        return free[int(best[rng.randrange(len(best))])]

    def _count_answers(self, place: int) -> int:
        return len(self.items[place].answers)

    def _draw_uniform(self, *key: object) -> float:
        """A number in [0, 1) that follows from the key."""
        text = " ".join(map(str, (self._seed, *key)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
