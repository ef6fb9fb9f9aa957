"""Rewards by environment: components, options, running statistics, failures, metrics and state."""

import dataclasses
import math

import pytest
from helpers.library import Echo
from helpers.reward_rollouts import call, group, rollout, say

import rl_core
from rl_core.rewards.contribution import compute_contributions
from rl_core.rewards.mixture_rewards import build_rewards, merge_reward_options
from rl_core.settings import RewardSettings


def played(label, *rollouts):
    """Return a group of one environment of the mixture."""
    for row in rollouts:
        row.trajectory = dataclasses.replace(
            row.trajectory, environment=label, level=f"{label}/low"
        )
    return group(*rollouts)


def mix(**parts):
    return rl_core.MixtureEnvironment(
        {label: rl_core.MixturePart(Echo(), **options) for label, options in parts.items()}
    )


def score_ten(trajectories):
    return [10.0 for _ in trajectories]


def test_each_environment_is_scored_by_its_components():
    mixture = mix(a={}, b={"rewards": {"task": 2.0, "tool_use": 0.5}})
    rewards = build_rewards(mixture, {"task": 1.0})
    groups = [
        played("a", rollout([call(error=True)], task=1.0), rollout(task=0.0)),
        played("b", rollout([call(error=True)], task=1.0), rollout(task=0.25)),
    ]
    metrics = rewards.score(groups)
    assert [row.reward for row in groups[0].rollouts] == [1.0, 0.0]
    # One misused call costs misuse = 1: 2 * 1 - 0.5 * 1; then 2 * 0.25.
    assert [row.reward for row in groups[1].rollouts] == [1.5, 0.5]
    assert metrics["reward/mean"] == pytest.approx(0.75)
    deviation = math.sqrt((0.25**2 + 0.75**2 + 0.75**2 + 0.25**2) / 4)
    assert metrics["reward/std"] == pytest.approx(deviation)
    assert metrics["reward/task"] == pytest.approx((1 + 0 + 1 + 0.25) / 4)
    assert metrics["reward/tool_use"] == pytest.approx(-0.5)  # of b alone
    assert "tool_use" not in groups[0].rollouts[0].trajectory.rewards


def test_the_running_statistics_are_separate():
    mixture = mix(a={}, b={})
    options = {"normalise": ("task",)}
    rewards = build_rewards(mixture, {"task": 1.0}, options=options)
    alone = build_rewards(Echo(), {"task": 1.0}, options=options)

    def rows(scale):
        return [
            rollout(task=scale * value, seed=seed) for seed, value in enumerate((1.0, 2.0, 4.0))
        ]

    for _ in range(2):
        mixed = [played("a", *rows(1.0)), played("b", *rows(1000.0))]
        rewards.score(mixed)
        single = group(*rows(1.0))
        alone.score([single])
    assert [row.reward for row in mixed[0].rollouts] == [row.reward for row in single.rollouts]
    assert [row.reward for row in mixed[1].rollouts] == pytest.approx(
        [row.reward for row in single.rollouts], rel=1e-6
    )


def test_the_state_is_restored_by_environment():
    def build():
        return build_rewards(mix(a={}, b={}), {"task": 1.0}, options={"normalise": ("task",)})

    first, second = build(), build()
    first.score([played("a", rollout(task=3.0), rollout(task=9.0)), played("b", rollout(task=5.0))])
    second.load_state_dict(first.state_dict())
    again = [[played("a", rollout(task=4.0)), played("b", rollout(task=4.0))] for _ in range(2)]
    first.score(again[0])
    second.score(again[1])
    values = [[row.reward for part in groups for row in part.rollouts] for groups in again]
    assert values[0] == values[1] and values[0][0] != values[0][1]


def test_options_of_an_environment_replace_those_of_the_stage_block_by_block():
    base = RewardSettings(clip=5.0, numeric={"tolerance": 0.5})
    merged = merge_reward_options(base, {"numeric": {"find": "boxed"}, "clip": 2.0})
    assert merged.numeric.find == "boxed" and merged.numeric.tolerance == 0.5
    assert merged.clip == 2.0 and base.clip == 5.0
    for changes, message in (
        ({"numric": {}}, "did you mean 'numeric'"),
        ({"numeric": {"fnd": 1}}, "did you mean 'find'"),
        ({"clip": -1.0}, "reward_options.clip"),
    ):
        with pytest.raises(rl_core.SettingsError, match=message):
            merge_reward_options(base, changes)


