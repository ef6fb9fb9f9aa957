"""Rollout workers as real Ray actors; skipped without Ray."""

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.letters import comparable, weights
from helpers.worker_cluster import letters_trainer, with_team

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError, WorkerFailed
from rl_core.rollout_workers import ray_cluster
from rl_core.rollout_workers.async_worker_group import (
    AsyncWorkerGroup,
    ScheduleReplay,
    read_schedule,
)
from rl_core.rollout_workers.ray_cluster import (
    MIN_OBJECT_STORE_BYTES,
    RayCluster,
    check_cluster_address,
    check_object_store,
)
from rl_core.settings import RolloutSettings
from rl_core.settings.rollouts import check_ray_installed
from rl_core.storage.session_resources import (
    RAY_PREFIX,
    SessionFolder,
    remove_stale_session_folders,
)

ray = pytest.importorskip("ray")

SETTINGS = RolloutSettings(workers="ray", count=2)


def list_leftovers():
    """List our session folders and files in shared memory."""
    folders = Path(tempfile.gettempdir()).glob(f"{RAY_PREFIX}*")
    return {str(path) for path in [*folders, *Path("/dev/shm").glob("plasma*")]}


def train_bits(trainer, iterations):
    return [comparable(trainer.step()) for _ in range(iterations)], weights(
        trainer
    ).numpy().tobytes()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.mark.slow
def test_actors_give_the_bits_of_one_process_even_if_one_is_killed(tokenizer):
    previous, handler = list_leftovers(), signal.getsignal(signal.SIGTERM)
    expected = train_bits(letters_trainer(tokenizer), 6)
    cluster = RayCluster(SETTINGS)
    trainer = with_team(letters_trainer(tokenizer), cluster)
    try:
        first, _ = train_bits(trainer, 3)
        assert signal.getsignal(signal.SIGTERM) is handler
        pid = cluster._ray.get(
            cluster._handles[0].answer.remote(
                "load", trainer.worker_group._build_full_update(), trainer.worker_group._probe
            )
        ).pid
        threading.Timer(0.01, os.kill, (pid, signal.SIGKILL)).start()
        rest, last = train_bits(trainer, 3)
        assert (first + rest, last) == expected
        assert trainer.worker_group.lost_workers == 1
    finally:
        trainer.worker_group.close()
    assert list_leftovers() == previous and not ray.is_initialized()


@pytest.mark.slow
def test_asynchronous_actors_outlive_a_kill_and_are_replayed_bit_for_bit(tokenizer, tmp_path):
    previous, file = list_leftovers(), tmp_path / "schedule.jsonl"

    def build_trainer():
        trainer = with_team(
            letters_trainer(tokenizer, importance="token"), RayCluster(SETTINGS), 2, max_staleness=1
        )
        group, trainer.worker_group = trainer.worker_group, None
        return trainer, group

    trainer, group = build_trainer()
    stream = trainer.stream = AsyncWorkerGroup(
        group.settings, group.cluster, group.config, schedule=file
    )
    try:
        rows = [comparable(trainer.step()) for _ in range(3)]
        worker = stream._slots[0].worker
        pid = group.cluster._ray.get(worker.answer.remote("process"))
        os.kill(pid, signal.SIGKILL)
        rows += [comparable(trainer.step()) for _ in range(3)]
        assert stream.lost_workers == 1
    finally:
        stream.close()
    assert list_leftovers() == previous
    used = [
        group["number"]
        for lines in read_schedule(file).values()
        for line in lines
        for group in line["groups"]
    ]
    assert sorted([*used, *(task.number for task in stream._list_open_tasks())]) == list(
        range(stream._next_number)
    )
    replay, group = build_trainer()
    replay.stream = ScheduleReplay(file, group.config, 1)
    for row in rows:
        assert comparable(replay.step()) == {
            name: row[name] for name in row if not name.startswith("policy/staleness")
        }
    assert weights(replay).numpy().tobytes() == weights(trainer).numpy().tobytes()


