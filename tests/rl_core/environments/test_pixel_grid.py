"""pixel_grid: questions checked against an independent reading of the image, misuse, determinism, images."""

import re
import struct
import zlib
from collections import Counter, defaultdict

import numpy as np
import pytest

from rl_core.environments import make_environment
from rl_core.environments.environment import HELDOUT_START
from rl_core.environments.pixel_grid import LEVELS, PixelGrid
from rl_core.environments.pixel_grid_questions import (
    COLOURS,
    QUESTION_BUILDERS,
    RGB,
    PixelGridImage,
    encode_png,
    render_grid,
)
from rl_core.errors import DataError, EnvironmentFault, SettingsError

GRID = PixelGridImage(  # 3 x 3, worked by hand below
    colours=[["red", "red", "blue"], ["green", "red", "blue"], ["black", "white", "red"]],
    digits=[[1, 2, 3], [4, 5, 6], [7, 8, 9]],
)


def read_answer_independently(prompt, colours, digits):
    """Read the answer off numpy arrays by the words of the prompt alone."""
    numbers = [int(word) - 1 for word in re.findall(r"\d+", prompt)]
    colour = next((name for name in COLOURS if re.search(rf"\b{name}\b", prompt)), None)

    def line(name, number):
        return colours[number, :] if name == "row" else colours[:, number]

    if prompt.startswith("colour at"):
        return colours[numbers[0], numbers[1]]
    if prompt.startswith("digit at"):
        return str(digits[numbers[0], numbers[1]])
    if prompt.startswith("how many"):
        return str(int((line(re.search("row|column", prompt)[0], numbers[0]) == colour).sum()))
    if prompt.startswith("last colour"):
        return line(re.search("row|column", prompt)[0], numbers[0])[-1]
    if prompt.startswith("larger digit"):
        return str(max(digits[numbers[0], numbers[1]], digits[numbers[2], numbers[3]]))
    if prompt.startswith("most"):
        in_row, in_column = (
            (line(name, n) == colour).sum()
            for name, n in zip(("row", "column"), numbers, strict=True)
        )
        return str(max(int(in_row), int(in_column)))
    assert prompt.startswith("colour where")
    return colours[numbers[0], digits[numbers[0], numbers[1]] - 1]


@pytest.mark.parametrize("level", LEVELS)
def test_targets_agree_with_the_image(level):
    environment = PixelGrid()
    kinds = Counter()
    for seed in range(600):
        episode = environment.episode(seed, level)
        grid = episode.grid
        colours, digits = np.array(grid.colours), np.array(grid.digits)
        assert colours.shape == digits.shape == (LEVELS[level][0],) * 2
        assert episode.target == read_answer_independently(episode.prompt, colours, digits), (
            episode.prompt
        )
        assert episode.reset() == [{"role": "user", "content": episode.prompt}]
        kinds[episode.kind] += 1
    assert set(kinds) == set(LEVELS[level][1])
    assert min(kinds.values()) > 600 / len(kinds) * 0.75


def test_every_kind_is_asked_somewhere():
    assert {kind for _, kinds in LEVELS.values() for kind in kinds} == set(QUESTION_BUILDERS)


