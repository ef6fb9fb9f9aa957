"""Log of the latest training rollouts."""

import json

from rl_core.rewards.rollout_log import RecentRollouts, build_combined_record
from rl_core.types import Rollout, Trajectory, Turn


def build_rollout(seed, reward):
    trajectory = Trajectory(
        "maze", "easy", "walk", seed, "where?", "out", turns=[Turn("go east")], reward=reward
    )
    return Rollout([1], [2], [True], [0.0], trajectory)


def test_the_newest_iterations_remain_spread_over_their_rollouts(tmp_path):
    path = tmp_path / "recent.jsonl"
    record = RecentRollouts(path, iterations=2, per_iteration=3)
    for iteration in range(4):
        record(iteration, [build_rollout(seed, 10.0 * iteration + seed) for seed in range(6)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["iteration"], row["seed"], row["reward"]) for row in rows] == [
        (2, 0, 20.0),
        (2, 2, 22.0),
        (2, 4, 24.0),
        (3, 0, 30.0),
        (3, 2, 32.0),
        (3, 4, 34.0),
    ]
    assert rows[0]["turns"][0]["action"] == "go east"
    assert [file.name for file in tmp_path.iterdir()] == ["recent.jsonl"]


def test_fewer_rollouts_than_the_limit_and_none_at_all(tmp_path):
    path = tmp_path / "recent.jsonl"
    record = RecentRollouts(path, iterations=2, per_iteration=8)
    record(0, [])
    assert path.read_text() == ""
    record(1, [build_rollout(5, 1.0)])
    assert len(path.read_text().splitlines()) == 1


def test_a_missing_folder_stops_nothing_and_every_record_is_reported(tmp_path):
    calls = []
    record = build_combined_record(
        RecentRollouts(tmp_path / "none" / "recent.jsonl"),
        lambda *arguments: calls.append(arguments),
    )
    record(3, (build_rollout(seed, 0.0) for seed in range(2)))
    assert calls[0][0] == 3 and len(calls[0][1]) == 2
