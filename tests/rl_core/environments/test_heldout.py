"""No question is on both sides: worked out from the episodes' own fields, not from the digest that splits them."""

import hashlib
import logging
import random
import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from rl_core.environments import make_environment
from rl_core.environments.arithmetic import Arithmetic
from rl_core.environments.environment import (
    HELDOUT_START,
    MAX_COMPARED_ROWS,
    ContentSeeds,
    Environment,
    Episode,
    HeldOutSeparation,
    Step,
    compare_splits,
    compute_content_digest,
    is_heldout,
    probe_separation,
    warn_once,
)
from rl_core.environments.maze import Maze
from rl_core.environments.pixel_grid import PixelGrid
from rl_core.environments.prompts import Prompts
from rl_core.environments.reckoning import Reckoning
from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.rollouts.collect import TrainingSeedOrders
from rl_core.rollouts.heldout_episodes import (
    draw_heldout_requests,
    draw_heldout_seeds,
    draw_validation_requests,
)
from rl_core.settings import EvaluationSettings

CELLS = [
    (row, column) for row in range(1, 4) for column in range(1, 4)
]  # of the easy maze, within the medium one


class Word(Episode):
    def __init__(self, seed, level, word, secret=None):
        super().__init__(seed, level)
        self.prompt, self.hidden = word, secret

    def reset(self):
        return [{"role": "user", "content": self.prompt}]

    def act(self, text):
        return Step(terminated=True, success=text == self.prompt)


class Words(Environment):
    """An environment of a user, which merely subclasses: one of `count` questions, drawn by the seed."""

    name, levels, tools, blocking = "words", ("one", "two"), Toolset([]), False

    def __init__(self, count=200, secrets=1):
        super().__init__()
        self.count, self.secrets, self.opened = count, secrets, 0

    def episode(self, seed, level):
        self.check_level(level)
        self.opened += 1
        rng = random.Random(f"{level}/{seed}")
        word = f"Word {rng.randrange(self.count)}"
        return Word(seed, level, word, rng.randrange(self.secrets) if self.secrets > 1 else None)


def question_reader(environment, level):
    """Return a function that reads an episode's question from its fields."""
    return {
        "arithmetic": lambda episode: episode.prompt,
        "reckoning": lambda episode: (episode.prompt, str(episode.questions)),
        "pixel_grid": lambda episode: (episode.prompt, str(episode.grid)),
        "maze": lambda episode: (
            episode.start,
            episode.treasure,
            str([sorted(episode.opened[c]) for c in CELLS]),
        ),
        "words": lambda episode: (episode.prompt, episode.hidden),
    }[environment.name]


# ------------------------------------------------------------------------------------------------------ splitting


@pytest.mark.parametrize(
    "environment", [Arithmetic(), Reckoning(), PixelGrid(), Maze(), Words(), Words(3, 300)]
)
def test_no_question_is_on_both_sides(environment):
    """Before: 99% of arithmetic's easy held-out questions were among 6,000 training ones, 85% of the maze's."""
    question = None
    for level in environment.levels[: 1 if environment.name == "maze" else 2]:
        question = question_reader(environment, level)
        train, heldout = (environment.seeds_of(split, level) for split in ("train", "heldout"))
        learned = {question(environment.episode(seed, level)) for seed in train[:400]}
        asked = [question(environment.episode(seed, level)) for seed in heldout[:60]]
        assert not learned & set(asked) and len(set(asked)) > 20
        assert environment.held_out(level) == HeldOutSeparation("content")


def test_one_question_is_on_the_same_side_at_every_level():
    words = Words(60)
    words.episode = lambda seed, level: Word(
        seed, level, f"word {random.Random(seed).randrange(60)}"
    )
    train = {words.episode(seed, "one").prompt for seed in words.seeds_of("train", "one")[:400]}
    heldout = {words.episode(seed, "two").prompt for seed in words.seeds_of("heldout", "two")[:200]}
    assert len(train | heldout) == 60 and not train & heldout


@pytest.mark.parametrize("count", [64, 100, 128, 1024])
def test_questions_that_recur_with_the_seed_are_all_played(count):
    """`rows[seed % count]` is how a small environment chooses its rows."""
    words = Words()
    words.episode = lambda seed, level: Word(seed, level, f"word {seed % count}")
    assert words.held_out("one") == HeldOutSeparation("content")
    questions = {number: words.question(number, "one") for number in range(count)}
    for split in ("train", "heldout"):
        right = [n for n in range(count) if is_heldout(questions[n], 0.2) == (split == "heldout")]
        played = Counter(seed % count for seed in words.seeds_of(split, "one")[: 40 * len(right)])
        assert set(played) == set(right)
        if split == "train":  # seats of a game by the seed's parity
            assert 0.35 < sum(n for seed, n in played.items() if seed % 2) / played.total() < 0.65


