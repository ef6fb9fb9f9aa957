"""Destinations of metrics: files, terminal, several together, TensorBoard."""

import csv
import json
import sys

import pytest
from helpers.library import length, settings, small_policy

import rl_core
from rl_core.trackers import build_tracker_group


def train_policy(tracker, **options):
    training = rl_core.grpo(
        small_policy(),
        prompts=["say e"],
        reward=length,
        tracker=tracker,
        settings=settings(),
        **options,
    )
    training.run()
    return training


def test_several_trackers_record_the_same(tmp_path, capsys):
    memory = rl_core.MemoryTracker()
    training = train_policy(
        [memory, "terminal", f"csv:{tmp_path / 'a.csv'}", str(tmp_path / "b.jsonl")],
        output=tmp_path / "out",
    )
    rewards = [value for _, value in memory.series("reward/mean")]
    assert len(rewards) == 3
    with (tmp_path / "a.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    table = [
        row for row in table if row["reward/mean"]
    ]  # the last one holds the seconds of the closing evaluation
    assert [float(row["reward/mean"]) for row in table] == rewards and [
        row["step"] for row in table
    ] == ["1", "2", "3"]
    for index in (tmp_path / "b.jsonl", tmp_path / "out"):
        assert list(rl_core.read_metrics(index)["reward/mean"]) == rewards
    assert list(training.metrics()["reward/mean"]) == rewards
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "/3 " in line] == [
        [f"{n}/3", "reward/mean"] for n in (1, 2, 3)
    ]


def test_a_name_alone_writes_into_the_output_folder(tmp_path):
    train_policy(["csv", "jsonl", "none"], output=tmp_path)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["reward/mean"]]
    assert steps == ["1", "2", "3"]
    frames = [
        rl_core.read_metrics(index)["reward/mean"]
        for index in (tmp_path / "tracker.jsonl", tmp_path)
    ]
    assert frames[0].tolist() == frames[1].tolist()
    with pytest.raises(
        rl_core.SettingsError,
        match=r"'csv' has no address; write csv:metrics\.csv, or set output=",
    ):
        build_tracker_group("csv")


def test_no_tracker_by_name(capsys):
    training = train_policy("none")
    assert capsys.readouterr().out == "" and training.outcome is not None


def test_a_csv_takes_new_columns_and_is_continued(tmp_path):
    path = tmp_path / "metrics.csv"
    rl_core.CsvTracker(path).log_metrics({"train/loss": 0.5}, 1)
    continued = rl_core.CsvTracker(path)
    continued.log_metrics({"train/loss": 0.25, "eval/loss": 1.0}, 2)
    continued.log_metrics({"eval/loss": 2.0}, 3)
    with path.open(newline="") as file:
        rows = [(row["step"], row["train/loss"], row["eval/loss"]) for row in csv.DictReader(file)]
    assert rows == [("1", "0.5", ""), ("2", "0.25", "1.0"), ("3", "", "2.0")]
    other = tmp_path / "prices.csv"
    other.write_text("name,price\nx,1\n")
    with pytest.raises(rl_core.DataError, match="not a metrics file"):
        rl_core.CsvTracker(other).log_metrics({"train/loss": 0.5}, 1)
    assert other.read_text() == "name,price\nx,1\n"


def test_lines_that_a_resumed_run_measures_again_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = rl_core.JsonlTracker(path)
    for step in (1, 2, 3):
        first.log_metrics({"train/loss": float(step)}, step)
    with path.open("a") as file:
        file.write('{"step": 4, "metr')  # torn by a kill
    resumed = rl_core.JsonlTracker(path, cut=True)
    resumed.log_metrics({"train/loss": 20.0, "train/x": float("nan")}, 2)
    resumed.log_metrics({"train/loss": 30.0}, 3)
    rows = [
        (row["step"], row["metrics"]["train/loss"])
        for row in map(json.loads, path.read_text().splitlines())
    ]
    assert rows == [(1, 1.0), (2, 2.0), (2, 20.0), (3, 30.0)]
    assert list(rl_core.read_metrics(path)["train/loss"]) == [1.0, 20.0, 30.0]


class Keeper(rl_core.MemoryTracker):
    def __init__(self):
        super().__init__()
        self.calls = []

    def begin(self, name, params):
        self.calls.append(("begin", name, params["settings"]["learning_rate"]))

    def close(self, status):
        self.calls.append(("close", status))


def test_a_tracker_learns_when_a_run_begins_and_how_it_ends():
    keeper = Keeper()
    train_policy(keeper)
    assert keeper.calls == [("begin", "grpo", 1e-2), ("close", "FINISHED")]
    failing = Keeper()
    training = rl_core.grpo(
        small_policy(), prompts=["e"], reward=lambda _: [0.0], tracker=failing, settings=settings()
    )
    with pytest.raises(rl_core.RewardError):
        training.run()
    assert failing.calls[-1] == ("close", "FAILED")


def test_a_missing_tensorboard_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(rl_core.SettingsError, match="needs the package tensorboard"):
        build_tracker_group(f"tensorboard:{tmp_path}")
    with pytest.raises(
        rl_core.SettingsError,
        match=r"has no address; write tensorboard:tensorboard, or set output=",
    ):
        build_tracker_group("tensorboard")


def test_tensorboard_reads_what_was_written(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = train_policy(f"tensorboard:{tmp_path}")
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    actual = [(event.step, pytest.approx(event.value)) for event in events.Scalars("reward/mean")]
    assert actual == list(training.metrics()["reward/mean"].items())