def plan_right_actions(episode):
    """Return the actions of a perfect policy, from the prompt and the observations alone."""
    numbers = re.findall(r"\d+", episode.prompt)
    colour = next((name for name in COLOURS if re.search(rf"\b{name}\b", episode.prompt)), "")
    where = re.search("row|column", episode.prompt)[0]

    def look(action):
        step = episode.step(action)
        assert (
            not step.is_error
            and not step.terminated
            and step.reward == 0
            and step.tool_call is not None
        )
        return step.messages[0]["content"]

    if episode.kind in ("colour", "digit"):
        return look(f"zoom {numbers[0]} {numbers[1]}").split()[episode.kind == "colour"]
    if episode.kind == "count":
        return look(f"count {colour} {where} {numbers[0]}")
    if episode.kind == "last":
        return look(f"scan {where} {numbers[0]}").split()[-1]
    if episode.kind == "larger":
        return max(
            look(f"zoom {numbers[0]} {numbers[1]}")[0], look(f"zoom {numbers[2]} {numbers[3]}")[0]
        )
    if episode.kind == "most":
        row, column = (
            look(f"count {colour} row {numbers[0]}"),
            look(f"count {colour} column {numbers[1]}"),
        )
        return max(row, column)
    pointed = look(f"zoom {numbers[0]} {numbers[1]}")[0]
    return look(f"zoom {numbers[0]} {pointed}").split()[1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_that_looks_can_always_be_right(level):
    environment = PixelGrid()
    for seed in range(150):
        episode = environment.episode(seed, level)
        step = episode.step(f"answer {plan_right_actions(episode)}")
        assert (
            step.success is True and step.reward == 1.0 and step.terminated and step.messages == []
        )
        with pytest.raises(EnvironmentFault, match="single-use"):
            episode.step("answer red")


@pytest.mark.parametrize("level", LEVELS)
def test_guessing_without_looking_fails(level):
    """The best fixed answer to each wording of the prompt, numbers included or not, chosen in hindsight."""
    environment = PixelGrid()
    targets = defaultdict(Counter)
    count = 3000
    for seed in range(count):
        episode = environment.episode(seed, level)
        targets[episode.kind][episode.target] += 1
    rates = {kind: max(answers.values()) / answers.total() for kind, answers in targets.items()}
    assert max(rates.values()) < 0.35, rates
    assert sum(max(answers.values()) for answers in targets.values()) / count < 0.28


def test_wrong_answer_ends_the_episode_without_reward():
    step = PixelGrid().episode(0, "easy").step("answer purple")
    assert (step.success, step.reward, step.terminated, step.answer) == (False, 0.0, True, "purple")


def test_answers_are_read_from_the_last_line_and_compared_loosely():
    environment = PixelGrid()
    target = environment.episode(3, "easy").target
    for text in (f"I looked.\nanswer {target}", f"answer  {target.upper()} \n"):
        assert environment.episode(3, "easy").step(text).success is True
    for text in ("answer", f"answer {target} or so", f"answer not {target}"):
        assert environment.episode(3, "easy").step(text).success is False


@pytest.mark.parametrize(
    ("action", "part"),
    [
        ("", "neither a call nor"),
        ("the answer is red", "neither a call nor"),
        ("zoom 9 1", "row 9 is outside 1 to 4"),
        ("zoom 1 0", "column 0 is outside 1 to 4"),
        ("zoom 1", "takes 2 arguments"),
        ("scan diagonal 1", "diagonal is neither row nor column"),
        ("scan column 5", "column 5 is outside"),
        ("count purple row 1", "purple is no colour"),
        ("count red row 7", "row 7 is outside"),
        ('<tool_call>{"name": "peek", "arguments": {}}</tool_call>', "no tool 'peek'"),
    ],
)
def test_misuse_is_answered_and_the_episode_continues(action, part):
    environment = PixelGrid(misuse_cost=0.25)
    episode = environment.episode(5, "easy")
    for _ in range(2):
        step = episode.step(action)
        assert (
            step.is_error and step.reward == -0.25 and not step.terminated and step.success is None
        )
        assert step.messages[0]["role"] == "tool" and part in step.messages[0]["content"]
    assert episode.step(f"answer {episode.target}").reward == 1.0


def test_tools_by_hand():
    tools = PixelGrid().tools.bind(GRID)
    expected = {
        "zoom 2 3": "6 blue",
        "zoom 3 2": "8 white",
        "scan row 1": "1 red, 2 red, 3 blue",
        "scan column 1": "1 red, 4 green, 7 black",
        "count red row 1": "2",
        "count red column 2": "2",
        "count yellow row 2": "0",
        "count red column 3": "1",
    }
    for text, observation in expected.items():
        assert tools.run(tools.parse(text)) == (observation, False)
    call = tools.parse(
        '<tool_call>{"name": "count", "arguments": {"colour": "red", "line": "row", "number": 1}}</tool_call>'
    )
    assert tools.run(call) == ("2", False)


def test_looks_cost_what_the_option_says():
    episode = PixelGrid(look_cost=0.1, misuse_cost=0.2).episode(5, "easy")
    assert [episode.step(text).reward for text in ("zoom 1 1", "scan row 9")] == [-0.1, -0.2]


def described(environment, seed, level):
    episode = environment.episode(seed, level)
    return episode.prompt, episode.target, episode.grid.colours, episode.grid.digits


def test_level_and_seed_determine_everything():
    for level in LEVELS:
        for seed in (0, 7, HELDOUT_START + 1):
            assert described(PixelGrid(), seed, level) == described(PixelGrid(), seed, level)
            assert PixelGrid().demonstration(seed, level) == PixelGrid().demonstration(seed, level)
    assert described(PixelGrid(), 1, "medium") != described(PixelGrid(), 2, "medium")
    assert described(PixelGrid(), 1, "medium") != described(PixelGrid(), 1, "hard")
    # A fixed value: seeds mean the same on every machine and in every Python.
    assert described(PixelGrid(), 0, "easy")[:2] == ("colour at row 2 column 2?", "black")


def test_training_and_heldout_seeds_never_meet():
    environment = PixelGrid()
    assert environment.seeds("train").stop <= environment.seeds("heldout").start
    assert len(environment.seeds("heldout")) > 10**6


def test_instructions_name_every_tool():
    (system, user) = PixelGrid(instructions=True, call_format="hermes").episode(0, "easy").reset()
    assert system["role"] == "system" and user["role"] == "user"
    for name in ("zoom", "scan", "count", "<tool_call>", "answer"):
        assert name in system["content"]
    assert (
        "count COLOUR LINE NUMBER"
        in PixelGrid(instructions=True).episode(0, "easy").reset()[0]["content"]
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"skill": {"eazy": 0.4}}, "did you mean 'easy'"),
        ({"skill": {"easy": 0.9}}, "between 0 and 1 / (1 + habit) = 0.8"),
        ({"habit": 1.5}, "options.habit"),
        ({"look_cost": -0.1}, "options.look_cost"),
        ({"misuse_cost": 2.0}, "options.misuse_cost"),
    ],
)
def test_bad_options_are_refused(options, part):
    with pytest.raises(SettingsError) as caught:
        make_environment("pixel_grid", options)
    assert part in str(caught.value)
    with pytest.raises(SettingsError, match="did you mean 'medium'"):
        PixelGrid().episode(0, "medum")


