"""Crashed runs: detected by their lock, delivered and marked; other runs stay unchanged."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from rl_core.errors import DataError, FolderBusy, SettingsError
from tasks.lifecycle.crashed_runs import close_crashed_runs, find_crashed_runs, list_recorded_runs
from tasks.tracking import Tracking
from tasks.tracking.journal import LineLog, build_events_path
from tasks.tracking.run_ids import shorten_run_name


@pytest.mark.parametrize("held", [False, True])
def test_a_read_only_journal_is_checked_too(tmp_path, monkeypatch, held):
    folder = write_journal(tmp_path)
    opened = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_RDWR and Path(path).name == "events.jsonl":
            raise PermissionError(13, "Permission denied", path)
        return opened(path, flags, *mode)

    lines = LineLog(build_events_path(folder)) if held else None
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "open", refuse)
    assert [run.journal_folder for run in find_crashed_runs(tmp_path)] == ([] if held else [folder])
    if lines is not None:
        lines.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT])
def test_an_unreadable_or_removed_journal_is_skipped(tmp_path, monkeypatch, number):
    write_journal(tmp_path)
    opened = os.open

    def refuse(path, flags, *mode):
        if Path(path).name == "events.jsonl":
            raise OSError(number, os.strerror(number), path)
        return opened(path, flags, *mode)

    assert len(find_crashed_runs(tmp_path)) == 1
    monkeypatch.setattr(os, "open", refuse)
    assert find_crashed_runs(tmp_path) == []


def test_folders_may_be_removed_during_detection(tmp_path, monkeypatch):
    """For example the folder of a stage that finishes, or a pruned checkpoint."""
    folder, scan = write_journal(tmp_path), os.scandir
    (tmp_path / "demo" / "checkpoint").mkdir()

    def scan_and_remove(path):
        if Path(path).name == "checkpoint":
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    assert [run.journal_folder for run in find_crashed_runs(tmp_path)] == [folder]
    assert not (tmp_path / "demo" / "checkpoint").exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return f"sqlite:///{folder / 'mlflow.db'}"


def write_journal(
    output, *events, pipeline="demo", started="2026-01-01 10:00:00", stage=None, metrics=()
):
    """Write a run folder as a process leaves it: its start and settings, then these events."""
    home = output / pipeline
    parent = home / "runs" / started.replace(" ", "-").replace(":", "-")
    folder = home / "stages" / stage / "0123456789abcdef.tracking" if stage else parent
    name = stage or f"{pipeline} · {started}"
    # pid 1 always exists, so the pid says nothing
    host = {
        "host": os.uname().nodename,
        "pid": 1,
    }
    start_event = {
        "op": "start",
        "name": name,
        "key": f"k{folder}",
        "parent_folder": str(parent) if stage else None,
        **host,
    }
    lines = LineLog(build_events_path(folder))
    for event in [start_event, *events]:
        lines.append_record({"time": 1_000, **event})
    lines.close()
    rows = [
        {"step": n, "time": 1_000, "metrics": {"train/loss": value}}
        for n, value in enumerate(metrics)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def end_event(status="FINISHED"):
    return {"op": "end", "status": status}


def test_a_crashed_run_is_delivered_and_marked_once(store, tmp_path):
    tracking = Tracking(store, tmp_path, "dead")
    parent = write_journal(tmp_path, {"op": "tags", "tags": {"prefect.flow_run_id": "f1"}})
    write_journal(tmp_path, stage="sft", metrics=(3.0, 2.0))
    write_journal(tmp_path, end_event(), started="2026-01-02 10:00:00")
    candidates = find_crashed_runs(tmp_path)
    assert [run.name for run in candidates] == ["demo · 2026-01-01 10:00:00", "sft"]
    result = close_crashed_runs(tracking, tmp_path)
    assert [(run.is_pipeline, run.is_remote, run.num_undelivered) for run in result] == [
        (True, False, 0),
        (False, False, 0),
    ]
    assert result[0].journal_folder == parent and result[0].flow_run_id == "f1"
    assert "process 1 no longer exists" in result[0].description
    rows = {row.name: row for row in tracking.list_runs()}
    assert {row.status for row in rows.values()} == {"KILLED"}
    assert rows["sft"].metrics == {"train/loss": 2.0}
    assert rows["sft"].parent_run_id == rows["demo · 2026-01-01 10:00:00"].run_id
    assert "no longer exists" in rows["sft"].tags["interrupted"]
    assert close_crashed_runs(tracking, tmp_path) == []


def test_a_living_run_is_left_alone_whatever_its_pid(store, tmp_path):
    tracking = Tracking(store, tmp_path, "alive")
    folder = write_journal(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from tasks.tracking.journal import LineLog, build_events_path\n"
        "log = LineLog(build_events_path(Path(sys.argv[1]))); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"held\n"
        assert close_crashed_runs(tracking, tmp_path) == []
        assert [record.status for record in list_recorded_runs(tmp_path)] == ["running"]
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert [record.status for record in list_recorded_runs(tmp_path)] == ["killed"]
        assert len(close_crashed_runs(tracking, tmp_path)) == 1
    finally:
        child.kill()
        child.wait()


def test_a_run_of_another_machine_is_not_closed(store, tmp_path):
    tracking = Tracking(store, tmp_path, "elsewhere")
    folder = write_journal(tmp_path, {"op": "resume", "host": "far-away", "pid": 5})
    before = build_events_path(folder).read_bytes()
    (run,) = close_crashed_runs(tracking, tmp_path)
    assert run.is_remote and "only far-away" in run.description
    assert build_events_path(folder).read_bytes() == before
    assert [record.status for record in list_recorded_runs(tmp_path)] == ["running"]


def test_records_wait_for_an_unreachable_store(tmp_path):
    write_journal(tmp_path, metrics=(1.0,))
    tracking = Tracking("http://127.0.0.1:9", tmp_path, "x")
    (run,) = close_crashed_runs(tracking, tmp_path)
    assert run.num_undelivered > 0
    assert list_recorded_runs(tmp_path)[0].status == "killed"


def dump_config(**stages):
    from tasks.config import build_settings, dump_settings

    stages = stages or {"policy": {}}
    return dump_settings(
        build_settings(
            {"name": "demo", "model": {"path": "a/b"}, "stages": stages}, check_files=False
        )
    )


def test_resumable_runs_are_selected_and_others_refused(tmp_path):
    from posttrain.cli.resume import find_resumable_run

    text = {"op": "text", "name": "config.json", "text": json.dumps(dump_config())}
    write_journal(tmp_path, text, end_event("KILLED"))
    done = write_journal(tmp_path, text, end_event(), started="2026-01-02 10:00:00")
    for run in (None, "demo", "demo · 2026-01-01 10:00:00"):
        record = find_resumable_run(tmp_path, run)
        assert (record.started, record.status) == ("2026-01-01 10:00:00", "stopped")
    with pytest.raises(SettingsError, match="has finished"):
        find_resumable_run(tmp_path, "demo · 2026-01-02 10:00:00")
    with pytest.raises(DataError, match=r"no run 'dmeo' in .*; did you mean|known"):
        find_resumable_run(tmp_path, "dmeo")
    with pytest.raises(DataError, match=r"no runs in .*--output"):
        find_resumable_run(tmp_path / "elsewhere", None)
    (done / "run.json").write_text(json.dumps({"status": "waiting", "only": "promote"}))
    # the newest, which waits for approval
    assert find_resumable_run(tmp_path, None).only == "promote"
    lines = LineLog(build_events_path(done))
    # stays in the journal; run.json has the answer
    lines.append_record({"op": "tags", "tags": {"approval": "waiting"}})
    lines.close()
    assert find_resumable_run(tmp_path, None).status == "waiting"
    (done / "run.json").write_text(
        json.dumps({"status": "finished", "answer": {"before": "?", "now": "!"}})
    )
    assert find_resumable_run(tmp_path, None).started == "2026-01-01 10:00:00"
    lines = LineLog(build_events_path(done))
    lines.append_record({"op": "resume", "time": 1})
    try:
        with pytest.raises(FolderBusy, match="is still running"):
            find_resumable_run(tmp_path, "demo · 2026-01-02 10:00:00")
    finally:
        lines.close()


def test_the_settings_are_those_that_were_recorded(tmp_path, monkeypatch, caplog):
    from posttrain.cli.recorded_settings import load_recorded_settings
    from posttrain.cli.resume import find_resumable_run
    from tasks import config as loading

    monkeypatch.setattr(loading, "resolve_files", lambda settings, folder: ({}, []))
    settings = dump_config(policy={"group_size": 6})
    text = {"op": "text", "name": "config.json", "text": json.dumps(settings)}
    write_journal(
        tmp_path, text, {"op": "tags", "tags": {"code_version": "old"}}, end_event("FAILED")
    )
    result = load_recorded_settings(find_resumable_run(tmp_path, None), tmp_path)
    assert result.stages.policy.group_size == 6 and result.output == str(tmp_path)
    assert "the code has changed" in caplog.text
    write_journal(tmp_path, end_event("KILLED"), pipeline="bare", started="2027-01-01 10:00:00")
    with pytest.raises(SettingsError, match="before its settings were recorded"):
        load_recorded_settings(find_resumable_run(tmp_path, "bare"), tmp_path)


def test_repair_reports_its_changes_and_how_to_resume(tmp_path, monkeypatch, capsys):
    from posttrain.cli import main as cli

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.main(["check", "machine", "--repair", "--output", str(tmp_path / "none")]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    write_journal(tmp_path, {"op": "text", "name": "config.json", "text": "{}"})
    assert cli.main(["check", "machine", "--repair", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "run 'demo · 2026-01-01 10:00:00' crashed: process 1 no longer exists; marked as killed"
        in out
    )
    short_id = shorten_run_name(tmp_path, "demo · 2026-01-01 10:00:00")
    assert short_id.startswith("demo-")
    assert f"posttrain resume {short_id} --output {tmp_path}" in out
    assert cli.main(["check", "machine", "--repair", "--output", str(tmp_path)]) == 0
    assert "nothing to repair: every run has ended or is alive" in capsys.readouterr().out
