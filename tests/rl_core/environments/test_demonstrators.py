"""The imperfect demonstrators: how often they are right, that their mistakes are what they are called, and habits."""

import random
import re
from collections import Counter

import pytest

from rl_core.environments.arithmetic import MISTAKES as ARITHMETIC_MISTAKES
from rl_core.environments.arithmetic import Arithmetic
from rl_core.environments.pixel_grid import LEVELS, MISTAKES, PixelGrid, plan_demonstration
from rl_core.environments.pixel_grid_questions import GridQuestion, PixelGridImage
from rl_core.environments.question_episodes import choose_mistake, compute_success_probability

ENVIRONMENTS = {"pixel_grid": PixelGrid, "arithmetic": Arithmetic}


def tempts(environment, demonstration):
    """From the words of the prompt alone."""
    prompt = environment.episode(demonstration.seed, demonstration.level).prompt
    if demonstration.kind in ("count", "last"):
        return "column" in prompt
    return int(re.search(r"\d+", prompt)[0]) % 2 == 0


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("level", LEVELS)
def test_rates_are_near_the_settings(name, level):
    environment = ENVIRONMENTS[name](skill={level: 0.5}, habit=0.8)
    right, count = Counter(), Counter()
    for seed in range(2000):
        demonstration = environment.demonstration(seed, level)
        tempting = tempts(environment, demonstration)
        right[tempting] += demonstration.mistake == ""
        count[tempting] += 1
        if demonstration.mistake == "":
            assert demonstration.success
    assert sum(right.values()) / 2000 == pytest.approx(0.5, abs=0.04)  # 4 standard errors
    assert right[True] / count[True] == pytest.approx(0.1, abs=0.04)
    assert right[False] / count[False] == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("level", LEVELS)
def test_demonstrations_replay_to_what_they_claim(name, level):
    environment = ENVIRONMENTS[name]()
    for seed in range(200):
        demonstration = environment.demonstration(seed, level)
        episode = environment.episode(seed, level)
        replayed = episode.reset()
        for message in demonstration.messages:
            if message["role"] == "assistant":
                step = episode.step(message["content"])
                replayed += [message, *step.messages]
        assert replayed == demonstration.messages and replayed[-1]["role"] == "assistant"
        assert step.terminated and step.success == demonstration.success
        assert (demonstration.kind, demonstration.seed, demonstration.level) == (
            episode.kind,
            seed,
            level,
        )


@pytest.mark.parametrize("level", LEVELS)
def test_without_skill_everything_is_a_mistake_and_with_it_nothing(level):
    assert {
        PixelGrid(skill={level: 0.0}).demonstration(seed, level).mistake for seed in range(400)
    } == {mistake for kind in LEVELS[level][1] for mistake in MISTAKES[kind]}
    perfect = PixelGrid(skill={level: 1.0}, habit=0.0)
    assert all(perfect.demonstration(seed, level).success for seed in range(200))


def test_call_format_of_demonstrations():
    messages = (
        PixelGrid(skill={"easy": 1.0}, habit=0.0, call_format="hermes")
        .demonstration(0, "easy")
        .messages
    )
    assert (
        messages[1]["content"]
        == '<tool_call>{"name": "zoom", "arguments": {"row": 2, "column": 2}}</tool_call>'
    )


def test_shares_by_hand():
    assert compute_success_probability(0.4, 0.5, tempting=True) == pytest.approx(0.2)
    assert compute_success_probability(0.4, 0.5, tempting=False) == pytest.approx(0.6)
    rng = random.Random(0)
    tempted = Counter(
        choose_mistake(rng, ("a", "b", "c"), skill=0.0, habit=0.0, tempting=True)
        for _ in range(4000)
    )
    assert tempted["a"] / 4000 == pytest.approx(0.65, abs=0.03)
    assert tempted["b"] / 4000 == pytest.approx(0.175, abs=0.03)
    others = Counter(
        choose_mistake(rng, ("a", "b", "c"), skill=0.0, habit=0.0, tempting=False)
        for _ in range(4000)
    )
    assert others["a"] / 4000 == pytest.approx(1 / 3, abs=0.03)


GRID = PixelGridImage(
    colours=[
        ["red", "red", "blue", "green"],
        ["green", "red", "blue", "red"],
        ["black", "white", "red", "red"],
        ["white", "blue", "green", "yellow"],
    ],
    digits=[[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2], [3, 4, 3, 2]],
)
COLOUR = GridQuestion("colour", "", "red", cells=((1, 2),))
COUNT = GridQuestion("count", "", "2", lines=(("row", 1),), colour="red")
COLUMN = GridQuestion("count", "", "1", lines=(("column", 1),), colour="red")
LAST_IN_COLUMN = GridQuestion("last", "", "white", lines=(("column", 1),))
LAST = GridQuestion("last", "", "green", lines=(("row", 1),))
LARGER = GridQuestion("larger", "", "7", cells=((1, 3), (2, 3)))
MOST = GridQuestion("most", "", "2", lines=(("row", 4), ("column", 2)), colour="red")
POINTER = GridQuestion("pointer", "", "yellow", cells=((4, 2),))


