"""`posttrain schedule`: cron expressions, next times, refusals; which process locks sqlite files."""

import datetime
import sqlite3
import sys
from types import SimpleNamespace

import pytest
from prefect.exceptions import ObjectNotFound

from flows.parameters import build_main_overrides, extract_pipeline_name
from posttrain.cli import main as cli
from posttrain.operations import database
from posttrain.operations.schedules import (
    check_cron,
    list_next_times,
    remove_schedule,
    resolve_config_parameter,
    resolve_schedule_name,
)
from rl_core.errors import DataError, SettingsError
from rl_core.processes.children import spawn_server


@pytest.mark.parametrize(
    ("cron", "message"),
    [
        ("61 2 * * *", "minute is '61', not 0 to 59"),
        ("0 24 * * *", "hour is '24', not 0 to 23"),
        ("0 2 0 * *", "day of the month is '0', not 1 to 31"),
        ("0 2 * 13 *", "month is '13', not 1 to 12 or jan to dec"),
        ("0 2 * * funday", "day of the week is 'funday', not 0 to 7 or sun to sat"),
        ("0 2 * *", "has 4 fields, not 5"),
        ("*/0 * * * *", "minute '\\*/0': a step is a number above 0"),
        ("30-10 * * * *", "minute '30-10' ends before it begins"),
        ("0 2 * * sun-0-1", "day of the week is '0-1'"),
        ("0 2 * * fri-mon", "day of the week 'fri-mon' ends before it begins"),
        ("@dayly", "did you mean '@daily'"),
        ("", "has 0 fields, not 5"),
    ],
)
def test_a_wrong_cron_is_refused_by_the_name_of_its_field(cron, message):
    with pytest.raises(SettingsError, match=message) as error:
        check_cron(cron, "UTC")
    assert "\n" not in str(error.value)


def test_right_crons_and_zones():
    for cron in (
        "0 2 * * *",
        "*/15 8-18 1,15 jan-mar mon-fri",
        "0 0 * * 7",
        "0 2 * * sat-sun",
        "@daily",
    ):
        check_cron(cron, "Europe/Berlin")
    for zone in ("Mars/Base", "Europe", "x" * 300):  # no zone, a folder of zones, too long a name
        with pytest.raises(SettingsError, match=f"'{zone}' is no time zone"):
            check_cron("0 2 * * *", zone)


def test_the_next_three_times_are_those_of_the_zone():
    now = datetime.datetime(2026, 11, 28, 23, 30, tzinfo=datetime.UTC)
    assert list_next_times("0 2 * * mon-fri", "Asia/Tokyo", now) == (
        "Mon 2026-11-30 02:00 Asia/Tokyo",
        "Tue 2026-12-01 02:00 Asia/Tokyo",
        "Wed 2026-12-02 02:00 Asia/Tokyo",
    )
    assert list_next_times("0 2 31 feb *", "UTC", now) == ()


def test_refusals_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for words, code, message in (
        (["schedule"], 2, "name a configuration and a time"),
        (["schedule", "demo"], 2, "--cron is missing"),
        (["schedule", "demo", "--cron", "0 99 * * *"], 2, "hour is '99'"),
        (["schedule", "dmeo", "--cron", "0 2 * * *"], 2, "did you mean 'demo'?"),
        (["schedule", "my team.yaml"], 2, "posttrain schedule 'my team.yaml' --cron"),
        (["schedule", "--list", "--cron", "0 2 * * *"], 2, "is for a new schedule"),
        (["schedule", "demo", "--cron", "0 2 * * *"], 1, "start them: posttrain up --detach"),
        (["schedule", "--list"], 1, "which do not run for"),
        (
            [*["schedule", "demo", "--cron", "@daily", "--set"], "environment.options.api_key=abc"],
            2,
            "--set environment.options.api_key: a secret, which Prefect would store",
        ),
        (
            [
                *["schedule", "demo", "--cron", "@daily", "--set"],
                "environment={options: {token: abc}}",
            ],
            2,
            "--set environment.options.token: a secret",
        ),
    ):
        assert cli.main(words) == code, words
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, words
    assert list(tmp_path.iterdir()) == []


class Prefect:
    """Stand-in for Prefect's server, with the deployments that it was asked to create."""

    def __init__(self):
        self.deployments = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def create_flow_from_name(self, name):
        return name

    async def read_flow(self, flow_id):
        return SimpleNamespace(name=flow_id)

    async def read_deployments(self, *, deployment_filter, limit, offset):
        return self.deployments[offset:]

    async def create_deployment(self, **values):
        if values["work_pool_name"] != "posttrain":
            raise ObjectNotFound(ValueError("no such pool"))
        self.deployments = [SimpleNamespace(paused=False, **values)]


