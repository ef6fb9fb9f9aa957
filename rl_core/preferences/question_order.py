"""The next item that a person is asked about: again, one that others have rated, or the most informative new one."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.preferences.items import RatedItem
from rl_core.preferences.rating_journal import Rating, RatingJournal
from rl_core.preferences.reward_posterior import RewardPosterior

__all__ = ["RatingQuestion", "QuestionOrder"]

LABELS = {"first": 1.0, "second": 0.0, "tie": 0.5, "both_bad": 0.5}
LATER = 10  # questions between an item and its repetition, at least
CANDIDATES = 16  # most informative pairs among which a person's next one is drawn, so that raters do not collide


@dataclass(frozen=True, slots=True)
class RatingQuestion:
    """An item for one person, now."""

    place: int  # of the item
    left: int  # answer that stands left: 0 = the item's first
    asked: int  # how often this person is asked about it, this time included


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
        self._place = {item.id: place for place, item in enumerate(items)}
        shuffled = list(range(len(items)))
        random.Random(seed).shuffle(shuffled)
        self._shared = [place for place in shuffled if self._draw("shared", items[place].id) < overlap]
        is_shared = set(self._shared)
        self._own = [place for place in shuffled if place not in is_shared]
        self._rated: Counter[int] = Counter()  # opinions of each item, of whomever
        self._by_rater: dict[str, Counter[int]] = {}  # questions answered, skipped ones included
        self._open: dict[str, tuple[int, RatingQuestion]] = {}  # with the number of ratings before it
        self._lock = threading.Lock()
        for rating in journal:
            self._note(rating)
        self._relearn()

    def take(self, rating: Rating) -> None:
        """Note a rating that the journal has."""
        with self._lock:
            place = self._note(rating)
            if self._posterior is not None and place is not None and rating.choice in LABELS:
                self._posterior.update(place, LABELS[rating.choice])

    def _note(self, rating: Rating) -> int | None:
        """Count a rating; place of its item, None = it is not among the items."""
        place = self._place.get(rating.item)
        self._open.pop(rating.rater, None)
        if place is not None:
            self._by_rater.setdefault(rating.rater, Counter())[place] += 1
            self._rated[place] += rating.is_opinion
        return place

    def _relearn(self) -> None:
        """Have the posterior learn from the journal's ratings alone."""
        if self._posterior is not None:
            known = [(self._place.get(rating.item), LABELS.get(rating.choice)) for rating in self._journal]
            self._posterior.relearn((place, label) for place, label in known if place is not None and label is not None)

    def take_back(self, rating: Rating) -> RatingQuestion | None:
        """Undo a rating that the journal no longer has: its question is the person's next one.

        None = its item is no longer among the items; the person's next question is another one.
        """
        place = self._place.get(rating.item)
        with self._lock:
            if place is None:
                self._open.pop(rating.rater, None)
                return None
            self._by_rater[rating.rater][place] -= 1
            if rating.is_opinion:
                self._rated[place] -= 1
            self._relearn()
            question = RatingQuestion(place, rating.left, rating.asked)
            self._open[rating.rater] = (self._journal.count(rating.rater), question)
        return question

    def next(self, rater: str) -> RatingQuestion | None:
        """The person's question: the open one, or a new one; None = nothing is left."""
        with self._lock:
            count = self._journal.count(rater)
            known = self._open.get(rater)
            if known is not None and known[0] == count:
                return known[1]
            place = self._choose(rater, count)
            if place is None:
                return None
            asked = self._by_rater.get(rater, Counter())[place] + 1
            left = int(self._draw("side", rater, self.items[place].id, asked) < 0.5) if self._sides(place) > 1 else 0
            question = RatingQuestion(place, left, asked)
            self._open[rater] = (count, question)
            return question

    def _choose(self, rater: str, count: int) -> int | None:
        mine = self._by_rater.get(rater, Counter())
        rng = random.Random(f"{self._seed} {rater} {count}")
        if rng.random() < self._repeat and (again := self._again(rater, rng)) is not None:
            return again
        shared = next((place for place in self._shared if not mine[place]), None)
        own = self._own_place(rater, mine, rng)
        if shared is None or own is None:
            return own if shared is None else shared
        # Shared items come at their share of what is left, so that agreement is known over the whole time.
        share = len(self._shared) / len(self.items)
        return shared if rng.random() < share else own

    def _again(self, rater: str, rng: random.Random) -> int | None:
        """An item that this person rated a while ago, once."""
        mine = self._by_rater.get(rater, Counter())
        earlier = self._journal.of(rater)[:-LATER]
        known = [self._place[r.item] for r in earlier if r.is_opinion and r.item in self._place]
        once = [place for place in known if mine[place] == 1]
        return rng.choice(once) if once else None

    def _own_place(self, rater: str, mine: Counter[int], rng: random.Random) -> int | None:
        """An item that nobody has rated, is asked about, or that this person skipped."""
        asked = {question.place for name, (_, question) in self._open.items() if name != rater}
        if self._posterior is None:
            return next((p for p in self._own if not (self._rated[p] or mine[p] or p in asked)), None)
        free = [place for place in self._own if not (self._rated[place] or mine[place] or place in asked)]
        if not free:
            return None
        information = self._posterior.information()[free]
        best = information.argsort()[::-1][: min(CANDIDATES, max(1, len(free) // 20))]
        return free[int(best[rng.randrange(len(best))])]

    def _sides(self, place: int) -> int:
        return len(self.items[place].answers)

    def _draw(self, *key: object) -> float:
        """A number in [0, 1) that follows from the key."""
        text = " ".join(map(str, (self._seed, *key)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
