"""Tracking of a pipeline run: tags of the parent run and of its stages' runs."""

from types import SimpleNamespace

from rl_core.errors import Stopped
from tasks.config import build_settings
from tasks.pipeline import run_tracking
from tasks.pipeline.run_options import FlowRunAddress, RunOptions
from tasks.pipeline.run_tracking import PipelineTracker
from tasks.run_status import STOP_TIMEOUT_SECONDS


class Tracking:
    def __init__(self):
        self.started, self.set = [], []

    def start_run(self, name, folder, **options):
        self.started.append((name, folder, options))
        return SimpleNamespace(
            name=name,
            run_id="parent",
            folder=folder,
            extra_trackers=[],
            record_elapsed_time=lambda: None,
            set_tags=lambda tags: self.set.append(dict(tags)),
            set_tag=lambda name, value: self.set.append({name: value}),
            close=lambda status, timeout_s: self.set.append((status, timeout_s)),
        )


def build_tracker(tmp_path, monkeypatch, options=RunOptions(), resumed=False):  # noqa: B008 frozen
    monkeypatch.setattr(run_tracking, "compute_code_version", lambda: "c0de")
    monkeypatch.setattr(run_tracking, "read_git_commit", lambda: "")
    settings = build_settings(
        {"name": "t", "output": str(tmp_path), "stages": {"sft": {}}}, check_files=False
    )
    tracking, shown = Tracking(), []
    tracker = PipelineTracker(
        tracking,
        settings,
        options,
        home=tmp_path / "t",
        started="2026-01-02 03:04:05",
        resumed=resumed,
        on_progress=lambda *progress: shown.append(progress),
    )
    return tracker, tracking, shown


def test_stages_carry_the_pipeline_s_tags_and_their_inputs(tmp_path, monkeypatch):
    options = RunOptions(only="sft", tags={"retraining": "now"}, flow_run=FlowRunAddress(id="f"))
    tracker, tracking, shown = build_tracker(tmp_path, monkeypatch, options, resumed=True)
    name, folder, parent = tracking.started[0]
    assert (name, folder) == (
        "t · 2026-01-02 03:04:05",
        tmp_path / "t" / "runs" / "2026-01-02-03-04-05",
    )
    common = {
        "retraining": "now",
        "pipeline": "t",
        "code_version": "c0de",
        "prefect.flow_run_id": "f",
    }
    common["config_digest"] = parent["tags"]["config_digest"]
    left = {"kind": "stage", "resumed": "true", "settings": "defaults"}  # empty ones are left out
    assert parent["tags"] == {**common, **left}
    digest = "0123456789abcdef01234567"
    tracker.open_stage(
        "evaluate_champion", "evaluate", tmp_path, None, {"data": digest}, "key", {"more": "1"}
    )
    label, _, stage = tracking.started[1]
    assert (
        label == "evaluate champion"
        and stage["parent_run_id"] == "parent"
        and stage["params"] == {}
    )
    assert stage["tags"] == {
        **common,
        "stage": "evaluate",
        "stage_key": "key",
        "more": "1",
        "input.data": "0123456789abcdef",
    }
    stage["on_progress"][0](1, 4, "x")
    assert shown == [("evaluate_champion", 1, 4, "x")]


def test_data_inputs_are_recorded_once_without_models(tmp_path, monkeypatch):
    tracker, tracking, _ = build_tracker(tmp_path, monkeypatch)
    for digests in ({"data": "a" * 20, "model": "b"}, {"data": "a" * 20}, {"preferences": "c"}):
        tracker.record_data_inputs(digests)
    assert tracking.set == [{"input.data": "a" * 16}, {"input.preferences": "c"}]


def test_a_cached_stage_is_recorded_and_shown_as_done(tmp_path, monkeypatch):
    tracker, tracking, shown = build_tracker(tmp_path, monkeypatch)
    tracker.record_cached_stage("sft", "r1")
    tracker.close("FAILED", ValueError("x" * 5000))
    assert shown == [("sft", 1, 1, "already finished, not run again")]
    assert tracking.set[0] == {"cached.sft": "r1"} and tracking.set[2] == ("FAILED", 30.0)
    assert (
        tracking.set[1]["error"].startswith("ValueError: xxx")
        and len(tracking.set[1]["error"]) == 4000
    )


def test_the_table_of_runs_shows_the_progress_of_a_running_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_tracking, "REPORT_INTERVAL_SECONDS", 0.0)
    tracker, tracking, _ = build_tracker(tmp_path, monkeypatch)
    tracker.open_stage("reward_model", "reward_model", tmp_path, None, {}, "key", {})
    report_progress = tracking.started[1][2]["on_progress"][0]
    report_progress(120, 1400, "train/loss 0.31")
    assert tracking.set == [{"result": "reward model, 120 of 1,400: train/loss 0.31"}]
    monkeypatch.setattr(run_tracking, "REPORT_INTERVAL_SECONDS", 60.0)
    report_progress(121, 1400, "")
    assert len(tracking.set) == 1


def test_a_stop_is_not_an_error_and_delivery_waits_only_briefly(tmp_path, monkeypatch):
    tracker, tracking, _ = build_tracker(tmp_path, monkeypatch)
    tracker.close("KILLED", Stopped("asked", 15))
    assert tracking.set == [("KILLED", STOP_TIMEOUT_SECONDS)]
