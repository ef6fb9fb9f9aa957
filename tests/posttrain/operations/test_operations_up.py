"""`posttrain up` with the real servers: start, use, crashes, registration, stop, no leftover processes."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers.postgres import find_postgres_problem, postgres
from helpers.team import PREFECT_YAML, Team, wait_for

from posttrain.operations.registration import count_gpus
from rl_core.json_client import ServerErrorResponse, fetch_json


def fetch_page(url: str) -> str:
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Accept": "text/html"}), timeout=60
    ) as response:
        assert response.status == 200
        return response.read().decode()


@pytest.fixture(params=["sqlite", "postgresql"])
def team(request, tmp_path):
    if request.param == "sqlite":
        team = Team(tmp_path, "")
        yield team
        team.call("down")
        return
    if find_postgres_problem():
        pytest.skip(find_postgres_problem())
    with postgres() as server:
        team = Team(tmp_path, f"postgresql://{server}/team")
        yield team
        team.call("down")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_life_of_the_servers(team, tmp_path):
    # Started, with everything registered.
    text = team.up("--detach")
    assert "deployed wait/quick" in text and "automation again on my event: made" in text
    assert "automation tell: skipped (there is no block 'webhook/absent'" in text
    assert "Prefect" in fetch_page(f"http://127.0.0.1:{team.prefect}/") and "MLflow" in fetch_page(
        f"http://127.0.0.1:{team.mlflow}/"
    )
    assert "Prefect" in fetch_page(f"http://127.0.0.1:{team.prefect}/deployments")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(
            urllib.request.Request(
                f"http://127.0.0.1:{team.mlflow}/", headers={"Host": "evil.example"}
            ),
            timeout=60,
        )
    if count_gpus():
        assert team.api("/v2/concurrency_limits/gpu")["limit"] == count_gpus()
    else:  # no stage would take it
        with pytest.raises(ServerErrorResponse, match="404"):
            team.api("/v2/concurrency_limits/gpu")
    assert "pass" not in (team.output / "operations" / "state.json").read_text()

    # A run through the worker is in both servers; it starts another one by its event.
    first = team.run(path=str(tmp_path / "first"))
    wait_for(lambda: team.state_of(first) == "COMPLETED", "the first run")
    runs = fetch_json(
        f"http://127.0.0.1:{team.mlflow}/api/2.0/mlflow/runs/search", {"experiment_ids": ["0"]}
    )["runs"]
    assert [metric["key"] for metric in runs[0]["data"]["metrics"]] == ["waited"]
    team.emit("mine.happened", "mine", 1)
    wait_for(lambda: len(team.api("/flow_runs/filter", {})) == 2, "the automation")
    wait_for(
        lambda: (
            {run["state"]["type"] for run in team.api("/flow_runs/filter", {})} == {"COMPLETED"}
        ),
        "its run",
    )

    # Again: nothing is duplicated, an error in a deployment is named, and correcting it works.
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
    os.kill(list_children(team.service("mlflow")["process"]["pid"])[0], signal.SIGKILL)
    wait_for(
        lambda: team.service("mlflow")["restarts"] == 1 and team.service("mlflow")["phase"] == "up",
        "MLflow again",
    )
    second = team.run(path=str(tmp_path / "second"), seconds=1000.0)
    wait_for(
        lambda: (tmp_path / "second").exists() and (tmp_path / "second").read_text(),
        "the second run",
    )
    os.kill(list_children(team.service("worker")["process"]["pid"])[0], signal.SIGKILL)
    wait_for(
        lambda: team.service("worker")["restarts"] == 1 and team.service("worker")["phase"] == "up",
        "a worker",
    )
    assert not Path(f"/proc/{(tmp_path / 'second').read_text()}").exists()
    assert "before: was ended by SIGKILL" in team.call("status")
    if (
        team.state_of(second) == "RUNNING"
    ):  # nothing was left to report it, and it occupies the only slot
        team.api(f"/flow_runs/{second}/set_state", {"state": {"type": "CRASHED"}, "force": True})

    # Stopped while a run is in progress: the run first, which is reported, then the servers.
    third = team.run(path=str(tmp_path / "third"), seconds=1000.0)
    wait_for(
        lambda: (tmp_path / "third").exists() and (tmp_path / "third").read_text(), "the third run"
    )
    time.sleep(2)
    assert team.call("down").splitlines()[-1] == "stopped"
    assert team.left() == [] and not Path(f"/proc/{(tmp_path / 'third').read_text()}").exists()
    assert "not running" in team.call("status", code=1)
    team.up("--detach")
    assert team.state_of(third) == "CRASHED"
    assert team.state_of(first) == "COMPLETED"  # the same database
    team.call("down")
    assert team.left() == []


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
