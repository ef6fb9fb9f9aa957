"""`posttrain service up` over a real port: killing worker and server while a client trains changes no result."""

import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from helpers import ROOT
from helpers.service import random_data
from helpers.service_clients import loss

from posttrain.operations.processes import is_port_free
from posttrain.settings_files import load_service_settings
from posttrain.training_service.store import ServiceStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Client:
    """Client that retries for as long as nobody answers, like the public client."""

    def __init__(self, address, key):
        self._http = httpx.Client(
            base_url=f"{address}/api/v1/", headers={"X-API-Key": key}, timeout=60
        )

    def send(self, path, **body):
        for _ in range(300):
            try:
                response = self._http.post(path, **body)
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            if response.status_code not in (408, 503):
                assert response.status_code == 200, response.text
                return response
        raise AssertionError(f"{path}: nobody answers")

    def result(self, promise):
        return self.send("retrieve_future", json={"request_id": promise["request_id"]}).content

    def train(self, steps, disturb=lambda step: None):
        """Return the results of every request of a run as bytes."""
        session = self.send("create_session", json={}).json()["session_id"]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "base",
            "lora_config": {"rank": 4, "seed": 1},
        }
        created = self.send("create_model", json=body).json()
        self.result(created)
        results = []
        for step in range(steps):
            disturb(step)
            payload = loss(created["model_id"], 2 * step + 1, random_data(step)).payload
            headers = {"content-type": "application/x-protobuf"}
            passed = self.send("forward_backward", content=payload, headers=headers).json()
            update = {
                "model_id": created["model_id"],
                "seq_id": 2 * step + 2,
                "adam_params": {"learning_rate": 1e-2},
            }
            stepped = self.send("optim_step", json=update).json()
            results += [self.result(passed), self.result(stepped)]
        return results


@pytest.fixture
def supervised(tmp_path, base_folder):
    """Run `posttrain service up`; yield (address, key, process)."""
    port = next(number for number in range(8500, 8600) if is_port_free(number))
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"folder: {tmp_path / 'service'}\nengine:\n  bases: {{base: {base_folder}}}\n  device: cpu\n"
        f"server: {{port: {port}}}\nworker: {{snapshot_steps: 2}}\n"
    )
    store = ServiceStore(load_service_settings(config).store_url)
    _, key = store.create_key("me")
    store.close()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posttrain.cli.main", "service", "up", str(config)]
    with open(tmp_path / "up.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}", key, process
    finally:
        process.terminate()
        process.wait(120)
    assert b"stopped; every run is saved" in (tmp_path / "up.log").read_bytes()


def kill(process, role):
    """Kill the server or worker below the supervisor with SIGKILL."""
    processes = [
        child
        for child in process.children(recursive=True)
        if child.cmdline()[1:5] == ["-P", "-m", "posttrain.training_service.process", role]
    ]
    assert len(processes) == 1
    processes[0].send_signal(signal.SIGKILL)


def test_killed_processes_come_back_and_change_no_bit(supervised):
    address, key, process = supervised
    client, parent = Client(address, key), psutil.Process(process.pid)
    killed = client.train(
        8,
        lambda step: (
            kill(parent, {2: "worker", 4: "server", 6: "worker"}[step])
            if step in (2, 4, 6)
            else None
        ),
    )
    assert killed == client.train(8) and len(set(killed)) == 16
