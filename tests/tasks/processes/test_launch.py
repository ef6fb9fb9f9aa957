"""Stages in several processes: errors for the user, no processes left behind, inputs of the key."""

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT, launch_bodies

from rl_core.errors import NonFiniteError, RecordsError, SettingsError, Stopped, WorkerFailed
from rl_core.settings import LaunchSettings, SFTSettings
from rl_core.storage import faults
from rl_core.storage.append_log import encode_checked_line
from rl_core.tracking import MemoryTracker
from tasks.config import build_settings
from tasks.pipeline.stage_key import collect_stage_key
from tasks.processes.launch import (
    EventLogHandler,
    EventReader,
    EventTracker,
    _find_stop_report,
    _load_result,
    build_torchrun_arguments,
    recover_events,
    run_in_workers,
    wait_for_exit,
)

TORCHRUN = LaunchSettings(kind="torchrun", processes=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "torchrun", "nodes": 2}, "rdzv_endpoint: 2 nodes need a rendezvous"),
        (
            {"kind": "torchrun", "rdzv_endpoint": "node-1"},
            "rdzv_endpoint: 'node-1' must be host:port",
        ),
        ({"processes": 2}, "kind: in_process is one process, but 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        LaunchSettings(**options)


def test_the_key_of_a_stage_does_not_depend_on_its_processes(tmp_path):
    pipeline = build_settings(
        {"name": "x", "stages": {"sft": {}, "prepare_data": {}}}, check_files=False
    )
    keys = {
        collect_stage_key("sft", SFTSettings(launch=launch), pipeline, {}).key
        for launch in (LaunchSettings(), TORCHRUN)
    }
    assert len(keys) == 1
    assert collect_stage_key("sft", SFTSettings(batch_size=5), pipeline, {}).key not in keys


def test_torchrun_arguments(tmp_path):
    far = dataclasses.replace(TORCHRUN, nodes=2, rdzv_endpoint="node-1:29400", rdzv_id="job 7")
    command = build_torchrun_arguments(far, tmp_path)
    assert command[:5] == [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=job 7",
        "--rdzv-endpoint=node-1:29400",
    ]
    assert command[-3:] == ["-m", "tasks.pipeline.stage_worker", str(tmp_path / "job.json")]
    assert "--local-addr=127.0.0.1" in build_torchrun_arguments(TORCHRUN, tmp_path)


def test_lines_reach_the_tracker_once_and_whole(tmp_path, caplog):
    path, tracker = tmp_path / "events.jsonl", MemoryTracker()
    writer, reader = EventTracker(path), EventReader(path)
    reader.forward_events(tracker)  # nothing is there yet
    writer.log_metrics({"train/loss": 0.1}, 1)
    line = encode_checked_line({"op": "metrics", "metrics": {"a": 1}, "step": 2})
    with path.open("ab") as file:
        file.write(line[:30])
    reader.forward_events(tracker)
    assert tracker.metrics == [(1, {"train/loss": 0.1})]
    with path.open("ab") as file:
        file.write(line[30:])
    writer._log.close()
    writer = EventTracker(path)  # continues after the line that this test has written
    writer.progress(3, 9, "loss 1")
    writer.set_tag("k", "v")
    writer.log_dict({"history": [1]}, "curriculum.json")
    writer.send_event("training", on=True)
    EventLogHandler(writer).emit(
        logging.makeLogRecord({"name": "rl_core.x", "levelno": 30, "msg": "50 % of %s"})
    )
    reader.forward_events(tracker)
    assert tracker.metrics[1:] == [(2, {"a": 1})]
    assert (tracker.done, tracker.total, tracker.message, tracker.tags) == (
        3,
        9,
        "loss 1",
        {"k": "v"},
    )
    assert tracker.dicts == {"curriculum.json": {"history": [1]}}
    assert reader.is_training
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("rl_core.x", 30, "50 % of %s")
    ]


