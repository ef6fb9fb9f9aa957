"""Exactly-once delivery through a real MLflow server that is killed during a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tasks.tracking import Tracking, build_offline_environment


def start_server(port, folder):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            f"sqlite:///{folder}/server.db",
            "--artifacts-destination",
            str(folder / "artifacts"),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "1",
        ],
        env={
            **os.environ,
            **build_offline_environment(),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return process
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_a_server_killed_in_the_middle(tmp_path, models):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start_server(port, tmp_path)
    try:
        tracking = Tracking(f"http://127.0.0.1:{port}", tmp_path / "out", "e")
        run = tracking.start_run("r", tmp_path / "run", interval_s=0.05)
        slowest = 0.0
        for step in range(300):
            if step == 100:
                kill(server)
            if step == 200:
                server = start_server(port, tmp_path)
            started = time.perf_counter()
            run.log_metrics({"train/loss": float(step), "train/reward": -float(step)}, step)
            slowest = max(slowest, time.perf_counter() - started)
            time.sleep(0.01)
        version = run.log_model(
            models["policy"], "policy", "policy", metrics={"eval/success_rate": 0.5}
        )
        (tmp_path / "report.md").write_text("# report")
        run.log_artifact(tmp_path / "report.md", "report")
        assert run.close(timeout_s=120) and run.num_failed == 0
        print(f"slowest log_metrics call: {1000 * slowest:.2f} ms")
        client = tracking.store.client
        for name, sign in (("train/loss", 1), ("train/reward", -1)):
            results = [
                (metric.step, metric.value)
                for metric in client.get_metric_history(run.run_id, name)
            ]
            assert sorted(results) == [(step, sign * float(step)) for step in range(300)]
        assert [entry.path for entry in client.list_artifacts(run.run_id, "report")] == [
            "report/report.md"
        ]
        folder = tracking.resolve_model(f"models:/policy/{version}", tmp_path / "cache")
        assert (folder / "model.safetensors").read_bytes() == (
            models["policy"] / "model.safetensors"
        ).read_bytes()
        assert tracking.find_champion("policy") is None
    finally:
        kill(server)
