"""pixel_grid knows whether an answer follows from what was observed."""

import pytest

from rl_core.environments import make_environment
from rl_core.errors import SettingsError


def build_episode(kind, level, **options):
    """Return an episode of that kind, with its grid and question."""
    environment = make_environment("pixel_grid", options)
    for seed in range(200):
        episode = environment.episode(seed, level)
        if episode.kind == kind:
            episode.reset()
            return episode
    raise AssertionError(f"no {kind} among 200 episodes")


def list_required_calls(episode):
    """Return the required observations, as tool calls."""
    question, grid = episode.question, episode.grid
    if question.kind in ("count", "most"):
        return [f"count {question.colour} {line} {number}" for line, number in question.lines]
    if question.kind == "last":
        return ["scan {} {}".format(*question.lines[0])]
    calls = [f"zoom {row} {column}" for row, column in question.cells]
    if question.kind == "pointer":
        row, column = question.cells[0]
        calls.append(f"zoom {row} {grid.read_cell(row, column)[1]}")
    return calls


KINDS = [
    ("colour", "easy"),
    ("digit", "easy"),
    ("count", "medium"),
    ("last", "medium"),
    ("larger", "hard"),
    ("most", "hard"),
    ("pointer", "hard"),
]


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_grounded_only_when_everything_needed_was_seen(kind, level):
    calls = list_required_calls(build_episode(kind, level))
    for shown in range(len(calls) + 1):
        episode = build_episode(kind, level, unsupported_reward=0.5)
        for call in calls[:shown]:
            assert not episode.step(call).is_error
        step = episode.step(f"answer {episode.target}")
        complete = shown == len(calls)
        assert step.success
        assert (step.is_grounded, step.reward) == (complete, 1.0 if complete else 0.5)


def test_a_wrong_answer_earns_nothing_and_calls_that_failed_show_nothing():
    episode = build_episode("colour", "easy", unsupported_reward=0.5)
    assert episode.step("zoom 99 99").is_error
    step = episode.step("answer nothing")
    assert (step.success, step.is_grounded, step.reward) == (False, False, 0.0)


def test_a_scan_of_the_line_shows_its_cells_too():
    episode = build_episode("count", "medium")
    episode.step("scan {} {}".format(*episode.question.lines[0]))
    assert episode.step(f"answer {episode.target}").is_grounded


def test_the_share_has_to_be_one():
    with pytest.raises(SettingsError, match="unsupported_reward"):
        make_environment("pixel_grid", {"unsupported_reward": 1.5})
