"""Verifiers as reward components: the last action is verified; a policy's text never stops a stage."""

import importlib.util

import pytest
from helpers.adapters import fakes
from helpers.reward_rollouts import call, group, rollout, say

from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import CodeSettings, ExactSettings, MathSettings, RewardSettings


def score_replies(name, replies, target="", row=None, **options):
    rollouts = []
    for seed, reply in enumerate(replies):
        played = rollout([call(), say(reply)], seed=seed)
        played.trajectory.target, played.trajectory.row = target, row or {}
        rollouts.append(played)
    metrics = RewardOrchestrator({name: 2.0}, options=RewardSettings(**options)).score(
        [group(*rollouts)]
    )
    return [played.reward for played in rollouts], metrics


def test_the_last_action_is_verified():
    rewards, metrics = score_replies("exact", ["A", "b"], target="a")
    assert rewards == [2.0, 0.0]
    assert metrics["reward/exact"] == 0.5 and metrics["reward/exact/right"] == 0.5
    assert score_replies("exact", ["x"], row={"gold": "x"}, exact=ExactSettings(column="gold"))[
        0
    ] == [2.0]
    with pytest.raises(
        RewardError,
        match=r"reward 'numeric': verifier 'numeric': the target 'a' is not one number.*seed 0",
    ):
        score_replies("numeric", ["1"], target="a")


def test_programs_run_concurrently_and_may_be_partly_right():
    options = CodeSettings(partial=True, timeout_s=20.0)
    tests = ["assert f(1) == 2", "assert f(2) == 4"]
    rewards, metrics = score_replies(
        "code",
        ["def f(x): return 2", "def f(x): return 2 * x", "no program"],
        row={"tests": tests},
        code=options,
    )
    assert rewards == [1.0, 2.0, 0.0]
    assert metrics["reward/code/right"] == pytest.approx(1 / 3)


def test_math_in_a_child_process():
    with fakes("math_verify"):
        options = MathSettings(timeout_s=1.0, workers=1)
        rewards, metrics = score_replies(
            "math", [r"so $\frac{1}{2}$", "0.5", "HANG 1/2", "none"], target="1/2", math=options
        )
        assert rewards == [2.0, 2.0, 0.0, 0.0]
        assert metrics["reward/math/timed_out"] == 1.0
        with pytest.raises(RewardError, match="math-verify reads nothing in the target 'x'"):
            score_replies("math", ["1"], target="x")


def test_the_real_package_tells_equal_expressions():
    if importlib.util.find_spec("math_verify") is None:
        with pytest.raises(
            SettingsError,
            match=r"verifier 'math' needs the package 'math_verify'.*--extras math",
        ):
            RewardOrchestrator({"math": 1.0})
        return
    replies = [r"Thus \boxed{\frac{2}{4}}", "$x = 0.5$", r"\boxed{\frac{1}{3}}", "I do not know"]
    assert score_replies("math", replies, target=r"\frac{1}{2}")[0] == [2.0, 2.0, 0.0, 0.0]


def test_a_package_that_does_not_work_is_no_zero(monkeypatch):
    monkeypatch.setattr(
        "rl_core.environments.answer_checks.MathCheck._probe", ({"target": "2", "text": "3"}, True)
    )
    with (
        fakes("math_verify"),
        pytest.raises(RewardError, match=r"verifier .math. does not work here: .* gave False"),
    ):
        score_replies("math", ["1"], target="1")
