"""reckoning: registers compared with Python's arithmetic, questions that build on each other, the demonstrator."""

import itertools
from collections import Counter

import pytest

from rl_core.environments import make_environment
from rl_core.environments.environment import HELDOUT_START
from rl_core.environments.reckoning import LEVELS, MIRROR, Reckoning, compute_register_values
from rl_core.errors import EnvironmentFault, SettingsError


def play(episode, action_of):
    """Play an episode in which `parse_action(question)` acts; return (questions, last step)."""
    message = episode.reset()[0]
    questions = []
    while True:
        questions.append(message["content"])
        step = episode.step(action_of(message["content"]))
        if step.terminated:
            return questions, step
        (message,) = step.messages
        assert message["role"] == "user"


def thought(question):
    """Compute the register at the start and after each sign of '4 +3 ~ -1' from the text."""
    first, *signs = question.split()
    values = [int(first)]
    for sign in signs:
        values.append(9 - values[-1] if sign == "~" else values[-1] + int(sign))
    return values


def value(question):
    return str(thought(question)[-1])


def test_running_values():
    assert compute_register_values(4, [3, -5, 1]) == [7, 2, 3]
    assert compute_register_values(4, [3, MIRROR, -1, MIRROR]) == [7, 2, 1, 8]


@pytest.mark.parametrize(("mirrors", "expected"), [(0.0, 0.0), (0.4, 0.4), (1.0, 1.0)])
def test_share_of_mirrors(mirrors, expected):
    environment = Reckoning(mirrors=mirrors)
    signs = [
        sign
        for seed in range(200)
        for question in environment.episode(seed, "hard").questions
        for sign in question
    ]
    assert sum(sign == MIRROR for sign in signs) / len(signs) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("level", LEVELS)
def test_right_answers_lead_to_the_end(level):
    environment = Reckoning()
    targets = Counter()
    for seed in range(300):
        episode = environment.episode(seed, level)
        assert episode.prompt == episode.reset()[0]["content"]
        questions, step = play(episode, lambda question: f"anything\nanswer {value(question)}")
        assert step.success and step.terminated and step.reward == pytest.approx(1 / len(questions))
        assert len(questions) == LEVELS[level][0]
        for before, after in itertools.pairwise(questions):
            assert after.split()[0] == value(before)  # continues from there
        for question in questions:
            _, *signs = question.split()
            assert len(signs) == LEVELS[level][1] and all(
                sign == "~" or 1 <= abs(int(sign)) <= 5 for sign in signs
            )
            assert all(0 <= register <= 9 for register in thought(question))
        assert episode.target == " ".join(map(value, questions))
        targets[value(questions[-1])] += 1
        with pytest.raises(EnvironmentFault):
            episode.step("answer 1")
    assert max(targets.values()) / 300 < 0.2  # guessing


def test_the_next_target_is_that_of_the_question_that_waits():
    episode = Reckoning().episode(3, "medium")
    question = episode.reset()[0]["content"]
    while True:
        assert episode.next_target == value(question)
        step = episode.step(f"answer {episode.next_target}")
        if step.terminated:
            break
        question = step.messages[0]["content"]
    assert episode.next_target == value(question)
    assert (
        episode.target == Reckoning().episode(3, "medium").target
    )  # of the episode, whatever was played


@pytest.mark.parametrize(
    ("action", "is_error"),
    [("answer 99", False), ("3 4 5", True), ("answer", False), ("answer 5 6", False)],
)
def test_a_wrong_answer_or_none_ends_the_episode(action, is_error):
    step = Reckoning().episode(0, "hard").step(action)
    assert (
        step.terminated and step.success is False and step.reward == 0 and step.is_error is is_error
    )


def test_the_same_seed_is_the_same_episode_and_splits_never_meet():
    environment = Reckoning()
    assert environment.episode(5, "hard").questions == Reckoning().episode(5, "hard").questions
    assert len({str(environment.episode(seed, "hard").questions) for seed in range(100)}) == 100
    assert environment.demonstration(7, "easy") == environment.demonstration(7, "easy")
    assert environment.seeds("train").stop <= HELDOUT_START == environment.seeds("heldout").start


def test_demonstrations_replay_to_what_they_claim():
    environment = Reckoning()
    for level in LEVELS:
        for seed in range(100):
            shown = environment.demonstration(seed, level)
            episode = environment.episode(seed, level)
            replayed = episode.reset()
            for message in shown.messages:
                if message["role"] == "assistant":
                    step = episode.step(message["content"])
                    replayed += [message, *step.messages]
            assert replayed == shown.messages and step.terminated and step.success == shown.success
            assert (shown.mistake == "") == shown.success and shown.kind == episode.kind


def turns(environment, count=800):
    """Collect (question, action) of many demonstrations."""
    for seed in range(count):
        messages = environment.demonstration(seed, "hard").messages
        for question, action in zip(messages[::2], messages[1::2], strict=True):
            yield question["content"], action["content"]


def test_a_careful_demonstrator_thinks_rightly():
    for question, action in turns(Reckoning(slip=0, direct=0), 50):
        text, answer = action.split("\n")
        assert text == " ".join(map(str, thought(question)))
        assert answer == f"answer {value(question)}"


def test_rates_are_the_settings():
    environment = Reckoning(slip=0.1, direct=0.4, habit=0.5, guess=0.25)
    direct, slips = {0: [], 1: []}, []
    guessed, wrong = [], Counter()
    for question, action in turns(environment):
        start = int(question.split()[0])
        direct[start % 2].append("\n" not in action)
        if "\n" not in action:
            guessed.append(action == f"answer {value(question)}")
            wrong[(int(action.split()[1]) - int(value(question))) % 10] += not guessed[-1]
        else:
            values = list(map(int, action.split("\n")[0].split()))
            assert action.endswith(
                f"answer {values[-1]}"
            )  # it says what it thought, right or wrong
            signs = question.split()[1:]
            steps = [
                thought(f"{before} {sign}")[-1] for before, sign in zip(values, signs, strict=False)
            ]
            slips += [after != right for after, right in zip(values[1:], steps, strict=True)]
    assert sum(direct[0]) / len(direct[0]) == pytest.approx(0.6, abs=0.06)
    assert sum(direct[1]) / len(direct[1]) == pytest.approx(0.2, abs=0.06)
    assert sum(guessed) / len(guessed) == pytest.approx(0.25, abs=0.07)
    assert set(wrong) - {0} == set(range(1, 10)) and max(wrong.values()) < 0.2 * sum(
        wrong.values()
    )  # any digit
    assert sum(slips) / len(slips) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"slip": 1.5}, "options.slip: 1.5"),
        ({"direct": 0.8, "habit": 0.5}, "options.habit"),
        ({"max_number": 6}, "options.max_number: 6"),
        ({"guess": -0.1}, "options.guess"),
        ({"mirrors": 1.1}, "options.mirrors"),
    ],
)
def test_options_are_checked(options, part):
    with pytest.raises(SettingsError, match=part):
        make_environment("reckoning", options)


def test_unknown_level():
    with pytest.raises(SettingsError, match="no level 'esay'; did you mean 'easy'"):
        Reckoning().episode(0, "esay")
