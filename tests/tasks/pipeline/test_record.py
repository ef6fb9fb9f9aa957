"""Record of a pipeline's folder: the run that is gone on with, the states it passes through, the lock."""

import json

import pytest

from rl_core.errors import FolderBusy
from rl_core.storage import faults
from rl_core.storage.locks import FolderLock
from tasks.pipeline.record import PipelineRecord, finished_run
from tasks.pipeline.run_options import RunOptions


def begun(home, options=RunOptions(), status="", digest="d"):  # noqa: B008 frozen
    """A record whose run began at noon and ended in `status`."""
    record = PipelineRecord(home, options)
    record.begin(home / "runs", started="noon", digest=digest, threads=3)
    assert PipelineRecord(home, RunOptions(only=options.only)).interrupted(digest) == "noon"  # with no run id yet
    record.note_run("r")
    if status:
        record.end(status)
    return record


@pytest.mark.parametrize(
    ("status", "options", "digest", "started"),
    [
        ("", RunOptions(), "d", "noon"),  # killed while it ran
        ("stopped", RunOptions(), "d", "noon"),
        ("waiting", RunOptions(), "d", "noon"),
        ("postponed", RunOptions(), "d", "noon"),  # the tracking store did not say who is champion
        ("finished", RunOptions(), "d", ""),
        ("failed", RunOptions(), "d", ""),
        ("stopped", RunOptions(), "other settings", ""),
        ("stopped", RunOptions(only="sft"), "d", ""),  # it was a run of the whole pipeline
        ("stopped", RunOptions(fresh=True), "d", ""),
        ("finished", RunOptions(started="dawn"), "other settings", "dawn"),  # asked for by name
    ],
)
def test_an_interrupted_run_with_equal_settings_is_gone_on_with(tmp_path, status, options, digest, started):
    begun(tmp_path, status=status)
    assert PipelineRecord(tmp_path, options).interrupted(digest) == started


def test_an_unreadable_record_is_no_run(tmp_path):
    assert PipelineRecord(tmp_path, RunOptions()).interrupted("d") == ""
    (tmp_path / "run.json").write_text('{"started": "no')
    assert PipelineRecord(tmp_path, RunOptions()).interrupted("d") == ""


@pytest.mark.parametrize(
    ("status", "digest", "started"), [("finished", "d", "noon"), ("finished", "e", ""), ("", "d", "")]
)
def test_a_run_whose_outcome_was_not_noted_is_found_by_its_settings(tmp_path, status, digest, started):
    assert finished_run(tmp_path, digest) == ""
    begun(tmp_path, status=status)
    assert finished_run(tmp_path, digest) == started


def test_the_record_lies_with_the_pipeline_and_with_the_run(tmp_path):
    record = begun(tmp_path, RunOptions(only="sft", given={"a": "models:/m@champion"}))
    first = json.loads((tmp_path / "run.json").read_text())
    assert {name: first[name] for name in first if name not in ("pid", "host")} == {
        "started": "noon", "run_id": "r", "config_digest": "d", "threads": 3, "only": "sft",
        "given": {"a": "models:/m@champion"}, "status": "running",
    }  # fmt: skip
    record.end("waiting")
    assert json.loads((tmp_path / "runs" / "run.json").read_text()) == {**first, "status": "waiting"}


def test_the_lock_is_released_only_by_who_took_it(tmp_path):
    own = PipelineRecord(tmp_path, RunOptions())
    own.acquire()
    with pytest.raises(FolderBusy):
        PipelineRecord(tmp_path, RunOptions()).acquire()
    own.release()
    with FolderLock(tmp_path / ".lock") as lock:
        borrowed = PipelineRecord(tmp_path, RunOptions(), lock=lock)
        borrowed.acquire()
        borrowed.release()
        assert lock.held
    assert not lock.held


@pytest.mark.parametrize("hit", [1, 2])
def test_a_run_that_is_killed_while_its_record_is_written_is_found_again(tmp_path, hit):
    """Of the two files the pipeline's is first: by it the run's own folder is found."""
    record = PipelineRecord(tmp_path, RunOptions())
    faults.configure(f"text.done:{hit}:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            record.begin(tmp_path / "runs" / "noon", started="noon", digest="d", threads=3)
    finally:
        faults.configure(None)
    assert PipelineRecord(tmp_path, RunOptions()).interrupted("d") == "noon"


@pytest.mark.parametrize(("hit", "started"), [(1, "noon"), (2, "")])
def test_a_run_that_is_killed_while_its_end_is_written_is_over_in_both_files_or_goes_on(tmp_path, hit, started):
    record = begun(tmp_path)
    faults.configure(f"text.done:{hit}:raise")
    try:
        with pytest.raises(faults.InjectedFault):
            record.end("finished")
    finally:
        faults.configure(None)
    assert PipelineRecord(tmp_path, RunOptions()).interrupted("d") == started
    assert json.loads((tmp_path / "runs" / "run.json").read_text())["status"] == "finished"
