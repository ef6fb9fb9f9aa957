"""`up`, `down`, `status` without servers, and how runs find those that are up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.waiting import wait_for

from posttrain.cli.main import main
from posttrain.operations import commands, connection, database
from posttrain.operations.commands import describe_status, start_servers, stop_servers
from posttrain.operations.connection import format_links
from posttrain.operations.processes import MARK_VARIABLE, ProcessId, format_mark
from posttrain.operations.registration import read_declared_names
from posttrain.operations.services import ROOT, ServiceSpec, build_service_specs
from posttrain.operations.state import (
    ServerOptions,
    ServiceState,
    StatePaths,
    SupervisorState,
    write_state,
)
from posttrain.operations.supervisor import Supervisor
from rl_core.errors import BackendError, DataError, SettingsError
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.locks import FolderLock


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path):
    for name in (
        "MLFLOW_TRACKING_URI",
        "PREFECT_API_URL",
        "PREFECT_PROFILE",
        "POSTTRAIN_DATABASE",
        "POSTTRAIN_GPU_LIMIT",
    ):
        monkeypatch.setenv(name, "x")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))


@pytest.fixture
def running(tmp_path):
    """A state file and a held lock, as of a supervisor that is up on other ports."""
    own = ProcessId.from_pid(os.getpid())
    assert own is not None
    options = ServerOptions(prefect_port=4301, mlflow_port=5101)
    found = [
        ServiceState("mlflow", "http://127.0.0.1:5101", "up"),
        ServiceState("prefect", "p", "up"),
    ]
    write_state(
        StatePaths(tmp_path),
        SupervisorState(own, options, "up", found, registration={"problem": ""}),
    )
    with FolderLock(StatePaths(tmp_path).lock_file):
        yield tmp_path


def test_nothing_is_running(tmp_path, capsys):
    assert describe_status(tmp_path) == (
        f"not running for {tmp_path}; start it: posttrain up --output {tmp_path}",
        False,
    )
    assert stop_servers(tmp_path) == f"nothing was running for {tmp_path}"
    assert main(["status", "--output", str(tmp_path)]) == 1
    assert main(["down", "--output", str(tmp_path)]) == 0


def test_a_stale_state_file_with_a_reused_process_id_harms_nobody(tmp_path):
    own = ProcessId.from_pid(os.getpid())
    assert own is not None
    write_state(
        StatePaths(tmp_path), SupervisorState(own, ServerOptions(), "up")
    )  # without the lock: that supervisor is dead
    assert "not running" in describe_status(tmp_path)[0]
    assert "nothing was running" in stop_servers(tmp_path)  # and this process lives
    assert not StatePaths(tmp_path).state_file.exists()


def test_what_a_dead_supervisor_left_is_named_and_ended(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        env={**os.environ, MARK_VARIABLE: format_mark(tmp_path)},
    )
    try:
        # A new program's environment can be read a moment after the program has begun.
        wait_for(
            lambda: f"1 of its processes are (first: {child.pid})" in describe_status(tmp_path)[0]
        )
        assert "ended 1 processes" in stop_servers(tmp_path)
        assert child.wait(10) != 0
    finally:
        child.kill()


def test_a_further_up_with_other_options_is_refused(running):
    with pytest.raises(
        SettingsError,
        match=r"--prefect-port: .* run with 4301, not 4200; `posttrain down --output .*` first",
    ):
        start_servers(running, {"prefect_port": 4200})


def test_a_further_up_for_more_servers_or_another_way_to_serve_is_refused_in_words(running):
    with pytest.raises(
        SettingsError, match=r"--monitor-port: the servers of \S+ run without it; `posttrain down"
    ):
        start_servers(running, {"monitor_port": 7860})
    with pytest.raises(
        SettingsError,
        match=r"`online:` of the config of --serve: the servers of \S+ run without it; ",
    ):
        start_servers(running, {"learn": 1})


def test_a_further_up_reports_what_was_not_registered(running, monkeypatch):
    def repaired(self, number):
        state = commands.read_state(StatePaths(running))
        state.repairs, state.registration = (
            1,
            {"problem": "prefect.yaml: deployment 'x': parameter 'fresh': not a boolean"},
        )
        write_state(StatePaths(running), state)
        return True

    monkeypatch.setattr(ProcessId, "send_signal", repaired)
    with pytest.raises(DataError, match="parameter 'fresh': not a boolean"):
        start_servers(running, {})


def test_another_database_than_last_time_is_refused(tmp_path):
    StatePaths(tmp_path).folder.mkdir()
    write_json_atomic(
        StatePaths(tmp_path).last_options_file, {"database": "postgresql://me@db/team"}
    )
    with pytest.raises(
        SettingsError, match=r"were last on postgresql://me@db/team, not sqlite"
    ):
        start_servers(tmp_path, {})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"prefect_port": 4300, "mlflow_port": 4300},
            "--mlflow-port and --prefect-port are both 4300",
        ),
        ({"serve": "x.yaml", "serve_port": 4200}, "--prefect-port and --serve-port are both 4200"),
    ],
)
def test_two_servers_on_one_port_are_refused_before_anything_starts(given, named, tmp_path):
    with pytest.raises(SettingsError, match=named):
        start_servers(tmp_path / "outputs", given)
    assert not (tmp_path / "outputs" / "logs").exists()


def test_a_server_beside_them_needs_a_port_of_its_own_too(tmp_path):
    """As vLLM of `--rollouts`, whose address the config names."""
    address = "the config's stages.policy.rollouts.address"
    beside = ServiceSpec(
        "rollouts", ("true",), {}, tmp_path, "http://x", lambda: True, address, 4200
    )
    with pytest.raises(SettingsError, match=f"--prefect-port and {address} are both 4200"):
        start_servers(tmp_path / "outputs", {}, extra_servers=lambda output, mlflow: [beside])
    assert not (tmp_path / "outputs" / "logs").exists()


def test_an_environment_that_points_elsewhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://team:4200/api")
    with pytest.raises(
        SettingsError,
        match=r"PREFECT_API_URL is http://team:4200/api, but .* unset PREFECT_API_URL",
    ):
        start_servers(tmp_path, {})
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////x.db")
    with pytest.raises(SettingsError, match="MLFLOW_TRACKING_URI names a database; unset it"):
        start_servers(tmp_path, {})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(BackendError, match=r"no MLflow server answers at http://127\.0\.0\.1:9"):
        start_servers(tmp_path, {})


def test_commands_point_at_the_servers_that_are_up(running, monkeypatch):
    asked = []
    monkeypatch.setattr(
        connection, "check_prefect_api", lambda url, origin: asked.append((url, origin)) or ""
    )
    connection.connect_to_servers(running)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4301/api" == asked[0][0]
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5101"


def test_what_the_user_set_stays_and_is_warned_of(running, monkeypatch, capsys):
    monkeypatch.setattr(connection, "check_prefect_api", lambda url, origin: "")
    monkeypatch.setenv("PREFECT_API_URL", "http://team:4200/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team:5000")
    connection.connect_to_servers(running)
    assert os.environ["PREFECT_API_URL"] == "http://team:4200/api"
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://team:5000"
    assert (
        "tracked by Prefect at http://team:4200/api (from PREFECT_API_URL)"
        in capsys.readouterr().err
    )


def test_without_servers_nothing_is_set(tmp_path):
    connection.connect_to_servers(tmp_path)
    assert "PREFECT_API_URL" not in os.environ and "MLFLOW_TRACKING_URI" not in os.environ


def test_a_server_that_is_up_but_does_not_answer_is_an_error_with_a_next_step(running, monkeypatch):
    def silent(url, origin):
        raise BackendError("connection refused")

    monkeypatch.setattr(connection, "check_prefect_api", silent)
    with pytest.raises(
        BackendError,
        match=r"of `posttrain up` does not answer \(up\).*`posttrain status --output .*` says why",
    ):
        connection.connect_to_servers(running)
    connection.connect_to_servers(
        running, needs_prefect=False
    )  # MLflow alone: the tracker keeps what it cannot deliver


def test_a_shell_that_points_at_nobody_stops_a_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(BackendError, match="no Prefect server answers at"):
        connection.connect_to_servers(tmp_path)


def test_servers_see_neither_the_users_profile_nor_the_worker_the_database(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_PROFILE", "cloud")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("POSTTRAIN_DATABASE", "postgresql://me:secret@db/team")
    mlflow, prefect, worker = build_service_specs(
        tmp_path,
        ServerOptions(runs=2),
        database.DatabaseAddresses("postgresql+asyncpg://a", "postgresql://b"),
    )
    for service in (mlflow, prefect, worker):
        assert (
            not {"PREFECT_PROFILE", "PREFECT_API_KEY", "POSTTRAIN_DATABASE"}
            & service.environment.keys()
        )
        assert service.environment[MARK_VARIABLE] == format_mark(tmp_path, service.name)
        assert not any(
            "postgresql" in part for part in service.command
        )  # commands can be read by everybody
    assert mlflow.environment["MLFLOW_BACKEND_STORE_URI"] == "postgresql://b"
    assert "127.0.0.1:5000,localhost:5000" in mlflow.command
    assert prefect.environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://a"
    assert not any("postgresql" in value for value in worker.environment.values())
    assert worker.environment["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert worker.environment["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert worker.command[-2:] == ("--limit", "2") and worker.folder == ROOT


def test_an_mlflow_that_runs_elsewhere_is_used_and_not_started(tmp_path):
    prefect, worker = build_service_specs(
        tmp_path, ServerOptions(), database.DatabaseAddresses(), "http://team:5000"
    )
    assert (prefect.name, worker.name) == ("prefect", "worker")
    assert worker.environment["MLFLOW_TRACKING_URI"] == "http://team:5000"


@pytest.mark.parametrize(
    ("elsewhere", "known", "told"),
    [
        (
            "http://team:5000",
            "http://team:5000",
            ("mlflow   http://team:5000 (runs", "MLFLOW_TRACKING_URI=http://team:"),
        ),
        (
            "http://me:secret@team:5000",
            "",
            ("mlflow   as MLFLOW_TRACKING_URI said (runs elsewhere)", "4200/api\n"),
        ),
    ],
)
def test_commands_use_the_mlflow_elsewhere_that_the_worker_uses(
    elsewhere, known, told, tmp_path, monkeypatch
):
    supervisor = Supervisor(tmp_path, ServerOptions(), "sqlite", external_mlflow=elsewhere)
    supervisor.state.services = [ServiceState("prefect", "p", "up")]
    write_state(StatePaths(tmp_path), supervisor.state)
    assert "secret" not in StatePaths(tmp_path).state_file.read_text()
    text = format_links(supervisor.state, tmp_path)
    assert all(part in text for part in told) and "127.0.0.1:5000" not in text
    with FolderLock(StatePaths(tmp_path).lock_file):
        connection.connect_to_servers(tmp_path, needs_prefect=False)
    assert os.environ.get("MLFLOW_TRACKING_URI", "") == known


def test_the_deployments_of_the_checkout_are_read(tmp_path):
    assert "demo" in read_declared_names(ROOT / "deployments" / "prefect.yaml")
    (tmp_path / "x.yaml").write_text("deployments: 3")
    assert (
        read_declared_names(tmp_path / "x.yaml")
        == []
        == read_declared_names(tmp_path / "absent.yaml")
    )


# ------------------------------------------------------------------------------------------------------------- database


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("sqlite", "sqlite"),
        ("postgresql://me:secret@db:5433/team", "postgresql://me@db:5433/team"),
        (
            "postgresql+psycopg2://me:secret@db/team?sslmode=require",
            "postgresql://me@db/team?sslmode=require",
        ),
        (
            "postgresql://me@/team?host=/run/pg&password=secret",
            "postgresql://me@/team?host=%2Frun%2Fpg",
        ),
    ],
)
def test_a_database_is_shown_without_its_password(address, expected):
    assert database.strip_password(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "mysql://me:secret@db/team",
        "postgresql://me:secret@db",
        "me:secret",
        "postgresql://me:secret@db:x/team",
    ],
)
def test_other_databases_are_refused_without_showing_the_password(address):
    with pytest.raises(SettingsError, match="--database: ") as caught:
        database.strip_password(address)
    assert "secret" not in str(caught.value)


def test_a_missing_driver_names_the_extra(monkeypatch):
    monkeypatch.setattr(database.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SettingsError, match=r"psycopg2 and asyncpg is not installed; pip install .*\[postgres\]"
    ):
        database.prepare_databases("postgresql://me@db/team")


def test_asyncpg_has_its_own_word_for_ssl():
    url = database._convert_for_asyncpg(
        database._parse_address("postgresql://me@db/team?sslmode=require&connect_timeout=3")
    )
    assert dict(url.query) == {"ssl": "require"}
