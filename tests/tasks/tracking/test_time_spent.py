"""Time spent on a run over all its processes, without the time between them."""

from __future__ import annotations

import json

import pytest

from tasks.tracking import list_runs
from tasks.tracking.journal import build_progress_path, read_recorded_seconds


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

        def __getattr__(self, name):
            import time

            return getattr(time, name)

    fake_clock = Clock()
    monkeypatch.setattr("tasks.tracking.run_tracker.time", fake_clock)
    return fake_clock


def test_seconds_of_an_interrupted_run_are_those_of_all_its_processes(tracking, tmp_path, clock):
    first = tracking.start_run("twice", tmp_path / "run", wait_s=0)
    clock.now += 30
    assert first.close("KILLED")
    clock.now += 5000  # no process runs
    again = tracking.start_run("twice", tmp_path / "run", wait_s=0)
    assert again.seconds == 30
    clock.now += 12
    again.progress(3, 4)
    assert again.seconds == 42 and read_recorded_seconds(tmp_path / "run") == 42
    assert again.close()
    assert tracking.store.client.get_run(again.run_id).data.tags["seconds"] == "42.0"
    [row] = [row for row in list_runs(tracking.output, tracking.store.uri) if row["run"] == "twice"]
    assert row["took"] == "42 s"


def test_a_killed_run_continues_counting_from_its_last_record(tracking, tmp_path, clock):
    run = tracking.start_run("killed", tmp_path / "run", wait_s=0)
    run.progress(1, 9)
    clock.now += 10
    run.progress(2, 9)
    clock.now += 0.5
    run.record_elapsed_time()  # within a second of the last one
    progress = build_progress_path(tmp_path / "run").read_text()
    run.close()
    build_progress_path(tmp_path / "run").write_text(progress)  # the state after kill -9
    assert json.loads(progress)["seconds"] == 10
    with tracking.start_run("killed", tmp_path / "run", wait_s=0) as again:
        clock.now += 1
        assert again.seconds == 11


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"done": 1}', '{"seconds": "x"}', '{"seconds": -3}', '{"seconds": NaN}'],
)
def test_an_unreadable_record_counts_as_zero(tmp_path, text):
    (tmp_path / ".tracking").mkdir()
    build_progress_path(tmp_path).write_text(text)
    assert (
        read_recorded_seconds(tmp_path) == 0.0 and read_recorded_seconds(tmp_path / "none") == 0.0
    )
