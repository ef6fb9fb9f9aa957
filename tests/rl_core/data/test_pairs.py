"""Preference pairs from scored rollouts."""

import pytest

from rl_core.data.pairs import build_pairs_from_groups
from rl_core.errors import DataError
from rl_core.types import Rollout, RolloutGroup, Trajectory


def build_rollout(tokens, success, grounded=None):
    trajectory = Trajectory(
        environment="e",
        level="l",
        kind="k",
        seed=0,
        prompt="p",
        target="t",
        success=success,
        is_grounded=grounded,
    )
    return Rollout([1, 2], list(tokens), [True] * len(tokens), [0.0] * len(tokens), trajectory)


def test_every_success_beats_every_failure_once():
    group = RolloutGroup(
        [
            build_rollout("a", True),
            build_rollout("b", True),
            build_rollout("c", False),
            build_rollout("d", False),
        ]
    )
    pairs = build_pairs_from_groups([group], per_group=10, seed=0)
    assert {("".join(p.chosen_ids[2:]), "".join(p.rejected_ids[2:])) for p in pairs} == {
        ("a", "c"),
        ("a", "d"),
        ("b", "c"),
        ("b", "d"),
    }
    assert all(pair.chosen_ids[:2] == pair.rejected_ids[:2] == [1, 2] for pair in pairs)


def test_both_sides_keep_their_prompt_and_loss_mask():
    good, bad = build_rollout("abc", True), build_rollout("d", False)
    good.loss_mask = [True, False, True]  # the policy wrote a and c, the environment b
    (pair,) = build_pairs_from_groups([RolloutGroup([bad, good])], per_group=1, seed=0)
    assert (pair.chosen.prompt_ids, pair.chosen.completion_ids, pair.chosen.loss_mask) == (
        [1, 2],
        ["a", "b", "c"],
        [True, False, True],
    )
    assert (pair.rejected.completion_ids, pair.rejected.loss_mask) == (["d"], [True])
    assert pair.chosen_ids == [1, 2, "a", "b", "c"]


def test_lucky_successes_equal_tokens_and_one_sided_groups_give_none():
    lucky = RolloutGroup([build_rollout("a", True, grounded=False), build_rollout("c", False)])
    assert build_pairs_from_groups([lucky], per_group=4, seed=0) == []
    twice = RolloutGroup(
        [
            build_rollout("a", True, True),
            build_rollout("a", True, True),
            build_rollout("c", False, False),
        ]
    )
    assert len(build_pairs_from_groups([twice], per_group=4, seed=0)) == 1
    assert (
        build_pairs_from_groups(
            [RolloutGroup([build_rollout("a", True)]), RolloutGroup([build_rollout("a", False)])],
            4,
            0,
        )
        == []
    )


def test_the_limit_holds_for_each_group_and_the_seed_decides_which():
    group = RolloutGroup(
        [build_rollout(c, True) for c in "abcd"] + [build_rollout(c, False) for c in "efgh"]
    )
    first, repeated, other = (
        build_pairs_from_groups([group, group], 3, seed) for seed in (0, 0, 1)
    )
    assert len(first) == 6
    assert [p.chosen_ids for p in first] == [p.chosen_ids for p in repeated]
    assert [(p.chosen_ids, p.rejected_ids) for p in first] != [
        (p.chosen_ids, p.rejected_ids) for p in other
    ]
    with pytest.raises(DataError, match="per_group"):
        build_pairs_from_groups([group], 0, 0)