def test_a_damaged_line_of_rank_0_is_named_and_ends_nothing(tmp_path, caplog):
    path, tracker = tmp_path / "events.jsonl", MemoryTracker()
    writer = EventTracker(path)
    for step in (1, 2, 3):
        writer.log_metrics({"a": step}, step)
    writer.sync()
    data = path.read_bytes()
    offset = data.index(b'"step":2')
    # zeros, the state after a power cut
    path.write_bytes(data[:offset] + bytes(8) + data[offset + 8 :])
    EventReader(path).forward_events(tracker)
    assert tracker.metrics == [(1, {"a": 1}), (3, {"a": 3})]
    assert "events.jsonl: the line of bytes" in caplog.text and "damaged" in caplog.text


def test_events_of_killed_processes_are_delivered(tmp_path):
    (tmp_path / "workers").mkdir()
    writer = EventTracker(tmp_path / "workers/events.jsonl")
    writer.log_metrics({"a": 1.0}, 1)
    writer.progress(1, 2, "old")
    tracker = MemoryTracker()
    recover_events(tmp_path, tracker)
    assert tracker.metrics == [(1, {"a": 1.0})]
    assert tracker.message == ""
    assert not (tmp_path / "workers").exists()


def write_error(folder, rank, kind, time, **fields):
    error = {
        "rank": rank,
        "type": kind,
        "module": "rl_core.errors",
        "message": f"of {rank}",
        "time": time,
    }
    error |= {"ours": True, "signum": None, "trace": "", **fields}
    (folder / f"error-{rank}.json").write_text(json.dumps(error))


def test_the_error_of_the_process_that_failed_first_is_raised(tmp_path):
    # a broken connection
    write_error(tmp_path, 0, "RuntimeError", 1.0, ours=False, module="builtins")
    write_error(tmp_path, 1, "WorkerFailed", 2.0)  # what it heard of another
    write_error(tmp_path, 2, "NonFiniteError", 4.0)
    write_error(tmp_path, 3, "SettingsError", 5.0)
    with pytest.raises(NonFiniteError, match="of 2"):
        _load_result(tmp_path, 1)


def test_a_stop_comes_back_with_its_signal(tmp_path):
    write_error(tmp_path, 0, "Stopped", 1.0, signum=15)
    with pytest.raises(Stopped) as caught:
        _load_result(tmp_path, 1)
    assert caught.value.signum == 15


def test_a_stop_that_took_too_long_to_end_says_what_is_saved(tmp_path):
    assert _find_stop_report(tmp_path) is None
    write_error(tmp_path, 1, "SettingsError", 1.0)
    assert _find_stop_report(tmp_path) is None
    write_error(tmp_path, 0, "Stopped", 2.0, message="stopped after iteration 7; saved", signum=15)
    stopped = _find_stop_report(tmp_path)
    assert (type(stopped), str(stopped), stopped.signum) == (
        Stopped,
        "stopped after iteration 7; saved",
        15,
    )


def test_a_killed_process_is_named(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"0": -15, "1": -9}))
    write_error(tmp_path, 0, "RuntimeError", 1.0, ours=False, module="builtins")
    with pytest.raises(WorkerFailed, match="process 1 was killed by SIGKILL"):
        _load_result(tmp_path, 1)


def test_any_other_error_comes_with_its_trace(tmp_path):
    write_error(tmp_path, 1, "KeyError", 1.0, ours=False, module="builtins", trace="line 7")
    with pytest.raises(WorkerFailed, match="process 1 raised KeyError: of 1\nline 7"):
        _load_result(tmp_path, 1)


def test_no_result_is_an_error(tmp_path):
    (tmp_path / "agent.log").write_text("no such module\n")
    with pytest.raises(WorkerFailed, match="status 1 and no result; it printed:\nno such module"):
        _load_result(tmp_path, 1)


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(tmp_path, monkeypatch):
    log = tmp_path / "reached"
    monkeypatch.setenv(faults.LOG_VARIABLE, str(log))
    faults.log_reached_points(log)
    context = launch_bodies.context_of(tmp_path / "open")
    with pytest.raises(RecordsError, match=r"^data\.jsonl:3: prompt: found 7$"):
        run_in_workers(context, launch_bodies.fail_in_the_second)
    faults.log_reached_points(None)
    reached = [line.split() for line in log.read_text().splitlines()]
    for name, processes in (
        ("workers.job", 1),
        ("workers.started", 1),
        ("workers.ended", 1),
        ("worker.joined", 2),
    ):
        assert len({pid for pid, _, point in reached if point == name}) == processes, name
    assert {name for name, point in faults.FAULT_POINTS.items() if point.run == "torchrun"} - {
        row[2] for row in reached
    } == {"worker.computed"}, (
        "the first process waits for the second; test_killed_stopped_and_finished reaches it"
    )
    assert context.tracker.metrics == [(1, {"train/loss": 2.5})]
    assert list_processes(tmp_path) == []


