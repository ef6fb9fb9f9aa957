"""Names of runs when clocks jump: never an existing name, and the newest is the last."""

import logging
from datetime import datetime

from tasks.pipeline import run_tracking
from tasks.pipeline.run_tracking import choose_start_time, resolve_run_folder


class Clock:
    """A `datetime` whose current time is set."""

    strptime = staticmethod(datetime.strptime)

    def __init__(self, text):
        self.text = text

    def now(self):
        return datetime.strptime(self.text, "%Y-%m-%d %H:%M:%S")


def begin(home, monkeypatch, text):
    monkeypatch.setattr(run_tracking, "datetime", Clock(text))
    started = choose_start_time(home / "runs")
    resolve_run_folder(home, started).mkdir(parents=True)
    return started


def test_runs_are_named_in_order_whatever_the_clock_says(tmp_path, monkeypatch, caplog):
    cases = [
        ("2026-03-01 10:00:00", "2026-03-01 10:00:00"),
        ("2026-03-01 10:00:00", "2026-03-01 10:00:01"),  # two within a second
        ("2026-03-01 10:00:30", "2026-03-01 10:00:30"),
        ("2026-03-01 09:00:30", "2026-03-01 10:00:31"),  # set back, or the end of summer time
        ("2031-01-01 00:00:00", "2031-01-01 00:00:00"),  # set forward, by mistake
        ("2026-03-01 10:00:40", "2031-01-01 00:00:01"),
    ]
    with caplog.at_level(logging.WARNING):
        started = [begin(tmp_path, monkeypatch, clock) for clock, _ in cases]
    assert started == [expected for _, expected in cases]
    assert sorted(started) == started
    assert [record.getMessage() for record in caplog.records] == [
        "the clock says 2026-03-01 09:00:30, but a run began at 2026-03-01 10:00:30; this run is dated after it",
        "the clock says 2026-03-01 10:00:40, but a run began at 2031-01-01 00:00:00; this run is dated after it",
    ]


def test_other_folders_are_ignored(tmp_path, monkeypatch):
    for name in ("notes", "9999-99-99-99-99-99", "2027-01-01"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert begin(tmp_path, monkeypatch, "2026-03-01 10:00:00") == "2026-03-01 10:00:00"
