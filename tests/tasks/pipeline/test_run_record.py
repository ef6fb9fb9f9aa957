"""Record of a pipeline's folder: the run to resume, its statuses, the lock."""

import json

import pytest

from rl_core.errors import FolderBusy
from rl_core.storage import faults
from rl_core.storage.locks import FolderLock
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.run_record import PipelineRecord, find_finished_run


def start_run(home, options=RunOptions(), status="", digest="d"):  # noqa: B008 frozen
    """Begin a run at noon that ends in `status`, and return its record."""
    record = PipelineRecord(home, options)
    record.record_start(home / "runs", started="noon", digest=digest, threads=3)
    assert (
        PipelineRecord(home, RunOptions(only=options.only)).find_interrupted_run(digest) == "noon"
    )  # with no run id yet
    record.record_run_id("r")
    if status:
        record.record_end(status)
    return record


@pytest.mark.parametrize(
    ("status", "options", "digest", "started"),
    [
        ("", RunOptions(), "d", "noon"),  # killed while running
        ("stopped", RunOptions(), "d", "noon"),
        ("waiting", RunOptions(), "d", "noon"),
        ("postponed", RunOptions(), "d", "noon"),  # the tracking store did not say who is champion
        ("finished", RunOptions(), "d", ""),
        ("failed", RunOptions(), "d", ""),
        ("stopped", RunOptions(), "other settings", ""),
        ("stopped", RunOptions(only="sft"), "d", ""),  # it was a run of the complete pipeline
        ("stopped", RunOptions(fresh=True), "d", ""),
        ("finished", RunOptions(started="dawn"), "other settings", "dawn"),  # requested by name
    ],
)
def test_an_interrupted_run_with_equal_settings_is_resumed(
    tmp_path, status, options, digest, started
):
    start_run(tmp_path, status=status)
    assert PipelineRecord(tmp_path, options).find_interrupted_run(digest) == started


def test_an_unreadable_record_is_no_run(tmp_path):
    assert PipelineRecord(tmp_path, RunOptions()).find_interrupted_run("d") == ""
    (tmp_path / "run.json").write_text('{"started": "no')
    assert PipelineRecord(tmp_path, RunOptions()).find_interrupted_run("d") == ""


@pytest.mark.parametrize(
    ("status", "digest", "started"),
    [("finished", "d", "noon"), ("finished", "e", ""), ("", "d", "")],
)
def test_a_finished_run_is_looked_up_by_its_settings(tmp_path, status, digest, started):
    assert find_finished_run(tmp_path, digest) == ""
    start_run(tmp_path, status=status)
    assert find_finished_run(tmp_path, digest) == started


def test_the_record_is_written_for_the_pipeline_and_for_the_run(tmp_path):
    record = start_run(
        tmp_path, RunOptions(only="sft", evaluated_models={"a": "models:/m@champion"})
    )
    first = json.loads((tmp_path / "run.json").read_text())
    assert {name: first[name] for name in first if name not in ("pid", "host")} == {
        "started": "noon",
        "run_id": "r",
        "config_digest": "d",
        "threads": 3,
        "only": "sft",
        "given": {"a": "models:/m@champion"},
        "status": "running",
    }
    record.record_end("waiting")
    assert json.loads((tmp_path / "runs" / "run.json").read_text()) == {
        **first,
        "status": "waiting",
    }


def test_the_lock_is_released_only_by_its_owner(tmp_path):
    record = PipelineRecord(tmp_path, RunOptions())
    record.acquire_lock()
    with pytest.raises(FolderBusy):
        PipelineRecord(tmp_path, RunOptions()).acquire_lock()
    record.release_lock()
    with FolderLock(tmp_path / ".lock") as lock:
        borrowed = PipelineRecord(tmp_path, RunOptions(), lock=lock)
        borrowed.acquire_lock()
        borrowed.release_lock()
        assert lock.is_held
    assert not lock.is_held


@pytest.mark.parametrize("hit", [1, 2])
def test_a_run_killed_while_its_record_is_written_is_resumed(tmp_path, hit):
    """The pipeline's copy is written first, since it leads to the run's folder."""
    record = PipelineRecord(tmp_path, RunOptions())
    faults.configure_faults(f"text.done:{hit}:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            record.record_start(tmp_path / "runs" / "noon", started="noon", digest="d", threads=3)
    finally:
        faults.configure_faults(None)
    assert PipelineRecord(tmp_path, RunOptions()).find_interrupted_run("d") == "noon"


@pytest.mark.parametrize(("hit", "started"), [(1, "noon"), (2, "")])
def test_a_run_killed_while_its_end_is_written_is_ended_in_both_files_or_resumed(
    tmp_path, hit, started
):
    record = start_run(tmp_path)
    faults.configure_faults(f"text.done:{hit}:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            record.record_end("finished")
    finally:
        faults.configure_faults(None)
    assert PipelineRecord(tmp_path, RunOptions()).find_interrupted_run("d") == started
    assert json.loads((tmp_path / "runs" / "run.json").read_text())["status"] == "finished"
