"""Prometheus: text that the parser of prometheus_client reads back, files, and a port."""

import math
import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rl_core.errors import SettingsError
from rl_core.trackers import prometheus
from rl_core.trackers.prometheus import MetricGauges, PrometheusTracker


def parse_text(text):
    """Return {(name, labels): value} of a text."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_values_are_exported_with_labels_and_in_base_units():
    gauges = MetricGauges()
    gauges.set_values(
        {"train/loss": 0.25, "system/gpu_0_memory_usage_megabytes": 3.0}, {"stage": "policy"}
    )
    gauges.set_values({"train/loss": 0.125, "train/nll": math.nan}, {"stage": 'a "b"\n\\'})
    values = parse_text(gauges.render_text())
    assert math.isnan(values.pop(("posttrain_train_nll", (("stage", 'a "b"\n\\'),))))
    assert values == {
        ("posttrain_train_loss", (("stage", "policy"),)): 0.25,
        ("posttrain_train_loss", (("stage", 'a "b"\n\\'),)): 0.125,
        ("posttrain_system_gpu_memory_usage_bytes", (("gpu", "0"), ("stage", "policy"))): 3
        * 2.0**20,
    }
    gauges.remove_values({"stage": "policy"})
    assert {dict(labels)["stage"] for _, labels in parse_text(gauges.render_text())} == {
        'a "b"\n\\'
    }


def test_generated_names_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(prometheus, "MAX_SERIES", 3)
    gauges = MetricGauges()
    for number in range(10):
        gauges.set_values({f"train/success_rate_by_level/{number}": float(number)}, {})
    gauges.set_values({"train/success_rate_by_level/2": 20.0}, {})
    name = "posttrain_train_success_rate_by_level"
    assert parse_text(gauges.render_text()) == {
        (name, (("level", str(n)),)): value for n, value in ((0, 0.0), (1, 1.0), (2, 20.0))
    }
    assert gauges.num_dropped == 7


def test_a_file_says_how_the_run_ended(tmp_path):
    path = tmp_path / "prometheus" / "policy.prom"
    tracker = PrometheusTracker(path, {"pipeline": "demo"})
    tracker.begin("demo", {})
    assert parse_text(path.read_text()) == {("posttrain_run_active", (("pipeline", "demo"),)): 1.0}
    # within the same second, so the file is not written yet
    tracker.log_metrics({"train/loss": 0.5}, 3)
    tracker.close("FINISHED")
    values = {name: value for (name, _), value in parse_text(path.read_text()).items()}
    assert values == {
        "posttrain_run_active": 0.0,
        "posttrain_run_step": 3.0,
        "posttrain_train_loss": 0.5,
    }


def test_a_port_is_shared_by_the_runs_of_a_process():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for stage, loss in (("sft", 1.0), ("policy", 2.0)):
        PrometheusTracker(("127.0.0.1", port), {"stage": stage}).log_metrics(
            {"train/loss": loss}, 1
        )
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        values = parse_text(response.read().decode())
    assert values["posttrain_train_loss", (("stage", "sft"),)] == 1.0
    assert values["posttrain_train_loss", (("stage", "policy"),)] == 2.0


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"prometheus:127.0.0.1:{port} cannot be opened"):
            PrometheusTracker(("127.0.0.1", port))


def test_the_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"needs the package prometheus-client; install it"):
        PrometheusTracker(tmp_path / "x.prom")
