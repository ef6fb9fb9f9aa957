"""Trials on the nodes of a Ray cluster: lines over an actor, lost nodes, capacity. A double of Ray runs actors here."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
from helpers.small_sweep import CONFIG

from flows.sweep import ray_trials
from flows.sweep.plan import SweepPlan
from flows.sweep.ray_trials import RayTrialPool, TrialHost, TrialResources
from flows.sweep.trial_process import LocalTrialPool, NodeLost, TrialWorker
from rl_core.errors import SettingsError, Stopped, WorkerFailed
from rl_core.rollout_workers.cluster import WorkerLost
from tasks.config import build_settings

NODES = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 8.0, "memory": 8e9, "GPU": 2.0}]
# Instead of flows.sweep.worker: follows the instructions in each job.
ECHO = """
import json, os, sys
events = os.fdopen(int(sys.argv[2]), "w", buffering=1)
for line in sys.stdin:
    job = json.loads(line)
    if job.get("dies"):
        os._exit(3)
    if job.get("rung"):
        events.write(json.dumps({"event": "rung", "value": 0.5}) + "\\n")
        job["decision"] = json.loads(sys.stdin.readline())
    events.write(json.dumps({"event": "ended", "outcome": job}) + "\\n")
"""


class FakeSession:
    """Double of `RaySession` whose actors are objects of this process; calls of an actor in `lost` fail."""

    def __init__(self, address, cpus, key):
        self.address, self.cpus, self.key = address, cpus, key
        self.lost, self.created, self.stopped = set(), [], []
        self.is_closed = self.is_silent = False

    def connect_ray(self):
        pass

    def check_node_versions(self):
        pass

    def list_node_resources(self):
        return NODES

    def create_actor(self, kind, *arguments, **options):
        host, number = kind(*arguments), len(self.created)

        def remote(name):
            return SimpleNamespace(remote=lambda *values: (number, getattr(host, name), values))

        self.created.append((host, options))
        return SimpleNamespace(number=number, read=remote("read"), do=remote("do"))

    def wait_for_calls(self, calls, timeout_s):
        return [] if self.is_silent else calls

    def fetch_result(self, call):
        number, method, values = call
        if number in self.lost:
            raise WorkerLost("the node died")
        return method(*values)

    def stop_worker(self, handle):
        self.stopped.append(handle.number)
        process = self.created[handle.number][0]._process.process
        process.kill()
        process.wait()

    def close(self):
        self.is_closed = True


@pytest.fixture
def trials(monkeypatch, tmp_path):
    echo = tmp_path / "echo.py"
    echo.write_text(ECHO)
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, str(echo), *command[-2:]], **options),
    )
    monkeypatch.setattr(ray_trials, "check_ray_installed", lambda *_: None)
    monkeypatch.setattr(ray_trials, "RaySession", FakeSession)
    monkeypatch.setattr(ray_trials, "_READ_SECONDS", 0.05)
    monkeypatch.setattr(ray_trials, "STOP_SECONDS", 0.2)
    pool = RayTrialPool("head:6379", 2, TrialResources(cpus=2))
    pool.open_pool(build_settings({"name": "x", "stages": {"prepare_data": {}}}, check_files=False))
    yield pool
    for host, _ in pool._session.created:
        host._process.process.kill()
        host._process.process.wait()


def start_worker(pool, home, stop=None):
    stop = stop or threading.Event()
    return TrialWorker(
        home / "w.log", lambda: pool.start_process(0, home, home / "w.log", stop), stop
    )


def test_jobs_and_rungs_travel_over_the_actor_which_holds_the_resources(trials, tmp_path):
    worker, values = start_worker(trials, tmp_path), []
    job = {"number": 1, "rung": True}
    outcome = worker.run_job(job, lambda value: values.append(value) or False, lambda *_: None)
    assert outcome == {**job, "decision": {"goes_on": False}} and values == [0.5]
    assert worker.run_job({"number": 2}, lambda value: True, lambda *_: None) == {"number": 2}
    ((_, options),) = trials._session.created  # one process for both
    assert options["num_cpus"] == 2 and options["num_gpus"] == 1.0 and options["memory"] > 0.5e9
    assert trials.threads == 2 and not trials.shares_memory
    worker.close_process()
    assert trials._session.stopped == [0], "its resources are free again"


def test_a_process_that_exits_is_a_failed_trial_and_the_next_trial_gets_a_new_one(trials, tmp_path):
    worker = start_worker(trials, tmp_path)
    with pytest.raises(
        WorkerFailed, match="the process of the trial ended with 3; its output is in"
    ):
        worker.run_job({"dies": True}, lambda value: True, lambda *_: None)
    assert worker.run_job({"number": 2}, lambda value: True, lambda *_: None) == {"number": 2}
    assert len(trials._session.created) == 2
    worker.close_process()


def test_a_lost_node_is_reported_and_the_same_job_moves_to_another(trials, tmp_path):
    worker = start_worker(trials, tmp_path)
    worker.run_job({"number": 1}, lambda value: True, lambda *_: None)
    trials._session.lost.add(0)
    with pytest.raises(NodeLost, match="the node died"):
        worker.run_job({"number": 2}, lambda value: True, lambda *_: None)
    assert worker.run_job({"number": 2}, lambda value: True, lambda *_: None) == {"number": 2}
    assert trials._session.stopped == [0]
    worker.close_process()


def test_a_sweep_that_stops_does_not_wait_for_a_silent_node(trials, tmp_path):
    stop = threading.Event()
    worker = start_worker(trials, tmp_path, stop)
    worker.run_job({"number": 1}, lambda value: True, lambda *_: None)
    trials._session.is_silent = True
    stop.set()
    with pytest.raises(Stopped, match="the same command resumes"):
        worker.run_job({"number": 2}, lambda value: True, lambda *_: None)


@pytest.mark.parametrize(
    ("parallel", "resources", "message"),
    [
        (4, TrialResources(cpus=2, gpus=0.5), ""),
        (
            5,
            TrialResources(cpus=2, gpus=0.5),
            r"--parallel 5: a trial holds 2 CPUs, .* GiB, 0.5 GPUs, and the 2 nodes",
        ),
        (6, TrialResources(cpus=2, gpus=0.0), ""),
        (
            7,
            TrialResources(cpus=2, gpus=0.0),
            r"have room for 6 at a time; use --parallel 6, --trial-cpus or",
        ),
        (
            1,
            TrialResources(cpus=16, gpus=0.0),
            r"have room for 0 at a time; use --parallel 1, --trial-cpus",
        ),
    ],
)
def test_more_trials_than_the_nodes_have_room_for_are_refused(
    monkeypatch, parallel, resources, message
):
    monkeypatch.setattr(ray_trials, "check_ray_installed", lambda *_: None)
    monkeypatch.setattr(ray_trials, "RaySession", FakeSession)
    pool = RayTrialPool("auto", parallel, resources)
    settings = build_settings({"name": "x", "stages": {"prepare_data": {}}}, check_files=False)
    if not message:
        pool.open_pool(settings)
        return
    with pytest.raises(SettingsError, match=message):
        pool.open_pool(settings)
    assert pool._session.is_closed


def test_a_node_without_the_folder_gives_one_line(tmp_path):
    host = TrialHost(str(tmp_path / "none"), str(tmp_path / "log"), {})
    assert "does not see" in str(host.read()) and "storage that all nodes share" in str(
        host.do("is_alive")
    )


def test_versions_of_a_cluster_are_checked_but_not_those_of_this_machine(monkeypatch):
    checked = []
    monkeypatch.setattr(ray_trials, "check_ray_installed", lambda *_: None)
    monkeypatch.setattr(ray_trials, "RaySession", FakeSession)
    monkeypatch.setattr(
        FakeSession, "check_node_versions", lambda self: checked.append(self.address)
    )
    settings = build_settings({"name": "x", "stages": {"prepare_data": {}}}, check_files=False)
    for address in ("head:1", "local"):
        RayTrialPool(address, 1, TrialResources()).open_pool(settings)
    assert checked == ["head:1"]


def test_missing_ray_gives_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        SettingsError, match=r"--ray needs the package ray .*--extras ray.*or leave --ray out"
    ):
        RayTrialPool("auto", 1, TrialResources())


def make_plan(tmp_path, text, method):
    from flows.sweep.search import parse_set_options

    (tmp_path / "small.yaml").write_text(CONFIG)
    overrides, dimensions = parse_set_options([f"output={tmp_path / 'out'}", *text])
    return SweepPlan(
        config=str(tmp_path / "small.yaml"),
        overrides=tuple(overrides),
        dimensions=tuple(dimensions),
        method=method,
    )


@pytest.mark.parametrize("method", ["grid", "random", "bayes", "halving"])
def test_an_unknown_key_is_refused_before_any_trial_with_any_method(tmp_path, method):
    with pytest.raises(SettingsError, match="learning_rat"):
        make_plan(
            tmp_path, ["stages.policy.learning_rat=1e-4,1e-3"], method
        ).validate_trial_settings()
    make_plan(
        tmp_path, ["stages.policy.learning_rate=0,1e-3"], "random"
    ).validate_trial_settings()  # one value is valid
    with pytest.raises(SettingsError, match="learning_rate"):
        make_plan(
            tmp_path, ["stages.policy.learning_rate=-2..-1"], "random"
        ).validate_trial_settings()


RATES = "stages.policy.learning_rate=1e-4,1e-2"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_on_real_ray_survives_a_lost_actor_and_gives_the_same_values(tmp_path):
    """Kill the actor of the first trial in the middle: the trial resumes from its checkpoint."""
    pytest.importorskip("ray")
    from flows.sweep.sweep_flow import run_sweep

    local_folder, ray_folder = tmp_path / "alone", tmp_path / "on_ray"
    for folder in (local_folder, ray_folder):
        folder.mkdir()
    plan = make_plan(local_folder, [RATES], "grid")
    first = run_sweep(plan, plan.load_base_settings(), gate=False, quiet=True)
    killed = []

    def kill_when_saved(path=ray_folder):
        for entry in (path / "out").rglob("*.open"):
            if entry.parent.name == "policy" and list((entry / "checkpoints").glob("*")):
                killed.append(kill_actor())
                return
        if not done.is_set():
            threading.Timer(0.1, kill_when_saved).start()

    done = threading.Event()
    kill_when_saved()
    try:
        plan = make_plan(ray_folder, [RATES], "grid")
        base = plan.load_base_settings()
        second = run_sweep(plan, base, gate=False, quiet=True, ray="local", parallel=1)
    finally:
        done.set()
    assert killed and [row["mean"] for row in first.rows] == [row["mean"] for row in second.rows]
    outcomes = [json.loads(path.read_text()) for path in ray_folder.rglob("trial.json")]
    assert len(outcomes) == 2 and {outcome["status"] for outcome in outcomes} == {"finished"}


def kill_actor():
    """Send SIGKILL to the running actor of a trial, whose process of trials ends with it."""
    (actor,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if "TrialHost" in "".join(child.cmdline())
    ]
    actor.kill()
    return actor.pid


def test_processes_of_this_machine_are_started_locally(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "flows.sweep.trial_process.LocalTrialProcess",
        lambda log, environment: seen.append((log, environment)),
    )
    LocalTrialPool(1).start_process(0, tmp_path, tmp_path / "log", threading.Event())
    ((log, environment),) = seen
    assert (
        log == tmp_path / "log"
        and environment["PATH"] == os.environ["PATH"]
        and environment["PYTHONPATH"]
    )
    assert LocalTrialPool(1).threads is None and LocalTrialPool(2).threads >= 1
