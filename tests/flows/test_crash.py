"""The short crash test: a small pipeline is killed at every point that it reaches, goes on each time, and is compared.

`make crash-test` is the long one: every hit, random times, runs that meet a champion.
"""

import pytest
from crash.forks import Forks
from crash.pipelines import write_inputs
from crash.report import unreached
from crash.servers import environment, prefect_server
from crash.trials import Bench, chains


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash")
    with prefect_server() as api, Forks(environment(api)) as forks:
        bench = Bench(folder, write_inputs(folder), forks)
        bench.prepare(["pipeline"], times=1)
        yield bench


def test_the_pipeline_reaches_every_point_that_is_listed_for_it(bench):
    assert unreached(bench.hits, ["pipeline"]) == []


def test_killed_at_every_point_in_turn_it_goes_on_to_the_same_bits(bench):
    points = set(bench.hits["pipeline"])
    killed = set()
    for trial in chains(bench, "pipeline"):
        assert trial.failures == [], trial.name
        killed |= {kill.fault.partition(":")[0] for kill in trial.kills[: trial.killed]}
    assert killed == points