def test_seeds_are_the_first_on_the_right_side_from_a_place_in_their_block():
    words = Words()
    train, heldout = words.seeds_of("train", "one"), words.seeds_of("heldout", "one")
    assert isinstance(train, ContentSeeds) and len(train) == 2**30 // 64 and len(heldout) == 2**20
    for seeds, split, start, block in ((train, False, 0, 64), (heldout, True, HELDOUT_START, 1024)):
        for index in (0, 1, 7, len(seeds) - 1):
            digest = hashlib.blake2b(index.to_bytes(8, "big"), digest_size=8).digest()
            place = int.from_bytes(digest, "big") % block
            first = next(
                seed
                for seed in (
                    start + index * block + (place + step) % block for step in range(block)
                )
                if is_heldout(
                    compute_content_digest([[["user", words.episode(seed, "one").prompt]], None]),
                    0.2,
                )
                == split
            )
            assert seeds[index] == first and first in seeds
        assert seeds[-1] == seeds[len(seeds) - 1] and seeds[2:4] == [seeds[2], seeds[3]]
        assert next(iter(seeds)) == seeds[0]
        with pytest.raises(IndexError):
            seeds[len(seeds)]
    wrong = next(seed for seed in range(64) if seed != train[0])
    assert wrong not in train and -1 not in train and "x" not in train and heldout[0] not in train


def test_the_same_environment_gives_the_same_seeds_everywhere():
    first, second = Words(), Words()
    second.seeds_of("heldout", "two")[5]  # what was asked before does not matter
    assert first.seeds_of("train", "one")[:50] == second.seeds_of("train", "one")[:50]
    # pinned: another digest or another Python would make other episodes of old seeds
    assert compute_content_digest([[["user", "Word 7"]], None]) == compute_content_digest(
        [[["user", "word  7"]], None]
    )
    assert (
        compute_content_digest(["A\n b"]) == hashlib.blake2b(b'["a b"]', digest_size=16).hexdigest()
    )


def test_training_draws_and_evaluation_draws_are_of_their_sides():
    environment = Arithmetic()
    orders, rng = TrainingSeedOrders(environment, 0), np.random.default_rng(0)
    learned = {
        environment.episode(orders.draw_seed("easy", rng), "easy").prompt for _ in range(1500)
    }
    settings = EvaluationSettings(episodes=90, levels=("easy",))
    reported = draw_heldout_requests(environment, settings, 0)
    asked = [environment.episode(request.seed, "easy").prompt for request in reported]
    assert len(learned) > 600 and not learned & set(asked)
    assert len(set(asked)) == 90  # each question once
    validation = draw_validation_requests(environment, 60, ["easy"], 0, reported)
    chosen = [environment.episode(request.seed, "easy").prompt for request in validation]
    assert len(set(chosen)) == 60 and not set(chosen) & (set(asked) | learned)
    others = draw_heldout_requests(environment, settings, 1, excluded=reported)
    assert not {environment.episode(request.seed, "easy").prompt for request in others} & set(asked)


def test_questions_repeat_only_when_there_are_no_others(caplog):
    words = Words(100)
    questions = {
        words.episode(seed, "one").prompt for seed in words.seeds_of("heldout", "one")[:600]
    }
    assert 10 <= len(questions) <= 30
    picked = draw_heldout_seeds(words, "one", len(questions) + 5, random.Random(0))
    assert len(set(picked)) == len(questions) + 5
    assert {words.episode(seed, "one").prompt for seed in picked} == questions
    assert f"5 of {len(questions) + 5} held-out episodes repeat a question" in caplog.text


# ------------------------------------------------------------------------------- where questions cannot be held out


