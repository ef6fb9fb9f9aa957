"""Contribution of reward components over a run: shares of the differences, ranks, and recorded groups."""

import json
import statistics

import pytest
from helpers.reward_rollouts import group, rollout

from rl_core.rewards.contribution import compute_contributions, iter_compared_groups
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.rollout_log import RewardRecord


def make_row(success, task, learned, *, weight=0.2, masked=False, **position):
    rewards = {
        "task": task,
        "learned": learned,
        "weighted/task": task,
        "weighted/learned": weight * learned,
    }
    reward = task + weight * learned
    return {"success": success, "reward": reward, "masked": masked, "rewards": rewards, **position}


def test_shares_by_hand():
    mixed = [
        make_row(True, 1.0, 1.0),
        make_row(False, 0.0, -1.0),
    ]  # totals 1.2 and -0.2: 0.7 from their mean, 0.5 of it task
    solved = [make_row(True, 1.0, 2.0), make_row(True, 1.0, -2.0)]  # only `learned` separates them
    equal = [make_row(True, 1.0, 0.5), make_row(True, 1.0, 0.5)]
    contributions = compute_contributions([mixed, solved, equal], ["task", "learned"])
    assert contributions["task"].share == pytest.approx((5 / 7 + 0) / 2)
    assert contributions["learned"].share == pytest.approx((2 / 7 + 1) / 2)
    assert (contributions["task"].alone, contributions["learned"].alone) == (
        0,
        pytest.approx(1 / 3),
    )


def test_a_component_that_goes_against_the_total_has_a_negative_share():
    # totals 1 - 0.4 and 0 + 0.4: 0.1 from their mean, of which task is 0.5 and learned -0.4
    contributions = compute_contributions(
        [[make_row(True, 1.0, -2.0), make_row(False, 0.0, 2.0)]], ["task", "learned"]
    )
    assert contributions["task"].share == pytest.approx(5.0) and contributions[
        "learned"
    ].share == pytest.approx(-4.0)
    assert contributions["task"].ranked == 1.0 and contributions["learned"].ranked == 0.0


def test_pairs_are_ranked_within_groups():
    groups = [
        [
            make_row(True, 1.0, 3.0),
            make_row(True, 1.0, 1.0),
            make_row(False, 0.0, 2.0),
            make_row(False, 0.0, 1.0),
        ],  # 1, 1, 0, a tie
        [make_row(False, 0.0, 9.0), make_row(False, 0.0, 8.0)],  # no pair
    ]
    contribution = compute_contributions(groups, ["learned"])["learned"]
    assert contribution.ranked == pytest.approx(2.5 / 4)
    values, won = [3.0, 1.0, 2.0, 1.0, 9.0, 8.0], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert contribution.correlation == pytest.approx(statistics.correlation(values, won))


def test_what_is_undefined_is_left_out():
    contribution = compute_contributions(
        [[make_row(True, 1.0, 0.5), make_row(True, 1.0, 0.5)]], ["learned"]
    )["learned"]
    assert (contribution.share, contribution.ranked, contribution.correlation) == (None, None, None)
    assert contribution.to_metrics() == {"alone": 0.0}
    assert (
        compute_contributions([], ["task"])
        == {}
        == compute_contributions([[make_row(True, 1.0, 1.0, masked=True)]], ["task"])
    )


def test_masked_rollouts_and_rounding_do_not_count():
    masked = {
        **make_row(False, 0.0, -9.0, masked=True),
        "rewards": {"task": 0.0},
    }  # no weighted parts
    counted = [make_row(True, 1.0, 1.0), make_row(False, 0.0, -1.0)]
    assert compute_contributions(
        [[*counted, masked]], ["task", "learned"]
    ) == compute_contributions([counted], ["task", "learned"])
    close = [
        make_row(True, 1.0, 1.0),
        make_row(True, 1.0, 1.002),
    ]  # rewards 0.0004 apart: advantages are 0
    assert compute_contributions([close], ["learned"])["learned"].alone == 0


def test_groups_of_a_record(tmp_path):
    def build_group(*samples, seed):
        rollouts = [rollout(task=float(n % 2), success=bool(n % 2), seed=seed) for n in samples]
        for n, rollout_of_n in zip(samples, rollouts, strict=True):
            rollout_of_n.trajectory.sample = n
        return group(*rollouts)

    record, path = RewardRecord(tmp_path / "rewards.jsonl"), tmp_path / "rewards.jsonl"
    orchestrator = RewardOrchestrator(
        {"task": 1.0, "learned": 0.5}, scorer=lambda rows: [float(len(r)) for r in rows]
    )
    for number in range(2):
        groups = [
            build_group(0, 1, seed=4),
            build_group(0, 1, seed=5),
            build_group(0, 1, 2, seed=5),
        ]  # the same episode drawn twice
        orchestrator.score(groups)
        record(number, [played for each in groups for played in each.rollouts])
    assert [len(rows) for rows in iter_compared_groups(path)] == [2, 2, 3] * 2
    assert [len(rows) for rows in iter_compared_groups(path, by_iteration=True)] == [7, 7]
    contributions = compute_contributions(iter_compared_groups(path), list(orchestrator.components))
    assert contributions["task"].share == pytest.approx(1.0) and contributions[
        "learned"
    ].share == pytest.approx(0.0)
    assert (
        contributions["task"].alone == 1.0
        and contributions["task"].ranked == 1.0
        and contributions["learned"].ranked == 0.5
    )
    assert len(json.loads(path.read_text().splitlines()[0])["rewards"]) == 4
