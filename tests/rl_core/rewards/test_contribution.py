"""Contribution of reward components over a run: shares of the differences, ranks, and the groups of the record."""

import json
import statistics

import pytest
from helpers.reward_rollouts import group, rollout

from rl_core.rewards.contribution import compute_contributions, iter_compared_groups
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.rollout_log import RewardRecord


def row(success, task, learned, *, weight=0.2, masked=False, **place):
    rewards = {
        "task": task,
        "learned": learned,
        "weighted/task": task,
        "weighted/learned": weight * learned,
    }
    reward = task + weight * learned
    return {"success": success, "reward": reward, "masked": masked, "rewards": rewards, **place}


def test_shares_by_hand():
    mixed = [
        row(True, 1.0, 1.0),
        row(False, 0.0, -1.0),
    ]  # totals 1.2 and -0.2: 0.7 from their mean, 0.5 of it task
    solved = [row(True, 1.0, 2.0), row(True, 1.0, -2.0)]  # learned alone tells them apart
    equal = [row(True, 1.0, 0.5), row(True, 1.0, 0.5)]
    found = compute_contributions([mixed, solved, equal], ["task", "learned"])
    assert found["task"].share == pytest.approx((5 / 7 + 0) / 2)
    assert found["learned"].share == pytest.approx((2 / 7 + 1) / 2)
    assert (found["task"].alone, found["learned"].alone) == (0, pytest.approx(1 / 3))


def test_a_component_that_goes_against_the_total_has_a_negative_share():
    # totals 1 - 0.4 and 0 + 0.4: 0.1 from their mean, of which task is 0.5 and learned -0.4
    found = compute_contributions(
        [[row(True, 1.0, -2.0), row(False, 0.0, 2.0)]], ["task", "learned"]
    )
    assert found["task"].share == pytest.approx(5.0) and found["learned"].share == pytest.approx(
        -4.0
    )
    assert found["task"].ranked == 1.0 and found["learned"].ranked == 0.0


def test_pairs_are_ranked_within_groups():
    groups = [
        [
            row(True, 1.0, 3.0),
            row(True, 1.0, 1.0),
            row(False, 0.0, 2.0),
            row(False, 0.0, 1.0),
        ],  # 1, 1, 0, a tie
        [row(False, 0.0, 9.0), row(False, 0.0, 8.0)],  # no pair
    ]
    found = compute_contributions(groups, ["learned"])["learned"]
    assert found.ranked == pytest.approx(2.5 / 4)
    values, won = [3.0, 1.0, 2.0, 1.0, 9.0, 8.0], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert found.correlation == pytest.approx(statistics.correlation(values, won))


def test_what_is_undefined_is_left_out():
    found = compute_contributions([[row(True, 1.0, 0.5), row(True, 1.0, 0.5)]], ["learned"])[
        "learned"
    ]
    assert (found.share, found.ranked, found.correlation) == (None, None, None)
    assert found.to_metrics() == {"alone": 0.0}
    assert (
        compute_contributions([], ["task"])
        == {}
        == compute_contributions([[row(True, 1.0, 1.0, masked=True)]], ["task"])
    )


def test_masked_rollouts_and_rounding_do_not_count():
    masked = {**row(False, 0.0, -9.0, masked=True), "rewards": {"task": 0.0}}  # no weighted parts
    kept = [row(True, 1.0, 1.0), row(False, 0.0, -1.0)]
    assert compute_contributions([[*kept, masked]], ["task", "learned"]) == compute_contributions(
        [kept], ["task", "learned"]
    )
    close = [row(True, 1.0, 1.0), row(True, 1.0, 1.002)]  # rewards 0.0004 apart: advantages are 0
    assert compute_contributions([close], ["learned"])["learned"].alone == 0


def test_groups_of_a_record(tmp_path):
    def played(*samples, seed):
        made = [rollout(task=float(n % 2), success=bool(n % 2), seed=seed) for n in samples]
        for n, one in zip(samples, made, strict=True):
            one.trajectory.sample = n
        return group(*made)

    record, path = RewardRecord(tmp_path / "rewards.jsonl"), tmp_path / "rewards.jsonl"
    orchestrator = RewardOrchestrator(
        {"task": 1.0, "learned": 0.5}, scorer=lambda rows: [float(len(r)) for r in rows]
    )
    for number in range(2):
        groups = [
            played(0, 1, seed=4),
            played(0, 1, seed=5),
            played(0, 1, 2, seed=5),
        ]  # an episode drawn twice
        orchestrator.score(groups)
        record(number, [one for each in groups for one in each.rollouts])
    assert [len(found) for found in iter_compared_groups(path)] == [2, 2, 3] * 2
    assert [len(found) for found in iter_compared_groups(path, by_iteration=True)] == [7, 7]
    found = compute_contributions(iter_compared_groups(path), list(orchestrator.components))
    assert found["task"].share == pytest.approx(1.0) and found["learned"].share == pytest.approx(
        0.0
    )
    assert (
        found["task"].alone == 1.0
        and found["task"].ranked == 1.0
        and found["learned"].ranked == 0.5
    )
    assert len(json.loads(path.read_text().splitlines()[0])["rewards"]) == 4
