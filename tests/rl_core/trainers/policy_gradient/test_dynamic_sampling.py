"""Dynamic sampling by hand: rounds, requests of each, selected groups, and metrics over all played rollouts."""

from types import SimpleNamespace

import pytest

from rl_core.trainers.policy_gradient.samples import sample_groups_with_signal


def build_group(*rewards):
    rollouts = [SimpleNamespace(reward=reward, is_masked=reward == -9) for reward in rewards]
    return SimpleNamespace(rollouts=rollouts, rewards=list(rewards))


def play_rounds(rounds, *, num_groups=2, tries=2):
    """Return the result and the requests: (groups, round)."""
    requests, rounds = [], iter(rounds)

    def play_round(count, attempt):
        requests.append((count, attempt))
        return next(rounds)

    scores = iter([{"reward/a": 1.0}, {"reward/a": 3.0, "reward/b": 5.0}, {"reward/a": 5.0}])
    return sample_groups_with_signal(
        play_round, lambda groups: (groups, next(scores)), num_groups=num_groups, num_retries=tries
    ), requests


def test_groups_of_equal_rewards_are_replaced_by_as_many():
    actual, requests = play_rounds(
        [[build_group(1, 1), build_group(0, 1)], [build_group(0, 0)], [build_group(2, 1)]]
    )
    assert requests == [(2, 0), (1, 1), (1, 2)]
    assert [g.rewards for g in actual.selected_groups] == [[0, 1], [2, 1]] and len(
        actual.all_groups
    ) == 4
    assert actual.dropped_rate == 0.5
    # means over the rounds that have a metric; rewards of all eight rollouts: 6 in sum, 8 in squares
    assert actual.compute_metrics() == {
        "reward/a": 3.0,
        "reward/b": 5.0,
        "reward/mean": 0.75,
        "reward/std": pytest.approx((8 / 8 - 0.75**2) ** 0.5),
    }


def test_it_ends_with_enough_or_after_the_last_round():
    actual, requests = play_rounds([[build_group(0, 1), build_group(1, 0)]])
    assert requests == [(2, 0)] and len(actual.selected_groups) == 2 and actual.dropped_rate == 0
    actual, requests = play_rounds(
        [[build_group(1, 1 + 1e-7)], [build_group(0, 0)]], num_groups=1, tries=1
    )  # a difference by rounding alone
    assert (
        requests == [(1, 0), (1, 1)] and actual.selected_groups == [] and actual.dropped_rate == 1
    )


def test_without_further_rounds_every_group_counts_and_a_round_without_groups_scores_nothing():
    actual, requests = play_rounds([[build_group(1, 1)]], num_groups=1, tries=0)
    assert requests == [(1, 0)] and len(actual.selected_groups) == 1
    actual, requests = play_rounds(
        [[], [build_group(0, 1, -9)]], num_groups=1, tries=1
    )  # all episodes of the first round had failed
    assert requests == [(1, 0), (1, 1)] and actual.compute_metrics()["reward/a"] == 1.0
    assert actual.compute_metrics()["reward/mean"] == 0.5  # a masked rollout has no reward