DRIVER = """
import os, signal, sys
sys.path[:0] = ["tests"]
from helpers.worker_cluster import letters_trainer, with_team
from rl_core.data.tokenizer import train_tokenizer
from rl_core.rollout_workers.ray_cluster import RayCluster
from rl_core.settings import RolloutSettings
trainer = with_team(letters_trainer(train_tokenizer(["abc xyz"], 300)), RayCluster(RolloutSettings(workers="ray")), 1)
trainer.step()
print(trainer.worker_group.cluster._session.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_every_node_is_asked_for_its_versions_before_anything_starts(monkeypatch):
    """On a real cluster of one node; another version here is like one there."""
    previous = list_leftovers()
    session = ray_cluster.RaySession(None, 1)
    session.connect_ray()
    try:
        assert [node["CPU"] for node in session.list_node_resources()] == [1.0]
        session.check_node_versions()
        monkeypatch.setattr(ray_cluster, "COMPARED_PACKAGES", ("torch", "no-such-package"))
        session.check_node_versions()  # installed on neither side
        get_version = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata,
            "version",
            lambda name: "9.9" if name == "torch" else get_version(name),
        )
        with pytest.raises(
            SettingsError, match=r"a node of the cluster \(.*\) has torch 2.*, this process 9.9"
        ):
            session.check_node_versions()
        monkeypatch.setattr(ray_cluster, "NODE_REPLY_TIMEOUT_S", -1.0)
        with pytest.raises(
            SettingsError, match="1 of 1 nodes of the cluster did not report their versions within"
        ):
            session.check_node_versions()
    finally:
        session.close()
    assert list_leftovers() == previous


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process_and_the_next_start_removes_its_folder():
    run = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    folder = Path(run.stdout.split()[-1])
    assert run.returncode == -signal.SIGKILL and folder.is_dir()
    ends = threading.Event()
    for _ in range(100):  # until Ray's reaper notices that its parent has died
        if not list_processes(folder):
            break
        ends.wait(0.2)
    assert list_processes(folder) == []
    assert folder.name in remove_stale_session_folders() and not folder.exists()


def list_processes(folder):
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes():
                pids.append(entry.parent.name)
        except OSError:
            continue
    return pids


def test_a_folder_of_a_living_run_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = SessionFolder()
    assert remove_stale_session_folders() == [] and session.path.is_dir()
    session.release_lock()
    assert remove_stale_session_folders() == [session.path.name] and not session.path.exists()
    other = SessionFolder()
    other.close()
    assert not other.path.exists() and remove_stale_session_folders() == []


def test_a_cluster_that_does_not_answer_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(
            SettingsError, match=rf"address: no Ray cluster answers at 127.0.0.1:{port}"
        ):
            check_cluster_address(f"127.0.0.1:{port}")
    check_cluster_address("auto")


def test_a_store_that_does_not_fit_is_one_line():
    assert check_object_store(0) == MIN_OBJECT_STORE_BYTES
    with pytest.raises(
        SettingsError,
        match=r"Ray's object store needs [\d,]+ MiB for the weights, but this machine",
    ):
        check_object_store(2**50)


def test_a_missing_ray_is_one_line(monkeypatch):
    check_ray_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SettingsError, match=r"needs the package ray .*: python -m posttrain.install --extras ray"
    ):
        check_ray_installed()


class BusyRay:
    """A replacement of the package whose first starts time out."""

    __spec__ = "there"  # for importlib.util.find_spec

    def __init__(self, failures, message="The current node timed out during startup."):
        self.failures, self.message, self.started, self.ended = failures, message, 0, 0

    def is_initialized(self):
        return False

    def init(self, **options):
        self.started += 1
        if self.started <= self.failures:
            raise Exception(self.message)

    def shutdown(self):
        self.ended += 1


def test_a_busy_machine_gets_more_time_to_start(monkeypatch):
    lost = "System error: Failed to connect to GCS. Please check if the GCS server is running"
    for failures, started, *message in ((0, 1), (2, 3), (2, 3, lost)):
        busy = BusyRay(failures, *message)
        monkeypatch.setitem(sys.modules, "ray", busy)
        cluster = RayCluster(SETTINGS)
        cluster.open_cluster(0)
        assert (busy.started, busy.ended) == (started, failures)
        cluster.close()
    for busy, kind, message in (
        (BusyRay(9), WorkerFailed, "Ray did not start in 3 attempts .*timed out.* too busy"),
        (BusyRay(9, "no such option"), Exception, "^no such option$"),
    ):
        monkeypatch.setitem(sys.modules, "ray", busy)
        cluster = RayCluster(SETTINGS)
        with pytest.raises(kind, match=message):
            cluster.open_cluster(0)
        cluster.close()
