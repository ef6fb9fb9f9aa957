"""Right actions, loops and exploration of an episode, by hand; the same while training."""

import pytest

from rl_core.analysis.summary import compute_right_action_rate, extract_tool_steps
from rl_core.rollouts.rollout_metrics import compute_behaviour_metrics
from rl_core.types import ToolCall, Trajectory, Turn


def call(x, seen="a", error=False, tool="look"):
    return Turn("call", ToolCall(tool, {"x": x}), seen, is_error=error)


def played(*turns, success=True, grounded=None, tokens=4):
    return Trajectory(
        "e",
        "easy",
        "k",
        0,
        "?",
        "red",
        turns=list(turns),
        success=success,
        is_grounded=grounded,
        num_action_tokens=tokens,
    )


ANSWER = Turn("red")


def test_right_action_right_place_by_hand():
    assert compute_right_action_rate(played(call(1), call(2, "b"), ANSWER)) == 1
    assert compute_right_action_rate(played(call(1), call(1), ANSWER)) == pytest.approx(
        2 / 3
    )  # the second tells nothing new
    assert compute_right_action_rate(played(call(1, "oops", error=True), ANSWER)) == 0.5
    assert compute_right_action_rate(played(call(1), ANSWER, success=False)) == 0.5
    assert compute_right_action_rate(played(ANSWER, grounded=False)) == 0  # a lucky guess
    assert compute_right_action_rate(played(Turn("hm", observation="?"), ANSWER)) == 0.5
    assert compute_right_action_rate(played()) is None


def test_steps_loops_and_efficiency():
    found = extract_tool_steps(played(call(1), call(2), call(1), call(2), ANSWER))
    assert found.loop_period == 2 and found.efficiency == 0.5
    assert (
        extract_tool_steps(played(ANSWER)).efficiency is None
        and extract_tool_steps(played(call(1))).loop_period == 0
    )


def test_while_training():
    rollouts = [
        played(call(1), call(1), ANSWER, tokens=1),
        played(call(1), call(2, "b", tool="zoom"), ANSWER, tokens=20),
        played(ANSWER, success=False, tokens=30),
        played(call(1, tool="evil/../name"), tokens=40),
    ]
    found = compute_behaviour_metrics(rollouts)
    assert found == {
        "train/loop_rate": 0.25,
        "train/right_action_rate": pytest.approx((2 / 3 + 1 + 0 + 1) / 4),
        "train/coherent_rate": 0.5,  # two write the same text twice
        "train/action_tokens_p10": 1.0,
        "train/action_tokens_p90": 40.0,
        "tool/used_rate": 0.75,
        "train/exploration_efficiency": pytest.approx((0.5 + 1 + 1) / 3),
        "tool/share/look": 3 / 5,
        "tool/share/zoom": 1 / 5,  # names that are no metric's have none
    }
    assert compute_behaviour_metrics(rollouts, ["look", "mark"]) == {
        **found,
        "tool/share/mark": 0.0,
    }
    assert "tool/share/mark" not in compute_behaviour_metrics(
        [played(ANSWER)], ["look", "mark"]
    )  # of no call there is no share
