"""Components computed from the trajectory alone: task, tool_use, format, length. Numbers worked by hand."""

import pytest
from helpers.reward_rollouts import call, rollout, say
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rewards.components import FormatReward, LengthReward, TaskReward, ToolUseReward
from rl_core.settings import FormatSettings, LengthSettings, ToolUseSettings


def test_task_is_what_the_environment_gave():
    reward = TaskReward()
    assert reward([rollout(task=0.75, answer="3"), rollout(task=-0.1)]) == [0.75, -0.1]
    assert reward.metrics == {"answered": 0.5}


def test_tool_use_by_hand():
    settings = ToolUseSettings(misuse=1.0, max_calls=2, excess=0.25, bonus=0.1, max_bonus=0.25)
    reward = ToolUseReward(settings)
    four = [call(row=1), call(row=1), call(row=2), call(row=3, error=True)]
    # 1 misuse, 2 beyond 2, 2 distinct successful calls: -1 - .5 + .2
    assert reward([rollout([*four, say("answer x")])]) == [pytest.approx(-1.3)]
    assert reward.metrics == pytest.approx(
        {"misused_turns": 1.0, "excess_calls": 2.0, "bonus": 0.2}
    )
    three = [call(row=1), call(row=2), call(row=3)]
    assert reward([rollout(three), rollout([say("?", error=True)]), rollout()]) == pytest.approx(
        [0.0, -1.0, 0.0]
    )
    assert reward.metrics["bonus"] == pytest.approx(
        0.25 / 3
    )  # .3 capped at .25, over three rollouts


def test_tool_use_is_unchanged_unless_more_is_requested():
    reward = ToolUseReward(ToolUseSettings())
    many = [call(row=n) for n in range(9)]
    assert reward([rollout(many), rollout([*many, say("?", error=True), call(error=True)])]) == [
        0.0,
        -2.0,
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=8), st.integers(0, 4))
def test_no_sequence_of_calls_earns_more_than_the_cap(calls, max_calls):
    settings = ToolUseSettings(max_calls=max_calls, bonus=0.3, max_bonus=0.5)
    turns = [call(row=row, error=error) for row, error in calls]
    (value,) = ToolUseReward(settings)([rollout(turns)])
    assert value <= 0.5
    if turns and not turns[-1].is_error:
        (repeated,) = ToolUseReward(settings)([rollout([*turns, turns[-1]])])
        assert repeated <= value  # repeating a call never pays


def test_format_by_hand():
    reward = FormatReward(FormatSettings())
    good = [
        call(),
        call(error=True),
        say("answer 3"),
    ]  # a failing tool can still be called correctly
    assert reward([rollout(good), rollout([call(), say("hm", error=True)]), rollout()]) == [
        1.0,
        0.5,
        0.0,
    ]
    assert reward.metrics == pytest.approx({"malformed_turns": 1 / 3, "perfect": 1 / 3})
    assert reward([rollout([call(), say("answer 3 and th")], stop="max_tokens")]) == [
        0.5
    ]  # cut off
    assert reward([rollout([call(), call()], stop="max_turns")]) == [1.0]


def test_format_pattern_takes_the_whole_action():
    reward = FormatReward(FormatSettings(pattern="<think>.*</think>.+"))
    fits, lacks = say("<think>a\nb</think>answer 3"), say("well <think>a</think>answer 3")
    assert reward([rollout([fits]), rollout([fits, lacks])]) == [1.0, 0.5]


def test_a_pattern_that_blows_up_costs_a_second_and_is_counted(caplog, monkeypatch):
    """Check a pattern that took `re` half a minute on 26 letters, doubling per letter; no signal interrupts it."""
    monkeypatch.setattr("rl_core.rewards.components.MATCH_TIME_LIMIT_S", 0.05)
    reward = FormatReward(FormatSettings(pattern="(a|a)*b"))
    fits, endless = say("aab"), say("a" * 60 + "bc")
    assert reward([rollout([fits]), rollout([fits, endless])]) == [1.0, 0.5]
    assert reward.metrics == {"malformed_turns": 0.5, "perfect": 0.5, "timed_out": 1.0}
    assert "pattern '(a|a)*b'" in caplog.text and "malformed" in caplog.text
    assert (
        reward([rollout([fits])]) == [1.0] and reward.metrics["timed_out"] == 0
    )  # counted per batch


def test_length_by_hand():
    reward = LengthReward(LengthSettings(free=2, limit=6))
    sampled = [0, 2, 3, 4, 6, 9]
    values = reward(
        [rollout(mask=[True] * n + [False] * 5) for n in sampled]
    )  # observations do not count
    assert values == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert reward.metrics == pytest.approx({"tokens": 4.0, "punished": 4 / 6})


@given(st.lists(st.integers(0, 200), min_size=2, max_size=5))
def test_length_never_rises_with_length(lengths):
    values = LengthReward(LengthSettings())([rollout(mask=[True] * n) for n in sorted(lengths)])
    assert values == sorted(values, reverse=True) and all(-1 <= value <= 0 for value in values)
