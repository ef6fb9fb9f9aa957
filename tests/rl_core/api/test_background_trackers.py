"""Trackers that are slow, broken or unreachable never stall or fail a run; Weights & Biases."""

import logging
import sys
import threading
from types import SimpleNamespace

import pytest

from rl_core.errors import SettingsError
from rl_core.trackers import BackgroundTracker, WandbTracker, build_tracker_group
from rl_core.tracking import MemoryTracker


def test_everything_arrives_in_order(tmp_path):
    class Keeper(MemoryTracker):
        calls: list = []  # noqa: RUF012

        def begin(self, name, params):
            self.calls.append((name, params))

        def close(self, status):
            self.calls.append(status)

    keeper = Keeper()
    tracker = BackgroundTracker("keeper", lambda: keeper)
    tracker.begin("run", {"a": 1})
    for step in (1, 2, 3):
        tracker.log_metrics({"x": float(step)}, step)
    tracker.log_artifact(tmp_path / "gone")
    tracker.close("FINISHED")
    assert keeper.series("x") == [(1, 1.0), (2, 2.0), (3, 3.0)] and keeper.calls == [
        ("run", {"a": 1}),
        "FINISHED",
    ]


def test_one_that_breaks_ends_with_one_warning(caplog):
    class Broken(MemoryTracker):
        def log_metrics(self, metrics, step):
            raise ConnectionError("away")

    tracker = BackgroundTracker("wandb", Broken)
    with caplog.at_level(logging.WARNING):
        for step in range(50):
            tracker.log_metrics({"x": 1.0}, step)
        tracker.close("FINISHED")
    assert [record.getMessage() for record in caplog.records] == [
        "wandb accepts no more records of this run: ConnectionError: away"
    ]


def test_one_that_hangs_is_left_behind_and_its_queue_does_not_grow(caplog):
    free = threading.Event()

    class Hanging(MemoryTracker):
        def log_metrics(self, metrics, step):
            free.wait(30)

    tracker = BackgroundTracker("wandb", Hanging, capacity=5)
    for step in range(100):
        tracker.log_metrics(
            {"x": 1.0}, step
        )  # returns immediately; waiting 30 s would fail the test
    assert tracker.num_dropped >= 94 and tracker._queue.qsize() <= 5
    with caplog.at_level(logging.WARNING):
        tracker.close("KILLED", timeout_s=0.05)
    free.set()
    assert "wandb does not accept the run's records within 0.05 s" in caplog.text


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.ended, self.tags = options, [], None, {}
        self.config = SimpleNamespace(
            update=lambda values, allow_val_change: self.tags.update(values)
        )

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    runs = []
    module = SimpleNamespace(
        api=SimpleNamespace(api_key=None),
        Settings=lambda **options: options,
        init=lambda **options: runs.append(FakeRun(options)) or runs[-1],
        runs=runs,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_a_run_of_weights_and_biases(wandb, tmp_path, monkeypatch):
    tracker = WandbTracker("project", tmp_path, group="demo · 1", run_id="policy-abc")
    tracker.begin("demo · policy", {"learning_rate": 1e-3})
    tracker.log_metrics({"train/loss": 0.5}, 3)
    tracker.set_tag("stage", "policy")
    tracker.close("FAILED")
    (run,) = wandb.runs
    assert (
        run.logged == [(3, {"train/loss": 0.5})]
        and run.tags == {"tag.stage": "policy"}
        and run.ended == 1
    )
    requests = {
        name: run.options[name]
        for name in ("project", "name", "group", "id", "resume", "config", "mode")
    }
    assert requests == {
        "project": "project",
        "name": "demo · policy",
        "group": "demo · 1",
        "id": "policy-abc",
        "resume": "allow",
        "config": {"learning_rate": 1e-3},
        "mode": "offline",
    }
    wandb.api.api_key = "k"
    tracker.log_metrics({"train/loss": 0.4}, 4)
    assert wandb.runs[1].options["mode"] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    other = build_tracker_group("wandb:p").trackers[0]
    other.log_metrics({}, 0)
    assert wandb.runs[2].options["mode"] == "disabled"


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        SettingsError, match=r"needs the package wandb; install it, or posttrain\[wandb\]"
    ):
        build_tracker_group("wandb:project")


def test_the_real_package_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker("project", tmp_path)
    tracker.begin("run", {"a": 1})
    tracker.log_metrics({"train/loss": 0.5}, 1)
    tracker.close("FINISHED")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"train/loss" in file.read_bytes()


def test_tensorboard_hides_the_points_that_a_resumed_run_measures_again(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from rl_core.trackers import TensorBoardTracker

    for values in ({1: 1.0, 2: 2.0, 3: 3.0}, {2: 20.0, 3: 30.0}):
        tracker = TensorBoardTracker(tmp_path, cut=True)
        tracker.begin("run", {"a": 1})
        for step, value in values.items():
            tracker.log_metrics({"x": value}, step)
        tracker.close("KILLED")
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [
        (1, 1.0),
        (2, 20.0),
        (3, 30.0),
    ]
    assert any("settings" in tag for tag in events.Tags()["tensors"])
