"""Metrics of training runs from the engine's answers: which reach trackers, and that none fails a request."""

import os
import threading
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from posttrain.training_service.worker import run_tracking
from posttrain.training_service.worker.run_tracking import MlflowRuns, RunMetrics
from rl_core.errors import BackendError, SettingsError
from rl_core.settings import ServiceSettings
from tasks.tracking.store import ensure_database


def test_an_update_is_a_step_with_the_means_of_its_passes(tmp_path):
    settings = ServiceSettings(sinks=("prometheus",), system_metrics_seconds=0.0, mlflow_runs=False)
    metrics = RunMetrics(settings, tmp_path, None)
    metrics.record_pass(
        "run-1",
        {"loss:sum": 4.0, "loss_per_token:mean": 1.0, "tokens:sum": 4.0, "ratio:mean": 1.0},
        0.25,
    )
    metrics.record_pass(
        "run-1",
        {"loss:sum": 8.0, "loss_per_token:mean": 2.0, "tokens:sum": 4.0, "ratio:mean": 2.0},
        0.5,
    )
    metrics.record_pass("run-2", {"loss:sum": 1.0}, 0.5)
    metrics.record_step(
        "run-1", {"grad_norm:mean": 3.0, "learning_rate:mean": 0.5, "step:max": 7.0}, 7, 0.125
    )
    metrics.end_run("run-1")
    metrics.close_trackers()
    text = (tmp_path / "prometheus" / "service-run-1.prom").read_text()
    results = {
        sample.name.removeprefix("posttrain_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert results == {
        "train_loss_sum": 12.0,
        "train_loss": 1.5,
        "train_tokens": 8.0,
        "policy_ratio_mean": 1.5,
        "policy_loss": 1.5,
        "train_grad_norm": 3.0,
        "train_learning_rate": 0.5,
        "perf_forward_backward_seconds": 0.75,
        "perf_optim_step_seconds": 0.125,
        "run_step": 7.0,
        "run_active": 0.0,
    }


class FakeMlflowRuns(MlflowRuns):
    """Runs of a fake store; `start` may take its time, or fail."""

    def __init__(self, tmp_path, start):
        store = SimpleNamespace(find_run=lambda model_id: None)
        super().__init__(ServiceSettings(), tmp_path, store)
        self._start_run = start


class RecordingRun(SimpleNamespace):
    """MLflow run that records its calls."""

    def log_metrics(self, metrics, step):
        self.logged.append((step, metrics))

    def close(self, status, timeout_s):
        self.closed = True


def test_a_tracker_that_raises_fails_no_update(tmp_path, caplog):
    def fail(model_id):
        raise OSError("no space left")

    metrics = RunMetrics(ServiceSettings(), tmp_path, FakeMlflowRuns(tmp_path, fail))
    for step in range(3):
        metrics.record_step("run-1", {"grad_norm:mean": 1.0}, step, 0.1)
        metrics.record_pass("run-1", {"loss:sum": 1.0}, 0.1)
    metrics.close_trackers()
    assert (
        caplog.text.count("MLflow accepts no more records of this run: OSError: no space left") == 1
    )


def test_an_mlflow_run_for_each_training_run(tmp_path):
    runs = []

    def start(model_id):
        runs.append(RecordingRun(name=model_id, logged=[], closed=False))
        return runs[-1]

    trackers = FakeMlflowRuns(tmp_path, start)
    metrics = RunMetrics(ServiceSettings(), tmp_path, trackers)
    metrics.record_step("run-1", {"grad_norm:mean": 1.0}, 1, 0.5)
    with trackers.use_run("run-1") as shared:  # as a saved path that is registered
        metrics.close_trackers()
        assert not shared.closed
    (run,) = runs
    assert run is shared and run.name == "run-1" and run.closed
    assert run.logged == [(1, {"train/grad_norm": 1.0, "perf/optim_step_seconds": 0.5})]


def test_a_store_that_hangs_stalls_no_update_and_no_end_of_a_run(tmp_path):
    """The tracker is opened in a thread; updates and the end of a run do not wait for it."""
    opened, released = threading.Event(), threading.Event()

    def hang(model_id):
        opened.set()
        assert released.wait(60)
        return RecordingRun(name=model_id, logged=[], closed=False)

    trackers = FakeMlflowRuns(tmp_path, hang)
    metrics = RunMetrics(ServiceSettings(), tmp_path, trackers)
    for step in range(50):
        metrics.record_step("run-1", {"grad_norm:mean": 1.0}, step, 0.1)
    assert opened.wait(60)
    metrics.end_run("run-1")
    metrics.record_step("run-1", {"grad_norm:mean": 1.0}, 50, 0.1)  # it is back in memory
    assert trackers._open == {}
    released.set()
    metrics.close_trackers()


def test_trackers_of_the_machine_get_the_length_of_the_queue(tmp_path):
    settings = ServiceSettings(sinks=("prometheus",), system_metrics_seconds=0.0, mlflow_runs=False)
    trackers = MlflowRuns(settings, tmp_path, None)
    trackers._store = SimpleNamespace(
        count_open_requests=lambda: {
            "sample": {"waiting": 2, "running": 1},
            "evaluate": {"waiting": 4},
        }
    )
    metrics = RunMetrics(settings, tmp_path, trackers)
    metrics._log_system_metrics({"system/disk_usage_percentage": 50.0}, 1)
    metrics.close_trackers()
    text = (tmp_path / "prometheus" / "service-worker.prom").read_text()
    assert [
        line.split()[-1]
        for line in text.splitlines()
        if line.startswith("posttrain_perf_queue_depth")
    ] == ["7.0"]

    def refuse():
        raise BackendError("the store is unreachable")

    trackers._store = SimpleNamespace(count_open_requests=refuse)
    assert trackers.measure_queue_depth() == {}


def test_the_default_is_a_run_of_each(tmp_path):
    assert ServiceSettings().mlflow_runs


def test_settings_of_sinks_and_alerts_are_checked():
    with pytest.raises(SettingsError, match="'promotheus' is not a tracker; did you mean"):
        ServiceSettings(sinks=("promotheus",))
    with pytest.raises(SettingsError, match=r"alerts\.policy/ref_kl: 'high' is not a condition"):
        ServiceSettings(alerts={"policy/ref_kl": "high"})


def test_the_store_in_the_services_folder_is_the_services_alone(tmp_path, monkeypatch):
    """API keys guard what it holds; it was readable by everybody on the machine."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(
        run_tracking.Tracking, "start_run", lambda tracking, *parts, **options: tracking
    )
    previous = os.umask(0o022)
    try:
        runs = run_tracking.MlflowRuns(ServiceSettings(), tmp_path, SilentStore())
        store = runs._start_run("run-1").store
        store.import_mlflow()
        ensure_database(store.uri)
        file = tmp_path / "mlflow" / "mlflow.db"
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        file.chmod(0o644)  # of an earlier version
        runs._start_run("run-1")
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(previous)


class SilentStore:
    """A store that knows no run."""

    def find_run(self, model_id):
        return None