def test_a_pipeline_that_retrain_would_refuse_is_not_scheduled(tmp_path, monkeypatch, capsys):
    server = Prefect()
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda: server)
    monkeypatch.setattr("posttrain.cli.schedule._connect_to_scheduler", lambda _: "posttrain")
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"name: pirate\noutput: {tmp_path}\nstages:\n  prepare_data: {{}}\n  sft: {{epochs: 2}}\n"
    )
    assert cli.main(["schedule", str(path), "--cron", "@daily"]) == 2
    assert capsys.readouterr().err.endswith(
        "add `evaluate: {}`; or schedule the pipeline as it is: --flow run\n"
    )
    assert cli.main(["schedule", str(path), "--cron", "@daily", "--flow", "run"]) == 0
    (deployment,) = server.deployments
    assert deployment.parameters["main"]["sft_epochs"] == 2.0  # the form opens with it
    assert "iterations" not in deployment.parameters["main"]
    assert build_main_overrides({"sft_epochs": 2.0, "seed": 0}, deployment.parameters["main"]) == []
    assert extract_pipeline_name(str(path)) == "pirate"
    assert extract_pipeline_name(str(tmp_path / "missing.yaml")) == "missing"


def test_a_replaced_schedule_is_named_and_a_refusal_is_one_line(tmp_path, monkeypatch, capsys):
    server, pools = Prefect(), ["posttrain", "posttrain", "gone"]
    monkeypatch.setattr("prefect.client.orchestration.get_client", lambda: server)
    monkeypatch.setattr("posttrain.cli.schedule._connect_to_scheduler", lambda _: pools.pop(0))
    words = ["schedule", "demo", "--output", str(tmp_path), "--cron"]
    assert cli.main([*words, "0 2 * * *"]) == 0
    assert "replaces" not in capsys.readouterr().out
    assert cli.main([*words, "0 14 * * *", "--timezone", "Europe/Berlin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "demo-retrain: retrain demo, cron '0 14 * * *'",
        "  replaces demo, cron '0 2 * * *' (UTC)",
    ]
    assert cli.main([*words, "0 2 * * *"]) == 1
    error = capsys.readouterr().err
    assert (
        "refuses or does not answer (ObjectNotFound: no such pool)" in error
        and error.count("\n") == 1
    )


def test_an_unknown_schedule_is_not_removed():
    class Client:
        deleted: list = []  # noqa: RUF012

        async def read_deployments(self, *, deployment_filter, limit, offset):
            assert deployment_filter.tags.all_ == ["posttrain-schedule"]
            rows = [SimpleNamespace(name="demo-retrain", id=7)]
            return rows[offset:]

        async def delete_deployment(self, number):
            self.deleted.append(number)

    import asyncio

    with pytest.raises(DataError, match=r"no schedule 'demo-retrian'; did you mean 'demo-retrain'"):
        asyncio.run(remove_schedule(Client(), "demo-retrian"))
    assert Client.deleted == []
    assert asyncio.run(remove_schedule(Client(), "retrain/demo-retrain")) == "demo-retrain"
    assert Client.deleted == [7]


def test_a_schedule_has_its_own_name_and_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    assert resolve_config_parameter("mine.yaml") == str(tmp_path / "mine.yaml")
    assert resolve_config_parameter("demo") == "demo"
    names = (tmp_path.parent, resolve_schedule_name("demo", "run"))
    assert names[1] == "demo-run"  # `up` registers post-training/demo again at each start


def test_a_held_lock_and_logged_locks_are_named_with_what_to_do(tmp_path):
    path = tmp_path / "mlflow" / "mlflow.db"
    for folder in ("mlflow", "prefect", "logs"):
        (tmp_path / folder).mkdir()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("create table t (a)")
    assert database.describe_sqlite_locks(tmp_path, tmp_path / "prefect", 0.0) == []
    connection.execute("begin immediate")
    first, advice = database.describe_sqlite_locks(tmp_path, tmp_path / "prefect", 0.0)
    assert first.startswith(f"{path} is locked by process ") and "python" in first
    assert "take PostgreSQL: `posttrain down`, then `posttrain up --database" in advice
    connection.execute("rollback")
    log = tmp_path / "logs" / "prefect.log"
    log.write_text("x (sqlite3) database is locked\n" * 3)
    first, _ = database.describe_sqlite_locks(tmp_path, tmp_path / "prefect", 0.0)
    assert first.startswith("prefect reported 'database is locked' 3 times since its start (log: ")
    spawn_server([sys.executable, "-c", "print('database is locked')"], None, tmp_path, log).wait(
        30
    )
    first, _ = database.describe_sqlite_locks(tmp_path, tmp_path / "prefect", 0.0)
    assert first.startswith("prefect reported 'database is locked' once since its start (log: ")
    assert log.read_text().count("database is locked") == 4  # three of the earlier start
    connection.close()


def test_shipped_schedules_are_off_until_asked_for():
    import yaml
    from helpers import ROOT

    places = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())["deployments"]
    switches = {
        place["name"]: [schedule["active"] for schedule in place.get("schedules", [])]
        for place in places
    }
    assert switches["demo"] == [] and switches["nightly-retrain"] == [False]
    assert not any(active for row in switches.values() for active in row)
