"""Start of a worker: it finishes what a killed worker had no time for, before anything else."""

import pytest
from helpers.service import bits, random_data
from helpers.service_clients import create, load, loss, save, unload, update
from helpers.service_load import settings_of

from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault


class WorkerFolder:
    """Store with workers that use it one after the other."""

    def __init__(self, folder, base):
        self.folder, self.base = folder, base
        self.store = ServiceStore(f"sqlite:///{folder}/service.db")
        self.worker = self.new_worker()

    def new_worker(self):
        """Start a worker as `run_until_stopped` does."""
        self.store.reset_running_requests()
        self.worker = EngineProcess(
            settings_of(self.folder, self.base, snapshot_steps=1), self.store
        )
        self.worker._runs.recover_after_crash()
        return self.worker

    def execute(self, *requests):
        stored = [self.store.accept_request(request) for request in requests]
        while self.worker.step(wait=0.0):
            pass
        self.worker._runs.wait_for_snapshots()
        return [self.store.find_request(item.request_id) for item in stored]

    def die_when_finished(self, request):
        """Kill the worker between the answer of a request and what follows it."""
        self.store.accept_request(request)
        faults.configure_faults("service.finished:1:raise")
        with pytest.raises(InjectedFault):
            self.execute()
        faults.configure_faults("")

    def weights(self, run):
        return bits(self.worker._executor._engine.state_dict(run)["model"])


@pytest.fixture
def place(tmp_path, base_folder):
    place_folder = WorkerFolder(tmp_path / "place", base_folder)
    yield place_folder
    place_folder.store.close()


def test_a_worker_killed_at_the_end_of_a_run_leaves_no_snapshots(place):
    place.execute(
        create("r"),
        loss("r", 1, random_data(1)),
        update("r", 2),
        create("s"),
        loss("s", 1, random_data(1)),
        update("s", 2),
    )
    place.die_when_finished(unload("r", 3))
    left = place.folder / "snapshots"
    assert place.store.find_run("r").state == "unloaded" and sorted(
        path.name for path in left.iterdir()
    ) == ["r", "s"]
    place.new_worker()
    assert [path.name for path in left.iterdir()] == ["s"]
    assert [item.state for item in place.execute(loss("s", 3, random_data(2)))] == ["done"]


def overwrite_path(place):
    """Save other weights under the path that was loaded."""
    place.execute(
        loss("a", 4, random_data(3)),
        update("a", 5, learning_rate=0.5),
        save("a", 6, "x", overwrite=True),
    )


def delete_path(place):
    place.store.delete_checkpoint("tinker://a/weights/x")
    place.worker._housekeeping.run_now()


@pytest.mark.parametrize("then", [overwrite_path, delete_path], ids=["overwritten", "deleted"])
def test_loaded_weights_are_copied_before_their_path_may_change(place, then):
    """Killed between the answer to `load_weights` and the run's snapshot: replay must not read the path again."""
    path = "tinker://a/weights/x"
    place.execute(
        create("a"),
        loss("a", 1, random_data(1)),
        update("a", 2, learning_rate=0.5),
        save("a", 3, "x"),
        create("b", seed=9),
    )
    saved = place.weights("a")
    place.die_when_finished(load("b", 1, path))
    place.new_worker()
    then(place)
    (answer,) = place.execute(loss("b", 2, random_data(4), forward_only=True))
    assert answer.state == "done" and place.weights("b") == saved
    assert place.store.read_worker_counters().get("replay_differences", 0) == 0
