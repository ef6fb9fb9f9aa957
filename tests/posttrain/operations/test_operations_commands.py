"""`up`, `down`, `status` without servers; discovery of running servers by other commands; database addresses."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.prefect_tables import create_migrated_database
from helpers.waiting import wait_for

from flows.runtime.embedded_server import cache_tables
from flows.runtime.prefect_home import locate_prefect_home, set_prefect_environment
from posttrain.cli import ui
from posttrain.cli.main import main
from posttrain.operations import commands, connection, database
from posttrain.operations.commands import describe_status, start_servers, stop_servers
from posttrain.operations.connection import format_links
from posttrain.operations.processes import MARK_VARIABLE, ProcessId, format_mark
from posttrain.operations.registration import read_declared_names, run_deploy_command
from posttrain.operations.services import ROOT, ServiceSpec, build_service_specs
from posttrain.operations.state import (
    ServerOptions,
    ServiceState,
    StatePaths,
    SupervisorState,
    write_last_options,
    write_state,
)
from posttrain.operations.supervisor import Supervisor
from rl_core.errors import BackendError, DataError, FolderBusy, SettingsError
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.locks import FolderLock


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in (
        "MLFLOW_TRACKING_URI",
        "PREFECT_API_URL",
        "PREFECT_PROFILE",
        "POSTTRAIN_DATABASE",
        "POSTTRAIN_GPU_LIMIT",
    ):
        monkeypatch.setenv(name, "x")  # so that changes of a test are undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))


@pytest.fixture
def running(tmp_path):
    """Write a state file and hold the lock, as a supervisor on other ports does."""
    process = ProcessId.from_pid(os.getpid())
    assert process is not None
    options = ServerOptions(prefect_port=4301, mlflow_port=5101)
    services = [
        ServiceState("mlflow", "http://127.0.0.1:5101", "up"),
        ServiceState("prefect", "p", "up"),
    ]
    write_state(
        StatePaths(tmp_path),
        SupervisorState(process, options, "up", services, registration={"problem": ""}),
    )
    with FolderLock(StatePaths(tmp_path).lock_file):
        yield tmp_path


def test_nothing_is_running(tmp_path, capsys):
    assert describe_status(tmp_path) == (
        {"phase": "down", "left": []},
        f"not running for {tmp_path}; start it: posttrain up --output {tmp_path}",
        False,
    )
    assert stop_servers(tmp_path) == f"nothing was running for {tmp_path}"
    assert main(["status", "--output", str(tmp_path)]) == 1
    assert main(["down", "--output", str(tmp_path)]) == 0


def test_stale_state_file_with_a_reused_process_id_is_ignored(tmp_path):
    process = ProcessId.from_pid(os.getpid())
    assert process is not None
    write_state(
        StatePaths(tmp_path), SupervisorState(process, ServerOptions(), "up")
    )  # the lock is not held: that supervisor is dead
    assert "not running" in describe_status(tmp_path)[1]
    assert "nothing was running" in stop_servers(tmp_path)  # and this process lives
    assert not StatePaths(tmp_path).state_file.exists()


def test_leftovers_of_a_crashed_supervisor_are_listed_and_ended(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        env={**os.environ, MARK_VARIABLE: format_mark(tmp_path)},
    )
    try:
        # A new program's environment becomes readable shortly after its start.
        wait_for(
            lambda: f"1 of its processes are (first: {child.pid})" in describe_status(tmp_path)[1]
        )
        assert "ended 1 processes" in stop_servers(tmp_path)
        assert child.wait(10) != 0
    finally:
        child.kill()


def test_second_up_with_other_options_is_refused(running):
    with pytest.raises(
        SettingsError,
        match=r"--prefect-port: .* run with 4301, not 4200; `posttrain down --output .*` first",
    ):
        start_servers(running, {"prefect_port": 4200})


def test_second_up_with_more_servers_is_refused(running):
    with pytest.raises(
        SettingsError, match=r"--monitor-port: the servers of \S+ run without it; `posttrain down"
    ):
        start_servers(running, {"monitor_port": 7860})
    with pytest.raises(
        SettingsError,
        match=r"`online:` of the config of --serve: the servers of \S+ run without it; ",
    ):
        start_servers(running, {"learn": 1})


def test_second_up_reports_a_failed_registration(running, monkeypatch):
    def write_repaired_state(self, number):
        state = commands.read_state(StatePaths(running))
        state.repairs, state.registration = (
            1,
            {"problem": "prefect.yaml: deployment 'x': parameter 'fresh': not a boolean"},
        )
        write_state(StatePaths(running), state)
        return True

    monkeypatch.setattr(ProcessId, "send_signal", write_repaired_state)
    with pytest.raises(DataError, match="parameter 'fresh': not a boolean"):
        start_servers(running, {})


def test_another_database_than_last_time_is_refused(tmp_path):
    StatePaths(tmp_path).folder.mkdir()
    write_json_atomic(
        StatePaths(tmp_path).last_options_file, {"database": "postgresql://me@db/team"}
    )
    with pytest.raises(SettingsError, match=r"were last on postgresql://me@db/team, not sqlite"):
        start_servers(tmp_path, {})


@pytest.mark.parametrize("home", ["", "home", "{tmp_path}/home", "~/home"])
def test_run_ui_and_up_use_the_same_prefect_home(home, tmp_path, monkeypatch):
    """`up` ignored PREFECT_HOME, so its pages lacked the runs of `run`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", home.format(tmp_path=tmp_path))
    output = tmp_path / "outputs"
    output.mkdir()
    expected = tmp_path / "home" if home else output / "prefect"
    for service in build_service_specs(output, ServerOptions(), database.DatabaseAddresses()):
        assert service.environment["PREFECT_HOME"] == str(expected)
        assert service.environment["PREFECT_PROFILES_PATH"] == f"{output}/prefect/profiles.toml"
    started = {}
    monkeypatch.setattr(ui, "start_child", lambda command, **options: started.update(options))
    pages = ui.PageServers.__new__(ui.PageServers)
    pages.output, pages.host, pages._ports, pages._reserved_ports = output, "127.0.0.1", {}, set()
    pages._ports["Prefect"] = 24999
    pages._start_prefect()
    assert started["environment"]["PREFECT_HOME"] == str(expected)
    set_prefect_environment(output)
    assert os.environ["PREFECT_HOME"] == str(expected) and expected.is_dir()
    assert not (tmp_path / "~").exists()


