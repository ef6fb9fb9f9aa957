import json
import math
import sys
import types

import pytest

from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.components import OverlongPenalty
from rl_core.rewards.model_components import LearnedReward
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.running_stats import RunningNorm
from rl_core.settings import RewardSettings
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn


def build_rollout(task, *, errors=(), seed=0, ids=(1, 2)):
    trajectory = Trajectory(
        environment="fake",
        level="easy",
        kind="k",
        seed=seed,
        prompt="p",
        target="t",
        turns=[Turn(action="a", is_error=error) for error in errors],
        reward=task,
        rewards={"task": task},
    )
    return Rollout(
        prompt_ids=[0],
        completion_ids=list(ids),
        loss_mask=[True] * len(ids),
        sampler_logprobs=[-1.0] * len(ids),
        trajectory=trajectory,
    )


def build_groups():
    return [
        RolloutGroup(
            [build_rollout(1.0, errors=[True, False], seed=1), build_rollout(0.0, seed=1)]
        ),
        RolloutGroup(
            [build_rollout(0.5, seed=2), build_rollout(-0.5, errors=[True, True], seed=2)]
        ),
    ]


@pytest.fixture
def user_module():
    module = types.ModuleType("user_rewards_for_test")
    module.length = lambda trajectories: [float(len(t.turns)) for t in trajectories]
    module.not_callable = 3
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_weighted_sum_parts_and_metrics():
    groups = build_groups()
    metrics = RewardOrchestrator({"task": 2.0, "tool_use": 0.25}).score(groups)
    rewards = [r.reward for g in groups for r in g.rollouts]
    assert rewards == [1.75, 0.0, 1.0, -1.5]  # 2 task - 0.25 misuses
    assert [g.rewards for g in groups] == [[1.75, 0.0], [1.0, -1.5]]
    assert groups[1].rollouts[1].trajectory.rewards == {
        "task": -0.5,
        "tool_use": -2.0,
        "weighted/task": -1.0,
        "weighted/tool_use": -0.5,
    }
    assert groups[1].rollouts[1].trajectory.reward == -1.5
    assert metrics["reward/mean"] == pytest.approx(0.3125)
    assert metrics["reward/std"] == pytest.approx(
        math.sqrt(sum((r - 0.3125) ** 2 for r in rewards) / 4)
    )
    assert metrics["reward/task"] == 0.25 and metrics["reward/tool_use"] == -0.75
    assert metrics["reward/weighted/task"] == 0.5 and metrics["reward/weighted/tool_use"] == -0.1875


def test_a_penalty_is_added_to_the_total_as_it_is():
    """Check limit 4, buffer 2: 2 tokens cost nothing, 3 cost 1/2, 4 cost 1."""
    groups = [RolloutGroup([build_rollout(1.0, ids=[1] * length) for length in (2, 3, 4)])]
    orchestrator = RewardOrchestrator({"task": 2.0}, options=RewardSettings(clip=0.25))
    metrics = orchestrator.score(
        groups, penalties={"overlong": OverlongPenalty(max_tokens=4, buffer=2)}
    )
    assert groups[0].rewards == [
        0.5,
        0.0,
        -0.5,
    ]  # 2 * 0.25, neither clipped nor weighted afterwards
    assert groups[0].rollouts[2].trajectory.rewards == {
        "task": 1.0,
        "weighted/task": 0.5,
        "overlong": -1.0,
    }
    assert (metrics["reward/overlong"], metrics["reward/mean"]) == (-0.5, 0.0)
    with pytest.raises(AttributeError):
        groups[0].rollouts[0].reward = 1.0  # the value is the trajectory's


def test_weights_can_change_during_a_run():
    orchestrator, played = RewardOrchestrator({"task": 1.0, "tool_use": 0.5}), build_groups()
    orchestrator.set_weights({"tool_use": 0.25})
    orchestrator.score(played)
    # task 1, .5 and tool_use -1, -2
    assert played[0].rewards == [0.75, 0.0] and played[1].rewards == [0.5, -1.0]
    with pytest.raises(
        SettingsError, match=r"rewards\.tsk: no component to weigh; did you mean 'task'"
    ):
        orchestrator.set_weights({"tsk": 1.0})


def test_scoring_twice_changes_nothing():
    groups = build_groups()
    orchestrator = RewardOrchestrator({"task": 2.0})
    assert orchestrator.score(groups) == orchestrator.score(groups)


