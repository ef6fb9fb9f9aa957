"""Metrics of training runs from the engine's answers: what reaches trackers, and that none fails a request."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flows.service.worker import run_metrics
from flows.service.worker.run_metrics import RunMetrics
from rl_core.errors import SettingsError
from rl_core.settings import ServiceSettings


def test_an_update_is_a_step_with_the_means_of_its_passes(tmp_path):
    metrics = RunMetrics(ServiceSettings(sinks=("prometheus",), system_metrics_seconds=0.0), tmp_path)
    metrics.passed("run-1", {"loss:sum": 4.0, "loss_per_token:mean": 1.0, "tokens:sum": 4.0, "ratio:mean": 1.0}, 0.25)
    metrics.passed("run-1", {"loss:sum": 8.0, "loss_per_token:mean": 2.0, "tokens:sum": 4.0, "ratio:mean": 2.0}, 0.5)
    metrics.passed("run-2", {"loss:sum": 1.0}, 0.5)
    metrics.stepped("run-1", {"grad_norm:mean": 3.0, "learning_rate:mean": 0.5, "step:max": 7.0}, 7, 0.125)
    metrics.ended("run-1")
    metrics.close()
    text = (tmp_path / "prometheus" / "service-run-1.prom").read_text()
    found = {
        s.name.removeprefix("posttrain_"): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert found == {
        "train_loss_sum": 12.0, "train_loss": 1.5, "train_tokens": 8.0, "policy_ratio_mean": 1.5, "policy_loss": 1.5,
        "train_grad_norm": 3.0, "train_learning_rate": 0.5, "perf_forward_backward_seconds": 0.75,
        "perf_optim_step_seconds": 0.125, "run_step": 7.0, "run_active": 0.0,
    }  # fmt: skip


def test_a_tracker_that_raises_fails_no_update(tmp_path, monkeypatch, caplog):
    def fail(*given, **options):
        raise OSError("no space left")

    monkeypatch.setattr(run_metrics, "Tracking", fail)
    metrics = RunMetrics(ServiceSettings(mlflow_runs=True), tmp_path)
    for step in range(3):
        metrics.stepped("run-1", {"grad_norm:mean": 1.0}, step, 0.1)
        metrics.passed("run-1", {"loss:sum": 1.0}, 0.1)
    assert caplog.text.count("no longer kept: OSError: no space left") == 1


def test_an_mlflow_run_for_each_training_run(tmp_path, monkeypatch):
    runs = []

    class Run(SimpleNamespace):
        def log_metrics(self, metrics, step):
            self.logged.append((step, metrics))

        def close(self, status, timeout_s):
            self.closed = True

    class Store:
        def __init__(self, uri, folder, experiment):
            assert (uri, folder, experiment) == (None, tmp_path, "service")

        def start_run(self, name, folder, *, tags, wait_s):
            assert folder == tmp_path / "tracking" / "run-1" and wait_s == 0.0
            runs.append(Run(name=name, logged=[], closed=False))
            return runs[-1]

    monkeypatch.setattr(run_metrics, "Tracking", Store)
    metrics = RunMetrics(ServiceSettings(mlflow_runs=True), tmp_path)
    metrics.stepped("run-1", {"grad_norm:mean": 1.0}, 1, 0.5)
    metrics.close()
    (run,) = runs
    assert run.name == "run-1" and run.logged == [(1, {"train/grad_norm": 1.0, "perf/optim_step_seconds": 0.5})]
    assert run.closed


def test_settings_of_sinks_and_alerts_are_checked():
    with pytest.raises(SettingsError, match="'promotheus' is no tracker; did you mean"):
        ServiceSettings(sinks=("promotheus",))
    with pytest.raises(SettingsError, match=r"alerts\.policy/ref_kl: 'high' is no condition"):
        ServiceSettings(alerts={"policy/ref_kl": "high"})