def test_another_prefect_home_than_last_time_is_refused(tmp_path, monkeypatch):
    StatePaths(tmp_path).folder.mkdir()
    write_last_options(StatePaths(tmp_path), ServerOptions(), locate_prefect_home(tmp_path))
    monkeypatch.delenv("PREFECT_HOME")
    with pytest.raises(SettingsError, match=r"was last in \S+/home, not \S+/prefect; set it to "):
        start_servers(tmp_path, {})
    write_json_atomic(StatePaths(tmp_path).last_options_file, {"database": "sqlite"})  # 0.1
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    with pytest.raises(SettingsError, match=r"was last in \S+/prefect, not \S+/home; unset it, or"):
        start_servers(tmp_path, {})


def test_two_teams_on_one_prefect_home_are_refused(tmp_path, monkeypatch):
    """Their workers would run each other's deployments."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    first, second = (
        Supervisor(tmp_path / name, ServerOptions(), "sqlite") for name in ("first", "second")
    )
    with (
        first._hold_prefect_home(),
        pytest.raises(FolderBusy, match=r"another `posttrain up` uses \S+/home; stop it, set"),
        second._hold_prefect_home(),
    ):
        pass
    with second._hold_prefect_home():
        monkeypatch.delenv("PREFECT_HOME")
        with first._hold_prefect_home():  # each in its output folder
            pass


def test_a_first_start_takes_the_cached_tables_of_prefect(tmp_path, monkeypatch):
    """Its migrations took a third of the start of Prefect's server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    create_migrated_database(tmp_path / "earlier")
    assert cache_tables(tmp_path / "earlier", {})
    specs = build_service_specs(tmp_path / "o", ServerOptions(), database.DatabaseAddresses())
    prefect = next(spec for spec in specs if spec.name == "prefect")
    assert Path(prefect.environment["PREFECT_HOME"], "prefect.db").stat().st_size > 0
    assert prefect.environment["PREFECT_SERVER_DATABASE_MIGRATE_ON_START"] == "false"