def test_the_environment_reward_stays_in_the_record():
    groups = build_groups()
    RewardOrchestrator({"tool_use": 1.0}).score(groups)
    assert groups[0].rollouts[0].trajectory.rewards == {
        "task": 1.0,
        "tool_use": -1.0,
        "weighted/tool_use": -1.0,
    }
    assert groups[0].rollouts[0].reward == -1.0


def test_user_function_by_import_path(user_module):
    groups = build_groups()
    metrics = RewardOrchestrator({"user_rewards_for_test:length": 1.0}).score(groups)
    assert [g.rewards for g in groups] == [[2.0, 0.0], [0.0, 2.0]]
    assert metrics["reward/user_rewards_for_test.length"] == 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda trajectories: [1.0], "gave 1 values for 4 trajectories"),
        (lambda trajectories: [1.0] * 5, "gave 5 values for 4 trajectories"),
        (lambda trajectories: 1.0, "gave float, expected a list"),
        (lambda trajectories: [0, 1, math.nan, 0], "gave nan, no finite number"),
        (lambda trajectories: [0, "good", 0, 0], "gave 'good'"),
        (lambda trajectories: [1 / (t.seed - 2) for t in trajectories], "raised ZeroDivisionError"),
    ],
)
def test_user_functions_that_fail_are_named(user_module, function, message):
    user_module.wrong = function
    groups = build_groups()
    strict = RewardSettings(max_failed_share=0)
    with pytest.raises(
        RewardError, match=f"reward 'user_rewards_for_test:wrong' {message}"
    ) as caught:
        RewardOrchestrator({"task": 1.0, "user_rewards_for_test:wrong": 1.0}, options=strict).score(
            groups
        )
    seed = {"gave nan": 2, "gave 'goo": 1, "raised Z": 2}.get(message[:8])
    assert seed is None or f"level 'easy', seed {seed}, sample 0: reward" in str(caught.value)
    assert [g.rewards for g in groups] == [[1.0, 0.0], [0.5, -0.5]]  # no group is half scored


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "names no component"),
        ({"taks": 1.0}, "rewards.taks: no such component; did you mean 'task'"),
        ({"learned": 1.0}, "rewards.learned: needs a reward model"),
        ({"no_such_module_here:f": 1.0}, "cannot be imported"),
        (
            {"user_rewards_for_test:lenght": 1.0},
            "no function 'lenght' there; did you mean 'length'",
        ),
        (
            {"user_rewards_for_test:not_callable": 1.0},
            "'user_rewards_for_test:not_callable' is a int, expected a function",
        ),
    ],
)
def test_mistakes_are_reported_before_anything_is_played(user_module, weights, message):
    with pytest.raises(SettingsError, match=message):
        RewardOrchestrator(weights)


def test_running_norm_equals_the_whole_sample():
    norm = RunningNorm()
    for batch in ([1.0, 2.0], [], [6.0], [3.0, 8.0]):
        norm.add_values(batch)
    assert norm.mean == pytest.approx(4.0)  # of 1 2 6 3 8
    assert norm.std == pytest.approx(math.sqrt((9 + 4 + 4 + 1 + 16) / 4))
    assert norm.normalise_values([4.0 + norm.std, 4.0]) == pytest.approx([1.0, 0.0])
    constant = RunningNorm()
    constant.add_values([5.0, 5.0])
    assert constant.normalise_values([5.0, 6.0]) == [0.0, 0.0]


def test_learned_reward_scores_whole_sequences_and_resumes():
    scored_rows = []

    def score_rows(rows):
        scored_rows.extend(rows)
        return [float(sum(row)) for row in rows]

    def build_batch(*sums):
        return [RolloutGroup([build_rollout(0.0, ids=(s,)) for s in sums])]

    orchestrator = RewardOrchestrator({"learned": 0.5}, scorer=score_rows)
    groups = build_batch(1, 2, 3)
    metrics = orchestrator.score(groups)
    assert scored_rows == [[0, 1], [0, 2], [0, 3]]
    assert groups[0].rewards == pytest.approx([-0.5, 0.0, 0.5])  # mean 2, std 1, weight .5
    assert metrics["reward/learned"] == pytest.approx(0.0)
    other = RewardOrchestrator({"learned": 0.5}, scorer=score_rows)
    other.load_state_dict(json.loads(json.dumps(orchestrator.state_dict())))
    first, second = build_batch(4, 8), build_batch(4, 8)
    orchestrator.score(first)
    other.score(second)
    assert first[0].rewards == second[0].rewards