def test_rows_that_are_handed_in_are_not_called_held_out_by_seed(caplog, monkeypatch):
    from rl_core.environments.prompts import Prompts
    from tasks.stages.evaluate import _describe_results

    def describe(rows, heldout):
        warn_once.cache_clear()
        environment = Prompts(rows=rows, heldout=heldout, verifier="exact")
        report = {"all": environment.held_out("all")}
        return _describe_results(environment, {}, report, len(heldout)), caplog.text

    rows = [{"prompt": f"what is {number}?", "answer": "1"} for number in range(30)]
    assert "held out by" not in "".join(describe(rows[:20], rows[20:]))
    monkeypatch.setitem(MAX_COMPARED_ROWS, False, 10)
    note, log = describe(rows[:20], rows[20:])
    assert note.endswith(
        "held-out questions not compared with the training questions, which are too many: all"
    )
    assert "by seed only" not in note + log
    monkeypatch.undo()
    note, log = describe(rows[:20], rows[:5])
    assert "held out in name only: every held-out question is a training question" in log
    assert "by seed only" not in log


def test_too_few_questions_are_held_out_by_seed_and_say_so(caplog):
    warn_once.cache_clear()
    words = Words(3)
    assert words.seeds_of("train", "one") == range(HELDOUT_START)
    separation = words.held_out("one")
    assert (
        separation.by == "seeds"
        and "100 episodes began with 3 different questions" in separation.note
    )
    assert caplog.text.count("level 'one': held out by seed only: 100 episodes began with 3") == 1
    assert "self.hidden" in separation.note


def test_a_hidden_state_makes_the_difference():
    assert (
        Words(3, secrets=1).held_out("one").by == "seeds"
        and Words(3, secrets=500).held_out("one").by == "content"
    )


def test_a_frequent_question_is_not_held_out_with_the_rest():
    keys = [compute_content_digest(text) for text in map(str, range(200))]
    left = [key for key in keys if not is_heldout(key, 0.2)]
    # 1,000 questions, none of which is on the held-out side; then the reverse
    separation = probe_separation(range(1000), lambda seed: left[seed % len(left)], 0.2)
    assert separation.by == "seeds" and "0% of all episodes" in separation.note
    held = [
        compute_content_digest(str(n))
        for n in range(2000)
        if is_heldout(compute_content_digest(str(n)), 0.2)
    ]
    assert (
        "100% of all"
        in probe_separation(range(1000), lambda seed: held[seed % len(held)], 0.2).note
    )


def test_nothing_is_held_out_where_nothing_is_asked_for():
    words = Words()
    words.heldout_share = 0
    assert words.held_out("one") == HeldOutSeparation("seeds", "heldout_share is 0")
    words = Words()
    words.heldout_share = 0.7
    with pytest.raises(SettingsError, match=r"heldout_share: 0.7 must be between 0 and 0.5"):
        words.seeds_of("train", "one")


def test_another_share():
    words = Words(1000)
    words.heldout_share = 0.5
    sides = [is_heldout(words.question(seed, "one"), 0.5) for seed in range(1000)]
    assert 400 < sum(sides) < 600 and words.held_out("one").by == "content"


def test_a_level_without_a_question_of_a_side_names_the_seeds():
    seeds = ContentSeeds(
        range(128), "train", lambda seed: "0" * 32, 0.2
    )  # the smallest digest is held out
    with pytest.raises(EnvironmentFault, match="64 seeds from 64 gave no training question"):
        seeds[1]


# ----------------------------------------------------------------------------------------------------- rows of data


def test_rows_are_compared_and_shared_questions_left_out(caplog):
    warn_once.cache_clear()
    rows = [{"prompt": f"question {n}"} for n in range(30)]
    heldout = [{"prompt": "Question  3"}, {"prompt": "question 30"}, {"prompt": "question 31"}]
    environment = Prompts(rows, heldout)
    separation = environment.held_out("all")
    assert separation.by == "content" and separation.shared == {HELDOUT_START}
    assert (
        "1 of 3 held-out episodes ask a question of the training episodes; they are left out"
        in caplog.text
    )
    assert separation.to_json() == {"by": "content", "note": separation.note, "shared": 1}
    assert set(draw_heldout_seeds(environment, "all", 5, random.Random(0))) == {
        HELDOUT_START + 1,
        HELDOUT_START + 2,
    }


def test_rows_that_are_all_training_rows_stay_and_say_so(caplog):
    warn_once.cache_clear()
    environment = Prompts([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "B"}])
    assert (
        environment.held_out("all").by == "seeds"
        and "every held-out question is a training" in caplog.text
    )
    assert draw_heldout_seeds(environment, "all", 1, random.Random(0)) == [HELDOUT_START]


