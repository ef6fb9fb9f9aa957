"""Workers that die anywhere: nothing is lost or done twice, and every number equals that of an undisturbed run.

Here the worker dies in memory: an error at a fault point, after which another worker takes over the folder. Processes
that are really killed are tested in `test_killed_processes`.
"""

import pytest
from helpers.service import bits, random_data
from helpers.service_clients import Line, create, loss, script, update
from helpers.service_load import Clients, answers, settings_of, weights

from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.storage import faults
from rl_core.storage.faults import FAULT_POINT_GROUPS, InjectedFault

SCRIPTS = [script(f"run{number}", number, steps=8) for number in (1, 2)]
SETTINGS = dict(snapshot_steps=3, snapshot_seconds=1e6)
ELSEWHERE = {
    "service.accepting",
    "service.accepted",
    "service.exported",
    "service.registered",
    "service.kept",
}
POINTS = [
    point.name for point in FAULT_POINT_GROUPS["training service"] if point.name not in ELSEWHERE
]
# Fault points of saving, which other writers also reach.
WRITES = ["publish.file", "publish.renamed", "pointer.written", "pointer.done", "prune.renamed"]


class Service:
    """Clients, store and a worker that is replaced when it fails."""

    def __init__(self, folder, base, scripts=SCRIPTS, **settings):
        self.folder, self.base, self.settings = folder, base, {**SETTINGS, **settings}
        self.store = ServiceStore(f"sqlite:///{folder}/service.db")
        self.clients = Clients(self.store, scripts)
        self.deaths = 0
        self.worker = self.new_worker()

    def new_worker(self):
        self.store.reset_running_requests()
        return EngineProcess(settings_of(self.folder, self.base, **self.settings), self.store)

    def run(self):
        while self.clients.step():
            try:
                self.worker.step(wait=0.0)
            except InjectedFault:
                self.deaths += 1
                self.worker._runs.wait_for_snapshots()  # a process that dies takes its threads along
                self.worker = self.new_worker()
        self.worker._runs.wait_for_snapshots()
        return self

    def close(self):
        self.store.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, base_folder):
    """Compute answers and weights of a run without kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    service = Service(folder, base_folder).run()
    results = answers(service.store, SCRIPTS), weights(service.store, folder)
    service.close()
    assert service.deaths == 0 and len(results[1]) >= 4
    states = [state for state, *_ in results[0].values()]
    # one of every client fails
    assert states.count("failed") == 2 and set(states) == {
        "done",
        "failed",
    }
    return results


def check_equal(service, undisturbed):
    faults.configure_faults(None)
    assert service.store.read_worker_counters().get("replay_differences", 0) == 0
    assert answers(service.store, SCRIPTS) == undisturbed[0]
    assert weights(service.store, service.folder) == undisturbed[1]
    service.close()


@pytest.mark.parametrize("hit", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_that_dies_at_every_point(hit, tmp_path, base_folder, undisturbed):
    faults.configure_faults(
        ",".join(f"{point}:{hit + number // 3}:raise" for number, point in enumerate(POINTS))
    )
    service = Service(tmp_path, base_folder).run()
    assert len(POINTS) - 1 <= service.deaths <= len(POINTS)  # few samplers are published
    check_equal(service, undisturbed)


HITS = [(point, hit) for point in POINTS for hit in (1, 2, 5) if point != "service.replayed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "hit"), [item for item in HITS if item != ("service.published", 5)]
)  # four samplers are
def test_a_worker_that_dies_at_a_point(point, hit, tmp_path, base_folder, undisturbed):
    faults.configure_faults(f"{point}:{hit}:raise,service.replayed:{hit}:raise")
    service = Service(tmp_path, base_folder).run()
    assert service.deaths >= 1
    check_equal(service, undisturbed)


def test_a_disk_that_refuses_snapshots_costs_time_and_nothing_else(tmp_path, base_folder, caplog):
    """Each kind of write fails once: no partial snapshot remains, and the next worker computes what is missing."""
    requests = [create("r")]
    for step in range(6):
        requests += [loss("r", 2 * step + 1, random_data(step)), update("r", 2 * step + 2)]
    scripts = [[Line(request) for request in requests]]
    results = []
    for name, plan in (
        ("plain", None),
        ("refused", ",".join(f"{point}:1:raise" for point in WRITES)),
    ):
        faults.configure_faults(plan)
        service = Service(tmp_path / name, base_folder, scripts, snapshot_steps=1).run()
        service.worker = service.new_worker()
        service.worker._runs.ensure_loaded("r")
        results.append(
            (
                answers(service.store, scripts),
                bits(service.worker._executor._engine.state_dict("r")),
            )
        )
        # behind the pointer and in pruning the error is the worker's end; the last one's may come after the answers
        assert service.deaths in ((1, 2) if plan else (0,))
        assert service.store.read_worker_counters().get("replay_differences", 0) == 0
        service.close()
    assert results[0] == results[1] and caplog.text.count("no snapshot") == 3


@pytest.mark.slow
def test_without_any_snapshot_a_run_is_computed_from_its_creation(
    tmp_path, base_folder, undisturbed
):
    faults.configure_faults("service.computed:24:raise")
    service = Service(tmp_path, base_folder, snapshot_steps=1_000_000).run()
    assert service.deaths == 1 and service.store.read_worker_counters()["replayed"] > 10
    check_equal(service, undisturbed)
