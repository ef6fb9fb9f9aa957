"""Difference of two models: figures by hand, the exact test against the enumeration of all signs."""

import itertools

import pytest
from helpers.handmade_trajectories import generate_trajectories, trajectory, zoom

from rl_core.analysis import write_trajectories
from rl_core.analysis.comparison import diff_models
from rl_core.errors import DataError
from rl_core.types import Turn


def write_models(tmp_path, first, second):
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, episodes in zip(paths, (first, second), strict=True):
        write_trajectories(path, list(episodes))
    return paths


def test_figures_by_hand(tmp_path):
    looks = [zoom(1, 2), zoom(3, 3, "blue"), Turn("answer blue", num_tokens=3)]
    first = [trajectory(seed, success=seed != 4) for seed in range(5)]
    second = [
        trajectory(0),
        trajectory(1, False, looks),
        trajectory(2, False, [zoom(1, 2)], stop_reason="max_turns", level="hard"),
        trajectory(3, False),  # the same actions
        trajectory(4),
    ]
    first[2].level = "hard"
    diff = diff_models(write_models(tmp_path, first, second), ("sft", "policy"))
    assert diff.paired.total.success.difference == pytest.approx(-2 / 5)  # 1 won, 3 lost
    assert (diff.paired.total.wins, diff.paired.total.losses) == (1, 3)
    # signs of four episodes: 2 (P(+ >= 3)) = 2 (4 + 1) / 16
    assert [diff.exact_p_value, diff.paired.p_value] == pytest.approx([10 / 16, 10 / 16])
    assert [(row.name, row.success.difference) for row in diff.worse] == [
        ("hard", -1.0),
        ("colour", pytest.approx(-0.4)),
        ("easy", pytest.approx(-0.25)),
    ]
    sft, policy = diff.behaviour
    assert (sft.turns, sft.tools, sft.truncated_rate) == (2.0, {"zoom": 1.0}, 0.0)
    assert (policy.turns, policy.tools, policy.truncated_rate) == (2.0, {"zoom": 6 / 5}, 0.2)
    parted = {episode.seed: episode for episode in diff.lost}
    assert set(parted) == {1, 2, 3} and [episode.seed for episode in diff.won] == [4]
    assert (parted[1].turn, parted[1].before, parted[1].actions) == (
        1,
        ("zoom 1 2",),
        ("answer red", "zoom 3 3"),
    )
    assert parted[1].observations == ("", "blue") and parted[1].success == (1.0, 0.0)
    assert (parted[2].turn, parted[2].actions, parted[2].ends) == (
        1,
        ("answer red", ""),
        ("terminated", "max_turns"),
    )
    assert (parted[3].turn, parted[3].actions) == (None, ("", ""))
    as_json = diff.to_json()
    assert as_json["first"] == "sft" and as_json["behaviour"]["policy"]["tools"] == {"zoom": 1.2}
    assert [row["seed"] for row in as_json["won"]] == [4] and as_json[
        "exact_p_value"
    ] == pytest.approx(0.625)


def test_the_exact_test_is_that_of_all_signs_with_several_samples(tmp_path):
    """Compare rates of three samples with the distribution over all 2^n signs, enumerated."""
    first, second = (
        list(generate_trajectories(12, 0.5, seed=1, samples=3)),
        list(generate_trajectories(12, 0.9, seed=2, samples=3)),
    )
    diff = diff_models(write_models(tmp_path, first, second), ("a", "b"))
    rates = [
        {
            seed: sum(t.success for t in side if t.seed == seed) / 3
            for seed in {t.seed for t in side}
        }
        for side in (first, second)
    ]
    differences = [rates[1][seed] - rates[0][seed] for seed in rates[0]]
    moved = [value for value in differences if value]
    sums = [
        sum(s * abs(v) for s, v in zip(signs, moved, strict=True))
        for signs in itertools.product((1, -1), repeat=len(moved))
    ]
    more, less = (
        sum(total * sign >= sum(moved) * sign - 1e-9 for total in sums) / len(sums)
        for sign in (1, -1)
    )
    assert len(moved) > 4 and diff.exact_p_value == pytest.approx(min(1.0, 2 * min(more, less)))
    assert diff.paired.total.success.difference == pytest.approx(sum(differences) / 12)


def test_a_model_and_itself_do_not_differ(tmp_path):
    episodes = list(generate_trajectories(9, 0.6))
    diff = diff_models(write_models(tmp_path, episodes, episodes), ("a", "a'"))
    assert (diff.exact_p_value, diff.paired.total.success) == (1.0, (0.0, 0.0, 0.0))
    assert diff.worse == diff.lost == diff.won == []


def test_episodes_of_a_single_model_are_counted_and_none_in_common_is_an_error(tmp_path):
    diff = diff_models(
        write_models(tmp_path, generate_trajectories(6, 0.5), generate_trajectories(9, 0.5)),
        ("a", "b"),
    )
    assert (diff.paired.only_first, diff.paired.only_second) == (0, 3)
    with pytest.raises(DataError, match="no episode in common"):
        diff_models(write_models(tmp_path, [trajectory(1)], [trajectory(2)]), ("a", "b"))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError):
        diff_models((tmp_path / "a.jsonl", tmp_path / "b.jsonl"), ("a", "b"))
