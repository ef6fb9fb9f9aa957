"""Short crash test: a small pipeline is killed at every point that it reaches, resumed each time, and compared.

`make crash-test` is the long one: every point, random times, runs that meet a champion; `--walk` takes every hit.
"""

import pytest
from crash.forks import Forks
from crash.pipelines import command, write_agent, write_inputs
from crash.servers import environment
from crash.trials import Bench, chains
from helpers.prefect_tables import create_migrated_database

from flows import parameters
from flows.runtime import embedded_server, prefect_access
from rl_core.storage.faults import FAULT_POINTS
from tasks.tracking import Tracking
from tasks.tracking.store import ensure_database

KIND = "analysis"  # from data over SFT to the gate


@pytest.fixture(scope="module")
def bench(tmp_path_factory, prefect_address):
    folder = tmp_path_factory.mktemp("crash")
    with Forks(environment(prefect_address)) as forks:
        bench = Bench(folder, write_inputs(folder), forks)
        bench.prepare_data([KIND], times=1)
        yield bench


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", [48, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_killed_at_point_after_point_ends_with_the_same_bits(bench, step):
    killed = set()
    for trial in chains(bench, KIND, step):
        assert trial.failures == [], trial.name
        killed |= {kill.fault.partition(":")[0] for kill in trial.kills[: trial.killed]}
    assert killed == set(bench.order[KIND][::step]) and len(killed) >= 70 // step


@pytest.mark.timeout(3600)
@pytest.mark.slow
def test_a_run_whose_episodes_an_agent_plays_ends_with_the_same_bits(bench):
    write_agent(bench.folder)
    bench.prepare_data(["agent"], times=1)
    for trial in chains(bench, "agent", 4):
        assert trial.failures == [], trial.name


def list_points(*runs):
    return {name for name, point in FAULT_POINTS.items() if point.run in runs}


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_point_is_reached_by_the_kind_of_run_that_is_listed_for_it(bench):
    bench.also(*command(bench.config, "again"))
    bench.also(
        *command(bench.config, "approval"), "--set", "seed=2"
    )  # without an answer version 3 stays challenger
    bench.also(*command(bench.config, "by hand", version=3))
    bench.also(
        *command(bench.config, "asked"), "--set", "seed=3", fault="approval.asked:1:kill", code=-9
    )
    bench.also(*command(bench.config, "approved"))
    bench.also(*command(bench.config, "retrain"))
    bench.also(*command(bench.config, "check"))
    bench.also("run", "--fresh", *command(bench.config, "empty")[1:])
    bench.also(*command(bench.config, "gc"))
    everything = (*command(bench.config, "training"), "--set", f"output={bench.output}/all")
    for fault in (
        "store.made:1:kill",
        "cursor.written:9:kill",
        "loop.saved:2:kill",
        "rewards.recorded:3:kill",
    ):
        bench.also(*everything, fault=fault, code=-9)
    assert "promoted" in bench.also(*everything)
    elsewhere = (
        "torchrun",
        "damage",
        "sweep",
        "online",
        "service",
        "serve",
        "prefer",
    )  # covered by other tests
    # The next test covers the first three.
    covered_elsewhere = list_points("own server", "up", "deployment", *elsewhere)
    missing = set(FAULT_POINTS) - covered_elsewhere - bench.seen
    assert not missing, sorted(missing)


@pytest.mark.slow
def test_points_of_servers_and_deployments(reached, tmp_path, monkeypatch):
    monkeypatch.delenv(prefect_access.SERVER_AUTH_VARIABLE, raising=False)
    assert prefect_access.load_or_create_password(tmp_path).startswith("posttrain:")
    declared = {
        "name": "mine",
        "environment": {"name": "arithmetic"},
        "stages": {"prepare_data": {}, "sft": {}},
    }
    monkeypatch.setattr(parameters, "read_declared_parameters", lambda: {"settings": declared})
    assert parameters.read_settings(declared, None).name == "mine"

    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    class FakeServer:
        def __init__(self, extra_environment, home): ...
        def wait_until_healthy(self, limit): ...
        def stop_process(self): ...

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", FakeServer)
    with temporary_settings(
        {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
    ):
        embedded_server.start_embedded_server()
        embedded_server.stop_embedded_server()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    create_migrated_database(tmp_path / "one")
    assert embedded_server.cache_tables(tmp_path / "one", {})
    assert embedded_server.copy_cached_tables(tmp_path / "two", {})
    Tracking(None, tmp_path).store.import_mlflow()
    ensure_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert reached() >= list_points("own server", "up", "deployment")
