"""DataFrames of the files that runs leave on disk."""

import json
import os

import pytest

import rl_core
from rl_core.analysis import write_trajectories


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_metrics_are_one_row_a_step(tmp_path):
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": 2, "time": 1, "metrics": {"train/loss": 0.5}},
            {"step": 2, "time": 2, "metrics": {"eval/loss": 0.25}},
            {"step": 1, "time": 3, "metrics": {"train/loss": 1.0}},
            {"step": 2, "time": 4, "metrics": {"train/loss": 0.75}},
        ],
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "metr')  # still being written
    frame = rl_core.read_metrics(tmp_path)
    assert list(frame.index) == [1, 2] and frame.index.name == "step"
    assert frame["train/loss"].tolist() == [1.0, 0.75]
    assert frame["eval/loss"].isna().tolist() == [True, False]


def test_rewards_are_one_row_a_rollout(tmp_path):
    row = {
        "iteration": 0,
        "level": "easy",
        "seed": 3,
        "sample": 1,
        "success": True,
        "reward": 0.5,
        "masked": False,
    }
    write_lines(
        tmp_path / "rewards.jsonl", [{**row, "rewards": {"task": 1.0, "weighted/task": 0.5}}]
    )
    frame = rl_core.read_rewards(tmp_path)
    assert frame.iloc[0].to_dict() == {**row, "reward/task": 1.0, "weighted/task": 0.5}


def build_trajectory(seed, action, **options):
    call = rl_core.ToolCall("look", {"x": 1})
    turns = [
        rl_core.Turn("look 1", call, "it is red", num_tokens=3),
        rl_core.Turn(action, is_error=False, num_tokens=2),
    ]
    return rl_core.Trajectory("e", "easy", "", seed, "p", "red", turns, action, **options)


def test_trajectories_are_one_row_an_episode_or_a_turn(tmp_path):
    for name in ("base", "policy"):
        write_trajectories(
            tmp_path / f"trajectories_{name}.jsonl",
            [
                build_trajectory(1, "answer red", row={"n": 7}, rewards={"task": 1.0}),
                build_trajectory(2, "answer blue"),
            ],
        )
    frame = rl_core.read_trajectories(tmp_path)
    assert frame["model"].tolist() == ["base", "base", "policy", "policy"]
    first = frame.iloc[0]
    assert (
        first["seed"],
        first["num_turns"],
        first["tool_calls"],
        first["reward/task"],
        first["row/n"],
    ) == (
        1,
        2,
        1,
        1,
        7,
    )
    assert first["completion"] == "look 1\nanswer red"
    turns = rl_core.read_trajectories(tmp_path / "trajectories_base.jsonl", turns=True)
    assert turns["turn"].tolist() == [0, 1, 0, 1]
    assert (
        turns["tool"].tolist()[:1] == ["look"] and turns["observation"].tolist()[0] == "it is red"
    )


def test_an_analysis_is_a_tidy_table(tmp_path):
    path = write_trajectories(
        tmp_path / "a.jsonl", [build_trajectory(n, "answer red", success=n < 2) for n in range(4)]
    )
    assert path == 4
    settings = rl_core.AnalysisSettings(bootstrap_samples=100)
    result = rl_core.analyze({"a": tmp_path / "a.jsonl"}, tmp_path / "out", settings)
    assert result.frame().loc["a", "success_rate"] == 0.5
    frame = rl_core.read_analysis(tmp_path / "out")
    actual = frame.query(
        "model == 'a' and group == 'level' and name == 'easy' and metric == 'success_rate'"
    ).iloc[0]
    assert (actual["value"], actual["n"]) == (0.5, 4) and 0 < actual["low"] < 0.5 < actual[
        "high"
    ] < 1


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (rl_core.read_metrics, '{"a": 1}\n', "contains no metrics"),
        (rl_core.read_metrics, "no\n", ":1: is not JSON"),
        (rl_core.read_rewards, '{"a": 1}\n', "contains no rewards"),
        (rl_core.read_rewards, "[1]\n", ":1: must be an obj"),
        (rl_core.read_analysis, "a,b\n1,2\n", "is not an analysis.csv"),
    ],
)
def test_other_files_are_named(read, text, message, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(rl_core.DataError, match=message):
        read(tmp_path / "file")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(rl_core.DataError, match=r"there is no metrics\.jsonl in it"):
        rl_core.read_metrics(tmp_path)
    with pytest.raises(rl_core.DataError, match="no such file"):
        rl_core.read_rewards(tmp_path / "nothing")
    with pytest.raises(rl_core.DataError, match="there is no trajectories file in it"):
        rl_core.read_trajectories(tmp_path)


def test_a_pipelines_folder_is_read_by_stage_and_newest_result(tmp_path):
    def write_result(stage, key, age, name, rows):
        folder = tmp_path / "stages" / stage / key
        folder.mkdir(parents=True)
        write_lines(folder / name, rows)
        manifest = folder / "manifest.json"
        manifest.write_text("{}")
        os.utime(manifest, (1000 - age, 1000 - age))
        return folder

    def build_loss_row(value):
        return [{"step": 1, "metrics": {"train/loss": value}}]

    write_result("sft", "aa", 1, "metrics.jsonl", build_loss_row(0.25))
    write_result("sft", "bb", 2, "metrics.jsonl", build_loss_row(0.5))
    write_result(
        "sft", "zz.tracking", 0, "metrics.jsonl", build_loss_row(9.0)
    )  # a journal, not a result
    assert rl_core.read_metrics(tmp_path)["train/loss"].tolist() == [0.25]
    row = {"iteration": 0, "rewards": {"task": 1.0}}
    policy = write_result("policy", "cc", 0, "metrics.jsonl", build_loss_row(0.125))
    write_lines(policy / "rewards.jsonl", [row])
    write_lines(
        policy / "recent_rollouts.jsonl",
        [{**build_trajectory(1, "answer red").to_json(), "iteration": 3}],
    )
    (policy / "metrics_history.json").write_text('{"window": 10}')
    assert rl_core.read_metrics(tmp_path, stage="policy")["train/loss"].tolist() == [0.125]
    assert rl_core.read_metrics(tmp_path, stage="sft")["train/loss"].tolist() == [0.25]
    assert len(rl_core.read_rewards(tmp_path)) == 1
    assert rl_core.read_history(tmp_path) == {"window": 10}
    assert rl_core.read_trajectories(tmp_path)["iteration"].tolist() == [3]
    evaluated = write_result("evaluate", "dd", 0, "summary.json", [])
    write_trajectories(evaluated / "trajectories_policy.jsonl", [build_trajectory(1, "answer red")])
    assert rl_core.read_trajectories(tmp_path)["model"].tolist() == [
        "policy"
    ]  # the evaluation's come first
    assert rl_core.read_trajectories(tmp_path, stage="policy")["iteration"].tolist() == [3]
    with pytest.raises(
        rl_core.DataError,
        match=r"several stages have a metrics\.jsonl: policy, sft\. Name one: stage=",
    ):
        rl_core.read_metrics(tmp_path)
    with pytest.raises(
        rl_core.DataError, match=r"no stage 'sft' with a rewards\.jsonl; there are: policy"
    ):
        rl_core.read_rewards(tmp_path, stage="sft")
