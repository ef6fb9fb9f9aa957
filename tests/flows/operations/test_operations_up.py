"""`posttrain up` with the real servers: started, used, crashed, registered again, stopped, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from postgres import missing, postgres
from test_operations_supervisor import free_ports

from flows.operations.processes import leftovers, mark_of
from flows.operations.services import ask

ROOT = Path(__file__).resolve().parents[3]
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


class Team:
    """A folder with a flow of its own, and the command."""

    def __init__(self, folder: Path, database: str):
        self.output, self.project = folder / "outputs", folder / "project"
        (self.project / "deployments").mkdir(parents=True)
        (self.project / "my_flow.py").write_text(FLOW)
        self.declare(PREFECT_YAML)
        (self.project / "deployments" / "automations.yaml").write_text(AUTOMATIONS)
        self.prefect, self.mlflow = free_ports(2)
        elsewhere = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_PROFILE", "PREFECT_HOME")
        self.environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), self.environment.get("PYTHONPATH", "")])
        if database:
            self.environment["POSTTRAIN_DATABASE"] = database

    def declare(self, text: str) -> None:
        (self.project / "deployments" / "prefect.yaml").write_text(text)

    def call(self, command: str, *options: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", command, "--output", str(self.output), *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=ROOT, timeout=1500,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    def up(self, *options: str, code: int = 0) -> str:
        ports = ("--prefect-port", str(self.prefect), "--mlflow-port", str(self.mlflow))
        return self.call("up", *ports, "--deployments", str(self.project / "deployments"), *options, code=code)

    def service(self, name: str) -> dict:
        state = json.loads((self.output / "operations" / "state.json").read_text())
        return next(service for service in state["services"] if service["name"] == name)

    def api(self, path: str, body=None):
        for _ in range(20):
            try:
                return ask(f"http://127.0.0.1:{self.prefect}/api{path}", body, timeout=60)
            except urllib.error.HTTPError as error:
                if error.code != 503:  # its sqlite file is busy; Prefect's own client tries again, too
                    raise
                time.sleep(1)
        raise AssertionError(f"{path}: busy for too long")

    def run(self, **parameters) -> str:
        deployment = self.api("/deployments/name/wait/quick")["id"]
        return self.api(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]

    def state_of(self, run: str) -> str:
        return self.api(f"/flow_runs/{run}")["state"]["type"]

    def left(self) -> list[int]:
        return [process.pid for process in leftovers(mark_of(self.output))]


def wait_for(condition, what: str, seconds: float = 600.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.5)
    raise AssertionError(f"{what}: it did not come about")


def page(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": "text/html"}), timeout=60) as response:
        assert response.status == 200
        return response.read().decode()


@pytest.fixture(params=["sqlite", "postgresql"])
def team(request, tmp_path):
    if request.param == "sqlite":
        team = Team(tmp_path, "")
        yield team
        team.call("down")
        return
    if missing():
        pytest.skip(missing())
    with postgres() as server:
        team = Team(tmp_path, f"postgresql://{server}/team")
        yield team
        team.call("down")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_life_of_the_servers(team, tmp_path):
    # Started, with everything registered.
    text = team.up("--detach")
    assert "deployed wait/quick" in text and "automation again on my event: made" in text
    assert "automation tell: left out (there is no block 'webhook/absent'" in text
    assert "Prefect" in page(f"http://127.0.0.1:{team.prefect}/") and "MLflow" in page(
        f"http://127.0.0.1:{team.mlflow}/"
    )
    assert "Prefect" in page(f"http://127.0.0.1:{team.prefect}/deployments")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{team.mlflow}/", headers={"Host": "evil.example"}), timeout=60
        )
    assert team.api("/v2/concurrency_limits/gpu")["limit"] == 1
    assert "pass" not in (team.output / "operations" / "state.json").read_text()

    # A run through the worker is in both servers; it starts another one by its event.
    first = team.run(path=str(tmp_path / "first"))
    wait_for(lambda: team.state_of(first) == "COMPLETED", "the first run")
    runs = ask(f"http://127.0.0.1:{team.mlflow}/api/2.0/mlflow/runs/search", {"experiment_ids": ["0"]})["runs"]
    assert [metric["key"] for metric in runs[0]["data"]["metrics"]] == ["waited"]
    event = {
        "event": "mine.happened", "resource": {"prefect.resource.id": "mine"}, "occurred": now(),
        "id": "00000000-0000-4000-8000-000000000001", "payload": {}, "related": [],
    }  # fmt: skip
    urllib.request.urlopen(
        urllib.request.Request(
            f"http://127.0.0.1:{team.prefect}/api/events",
            json.dumps([event]).encode(),
            {"Content-Type": "application/json"},
        ),
        timeout=60,
    )
    wait_for(lambda: len(team.api("/flow_runs/filter", {})) == 2, "the automation")
    wait_for(lambda: {run["state"]["type"] for run in team.api("/flow_runs/filter", {})} == {"COMPLETED"}, "its run")

    # Again: nothing is doubled, a mistake in a deployment is named, and mending it mends it.
    text = team.up()
    assert "already running" in text and "automation again on my event: unchanged" in text
    team.declare(PREFECT_YAML.replace("seconds: 0.0", "seconds: soon"))
    text = team.up(code=2)
    assert "deployment 'quick': parameter 'seconds': 'soon' is not of type 'number'" in text
    assert "not registered" in team.call("status", code=1)
    team.declare(PREFECT_YAML)
    team.up()
    assert len(team.api("/automations/filter", {})) == 1
    team.call("status")

    # Crashes: MLflow's server; the worker, whose run ends with it.
    os.kill(children_of(team.service("mlflow")["process"]["pid"])[0], signal.SIGKILL)
    wait_for(
        lambda: team.service("mlflow")["restarts"] == 1 and team.service("mlflow")["phase"] == "up", "MLflow again"
    )
    second = team.run(path=str(tmp_path / "second"), seconds=1000.0)
    wait_for(lambda: (tmp_path / "second").exists() and (tmp_path / "second").read_text(), "the second run")
    os.kill(children_of(team.service("worker")["process"]["pid"])[0], signal.SIGKILL)
    wait_for(lambda: team.service("worker")["restarts"] == 1 and team.service("worker")["phase"] == "up", "a worker")
    assert not Path(f"/proc/{(tmp_path / 'second').read_text()}").exists()
    assert "before: was ended by SIGKILL" in team.call("status")
    if team.state_of(second) == "RUNNING":  # nobody was left to report it, and it holds the only place
        team.api(f"/flow_runs/{second}/set_state", {"state": {"type": "CRASHED"}, "force": True})

    # Stopped while a run is under way: the run first, which is reported, then the servers.
    third = team.run(path=str(tmp_path / "third"), seconds=1000.0)
    wait_for(lambda: (tmp_path / "third").exists() and (tmp_path / "third").read_text(), "the third run")
    time.sleep(2)
    assert team.call("down").splitlines()[-1] == "stopped"
    assert team.left() == [] and not Path(f"/proc/{(tmp_path / 'third').read_text()}").exists()
    assert "not running" in team.call("status", code=1)
    team.up("--detach")
    assert team.state_of(third) == "CRASHED"
    assert team.state_of(first) == "COMPLETED"  # the same database
    team.call("down")
    assert team.left() == []


def now() -> str:
    import datetime

    return datetime.datetime.now(datetime.UTC).isoformat()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