def test_equal_rollouts_are_scored_once():
    scored_rows = []
    reward = LearnedReward(
        lambda rows: scored_rows.append(rows) or [float(sum(row)) for row in rows]
    )
    scores = reward([build_rollout(0.0, ids=ids) for ids in ((4,), (2,), (4,), (2, 2), (4,))])
    assert scored_rows == [[[0, 4], [0, 2], [0, 2, 2]]]
    assert reward.norm.count == 5 and reward.norm.mean == pytest.approx(
        18 / 5
    )  # sums 4, 2, 4, 4, 4
    assert scores[0] == scores[2] == scores[4] == scores[3] == pytest.approx(0.4 / math.sqrt(0.8))
    assert scores[1] == pytest.approx(
        -1.6 / math.sqrt(0.8)
    )  # squares 4 x 0.16 + 2.56 = 3.2, over 4


def test_learned_reward_refuses_bad_scores():
    rollouts = [build_rollout(0.0, ids=(1,)), build_rollout(1.0, ids=(2,))]
    with pytest.raises(RewardError, match="1 scores for 2 different rollouts"):
        LearnedReward(lambda rows: [1.0])(rollouts)
    reward = LearnedReward(lambda rows: [1.0, math.inf])
    with pytest.raises(RewardError, match="rollout 1 with inf"):
        reward(rollouts)
    assert reward.norm.count == 0


def test_observations_count_towards_the_length_that_is_punished():
    """Check six tokens, the last four of which cost: 2 tokens none, 4 a half, 6 all, whoever wrote them."""
    penalty = OverlongPenalty(max_tokens=6, buffer=4)
    masks = [[True] * 2, [True, False, False, True], [True] + [False] * 5]
    rollouts = [
        Rollout(
            [0], list(range(len(mask))), mask, [-1.0] * len(mask), build_rollout(1.0).trajectory
        )
        for mask in masks
    ]
    assert penalty(rollouts) == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("value", [1e30, -1e30, 1.0001e12])
@pytest.mark.parametrize(
    "options",
    [{}, {"normalise": ("task",)}, {"normalise": ("task",), "clip": 5.0}],
)
def test_a_reward_beyond_the_limit_masks_and_counts_its_sample(value, options):
    groups = build_groups()
    groups[0].rollouts[0].trajectory.rewards["task"] = value
    rewards = RewardOrchestrator(
        {"task": 1.0}, options=RewardSettings(max_failed_share=0.5, **options)
    )
    metrics = rewards.score(groups)
    masks = [[rollout.is_masked for rollout in group.rollouts] for group in groups]
    assert masks == [[True, False], [False, False]]
    assert rewards.failures.total == 1 and metrics["reward/masked_rate"] == 0.25
    assert metrics["reward/task"] == 0.0  # of 0, 0.5, -0.5
    assert all(abs(total) < 10 for group in groups for total in group.rewards)
    if rewards.norms:
        assert rewards.norms["task"].mean == 0.0  # not spoiled


def test_a_reward_at_the_limit_or_clipped_below_it_counts():
    groups = build_groups()
    groups[0].rollouts[0].trajectory.rewards["task"] = 1e12
    assert not RewardOrchestrator({"task": 1.0}).score(groups).get("reward/masked_rate")
    assert groups[0].rewards[0] == 1e12
    groups = build_groups()
    groups[0].rollouts[0].trajectory.rewards["task"] = 1e30
    RewardOrchestrator({"task": 1.0}, options=RewardSettings(clip=5.0)).score(groups)
    assert groups[0].rewards[0] == 5.0


def test_a_total_beyond_the_limit_is_a_failure_of_its_largest_part():
    groups = build_groups()
    groups[0].rollouts[0].trajectory.rewards["task"] = 1e10
    strict = RewardSettings(max_failed_share=0)
    rewards = RewardOrchestrator({"task": 1e9, "format": 1.0}, options=strict)
    with pytest.raises(RewardError, match=r"reward 'task' with its weight gave 1e\+19, a total"):
        rewards.score(groups)
