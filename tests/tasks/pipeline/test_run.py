"""A pipeline run: results, approval and progress change through methods; the outcome goes to its record and tracker."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from prefect.exceptions import TerminationSignal

from rl_core.cpu import openmp_spin
from rl_core.errors import FolderBusy, Stopped
from rl_core.storage import faults
from tasks.config import build_settings
from tasks.pipeline import pipeline_run as runs
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_result import StageResult

RESULT = StageResult("sft", "f", "d", "k", False, 1.0, "r", {})


def make_run(folder, options=None, threads=None, **live):
    stages = {"sft": {}, "prepare_data": {}}
    settings = build_settings(
        {"name": "t", "output": str(folder), "threads": threads, "stages": stages}
    )
    return PipelineRun(settings, options, **live)


@pytest.fixture
def closed_statuses(monkeypatch):
    """Replace tracking by a list of the statuses that parent runs were closed with."""
    closed = []

    class Tracker:
        def __init__(self, tracking, settings, options, *, home, started, resumed, on_progress):
            self.parent = SimpleNamespace(folder=tracking.output / "t" / "runs" / "1", run_id="p")
            self.parent.folder.mkdir(parents=True, exist_ok=True)
            self.resumed = resumed

        def log_settings(self, threads):
            self.threads = threads

        def close(self, status, error=None):
            closed.append((status, error))

    monkeypatch.setattr(runs, "PipelineTracker", Tracker)
    monkeypatch.setattr(runs, "close_crashed_runs", lambda tracking, home: [])
    monkeypatch.setattr(runs.Tracking, "deliver_all_journals", lambda self, root: 0)
    monkeypatch.setattr(runs, "_prepare_libraries", lambda threads: None)
    return closed


def test_results_are_added_not_assigned(tmp_path):
    run = make_run(tmp_path)
    run.add_result("sft", RESULT)
    assert dict(run.results) == {"sft": RESULT}
    with pytest.raises(TypeError):
        run.results["policy"] = RESULT
    for name in ("results", "approval", "fraction"):
        with pytest.raises(AttributeError):
            setattr(run, name, None)


def test_fresh_recomputes_stages_that_this_run_has_not_computed(tmp_path):
    run = make_run(tmp_path, RunOptions(fresh=True, only="sft"))
    assert run.should_recompute("sft", "k1") and not run.should_recompute("policy", "k1")
    run.mark_computed("k1")
    assert not run.should_recompute("sft", "k1") and run.should_recompute("sft", "k2")
    assert not make_run(tmp_path).should_recompute("sft", "k1")
    assert make_run(tmp_path, RunOptions(fresh=True)).should_recompute("policy", "k1")


def test_progress_goes_to_the_display(tmp_path):
    shown = []
    run = make_run(tmp_path, on_progress=lambda *progress: shown.append(progress))
    run.report_progress("sft", 1, 4, "x")
    assert run.fraction == 0.25 and shown == [("sft", 1, 4, "x")]
    run.report_progress("sft", 0, 0)
    assert run.fraction == 0.0


@pytest.mark.parametrize(
    ("error", "approval", "status", "closed"),
    [
        (None, None, "finished", "FINISHED"),
        (None, "request", "waiting", "FINISHED"),
        (Stopped("asked", 15), None, "stopped", "KILLED"),
        (KeyboardInterrupt(), None, "stopped", "KILLED"),
        (TerminationSignal(15), None, "stopped", "KILLED"),  # SIGTERM within a Prefect flow
        (ValueError("x"), "request", "failed", "FAILED"),
    ],
)
def test_the_outcome_is_recorded(tmp_path, closed_statuses, error, approval, status, closed):
    def use():
        with make_run(tmp_path) as run:
            run.await_approval(approval)
            assert json.loads((run.home / "run.json").read_text())["status"] == "running"
            with pytest.raises(FolderBusy):
                make_run(tmp_path).__enter__()
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(type(error)):
            use()
    assert closed_statuses == [(closed, error)]
    assert json.loads((tmp_path / "t" / "run.json").read_text())["status"] == status
    with make_run(tmp_path) as again:  # the lock is free
        assert again.tracker.resumed is (status in ("stopped", "waiting"))


def test_a_run_killed_in_its_first_moment_is_resumed(tmp_path, closed_statuses, monkeypatch):
    tracker = runs.PipelineTracker

    def killed(*arguments, started, **options):
        assert json.loads((tmp_path / "t" / "run.json").read_text())["started"] == started
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "PipelineTracker", killed)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path).__enter__()
    monkeypatch.setattr(runs, "PipelineTracker", tracker)
    with make_run(tmp_path) as again:
        assert again.tracker.resumed


@pytest.mark.parametrize("point", ["run.ending", "run.ended"])
def test_a_run_killed_at_its_very_end_is_resumed(tmp_path, closed_statuses, point):
    """Otherwise the same command would begin a second run, and the first one would count as killed."""
    faults.configure_faults(f"{point}:1:raise")
    try:
        with pytest.raises(faults.InjectedFault), make_run(tmp_path):
            pass
    finally:
        faults.configure_faults(None)
    with make_run(tmp_path) as again:
        assert again.tracker.resumed


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path, closed_statuses, monkeypatch):
    free = iter([5, 2])
    monkeypatch.setattr(openmp_spin, "free_processors", lambda: next(free))
    monkeypatch.setattr(openmp_spin, "count_usable_processors", lambda: 8)

    def use(options=None, error=None):
        with contextlib.suppress(KeyboardInterrupt), make_run(tmp_path, options, "auto") as run:
            recorded = json.loads((run.home / "run.json").read_text())["threads"]
            assert run.threads == run.tracker.threads == recorded
            if error is not None:
                raise error
        return run.threads, run.threads_note

    assert use(error=KeyboardInterrupt()) == (5, "threads: 5, as 5 of 8 processors are free")
    started = json.loads((tmp_path / "t" / "run.json").read_text())["started"]
    resumed = (5, "threads: 5, the number that this run started with")
    assert use() == resumed  # without measuring again
    # that run has finished, so this is a new one
    assert use() == (2, "threads: 2, as 2 of 8 processors are free")
    assert use(RunOptions(started=started)) == resumed  # by name


def test_a_run_that_is_stopped_while_it_opens_is_ended(tmp_path, closed_statuses, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "ModelVersions", stop)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path).__enter__()
    assert [status for status, _ in closed_statuses] == ["KILLED"]
    assert json.loads((tmp_path / "t" / "run.json").read_text())["status"] == "stopped"


def test_an_abandoned_run_is_recorded_as_stopped(tmp_path, closed_statuses, monkeypatch):
    with make_run(tmp_path) as run:
        run.tracker.abandon_runs = lambda: closed_statuses.append("abandoned")
        run.abandon_run()
        assert json.loads((tmp_path / "t" / "run.json").read_text())["status"] == "stopped"
    assert closed_statuses[0] == "abandoned"


def test_a_run_that_cannot_open_frees_the_lock(tmp_path, closed_statuses, monkeypatch):
    def refuse(settings):
        raise ValueError("no data")

    monkeypatch.setattr(runs, "inspect_data_sources", refuse)
    with pytest.raises(ValueError, match="no data"):
        make_run(tmp_path).__enter__()
    monkeypatch.undo()
    record = runs.PipelineRecord(tmp_path / "t", RunOptions())
    record.acquire_lock()
    record.release_lock()
