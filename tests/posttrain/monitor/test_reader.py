"""Reader of runs that run, ended, crashed, were moved, half written or deleted."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.monitor_runs import MOVES, START, make_run, write_journal, write_lines

from posttrain.monitor.reader import RunReader
from posttrain.monitor.runs import is_process_alive
from rl_core.errors import SettingsError
from rl_core.storage.locks import FolderLock
from tasks.tracking.journal import LineLog, MetricsJournal, build_events_path


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def load_run(output, name=""):
    return RunReader(output).load_run(name)


def test_empty_and_missing_folders_have_no_runs(tmp_path):
    reader = RunReader(tmp_path)
    assert reader.list_runs() == [] and reader.load_run("") is None
    assert RunReader(tmp_path / "none").load_run("") is None


def test_running_run(tmp_path):
    home = make_run(tmp_path)
    os.utime(home / "stages/policy/bbbb.tracking/metrics.jsonl", (time.time(), time.time()))
    run = load_run(tmp_path)
    assert (run.id, run.status, run.pid, run.started) == (
        "demo/2027-01-15-08-00-00",
        "running",
        os.getpid(),
        START,
    )
    statuses = {stage.label: stage.status for stage in run.stages}
    assert statuses == {
        "sft": "finished",
        "policy": "running",
        "evaluate": "to come",
    }  # thoughts is null in the settings
    sft, policy, _ = run.stages
    assert (sft.done, sft.total, sft.result, sft.ended - sft.started) == (4.0, 4.0, "4 steps", 9.0)
    assert (policy.done, policy.total, policy.message) == (5.0, 10.0, "reward/mean 0.5")
    assert policy.table.series["reward/mean"].read_arrays()[2].tolist() == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )
    assert policy.seconds_left == pytest.approx(10.0)  # 5 iterations to go, 2 s each
    assert policy.curriculum == MOVES
    assert policy.folder == home / "stages/policy/bbbb.open"
    assert run.find_stage("").label == "policy"
    assert run.system.series["system/process_cpu_percentage"].last == 102.0


def test_appended_lines_are_read_and_the_torn_line_completed(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.MIN_REFRESH_SECONDS", 0.0)
    home = make_run(tmp_path)
    reader = RunReader(tmp_path)
    table = reader.load_run("").find_stage("policy").table
    assert table.series["reward/mean"].count == 5
    with (home / "stages/policy/bbbb.tracking/metrics.jsonl").open("a") as file:
        file.write('00000000,"metrics":{"reward/mean":0.75}}\n')
    assert reader.load_run("").find_stage("policy").table.series["reward/mean"].last == 0.75
    assert table.series["reward/mean"].count == 6


@pytest.mark.parametrize(
    ("end", "status"), [("FINISHED", "finished"), ("FAILED", "failed"), ("KILLED", "stopped")]
)
def test_ended_run_has_its_status(tmp_path, end, status):
    make_run(tmp_path, status=end)
    run = load_run(tmp_path)
    assert run.status == status == run.find_stage("policy").status
    assert run.find_stage("evaluate").status == "not run"
    assert run.ended - run.started == 100
    assert run.find_stage("policy").seconds_left is None


@pytest.mark.parametrize("damage", [{}, {"before": 3}, {"before": "", "now": "x"}, {"now": "x"}])
def test_answer_replaces_the_question(tmp_path, damage):
    home = make_run(tmp_path, status="FINISHED")
    question, parent = "version 2 waits for approval", home / "runs" / "2027-01-15-08-00-00"
    write_lines(
        parent / ".tracking/events.jsonl",
        [{"op": "tags", "tags": {"result": f"policy 50%; {question}"}}],
    )
    (home / "stages/sft/aaaa/summary.json").write_text(json.dumps({"note": question}))
    assert question in load_run(tmp_path).result
    answer = damage or {"before": question, "now": "version 2 promoted by ada"}
    (parent / "run.json").write_text(json.dumps({"answer": answer}))
    run = load_run(tmp_path)
    expected = question if damage else "version 2 promoted by ada"
    assert run.result == f"policy 50%; {expected}" and run.find_stage("sft").result == expected
    (parent / "run.json").write_text(json.dumps({"answer": [1]}))
    assert question in load_run(tmp_path).result


def test_run_without_its_process_was_killed(tmp_path, dead_pid):
    make_run(tmp_path, pid=dead_pid)
    run = load_run(tmp_path)
    assert run.status == "killed" == run.find_stage("policy").status
    assert (
        f"Process {dead_pid} no longer exists" in run.status_reason
        and "resumes from the last checkpoint" in run.status_reason
    )


def test_process_started_after_the_run_is_another_one(tmp_path):
    home = make_run(tmp_path)
    os.utime(
        home / "run.json", (START - 10**9, START - 10**9)
    )  # long before this process was started
    assert load_run(tmp_path).status == "killed"
    assert is_process_alive(os.getpid(), time.time()) and not is_process_alive(os.getpid(), 1.0)
    assert not is_process_alive(-1, time.time()) and not is_process_alive(2**62, time.time())


def test_run_on_another_machine_is_judged_by_its_records(tmp_path):
    home = make_run(tmp_path, pid=1)
    record = json.loads((home / "run.json").read_text())
    (home / "run.json").write_text(json.dumps({**record, "host": "gpu-box"}))
    run = load_run(tmp_path)
    assert (run.status, run.status_reason) == ("running", "on gpu-box")
    for path in home.rglob("*.jsonl"):
        os.utime(path, (START - 10**9, START - 10**9))
    run = load_run(tmp_path)
    assert run.status == "silent" and "gpu-box" in run.status_reason


def test_a_stage_without_metrics_does_not_hide_those_of_the_others(tmp_path):
    """The run is not viewed, so that only file times show that it is running."""
    home = make_run(tmp_path)
    (home / "run.json").write_text(
        json.dumps({**json.loads((home / "run.json").read_text()), "host": "elsewhere"})
    )
    (home / "runs/2027-01-15-08-00-00/metrics.jsonl").unlink()
    (home / "stages/sft/aaaa.tracking/metrics.jsonl").unlink()
    for path in home.rglob("events.jsonl"):
        os.utime(path, (START, START))
    os.utime(home / "stages/policy/bbbb.tracking/metrics.jsonl", (time.time(), time.time()))
    (run,) = RunReader(tmp_path).list_runs()
    assert (run.status, run.status_reason) == ("running", "on elsewhere")


def test_incomplete_files_are_read_as_far_as_possible(tmp_path):
    home = make_run(tmp_path)
    (home / "run.json").write_text('{"started": "2027')
    (home / "stages/policy/bbbb.tracking/.tracking/progress.json").write_text("")
    (home / "stages/sft/aaaa/summary.json").write_text("[")
    events = home / "stages/policy/bbbb.tracking/.tracking/events.jsonl"
    write_lines(
        events,
        [{"op": "tags"}, {"no": 1}, {"op": "text", "name": "curriculum.json", "text": "{"}],
        torn="{",
    )
    (home / "stages/reward_model/cccc.tracking").mkdir(parents=True)  # still empty
    (home / "stages/policy/dddd.tracking").write_text("a file where a folder should be")
    run = load_run(tmp_path)
    policy = run.find_stage("policy")
    assert (policy.done, policy.total) == (5.0, 10.0)  # counted; from the settings
    assert policy.curriculum == MOVES


def test_folder_removed_while_viewed(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr("posttrain.monitor.reader.MIN_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("posttrain.monitor.reader.LISTING_SECONDS", 0.0)
    make_run(tmp_path / "out")
    reader = RunReader(tmp_path / "out")
    assert reader.load_run("").status == "running"
    shutil.rmtree(tmp_path / "out/demo/stages")
    assert {stage.status for stage in reader.load_run("").stages} == {"to come"}
    shutil.rmtree(tmp_path / "out")
    assert reader.load_run("") is None
    make_run(tmp_path / "out")
    assert reader.load_run("").find_stage("policy").table.series["reward/mean"].count == 5


def test_a_stage_of_an_earlier_run_is_shown_as_cached(tmp_path):
    home = make_run(tmp_path, status="FINISHED")
    parent = home / "runs/2027-01-15-09-00-00"
    write_journal(
        parent,
        "demo · 2027-01-15 09:00:00",
        started=START + 3600,
        ended=START + 3700,
        events=[{"op": "tags", "tags": {"cached.sft": "aaaa", "cached.evaluate": "missing"}}],
    )
    runs = RunReader(tmp_path).list_runs()
    assert [run.started_text for run in runs] == ["2027-01-15 09:00:00", "2027-01-15 08:00:00"]
    run = load_run(tmp_path)
    assert [(stage.label, stage.status) for stage in run.stages] == [
        ("sft", "cached"),
        ("evaluate", "cached"),
    ]
    assert run.find_stage("sft").table.series["train/loss"].last == 0.5
    assert run.find_stage("evaluate").result == "its files no longer exist"


def test_reused_champion_has_its_reason_and_no_training_curves(tmp_path):
    """The stage `promote` of such a run is recorded as reused from the run that trained the champion."""
    home = make_run(tmp_path, status="FINISHED")
    reason = "version 2 of demo is the champion already"
    tags = {"cached.policy": "bbbb", "cached.promote": "bbbb", "gate.reason": reason}
    write_journal(
        home / "runs/2027-01-15-09-00-00",
        "demo · 2027-01-15 09:00:00",
        started=START + 3600,
        ended=START + 3700,
        events=[{"op": "tags", "tags": {"cached.policy": "bbbb"}}, {"op": "tags", "tags": tags}],
    )
    run = load_run(tmp_path)
    assert (run.find_stage("promote").status, run.find_stage("promote").result) == (
        "cached",
        reason,
    )
    assert run.find_stage("").label == "policy" and not run.find_stage("promote").table.series


def test_a_resumed_run_keeps_its_stages_in_order(tmp_path):
    """A resumed run records earlier stages again as cached."""
    home = make_run(tmp_path)
    parent = home / "runs/2027-01-15-09-00-00"
    cached_event = {"op": "tags", "tags": {"cached.sft": "aaaa"}}
    write_journal(
        parent,
        "demo · 2027-01-15 09:00:00",
        started=START + 3600,
        events=[cached_event, {**cached_event, "time": (START + 3800) * 1000}],
    )
    write_journal(
        home / "stages/policy/cccc.tracking", "policy", started=START + 3601, parent=parent
    )
    run = RunReader(tmp_path).load_run("")
    assert [stage.label for stage in run.stages if stage.status != "to come"] == ["sft", "policy"]


def test_a_run_is_selected_by_its_names(tmp_path):
    make_run(tmp_path, status="FINISHED")
    make_run(tmp_path, name="other", status="FINISHED", begun=START + 5)
    reader = RunReader(tmp_path)
    assert (
        reader.resolve_run_id("demo")
        == "demo/2027-01-15-08-00-00"
        == reader.resolve_run_id("demo/2027-01")
    )
    assert (
        reader.resolve_run_id("2027-01-15 08:00:00") == "other/2027-01-15-08-00-00"
    )  # the newest match
    with pytest.raises(SettingsError, match=r"no run 'demmo'.*did you mean 'demo'\?"):
        reader.resolve_run_id("demmo")
    with pytest.raises(SettingsError, match="none are known"):
        RunReader(tmp_path / "empty").resolve_run_id("demo")


def test_runs_not_viewed_are_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.monitor.reader.MAX_LOADED_RUNS", 1)
    make_run(tmp_path, status="FINISHED")
    make_run(tmp_path, name="other", status="FINISHED")
    reader = RunReader(tmp_path)
    for _ in range(2):
        for name in ("demo", "other"):
            assert (
                reader.load_run(reader.resolve_run_id(name))
                .find_stage("policy")
                .table.series["reward/mean"]
                .count
                == 5
            )
    loaded = [j.folder.parts[-4] for j in reader._stages.values() if j.table.series]
    assert set(loaded) == {"other"}


def test_nothing_is_locked_written_or_left_open(tmp_path):
    home = make_run(tmp_path)
    files_before = sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    folder = home / "stages/sft/eeee.tracking"
    with FolderLock(home / ".lock"):
        writer = LineLog(build_events_path(folder))  # holds a lock, as training does
        writer.append_record({"op": "start", "time": 1000, "name": "sft", "parent_folder": None})
        log = MetricsJournal(folder)
        log.append_metrics({"train/loss": 1.0}, 1)
        reader = RunReader(tmp_path)
        assert reader.load_run("") is not None
        log.append_metrics({"train/loss": 2.0}, 2)
    with FolderLock(home / ".lock"):  # free, although the reader has read
        pass
    log.close()
    writer.close()
    LineLog(build_events_path(folder)).close()
    files_after = sorted(
        (str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if "eeee" not in str(p)
    )
    assert [row for row in files_after if not row[0].endswith((".lock", "/demo", "/sft"))] == [
        row for row in files_before if not row[0].endswith(("/demo", "/sft"))
    ]
    open_files = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert not any(str(tmp_path) in path for path in open_files)


def create_store(path: Path) -> None:
    """Create the tables of MLflow's store that are read, with one pipeline run and its stage."""
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as db:
        db.executescript(
            """
            CREATE TABLE experiments (experiment_id INTEGER, name TEXT, lifecycle_stage TEXT);
            CREATE TABLE runs (run_uuid TEXT, name TEXT, status TEXT, start_time INTEGER, end_time INTEGER,
                               lifecycle_stage TEXT, experiment_id INTEGER);
            CREATE TABLE tags (run_uuid TEXT, key TEXT, value TEXT);
            CREATE TABLE metrics (run_uuid TEXT, key TEXT, value REAL, timestamp INTEGER, step INTEGER, is_nan INTEGER);
            INSERT INTO experiments VALUES (1, 'demo', 'active'), (2, 'removed', 'deleted');
            INSERT INTO runs VALUES ('p1', 'demo · x', 'FINISHED', 1700000000000, 1700000100000, 'active', 1),
                                    ('s1', 'reward model', 'FAILED', 1700000010000, 1700000020000, 'active', 1),
                                    ('d1', 'deleted', 'FINISHED', 1700000000000, NULL, 'deleted', 1),
                                    ('e2', 'of a deleted experiment', 'FINISHED', 1700000000000, NULL, 'active', 2);
            INSERT INTO runs VALUES ('o1', 'online demo', 'RUNNING', 1700000200000, NULL, 'active', 1),
                                    ('t1', 'run 1', 'RUNNING', 1700000300000, NULL, 'active', 1);
            INSERT INTO tags VALUES ('o1', 'online.service', 'out/version-1'), ('t1', 'service.run', 'run-1');
            INSERT INTO tags VALUES ('s1', 'mlflow.parentRunId', 'p1'), ('s1', 'stage', 'reward_model'),
                                    ('p1', 'pipeline', 'old'), ('e2', 'pipeline', 'old'), ('p1', 'result', 'fine');
            INSERT INTO metrics VALUES ('s1', 'train/loss', 2.0, 1700000011000, 1, 0),
                                       ('s1', 'train/loss', 1.5, 1700000012000, 2, 0),
                                       ('s1', 'train/loss', 0.0, 1700000013000, 3, 1);
            """
        )
    db.close()


