"""Journal: one line per call, each (step, name) once; torn lines and full disks are survived."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import DataError, FolderBusy
from tasks.tracking.journal import (
    DeliveryCursor,
    LineLog,
    MetricsJournal,
    build_cursor_path,
    build_events_path,
    build_metrics_path,
    clear_journal,
    read_lines,
    read_metrics,
)


def read_json_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in build_metrics_path(folder).read_text().splitlines()]


def test_a_call_is_immediately_one_line_on_disk(tmp_path):
    journal = MetricsJournal(tmp_path)
    journal.append_metrics({"train/loss": 0.5, "train/step": torch.tensor(3.0)}, 7)
    (line,) = read_json_lines(tmp_path)  # not closed, not flushed: a SIGKILL now loses nothing
    assert line["step"] == 7 and line["metrics"] == {"train/loss": 0.5, "train/step": 3.0}
    assert isinstance(line["time"], int)
    journal.close()


def test_non_finite_values_survive_and_the_file_stays_json(tmp_path):
    journal = MetricsJournal(tmp_path)
    journal.append_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, 0)
    journal.close()
    assert (
        "NaN" not in build_metrics_path(tmp_path).read_text()
        and "Infinity" not in build_metrics_path(tmp_path).read_text()
    )
    ((step, metrics),) = read_metrics(tmp_path)
    assert (
        step == 0
        and math.isnan(metrics["a"])
        and metrics["b"] == math.inf
        and metrics["c"] == -math.inf
    )


def test_a_value_that_is_no_number_names_metric_and_step(tmp_path):
    journal = MetricsJournal(tmp_path)
    with pytest.raises(DataError, match=r"'eval/best' at step 4: 'seven' is not a number"):
        journal.append_metrics({"eval/best": "seven"}, 4)
    journal.close()
    assert read_metrics(tmp_path) == []


def test_replayed_steps_leave_no_duplicate_and_lose_no_new_name(tmp_path):
    first = MetricsJournal(tmp_path)
    for step in (1, 2, 3):
        first.append_metrics({"train/loss": step / 10}, step)
    first.append_metrics({"eval/accuracy": 0.5}, 2)
    first.close()
    again = MetricsJournal(tmp_path)  # the checkpoint was at step 1: steps 2 and 3 are replayed
    again.append_metrics({"train/loss": 0.2}, 2)
    again.append_metrics({"train/loss": 9.9, "eval/accuracy": 0.7}, 3)
    again.append_metrics({"train/loss": 0.4}, 4)
    again.close()
    assert again.num_repeated == 2
    assert read_metrics(tmp_path) == [
        (1, {"train/loss": 0.1}),
        (2, {"train/loss": 0.2}),
        (3, {"train/loss": 0.3}),
        (2, {"eval/accuracy": 0.5}),
        (3, {"eval/accuracy": 0.7}),  # the only name that step 3 had not logged before the kill
        (4, {"train/loss": 0.4}),
    ]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 60))
def test_a_torn_last_line_is_cut_off_and_logged_again(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    journal = MetricsJournal(folder)
    for step in range(3):
        journal.append_metrics({"train/loss": float(step)}, step)
    journal.close()
    path = build_metrics_path(folder)
    complete = path.read_bytes()
    last = len(complete.splitlines(keepends=True)[-1])
    path.write_bytes(complete[: -min(cut, last)])
    # a reader tolerates it
    assert read_metrics(folder) == [
        (0, {"train/loss": 0.0}),
        (1, {"train/loss": 1.0}),
    ]
    again = MetricsJournal(folder)
    assert path.read_bytes() == complete[:-last]
    again.append_metrics({"train/loss": 2.0}, 2)
    again.append_metrics({"train/loss": 2.0}, 2)
    again.close()
    assert [step for step, _ in read_metrics(folder)] == [0, 1, 2]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_second_writer_is_refused(tmp_path):
    journal = MetricsJournal(tmp_path)
    with pytest.raises(FolderBusy, match="being written by another run"):
        MetricsJournal(tmp_path)
    journal.close()
    MetricsJournal(tmp_path).close()


def test_a_full_disk_delays_lines_and_tears_none(tmp_path, monkeypatch):
    log = LineLog(tmp_path / "log.jsonl")
    log.append_record({"n": 0})
    pwrite = os.pwrite

    def write_four_bytes(fd, data, offset):
        """Write as a disk does that has no more space within a line: in part, then not at all."""
        if data[:1] != b"{":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[:4], offset)

    monkeypatch.setattr(os, "pwrite", write_four_bytes)
    log.append_record({"n": 1})
    log.append_record({"n": 2})
    assert [record for record, _ in read_lines(log.path)] == [{"n": 0}]
    assert log.path.read_bytes().endswith(b"\n")
    assert not log.flush_pending()
    monkeypatch.undo()
    assert log.flush_pending()
    assert [record["n"] for record, _ in read_lines(log.path)] == [0, 1, 2]
    log.close()


def test_an_unreadable_line_in_the_middle_is_stepped_over(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 0}\n\xff\xfe{\n[1]\n{"n": 3}\n')
    assert [record for record, _ in read_lines(path)] == [{"n": 0}, {}, {}, {"n": 3}]
    assert "unreadable" in caplog.text
    assert [end for _, end in read_lines(path)][-1] == path.stat().st_size


def test_changed_digits_are_left_out_and_logged_again(tmp_path, caplog):
    journal = MetricsJournal(tmp_path)
    for step in range(3):
        journal.append_metrics({"train/loss": 0.125 + step}, step)
    journal.close()
    path = build_metrics_path(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"1.125", b"1.999"))
    assert read_metrics(tmp_path) == [(0, {"train/loss": 0.125}), (2, {"train/loss": 2.125})]
    assert "its checksum does not match" in caplog.text and caplog.text.count(str(path)) == 1
    again = MetricsJournal(tmp_path)
    # a run that resumes from step 0 measures it again
    again.append_metrics({"train/loss": 1.125}, 1)
    again.append_metrics({"train/loss": 2.125}, 2)
    again.close()
    assert [step for step, _ in read_metrics(tmp_path)] == [0, 2, 1] and again.num_repeated == 1


def test_a_journal_of_an_older_version_is_continued(tmp_path):
    path = build_metrics_path(tmp_path)
    path.write_text('{"step":0,"time":1,"metrics":{"a":0.5}}\n')
    journal = MetricsJournal(tmp_path)
    journal.append_metrics({"a": 0.5, "b": 1.0}, 0)
    journal.close()
    assert read_metrics(tmp_path) == [(0, {"a": 0.5}), (0, {"b": 1.0})]


def test_the_cursor_is_replaced_atomically(tmp_path):
    build_cursor_path(tmp_path).parent.mkdir()
    DeliveryCursor("store", "run", "1", 10, 20, 1).save(tmp_path)
    assert DeliveryCursor.load(tmp_path) == DeliveryCursor("store", "run", "1", 10, 20, 1)
    assert [path.name for path in build_cursor_path(tmp_path).parent.iterdir()] == ["shipped.json"]
    build_cursor_path(tmp_path).write_text('{"store": "sto')
    assert DeliveryCursor.load(tmp_path) == DeliveryCursor()


def test_leftovers_of_a_killed_process_are_removed_and_undelivered_files_stay(tmp_path):
    folder = build_events_path(tmp_path).parent
    for name in (
        "files/delivered/a",
        "files/waits/b",
        "files/forgotten/c",
        "model-abcd1234/artifact/d",
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
    (folder / ".tmp-shipped.json-999999").write_text("{")
    log = LineLog(build_events_path(tmp_path))
    log.append_record({"op": "artifact", "path": ".tracking/files/delivered/a"})
    delivered = log.end
    log.append_record({"op": "artifact", "path": ".tracking/files/waits/b"})
    clear_journal(tmp_path, delivered)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [
        "b",
        "events.jsonl",
    ]
    log.close()


@pytest.mark.parametrize("seconds", [0.03, 10.0])
def test_a_lock_that_is_held_briefly_is_waited_for_and_another_is_not(tmp_path, seconds):
    """`posttrain runs` tries the lock of every journal, including one that a run is about to take."""
    path = tmp_path / "log.jsonl"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    timer = threading.Timer(seconds, os.close, [descriptor])
    timer.start()
    if seconds < 1:
        LineLog(path).close()
        timer.join()
        return
    with pytest.raises(FolderBusy, match="is being written by another run"):
        LineLog(path)
    timer.cancel()
    os.close(descriptor)