def test_a_registration_builds_the_form_of_a_flow_once(monkeypatch):
    import prefect.cli
    from prefect.utilities import callables

    def train(steps: int = 3):
        """Train.

        Args:
            steps: how many.
        """

    def score(steps: int = 4): ...

    expected = [callables.parameter_schema(function) for function in (train, score)]
    built, schemas = [], []
    build_schema = callables.generate_parameter_schema

    def count_schema(signature: inspect.Signature, docstrings: dict[str, str]):
        built.append(signature)
        return build_schema(signature, docstrings)

    monkeypatch.setattr(callables, "generate_parameter_schema", count_schema)
    monkeypatch.setattr(sys, "argv", [])
    functions = (train, score, train, score, train)
    deploy = lambda: schemas.extend(map(callables.parameter_schema, functions))  # noqa: E731
    monkeypatch.setattr(prefect.cli, "app", deploy)
    assert run_deploy_command(["--all"]) == 0
    assert sys.argv == ["prefect", "--no-prompt", "deploy", "--all"]
    first, second = expected
    assert schemas == [first, second, first, second, first] and len(built) == 2


def test_a_registration_works_with_a_prefect_that_builds_schemas_otherwise(monkeypatch):
    import prefect.cli
    from prefect.utilities import callables

    called = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(prefect.cli, "app", lambda: called.append(list(sys.argv)))
    monkeypatch.delattr(callables, "generate_parameter_schema")
    assert run_deploy_command(["--all"]) == 0 and len(called) == 1

    build = lambda flow, signature, docstrings: (flow, docstrings)  # noqa: E731
    monkeypatch.setattr(callables, "generate_parameter_schema", build, raising=False)
    assert run_deploy_command(["--all"]) == 0
    built = callables.generate_parameter_schema("train", inspect.Signature(), docstrings={"a": "b"})
    assert built == ("train", {"a": "b"})


def test_the_flows_of_deployments_are_imported_without_torch():
    """Registering seven deployments imported torch for one of them."""
    text = (ROOT / "deployments" / "prefect.yaml").read_text()
    entries = [
        line.split()[1] for line in text.splitlines() if line.strip().startswith("entrypoint:")
    ]
    modules = sorted({entry.rpartition(".")[0] for entry in entries})
    assert len(modules) == 5
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefect_port": 4300, "mlflow_port": 4300},
            "--mlflow-port and --prefect-port are both 4300",
        ),
        ({"serve": "x.yaml", "serve_port": 4200}, "--prefect-port and --serve-port are both 4200"),
    ],
)
def test_two_servers_on_one_port_are_refused(options, message, tmp_path):
    with pytest.raises(SettingsError, match=message):
        start_servers(tmp_path / "outputs", options)
    assert not (tmp_path / "outputs" / "logs").exists()


def test_an_extra_server_needs_a_separate_port(tmp_path):
    """Such as vLLM of `--rollouts`, whose address the config names."""
    address = "the config's stages.policy.rollouts.address"
    extra_server = ServiceSpec(
        "rollouts", ("true",), {}, tmp_path, "http://x", lambda: True, address, 4200
    )
    with pytest.raises(SettingsError, match=f"--prefect-port and {address} are both 4200"):
        start_servers(tmp_path / "outputs", {}, extra_servers=lambda output, mlflow: [extra_server])
    assert not (tmp_path / "outputs" / "logs").exists()


def test_environment_of_another_server_is_refused(tmp_path, monkeypatch):
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


def test_commands_use_running_servers(running, monkeypatch):
    checked = []
    monkeypatch.setattr(
        connection, "check_prefect_api", lambda url, origin: checked.append((url, origin)) or ""
    )
    connection.connect_to_servers(running)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4301/api" == checked[0][0]
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5101"