def test_runs_without_files_come_from_mlflow(tmp_path):
    create_store(tmp_path / "mlflow/mlflow.db")
    reader = RunReader(tmp_path)
    run = reader.load_run("mlflow:p1")
    assert (run.group, run.status, run.result, run.source) == (
        "old",
        "finished",
        "fine",
        "mlflow",
    )
    assert [(s.label, s.status, s.ended - s.started) for s in run.stages] == [
        ("reward_model", "failed", 10.0)
    ]
    assert run.stages[0].table.series["train/loss"].read_arrays()[2].tolist() == [2.0, 1.5]
    assert [listed.id for listed in reader.list_runs()] == ["mlflow:p1"]  # services have other tabs
    assert sorted(path.name for path in (tmp_path / "mlflow").iterdir()) == [
        "mlflow.db"
    ]  # no journal, no -shm


def test_locked_or_damaged_store_keeps_the_previous_result(tmp_path):
    path = tmp_path / "mlflow/mlflow.db"
    create_store(path)
    reader = RunReader(tmp_path)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    assert [run.run_id for run in reader.store.list_runs()] == [
        "t1",
        "o1",
        "s1",
        "p1",
    ]  # without waiting for the lock
    writer.execute("ROLLBACK")
    writer.close()
    path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    assert [run.run_id for run in reader.store.list_runs()] == ["t1", "o1", "s1", "p1"]
    path.unlink()
    assert reader.store.list_runs() == []


def test_reading_and_drawing_load_neither_gradio_nor_torch_nor_mlflow():
    program = "import sys, posttrain.monitor.views, posttrain.monitor.export; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(process.stdout.split())
    assert "posttrain.monitor.reader" in loaded
    assert not {"gradio", "torch", "mlflow", "prefect", "fastapi"} & loaded
