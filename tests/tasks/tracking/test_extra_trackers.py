"""Trackers in addition to MLflow: selected by name, and none of them stalls or fails a run."""

import threading

import pytest
import torch

from rl_core.trackers import BackgroundTracker
from rl_core.tracking import MemoryTracker
from tasks.tracking import Tracking, extra_trackers, system
from tasks.tracking.extra_trackers import build_alert_tracker, build_extra_trackers


def test_a_stage_s_file_for_prometheus(tmp_path):
    (sink,) = build_extra_trackers(
        ["prometheus"], tmp_path, pipeline="demo", group="g", folder="f", run_id="r", stage="policy"
    )
    sink.begin("demo", {})
    sink.log_metrics({"train/loss": 0.5}, 3)
    sink.log_system({"system/gpu_0_utilization_percentage": 50.0}, 1)
    sink.close("FINISHED", 20.0)
    lines = (tmp_path / "prometheus" / "demo-policy.prom").read_text().splitlines()
    assert 'posttrain_train_loss{pipeline="demo",stage="policy"} 0.5' in lines
    assert (
        'posttrain_system_gpu_utilization_ratio{gpu="0",pipeline="demo",stage="policy"} 0.5'
        in lines
    )


def test_an_alert_of_a_run_is_sent_by_its_thread(monkeypatch):
    sent = []
    monkeypatch.setattr(
        extra_trackers.AlertTracker,
        "log_metrics",
        lambda self, metrics, step: sent.append((step, metrics)),
    )
    sink = build_alert_tracker({}, "demo", "policy")
    sink.log_metrics({"reward/alarm": 1.0}, 2)
    sink.close("FINISHED", 20.0)
    assert sent == [(2, {"reward/alarm": 1.0})]


def test_sinks_that_hang_or_raise_do_not_affect_the_run(tmp_path):
    free, keeper = threading.Event(), MemoryTracker()

    class Hanging(MemoryTracker):
        def log_metrics(self, metrics, step):
            free.wait(60)

    class Raising(MemoryTracker):
        def log_metrics(self, metrics, step):
            raise OSError("the endpoint is unreachable")

        log_system = log_metrics

    run = Tracking(None, tmp_path).start_run("stage", tmp_path / "run", interval_s=60)
    run.extra_trackers += [
        BackgroundTracker("a", Hanging, 3),
        BackgroundTracker("b", Raising),
        BackgroundTracker("c", lambda: keeper),
    ]
    for step in range(50):
        # must return immediately: waiting a minute would fail the test
        run.log_metrics({"train/loss": float(step)}, step)
    run._log_system_metrics({"system/x": 1.0}, 0)
    run.close("FINISHED", timeout_s=0.5)
    free.set()
    assert [value for _, value in keeper.series("train/loss")] == [
        float(step) for step in range(50)
    ]
    assert run.extra_trackers[0].num_dropped >= 46 and run.extra_trackers[1].is_broken


def test_gpus_are_read_without_creating_a_context(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: pytest.fail("makes a context"))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: 40)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda index: 250_000)
    result = system.sample_system_metrics(system.psutil.Process(), tmp_path)
    assert {name: value for name, value in result.items() if "gpu" in name} == {
        "system/gpu_0_memory_usage_megabytes": 3.0,
        "system/gpu_0_utilization_percentage": 40.0,
        "system/gpu_0_power_usage_watts": 250.0,
    }
