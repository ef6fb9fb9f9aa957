"""Right actions, loops and exploration of an episode, by hand; the same during training."""

import pytest

from rl_core.analysis.summary import (
    TrajectorySummary,
    compute_right_action_rate,
    extract_tool_steps,
)
from rl_core.environments.calculator import CALCULATOR
from rl_core.environments.pixel_grid import PixelGrid
from rl_core.environments.tools import Toolset
from rl_core.rollouts.rollout_metrics import compute_behaviour_metrics
from rl_core.types import ToolCall, Trajectory, Turn


def make_call(x, observation="a", error=False, tool="look"):
    return Turn("call", ToolCall(tool, {"x": x}), observation, is_error=error)


def make_trajectory(*turns, success=True, grounded=None, tokens=4):
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
    assert compute_right_action_rate(make_trajectory(make_call(1), make_call(2, "b"), ANSWER)) == 1
    assert compute_right_action_rate(
        make_trajectory(make_call(1), make_call(1), ANSWER)
    ) == pytest.approx(2 / 3)  # the second gives no new observation
    assert (
        compute_right_action_rate(make_trajectory(make_call(1, "oops", error=True), ANSWER)) == 0.5
    )
    assert compute_right_action_rate(make_trajectory(make_call(1), ANSWER, success=False)) == 0.5
    assert compute_right_action_rate(make_trajectory(ANSWER, grounded=False)) == 0  # a lucky guess
    assert compute_right_action_rate(make_trajectory(Turn("hm", observation="?"), ANSWER)) == 0.5
    assert compute_right_action_rate(make_trajectory()) is None


def test_steps_loops_and_efficiency():
    steps = extract_tool_steps(
        make_trajectory(make_call(1), make_call(2), make_call(1), make_call(2), ANSWER)
    )
    assert steps.loop_period == 2 and steps.efficiency == 0.5
    assert (
        extract_tool_steps(make_trajectory(ANSWER)).efficiency is None
        and extract_tool_steps(make_trajectory(make_call(1))).loop_period == 0
    )


def test_while_training():
    rollouts = [
        make_trajectory(make_call(1), make_call(1), ANSWER, tokens=1),
        make_trajectory(make_call(1), make_call(2, "b", tool="zoom"), ANSWER, tokens=20),
        make_trajectory(ANSWER, success=False, tokens=30),
        make_trajectory(make_call(1, tool="evil/../name"), tokens=40),
    ]
    metrics = compute_behaviour_metrics(rollouts)
    assert metrics == {
        "train/loop_rate": 0.25,
        "train/right_action_rate": pytest.approx((2 / 3 + 1 + 0 + 1) / 4),
        "train/coherent_rate": 0.5,  # two write the same text twice
        "train/action_tokens_p10": 1.0,
        "train/action_tokens_p90": 40.0,
        "tool/used_rate": 0.75,
        "train/exploration_efficiency": pytest.approx((0.5 + 1 + 1) / 3),
        "tool/share/look": 3 / 5,
        "tool/share/zoom": 1 / 5,  # invalid metric names are left out
    }
    assert compute_behaviour_metrics(rollouts, ["look", "mark"]) == {
        **metrics,
        "tool/share/mark": 0.0,
    }
    visual = compute_behaviour_metrics(rollouts, visual_tools=["zoom"])
    assert visual == {**metrics, "tool/rapr": 0.25}  # RaPR: one of four calls a visual tool
    tools = PixelGrid().tools
    assert tools.list_visual_tools() == ("zoom", "scan", "count")
    assert Toolset([CALCULATOR]).list_visual_tools() == ()
    summary = TrajectorySummary(["zoom"])
    assert [summary.add_trajectory(each)["rapr"] for each in rollouts] == [0, 1, 0, 0]
    assert summary.compute_metrics()["rapr"] == 0.25
    assert "rapr" not in TrajectorySummary(()).compute_metrics()
    assert "tool/share/mark" not in compute_behaviour_metrics(
        [make_trajectory(ANSWER)], ["look", "mark"]
    )  # no calls, hence no share
