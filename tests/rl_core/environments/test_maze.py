"""Mazes: everything can be reached, walls hold, what is seen is true, and guessing earns nothing."""

import random
from collections import Counter

import pytest

from rl_core.environments import make_environment
from rl_core.environments.maze import DIRECTIONS, LEVELS, Maze, carve_maze, find_shortest_path
from rl_core.errors import SettingsError

BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("loops", [0.0, 0.15, 1.0])
def test_every_cell_can_be_reached_and_doors_open_both_ways(size, loops):
    for seed in range(20):
        opened = carve_maze(random.Random(seed), size, loops)
        doors = sum(len(ways) for ways in opened.values()) // 2
        walls_of_a_tree = 2 * size * (size - 1) - (size**2 - 1)
        assert doors == size**2 - 1 + round(loops * walls_of_a_tree)
        for cell, ways in opened.items():
            assert len(find_shortest_path(opened, (1, 1), cell)) < size**2
            for name in ways:
                other = (cell[0] + DIRECTIONS[name][0], cell[1] + DIRECTIONS[name][1])
                assert BACK[name] in opened[other]


def test_a_shortest_way_by_hand():
    #  S|.   the wall between (1,1) and (1,2) makes it go round
    #  . .
    opened = {
        (1, 1): {"south"},
        (2, 1): {"north", "east"},
        (2, 2): {"west", "north"},
        (1, 2): {"south"},
    }
    assert find_shortest_path(opened, (1, 1), (1, 2)) == ["south", "east", "north"]
    assert find_shortest_path(opened, (1, 1), (1, 1)) == []


def test_walking_the_shortest_way_and_naming_the_place_succeeds():
    environment = Maze()
    for seed in range(30):
        episode = environment.episode(seed, "hard")
        first = episode.reset()
        assert first[-1]["content"].startswith("5 x 5 maze. you are at ")
        for name in find_shortest_path(episode.opened, episode.start, episode.treasure):
            step = episode.step(f"move {name}")
            assert not step.terminated and not step.is_error
        assert step.messages[0]["content"].endswith(": treasure")
        end = episode.step(f"answer {episode.treasure[0]} {episode.treasure[1]}")
        assert end.terminated and end.success and end.reward == 1.0 and end.is_grounded


def test_a_wall_stops_and_says_where_one_is():
    environment = Maze(loops=0.0)
    episode = environment.episode(3, "easy")
    episode.reset()
    wall = next(name for name in DIRECTIONS if name not in episode.opened[episode.start])
    step = episode.step(f"move {wall}")
    assert step.messages[0]["content"].startswith(
        f"wall. at {episode.start[0]} {episode.start[1]} open "
    )
    assert episode.position == episode.start and not step.is_error
    step = episode.step("move up")
    assert step.is_error and "none of north east south west" in step.messages[0]["content"]


def test_a_guess_earns_nothing_and_is_not_grounded():
    environment = Maze()
    episode = environment.episode(1, "easy")
    episode.reset()
    end = episode.step(f"answer {episode.treasure[0]} {episode.treasure[1]}")
    assert end.success and end.reward == 0.0 and end.is_grounded is False
    luck = Maze(unsupported_reward=0.5).episode(1, "easy")
    luck.reset()
    assert luck.step(f"answer {luck.treasure[0]} {luck.treasure[1]}").reward == 0.5


def test_circles_are_cut_off():
    environment = Maze(max_moves=8)
    episode = environment.episode(5, "medium")
    episode.reset()
    there = next(name for name in DIRECTIONS if name in episode.opened[episode.start])
    for count in range(8):
        step = episode.step(f"move {there if count % 2 == 0 else BACK[there]}")
    assert step.truncated and not step.terminated and not step.success
    assert len(set(episode.visited)) == 2


def test_the_same_seed_is_the_same_maze_and_levels_differ():
    one, two = Maze().episode(7, "hard"), make_environment("maze").episode(7, "hard")
    assert (one.opened, one.start, one.treasure) == (two.opened, two.start, two.treasure)
    assert one.opened != Maze().episode(8, "hard").opened
    for level, size in LEVELS.items():
        assert len(Maze().episode(0, level).opened) == size**2
    assert {Maze().episode(seed, "hard").kind for seed in range(40)} == {"near", "far"}


def test_the_demonstrator_is_right_as_often_as_its_skill_says():
    environment = Maze()
    for level in environment.levels:
        shown = [environment.demonstration(seed, level) for seed in range(400)]
        clean = [row for row in shown if row.mistake == ""]
        assert len(clean) / 400 == pytest.approx(environment.skill[level], abs=0.08)
        # depth first may take longer than max_moves, in large mazes above all
        assert sum(row.success for row in clean) > {"easy": 0.99, "medium": 0.9, "hard": 0.6}[
            level
        ] * len(clean)
        assert (
            sum(row.success for row in shown if row.mistake in ("guesses", "gives_up")) < 0.25 * 400
        )
        assert len(Counter(row.mistake for row in shown)) == 4
        assert shown[5].messages == environment.demonstration(5, level).messages


def test_the_map_for_people():
    environment = Maze()
    episode = environment.episode(2, "easy")
    text = environment.render_maze(episode)
    assert text.count("S") == 1 and text.count("T") == 1 and len(text.splitlines()) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loops": 1.5}, r"options\.loops: 1\.5"),
        ({"max_moves": 3}, r"options\.max_moves: 3"),
        ({"skill": {"x": 1.0}}, "no level 'x'"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(SettingsError, match=message):
        Maze(**options)
