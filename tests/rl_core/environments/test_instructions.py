"""`instructions`: checks by hand, splits, and answers that please one check only."""

from __future__ import annotations

import pytest

from rl_core.environments import make_environment
from rl_core.environments.instructions import (
    FORMS,
    _load_topics,
    has_repeated_word,
    is_one_sentence,
    split_words,
)


@pytest.mark.parametrize(
    "text, mark, expected",
    [
        ("Salt is in the sea.", ".", True),
        ("Salt is in the sea", ".", False),
        ("Salt is in the sea!", ".", False),
        ("salt is in the sea.", ".", False),
        ("Salt. It is in the sea.", ".", False),
        ("Salt is in\nthe sea.", ".", False),
        ("Why is salt in the sea?", "?", True),
        ("Why?! Salt is in the sea?", "?", False),
        ('"Salt is in the sea."', ".", True),
        ("It costs 3.50 a bag.", ".", True),
        ("", ".", False),
        ("...", ".", False),
        ("Écume et sel.", ".", True),
    ],
)
def test_one_sentence_with_its_mark(text, mark, expected):
    assert is_one_sentence(text, mark) is expected


def test_words_and_repetitions():
    assert split_words("It's 3 o'clock -- a well-known hour.") == [
        "it's",
        "o'clock",
        "a",
        "well-known",
        "hour",
    ]
    assert has_repeated_word("A stone is a stone.")
    assert not has_repeated_word("The cat and the dog eat the fish.")


@pytest.mark.parametrize("level", ["easy", "medium", "hard", "unseen"])
def test_reward_is_the_share_of_parts_that_hold(level):
    episode = make_environment("instructions").episode(3, level)
    names = [part.name for part in episode.parts]
    assert len(names) == len(set(names)) == {"easy": 4, "medium": 5, "hard": 6, "unseen": 5}[level]
    nothing = make_environment("instructions").episode(3, level).step("x\ny")
    held = nothing.info["checks"]
    assert nothing.reward == sum(held.values()) / len(names) and nothing.success is False
    assert nothing.terminated and nothing.answer == "x\ny"
    assert held["form"] is False and held["length"] is False


def test_an_answer_that_holds_everything_is_a_success():
    environment = make_environment("instructions")
    seed = next(
        seed
        for seed in range(100_000)
        if "question about the sea in 7 to 12 words. Use the word salt."
        in environment.episode(seed, "easy").prompt
    )
    step = environment.episode(seed, "easy").step("Why does the whole sea taste of salt?")
    assert step.reward == 1.0 and step.success is True
    step = environment.episode(seed, "easy").step("Is salt salt or is salt no salt here?")
    assert step.info["checks"] == {
        "form": True,
        "length": True,
        "use salt": True,
        "variety": False,
    }
    assert step.reward == 0.75 and step.success is False


def test_held_out_topics_are_never_trained_on():
    environment = make_environment("instructions")
    topics = _load_topics()
    assert not topics["train"].keys() & topics["heldout"].keys()
    for level in environment.levels:
        assert environment.held_out(level).by == "content"
        for split, other in (("train", "heldout"), ("heldout", "train")):
            for seed in environment.seeds_of(split, level)[:60]:
                prompt = environment.episode(seed, level).prompt
                assert not any(f"about {topic} in" in prompt for topic in topics[other])


def test_the_same_seed_gives_the_same_instruction_and_seeds_differ():
    environment = make_environment("instructions")
    prompts = [environment.episode(seed, "medium").prompt for seed in range(200)]
    assert prompts == [environment.episode(seed, "medium").prompt for seed in range(200)]
    assert len(set(prompts)) > 190
    assert {environment.episode(seed, "easy").kind for seed in range(30)} == set(FORMS)


def test_every_topic_has_six_single_words():
    for topics in _load_topics().values():
        for topic, words in topics.items():
            assert len(set(words)) == 6 and all(split_words(word) == [word] for word in words), (
                topic
            )
