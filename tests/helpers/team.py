"""A team's servers by `posttrain up`: real command and servers, deployments of the test."""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from flows.runtime.prefect_access import build_basic_auth_header, load_or_create_password
from helpers import ROOT, waiting
from posttrain.operations.processes import find_marked_processes, format_mark
from rl_core.json_client import ServerUnavailable, fetch_json

FLOW = """
import os, time
from prefect import flow

@flow
def wait(path: str = "pid", seconds: float = 0.0):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(seconds)
    import mlflow
    with mlflow.start_run():
        mlflow.log_metric("waited", seconds)
"""
PREFECT_YAML = """
name: mine
pull: null
deployments:
  - name: quick
    entrypoint: my_flow.py:wait
    work_pool: {name: posttrain}
    concurrency_limit: 1
    parameters: {seconds: 0.0}
"""
AUTOMATIONS = """
automations:
  - name: again on my event
    trigger: {type: event, posture: Reactive, expect: [mine.happened], threshold: 1, within: 0}
    actions: [{type: run-deployment, source: selected, deployment_id: wait/quick, parameters: {seconds: 1.0}}]
  - name: tell
    trigger: {type: event, posture: Reactive, expect: [prefect.flow-run.Failed], threshold: 1, within: 0}
    actions: [{type: call-webhook, block_document_id: webhook/absent, payload: "{}"}]
"""

# what a server does on a busy machine takes its time
wait_for = functools.partial(waiting.wait_for, seconds=600.0, every=0.5)


class Team:
    """A folder with a flow, and the command."""

    def __init__(self, folder: Path, database: str):
        self.output, self.project = folder / "outputs", folder / "project"
        (self.project / "deployments").mkdir(parents=True)
        (self.project / "my_flow.py").write_text(FLOW)
        self.declare(PREFECT_YAML)
        (self.project / "deployments" / "automations.yaml").write_text(AUTOMATIONS)
        self.prefect, self.mlflow = waiting.free_ports(2)
        elsewhere = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_PROFILE", "PREFECT_HOME")
        self.environment = {
            name: value for name, value in os.environ.items() if name not in elsewhere
        }
        self.environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), self.environment.get("PYTHONPATH", "")]
        )
        if database:
            self.environment["POSTTRAIN_DATABASE"] = database

    def declare(self, text: str) -> None:
        (self.project / "deployments" / "prefect.yaml").write_text(text)

    def call(self, command: str, *options: str, code: int = 0) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "posttrain.cli.main",
                command,
                "--output",
                str(self.output),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            cwd=ROOT,
            timeout=1500,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def up(self, *options: str, code: int = 0) -> str:
        ports = ("--prefect-port", str(self.prefect), "--mlflow-port", str(self.mlflow))
        return self.call(
            "up", *ports, "--deployments", str(self.project / "deployments"), *options, code=code
        )

    def service(self, name: str) -> dict:
        state = json.loads((self.output / "operations" / "state.json").read_text())
        return next(service for service in state["services"] if service["name"] == name)

    def api(self, path: str, body=None):
        for _ in range(20):
            try:
                return fetch_json(
                    f"http://127.0.0.1:{self.prefect}/api{path}",
                    body,
                    timeout_s=60,
                    headers=build_basic_auth_header(load_or_create_password(self.output)),
                )
            except ServerUnavailable as error:
                if error.status != 503:  # its sqlite file is busy; Prefect's client retries, too
                    raise
                time.sleep(1)
        raise AssertionError(f"{path}: busy for too long")

    def emit(self, event: str, resource: str, number: int) -> None:
        """Send an event to Prefect, as a flow does; `number`: its digit, by which Prefect identifies it."""
        body = {
            "event": event,
            "resource": {"prefect.resource.id": resource},
            "payload": {},
            "related": [],
            "occurred": datetime.datetime.now(datetime.UTC).isoformat(),
            "id": f"00000000-0000-4000-8000-00000000000{number}",
        }
        self.api("/events", [body])

    def run(self, **parameters) -> str:
        deployment = self.api("/deployments/name/wait/quick")["id"]
        return self.api(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})[
            "id"
        ]

    def state_of(self, run: str) -> str:
        return self.api(f"/flow_runs/{run}")["state"]["type"]

    def left(self) -> list[int]:
        return [process.pid for process in find_marked_processes(format_mark(self.output))]