def test_user_settings_take_precedence_with_a_warning(running, monkeypatch, capsys):
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


def test_running_server_that_does_not_answer_is_an_error(running, monkeypatch):
    def refuse_connection(url, origin):
        raise BackendError("connection refused")

    monkeypatch.setattr(connection, "check_prefect_api", refuse_connection)
    with pytest.raises(
        BackendError,
        match=r"of `posttrain up` does not answer \(up\).*`posttrain status --output .*` says why",
    ):
        connection.connect_to_servers(running)
    connection.connect_to_servers(
        running, needs_prefect=False
    )  # MLflow only: the tracker stores what it cannot deliver


def test_unreachable_configured_server_stops_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(BackendError, match="no Prefect server answers at"):
        connection.connect_to_servers(tmp_path)


def test_environments_hide_the_profile_and_the_database(tmp_path, monkeypatch):
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
        )  # every user can read commands
    assert mlflow.environment["MLFLOW_BACKEND_STORE_URI"] == "postgresql://b"
    assert "127.0.0.1:5000,localhost:5000" in mlflow.command
    assert prefect.environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://a"
    assert not any("postgresql" in value for value in worker.environment.values())
    assert worker.environment["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert worker.environment["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert worker.command[-2:] == ("--limit", "2") and worker.folder == ROOT


def test_external_mlflow_is_used_and_not_started(tmp_path):
    prefect, worker = build_service_specs(
        tmp_path, ServerOptions(), database.DatabaseAddresses(), "http://team:5000"
    )
    assert (prefect.name, worker.name) == ("prefect", "worker")
    assert worker.environment["MLFLOW_TRACKING_URI"] == "http://team:5000"


@pytest.mark.parametrize(
    ("external_mlflow", "expected", "parts"),
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
def test_commands_use_the_workers_external_mlflow(
    external_mlflow, expected, parts, tmp_path, monkeypatch
):
    supervisor = Supervisor(tmp_path, ServerOptions(), "sqlite", external_mlflow=external_mlflow)
    supervisor.state.services = [ServiceState("prefect", "http://127.0.0.1:4200", "up")]
    supervisor.state.registration = {"runs_url": "http://team:5000/#/experiments/1/runs"}
    write_state(StatePaths(tmp_path), supervisor.state)
    assert "secret" not in StatePaths(tmp_path).state_file.read_text()
    text = format_links(supervisor.state, tmp_path)
    assert all(part in text for part in parts) and "127.0.0.1:5000" not in text
    assert "\nruns     http://team:5000/#/experiments/1/runs\n" in text
    assert text.startswith("prefect  http://127.0.0.1:4200/runs\n")  # the table, not the dashboard
    with FolderLock(StatePaths(tmp_path).lock_file):
        connection.connect_to_servers(tmp_path, needs_prefect=False)
    assert os.environ.get("MLFLOW_TRACKING_URI", "") == expected


def test_the_deployments_of_the_checkout_are_read(tmp_path):
    assert "demo" in read_declared_names(ROOT / "deployments" / "prefect.yaml")
    (tmp_path / "x.yaml").write_text("deployments: 3")
    assert (
        read_declared_names(tmp_path / "x.yaml")
        == []
        == read_declared_names(tmp_path / "absent.yaml")
    )


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
    with pytest.raises(SettingsError, match="--database: ") as raised:
        database.strip_password(address)
    assert "secret" not in str(raised.value)


def test_a_missing_driver_names_the_extra(monkeypatch):
    monkeypatch.setattr(database.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SettingsError,
        match=r"psycopg2 and asyncpg is not installed; python -m posttrain.install --extras postgres",
    ):
        database.prepare_databases("postgresql://me@db/team")


def test_asyncpg_address():
    url = database._convert_for_asyncpg(
        database._parse_address("postgresql://me@db/team?sslmode=require&connect_timeout=3")
    )
    assert dict(url.query) == {"ssl": "require"}