def list_processes(folder):
    """List pids of running processes whose command names this folder."""
    pids = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(folder) in a for a in process.info["cmdline"] or ()
        ):
            pids.append(process.info["pid"])
    return sorted(pids)


def build_environment():
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": paths}


def test_a_child_dies_with_its_parent():
    child = "from rl_core.processes.children import bind_to_parent; import os, sys;"
    child += "bind_to_parent(int(sys.argv[1])); print(os.getpid(), flush=True); import time; time.sleep(100)"
    parent = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, env=build_environment()
    )
    pid = int(process.stdout.readline())
    assert wait_for_exit([pid], 0.0) == [pid]
    process.kill()
    process.wait()
    assert wait_for_exit([pid], 20.0) == []
    assert (
        subprocess.run(
            [sys.executable, "-c", child, "1"], env=build_environment(), timeout=60
        ).returncode
        == 1
    )


def start_stage(folder, metrics, count):
    """Start a stage of two processes; return once `count` steps are logged."""
    command = [sys.executable, str(ROOT / "tests/helpers/launch_bodies.py"), str(folder), "train"]
    process = subprocess.Popen(command, env=build_environment(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 600
    while count_steps(metrics) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def count_steps(metrics):
    return len(read_losses(metrics))


def read_losses(metrics):
    """Read {step: loss} from the file; a step never has two different losses."""
    losses = {}
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        step, row = json.loads(line)
        if "train/loss" in row:
            assert losses.setdefault(step, row["train/loss"]) == row["train/loss"]
    return losses


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_stopped_and_finished(tmp_path, monkeypatch):
    """SIGKILL of the stage, then SIGTERM, each leaving no process; the third run ends like an undisturbed one."""
    folder, metrics = tmp_path / "stage/open", tmp_path / "stage/metrics.jsonl"
    process = start_stage(folder, metrics, 3)
    children = [pid for pid in list_processes(tmp_path) if pid != process.pid]
    assert len(children) >= 3  # torchrun and two
    process.kill()
    process.wait()
    assert wait_for_exit(children, 20.0) == []
    process = start_stage(folder, metrics, count_steps(metrics) + 3)
    children = [pid for pid in list_processes(tmp_path) if pid != process.pid]
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    # a slow or busy machine abandons the iteration, so that the stage ends in time
    assert re.search(
        rb"Stopped: stopped (after iteration \d+; saved, |within an iteration; )the same command resumes",
        stderr,
    )
    assert wait_for_exit(children, 0.0) == []
    assert count_steps(metrics) < 16
    process = start_stage(folder, metrics, 16)
    assert process.wait(timeout=300) == 0
    assert sorted(read_losses(metrics)) == list(range(1, 17))
    alone = tmp_path / "alone/metrics.jsonl"
    monkeypatch.setenv(faults.LOG_VARIABLE, str(tmp_path / "reached"))
    assert start_stage(tmp_path / "alone/open", alone, 16).wait(timeout=300) == 0
    assert read_losses(alone) == read_losses(metrics)
    reached = [line.split() for line in (tmp_path / "reached").read_text().splitlines()]
    assert len({pid for pid, _, point in reached if point == "worker.computed"}) == 2
    summaries = [
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("stage", "alone")
    ]
    assert summaries[0] == summaries[1]
    assert summaries[0]["kinds"] == {"data": "PosixPath", "model": "str"}
    assert not (folder / "workers").exists()