def test_user_rows_are_compared():
    class Rows(Words):
        def seeds_of(self, split, level):
            return [1, 2, 3, 4] if split == "train" else [4, 5, 6]

        def episode(self, seed, level):
            return Word(seed, level, f"row {seed % 5}")  # 6 asks what 1 asks, 4 is in both

    assert Rows().held_out("one").shared == {4, 6}
    assert draw_heldout_seeds(Rows(), "one", 3, random.Random(0)) == [5]


def test_too_many_rows_are_reported_as_unchecked():
    separation = compare_splits(range(20_000), range(1), str, blocking=False)
    assert separation.by == "unchecked" and "20000 training and 1 held-out" in separation.note
    assert compare_splits(range(1_000), range(1_000, 1_001), str, blocking=True).by == "unchecked"
    assert compare_splits(
        range(19_999), range(20_000, 20_001), str, blocking=False
    ) == HeldOutSeparation("content")


# ------------------------------------------------------------------------------------------------------- contents


@dataclass
class Cell:
    row: int


def test_digests_tell_contents_apart():
    same = [
        ["A  b", "a\nB"],
        [(1, 2), [1, 2]],
        [{2, 1}, [1, 2]],
        [Cell(3), {"row": 3}],
        [np.arange(2), [0, 1]],
    ]
    assert all(
        compute_content_digest(first) == compute_content_digest(second) for first, second in same
    )
    others = ["a b", "ab", ["a", "b"], ["a b"], 1, "1", None, [[1], 2], [1, [2]], {"row": 4}]
    assert len({compute_content_digest(content) for content in others}) == len(others)
    with pytest.raises(TypeError, match="hidden: a object has no digest"):
        compute_content_digest([object()])


def test_a_digest_is_asked_for_once_per_episode():
    words = Words()
    words.question(3, "one")
    opened = words.opened
    assert words.question(3, "one") == words.question(3, "one") and words.opened == opened


def test_an_episode_that_cannot_be_opened_is_named():
    words = Words()
    words.episode = lambda seed, level: 1 / 0
    with pytest.raises(
        EnvironmentFault, match="environment 'words', level 'one', seed 2: ZeroDivisionError"
    ):
        words.seeds_of("train", "one")


def test_an_episode_that_cannot_be_opened_now_and_then_is_passed_over(caplog):
    words, whole = Words(1000), Words(1000)
    opened = words.content

    def content(seed, level):
        if seed % 12 == 5:
            raise ConnectionError("server")
        return opened(seed, level)

    words.content = content
    assert words.held_out("one").by == "content"
    train, all_of = words.seeds_of("train", "one"), whole.seeds_of("train", "one")
    assert not any(seed % 12 == 5 for seed in train[:200])
    assert all(train[index] == all_of[index] for index in range(200) if all_of[index] % 12 != 5)
    assert (
        "cannot be opened: environment 'words', level 'one', seed 5: ConnectionError: server"
        in caplog.text
    )
    broken = ContentSeeds(
        range(128), "train", lambda seed: words.question(seed * 12 + 5, "one"), 0.2
    )
    with pytest.raises(EnvironmentFault, match="seed 317: ConnectionError"):
        broken[0]  # 293, 305, 317: three in a row
    half = Words(1000)
    half.content = lambda seed, level: 1 / (seed % 2)
    with pytest.raises(
        EnvironmentFault, match="seed 20: ZeroDivisionError"
    ):  # more than a tenth of 100
        half.held_out("one")


def test_a_reset_that_hangs_times_out(monkeypatch):
    monkeypatch.setattr("rl_core.environments.environment._OPENING_TIMEOUT_S", 0.05)
    words, end = Words(), threading.Event()
    words.blocking = True
    assert words.held_out("one").by == "content"  # on threads
    words.content = lambda seed, level: end.wait(60)
    with pytest.raises(
        EnvironmentFault, match=r"seed -5: its reset has not returned within 0.05 s"
    ):
        words.question(-5, "one")
    end.set()

    def late(seed, level):
        raise TimeoutError("server")

    words.content = late
    with pytest.raises(EnvironmentFault, match="TimeoutError: server"):
        words.question(-6, "one")


def test_making_an_environment_says_what_is_not_held_out(caplog):
    warn_once.cache_clear()
    make_environment(f"{__name__}:Words", {"count": 2})
    assert (
        caplog.record_tuples[0][1] == logging.WARNING
        and "environment 'words', level 'one'" in caplog.text
    )
    caplog.clear()
    make_environment(f"{__name__}:Words", {"count": 300})
    assert caplog.text == ""
