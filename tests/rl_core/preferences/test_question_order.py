"""Order of questions: shared items, repeats, sides, several raters, undo, and the most informative pair."""

import time
from collections import Counter

import numpy as np

from rl_core.preferences.items import RatedItem
from rl_core.preferences.question_order import (
    MIN_QUESTIONS_BEFORE_REPEAT,
    QuestionOrder,
    RewardPosterior,
)
from rl_core.preferences.rating_journal import Rating, RatingJournal


def make_items(count):
    return [RatedItem(f"{n} ?", (f"yes {n}", f"no {n}"), ("a", "b")) for n in range(count)]


class Desk:
    """An order with its journal, and raters who answer."""

    def __init__(self, folder, count=60, posterior=None, **options):
        order_options = {"overlap": 0.2, "repeat": 0.0, "seed": 0, **options}
        self.items, self.journal = make_items(count), RatingJournal(folder / "ratings.jsonl")
        self.make_order = lambda: QuestionOrder(
            self.items, self.journal, posterior=posterior, **order_options
        )
        self.order = self.make_order()

    def rate(self, rater, choice="first"):
        question = self.order.choose_next_question(rater)
        if question is None:
            return None
        item = self.items[question.item_index].id
        rating = self.journal.add_rating(
            Rating(0, item, rater, choice, left=question.left, asked=question.times_asked)
        )
        self.order.record_rating(rating)
        return question


def test_shared_items_are_asked_of_everybody_and_the_others_of_one(tmp_path):
    desk = Desk(tmp_path)
    asked = {"ann": [], "bob": []}
    for _ in range(100):
        for rater, indices in asked.items():
            question = desk.rate(rater)
            if question is not None:
                indices.append(question.item_index)
    assert all(len(indices) == len(set(indices)) for indices in asked.values())
    both = set(asked["ann"]) & set(asked["bob"])
    assert both == set(desk.order._shared) and 6 <= len(both) <= 20  # a fifth of 60
    assert set(asked["ann"]) | set(asked["bob"]) == set(range(60))
    assert desk.order.choose_next_question("ann") is None
    # eve is asked the shared items too
    assert desk.order.choose_next_question("eve") is not None


def test_the_same_question_after_a_reload_and_a_restart(tmp_path):
    desk = Desk(tmp_path, repeat=0.2)
    for _ in range(25):
        desk.rate("ann")
    question = desk.order.choose_next_question("ann")
    assert desk.order.choose_next_question("ann") == question
    assert desk.make_order().choose_next_question("ann") == question
    # the question is open with ann, so bob is asked another one
    assert desk.order.choose_next_question("bob").item_index != question.item_index


def test_sides_are_random_and_items_are_repeated_late(tmp_path):
    desk = Desk(tmp_path, count=400, repeat=0.2)
    questions = [desk.rate("ann") for _ in range(300)]
    assert 110 < sum(question.left for question in questions) < 190
    repeated = [(n, question) for n, question in enumerate(questions) if question.times_asked == 2]
    assert 35 < len(repeated) < 85 and max(Counter(q.item_index for q in questions).values()) == 2
    for number, question in repeated:
        earlier = next(
            n
            for n, earlier_question in enumerate(questions)
            if earlier_question.item_index == question.item_index
        )
        assert number - earlier >= MIN_QUESTIONS_BEFORE_REPEAT


def test_a_skipped_item_is_for_others(tmp_path):
    desk = Desk(tmp_path, count=1, overlap=0.0)
    assert desk.rate("ann", "skip").item_index == 0
    assert desk.order.choose_next_question("ann") is None
    assert desk.rate("bob").item_index == 0
    assert desk.order.choose_next_question("eve") is None


def test_undo_opens_the_same_question_with_the_same_sides(tmp_path):
    desk = Desk(tmp_path)
    for _ in range(5):
        question = desk.rate("ann")
    undone = desk.journal.undo_last_rating("ann", 0.0)
    assert desk.order.undo_rating(undone) == question
    assert desk.order.choose_next_question("ann") == question
    assert desk.make_order().choose_next_question("ann") == question


def test_nothing_is_learned_from_an_undone_rating(tmp_path):
    features = np.random.default_rng(0).normal(size=(60, 3))
    desk = Desk(tmp_path, overlap=0.5, repeat=0.2, posterior=RewardPosterior(features))
    for choice in ("first", "tie", "skip", "second", "first"):
        desk.rate("ann", choice)
        desk.rate("bob", choice)
    posterior = desk.order._posterior
    mean, information = posterior.mean_D.copy(), posterior.compute_information()
    desk.rate("ann", "second")
    desk.rate("ann", "both_bad")
    assert not np.allclose(posterior.mean_D, mean)
    for _ in range(2):
        desk.order.undo_rating(desk.journal.undo_last_rating("ann", 0.0))
    assert np.allclose(posterior.mean_D, mean)
    assert np.allclose(posterior.compute_information(), information)
    question = desk.order.choose_next_question("ann")
    desk.order = desk.make_order()  # a restart asks the same question
    assert desk.order.choose_next_question("ann") == question
    assert np.allclose(posterior.mean_D, mean)


def test_the_most_informative_pair_comes_first(tmp_path):
    features = np.zeros((40, 2))
    features[:, 0] = 0.05
    features[17] = [0.0, 2.0]
    desk = Desk(tmp_path, count=40, overlap=0.0, posterior=RewardPosterior(features))
    if desk.rate("ann", "second").item_index != 17:  # at most one question precedes it
        assert desk.rate("ann", "second").item_index == 17
    assert desk.order._posterior.mean_D[1] < -0.5


def test_ten_thousand_pairs_stay_fast(tmp_path):
    """Measure the processor time of a question and its rating among 10,000 pairs."""
    rng = np.random.default_rng(0)
    posterior = RewardPosterior(rng.normal(size=(10_000, 32)))
    desk = Desk(tmp_path, count=10_000, posterior=posterior, overlap=0.0)
    started = time.process_time()
    for _ in range(10):
        desk.rate("ann")
    assert (time.process_time() - started) / 10 < 0.25