def test_failures_of_all_environments_are_counted_together():
    def fail(trajectories):
        raise ValueError("boom")

    mixture = mix(a={"rewards": {"fail": 1.0}}, b={})
    rewards = build_rewards(
        mixture, {"task": 1.0}, functions={"fail": fail}, options={"max_failed_share": 0.5}
    )
    groups = [played("a", rollout(), rollout()), played("b", rollout(task=1.0), rollout(task=0.0))]
    metrics = rewards.score(groups)
    # All samples of a failed, but half of the mixture's samples could be scored.
    assert [row.is_masked for row in groups[0].rollouts] == [True, True]
    assert rewards.failures.total == 2 and metrics["reward/masked_rate"] == 1.0
    assert metrics["reward/mean"] == pytest.approx(0.5)
    strict = build_rewards(
        mixture, {"task": 1.0}, functions={"fail": fail}, options={"max_failed_share": 0.0}
    )
    with pytest.raises(rl_core.RewardError, match="reward 'fail'"):
        strict.score([played("a", rollout()), played("b", rollout())])


def test_weights_of_a_curriculum_stage_change_where_the_component_is():
    mixture = mix(a={}, b={"rewards": {"task": 1.0, "tool_use": 0.5}})
    rewards = build_rewards(mixture, {"task": 1.0})
    rewards.set_weights({"tool_use": 2.0})
    groups = [played("a", rollout(task=1.0)), played("b", rollout([call(error=True)], task=1.0))]
    rewards.score(groups)
    assert [part.rollouts[0].reward for part in groups] == [1.0, -1.0]
    with pytest.raises(rl_core.SettingsError, match="no component to weigh"):
        rewards.set_weights({"length": 1.0})


def test_an_unknown_component_names_the_environment():
    with pytest.raises(rl_core.SettingsError, match=r"environment 'b': rewards\.exakt"):
        build_rewards(mix(a={}, b={"rewards": {"exakt": 1.0}}), {"task": 1.0})
    with pytest.raises(rl_core.SettingsError, match=r"environment 'b': .*needs a reward model"):
        build_rewards(mix(a={}, b={"rewards": {"learned": 1.0}}), {"task": 1.0})


def test_alarms_and_correlations_are_of_each_environment():
    rewards = build_rewards(mix(a={}, b={}), {"task": 1.0}, options={"window": 3})
    alarms = []
    for step in range(6):
        groups = [
            played("a", rollout([say("x")], task=float(step), success=step < 3), rollout(task=0.0)),
            played("b", rollout(task=1.0, success=True), rollout(task=0.0)),
        ]
        rewards.score(groups)
        metrics = rewards.observe(groups, "all")
        alarms.append(metrics.get("reward/alarm", 0.0))
    # The reward of a rises while its success falls; over both environments it is hidden by b at first.
    assert max(alarms) == 1.0
    b_watch = rewards.parts["b"].hacking_monitor
    assert b_watch is not rewards.parts["a"].hacking_monitor


def test_contributions_leave_out_groups_without_the_component():
    def row(label, seed, sample, reward, **parts):
        weighted = {f"weighted/{name}": value for name, value in parts.items()}
        return {
            "masked": False,
            "reward": reward,
            "success": reward > 0.5,
            "rewards": {**parts, **weighted},
            "level": f"{label}/low",
            "seed": seed,
            "sample": sample,
            "iteration": 0,
        }

    first = [row("a", 1, 0, 1.0, task=1.0), row("a", 1, 1, 0.0, task=0.0)]
    second = [
        row("b", 1, 0, 1.5, task=1.0, tool_use=0.5),
        row("b", 1, 1, 0.0, task=0.0, tool_use=0.0),
    ]
    result = compute_contributions([first, second], ["task", "tool_use"])
    # Of b's difference of 1.5 the task gives 1 and tool_use 0.5; of a's the task gives all.
    assert result["task"].share == pytest.approx((1 + 2 / 3) / 2)
    assert result["tool_use"].share == pytest.approx(1 / 3)
    assert result["task"].ranked == 1.0 and result["tool_use"].ranked == 1.0
