"""Reward orchestrator: normalising, clipping and weighting of components, hidden states, saved state."""

import json
import math

import pytest
from helpers.reward_rollouts import call, group, rollout, say, walk

from rl_core.environments.answer_checks import ANSWER_CHECKS
from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.orchestrator import REWARD_COMPONENTS, RewardOrchestrator
from rl_core.settings import LengthSettings, RewardSettings


def build_groups(*tasks):
    return [group(*(rollout([say("a")], task=task, seed=n) for n, task in enumerate(tasks)))]


def test_parts_are_normalised_by_all_that_was_seen_then_clipped_then_weighed():
    orchestrator = RewardOrchestrator(
        {"task": 2.0}, options=RewardSettings(normalise=("task",), clip=1.1)
    )
    groups = build_groups(1.0, 3.0)
    metrics = orchestrator.score(groups)
    std = math.sqrt(2)  # of 1 and 3
    assert groups[0].rewards == pytest.approx([-2 / std, 2 / std])
    assert groups[0].rollouts[0].trajectory.rewards == {
        "task": 1.0,
        "weighted/task": pytest.approx(-2 / std),
    }
    assert metrics["reward/task"] == 2.0 and metrics["reward/weighted/task"] == pytest.approx(0.0)
    later = build_groups(2.0, 8.0)  # of 1 3 2 8: mean 3.5, squares 6.25 + .25 + 2.25 + 20.25 = 29
    orchestrator.score(later)
    std = math.sqrt(29 / 3)
    assert later[0].rewards == pytest.approx([2 * -1.5 / std, 2 * 1.1])  # 4.5 / 3.1 is clipped
    other = RewardOrchestrator({"task": 2.0}, options=RewardSettings(normalise=("task",), clip=1.1))
    other.load_state_dict(json.loads(json.dumps(orchestrator.state_dict())))
    first, second = build_groups(0.0, 4.0), build_groups(0.0, 4.0)
    assert (
        orchestrator.score(first) == other.score(second) and first[0].rewards == second[0].rewards
    )


def test_clipping_is_at_both_ends():
    groups = build_groups(-5.0, -0.5, 5.0)
    RewardOrchestrator({"task": 2.0}, options=RewardSettings(clip=1.0)).score(groups)
    assert groups[0].rewards == [-2.0, -1.0, 2.0]


def test_nothing_is_normalised_or_clipped_unless_asked_for():
    groups = build_groups(100.0, -0.1)
    RewardOrchestrator({"task": 0.3}).score(groups)
    assert groups[0].rewards == [0.3 * 100.0, 0.3 * -0.1]  # exactly


def test_the_curriculum_changes_weights():
    orchestrator = RewardOrchestrator(
        {"task": 1.0, "length": 0.0}, options=RewardSettings(length=SHORT)
    )
    groups = build_groups(1.0)
    orchestrator.score(groups)
    assert groups[0].rewards == [1.0]
    orchestrator.set_weights({"length": 2.0})
    orchestrator.score(groups)
    assert groups[0].rewards == [1.0 - 2.0 * 0.5]  # 2 tokens, 1 of 2 beyond the free length
    orchestrator.set_weights({})
    orchestrator.score(groups)
    assert groups[0].rewards == [1.0]
    with pytest.raises(SettingsError, match="lenght: no component to weigh; did you mean 'length'"):
        orchestrator.set_weights({"lenght": 1.0})


SHORT = LengthSettings(free=1, limit=3)


def test_learned_with_weight_0_needs_no_model():
    groups = build_groups(1.0)
    orchestrator = RewardOrchestrator({"task": 1.0, "learned": 0.0})
    orchestrator.score(groups)
    assert groups[0].rewards == [1.0] and "learned" not in orchestrator.components


def test_every_shipped_component_can_be_named():
    # need a readable target, a server, or the tokens of each turn
    of_rows = {*ANSWER_CHECKS, "judge", "process"}
    names = [name for name in REWARD_COMPONENTS if name not in of_rows]
    orchestrator = RewardOrchestrator(
        dict.fromkeys(names, 1.0), scorer=lambda rows: [float(len(r)) for r in rows]
    )
    assert set(orchestrator.components) == set(REWARD_COMPONENTS) - of_rows
    groups = [
        group(
            rollout([call(row=1), say("answer 3")], mask=[True, False, True]),
            rollout([say("answer 4")]),
        )
    ]
    sizes = []

    def embed_rollouts(rollouts):
        sizes.append(len(rollouts))
        return [walk([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]), walk([1.0, 0.0], [1.0, 1.0])]

    metrics = orchestrator.score(groups, embed=embed_rollouts)
    assert sizes == [2]  # one call for all
    for name in names:
        assert math.isfinite(metrics[f"reward/{name}"]) and math.isfinite(
            metrics[f"reward/weighted/{name}"]
        )
        assert any(key.startswith(f"reward/{name}/") for key in metrics), (
            name
        )  # each has separate metrics
    parts = groups[0].rollouts[0].trajectory.rewards
    assert set(parts) == {*names, *(f"weighted/{name}" for name in names)}
    assert groups[0].rewards[0] == pytest.approx(sum(parts[f"weighted/{name}"] for name in names))


def test_states_are_computed_only_where_needed():
    def fail_if_called(rollouts):
        raise AssertionError("nobody needs them")

    RewardOrchestrator({"task": 1.0, "format": 1.0}).score(build_groups(1.0), embed=fail_if_called)
    with pytest.raises(RewardError, match="reward 'coherence' needs the policy's states"):
        RewardOrchestrator({"task": 1.0, "coherence": 1.0}).score(build_groups(1.0))