def read_png(data):
    """Decode an 8-bit RGB PNG without filters to uint8 [height, width, 3]."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, chunks = 8, {}
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack_from(">I", data, place + 8 + size)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + size
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0] and list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(
        height, 1 + 3 * width
    )
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(height, width, 3)


def test_pictures_show_the_right_colours_and_digits():
    image = render_grid(GRID, scale=2)
    assert (
        read_png(encode_png(image[:40])) == image[:40]
    ).all()  # not square, to distinguish width from height
    assert image.shape == (56, 56, 3)  # (3 cells of 9 dots + 1) * 2 pixels
    for row in range(3):
        for column in range(3):
            cell = image[18 * row + 2 : 18 * row + 18, 18 * column + 2 : 18 * column + 18]
            colour = RGB[GRID.colours[row][column]]
            assert tuple(cell[0, 0]) == tuple(cell[-1, -1]) == colour
            ink = (cell != colour).any(axis=2)[::2, ::2][2:7, 3:6]
            assert ink.any() and not (cell != colour).any(axis=2)[:4].any()
    ones = (image[2:18, 2:18] != RGB["red"]).any(axis=2)[::2, ::2][2:7, 3:6]
    assert ones.astype(int).tolist() == [[0, 1, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0], [1, 1, 1]]
    glyphs = {render_grid(PixelGridImage([["white"]], [[digit]])).tobytes() for digit in range(10)}
    assert len(glyphs) == 10


def test_an_episode_can_be_looked_at():
    episode = PixelGrid().episode(0, "easy")
    assert tuple(episode.image()[4, 4]) == RGB[episode.grid.colours[0][0]]


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((2, 2, 3)),
        np.zeros((0, 2, 3), np.uint8),
    ],
)
def test_what_is_no_picture_is_refused(image):
    with pytest.raises(DataError, match="uint8"):
        encode_png(image)