@pytest.mark.parametrize(
    ("question", "mistake", "calls", "answers"),
    [
        (COLOUR, "", ["zoom 1 2"], {"red"}),
        (COLOUR, "transposed", ["zoom 2 1"], {"green"}),
        (COLOUR, "too_far", ["zoom 1 3"], {"blue"}),
        (COLOUR, "wrong_attribute", ["zoom 1 2"], {"2"}),
        (
            GridQuestion("digit", "", "4", cells=((1, 4),)),
            "too_far",
            ["zoom 1 3"],
            {"3"},
        ),  # none beyond the edge
        (
            GridQuestion("digit", "", "4", cells=((1, 4),)),
            "wrong_attribute",
            ["zoom 1 4"],
            {"green"},
        ),
        (COUNT, "", ["count red row 1"], {"2"}),
        (COLUMN, "", ["count red column 1"], {"1"}),
        (COLUMN, "wrong_line", ["count red row 1"], {"2"}),
        (COUNT, "too_far", ["count red row 2"], {"2"}),
        (COUNT, "miscounted", ["scan row 1"], {"1", "3"}),
        (LAST, "", ["scan row 1"], {"green"}),
        (LAST_IN_COLUMN, "wrong_line", ["scan row 1"], {"green"}),
        (LAST, "wrong_attribute", ["scan row 1"], {"4"}),
        (LARGER, "", ["zoom 1 3", "zoom 2 3"], {"7"}),
        (LARGER, "one_side", ["zoom 1 3"], {"3"}),
        (LARGER, "transposed", ["zoom 3 1", "zoom 2 3"], {"9"}),
        (MOST, "", ["count red row 4", "count red column 2"], {"2"}),
        (MOST, "one_side", ["count red row 4"], {"0"}),
        (MOST, "wrong_line", ["count red column 4", "count red column 2"], {"2"}),
        (POINTER, "", ["zoom 4 2", "zoom 4 4"], {"yellow"}),
        (POINTER, "stopped_early", ["zoom 4 2"], {"blue"}),
        (POINTER, "wrong_line", ["zoom 4 2", "zoom 4 2"], {"blue"}),
        (POINTER, "wrong_attribute", ["zoom 4 2", "zoom 4 4"], {"2"}),
    ],
)
def test_every_mistake_is_what_it_is_called(monkeypatch, question, mistake, calls, answers):
    monkeypatch.setattr(
        "rl_core.environments.pixel_grid.choose_mistake", lambda *args, **kwargs: mistake
    )
    tools = PixelGrid().tools
    for seed in range(10):
        planned = plan_demonstration(GRID, question, random.Random(seed), skill=0.5, habit=0.5)
        assert [tools.format(call) for call in planned.calls] == calls
        assert planned.answer in answers and planned.mistake == mistake


def test_the_diagonal_has_no_other_side():
    question = GridQuestion("colour", "", "red", cells=((2, 2),))
    mistakes = {
        plan_demonstration(GRID, question, random.Random(seed), skill=0.0, habit=0.0).mistake
        for seed in range(200)
    }
    assert mistakes == {"too_far", "no_look", "wrong_attribute"}


@pytest.mark.parametrize("question", [COUNT, LAST])
def test_rows_are_never_mistaken_for_columns(question):
    mistakes = {
        plan_demonstration(GRID, question, random.Random(seed), skill=0.0, habit=0.0).mistake
        for seed in range(200)
    }
    assert mistakes == set(MISTAKES[question.kind]) - {"wrong_line"}


def test_arithmetic_mistakes():
    environment = Arithmetic(skill={"hard": 0.2})
    seen = Counter()
    for seed in range(500):
        demonstration = environment.demonstration(seed, "hard")
        episode = environment.episode(seed, "hard")
        actions = [
            message["content"]
            for message in demonstration.messages
            if message["role"] == "assistant"
        ]
        called = actions[0].removeprefix("calculator ").split() if len(actions) == 2 else None
        answer = int(actions[-1].removeprefix("answer "))
        match demonstration.mistake:
            case "":
                assert called == episode.parts and str(answer) == episode.target
            case "other_sign":
                assert [a != b for a, b in zip(called, episode.parts, strict=True)].count(True) == 1
            case "dropped":
                assert called == episode.parts[:-2]
            case "no_look":
                assert called is None
            case "off_by_one":
                assert called == episode.parts and abs(answer - int(episode.target)) == 1
        seen[demonstration.mistake] += 1
    assert set(seen) == {"", *ARITHMETIC_MISTAKES}
