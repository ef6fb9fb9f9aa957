"""Append logs: what they write with each option, what a killed or refused writer leaves, and who may write."""

import errno
import fcntl
import os
import signal
import threading
import time

import pytest

from rl_core.errors import CheckpointError, FolderBusy
from rl_core.storage.append_log import (
    AppendLog,
    LockedAppendLog,
    encode_checked_line,
    extract_number,
    list_log_files,
    read_records,
)

STEPS = [{"step": step} for step in range(1, 5)]


def write_steps(path, steps=STEPS):
    path.write_bytes(b"".join(map(encode_checked_line, steps)))


def test_records_are_lines_with_or_without_checksums(tmp_path):
    AppendLog(tmp_path / "checked").append_records([{"a": 1}, {"b": 2}])
    assert (tmp_path / "checked").read_bytes() == encode_checked_line(
        {"a": 1}
    ) + encode_checked_line({"b": 2})
    AppendLog(tmp_path / "unchecked", checksums=False).append_record({"a": 1, "b": "\u00e9"})
    assert (tmp_path / "unchecked").read_bytes() == b'{"a": 1, "b": "\\u00e9"}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        AppendLog(tmp_path / "checked").append_records([{"a": 3}, {"a": float("nan")}])
    assert list(read_records(tmp_path / "checked")) == [{"a": 1}, {"b": 2}]
    AppendLog(tmp_path / "nan", allow_nan=True).append_record({"a": float("nan")})
    assert b"NaN" in (tmp_path / "nan").read_bytes()


@pytest.mark.parametrize("synced", [False, True])
def test_an_append_is_synced_once_and_so_is_a_new_file(tmp_path, monkeypatch, synced):
    synced_inodes = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced_inodes.append(os.fstat(fd).st_ino))
    log = AppendLog(tmp_path / "log", synced=synced)
    log.append_records(STEPS)
    log.append_records(STEPS)
    file, folder = log.path.stat().st_ino, tmp_path.stat().st_ino
    assert synced_inodes == ([file, folder, file] if synced else [])


def test_a_resumed_run_truncates_stale_and_torn_lines(tmp_path, caplog):
    path = tmp_path / "log"
    write_steps(path)
    path.write_bytes(path.read_bytes().replace(b"2", b"7", 1) + b'{"torn')
    log = AppendLog(path, consequence="a step is lost")
    lines = list(log.recover_lines(lambda record: extract_number(record, "step") >= 4))
    assert [line.record for line in lines] == [{"step": 1}, None, {"step": 3}]
    assert path.stat().st_size == lines[-1].end
    assert "a step is lost" in caplog.text
    assert log.truncate_tail() == 3
    log.append_record({"step": 4})
    assert list(read_records(path)) == [{"step": 1}, {"step": 3}, {"step": 4}]
    assert log.truncate_tail(lambda record: record["step"] >= 1) == 0 and path.read_bytes() == b""
    assert AppendLog(tmp_path / "absent").truncate_tail() == 0
    assert not (tmp_path / "absent").exists()


def test_an_intact_log_is_recovered_without_being_opened_for_writing(tmp_path, monkeypatch):
    """Check that it works on a read-only disk."""
    write_steps(tmp_path / "log")
    flags = []
    monkeypatch.setattr(os, "open", lambda *arguments: flags.append(arguments))
    assert AppendLog(tmp_path / "log").truncate_tail() == len(STEPS) and flags == []


def test_a_refused_append_leaves_nothing(tmp_path, monkeypatch):
    write_steps(tmp_path / "log")
    before, pwrite = (tmp_path / "log").read_bytes(), os.pwrite

    def write_in_part(descriptor, data, offset):
        if data[:1] != b"{":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[:5], offset)

    locked = LockedAppendLog(tmp_path / "log")
    for log in (AppendLog(tmp_path / "log"), locked):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write_in_part)
            with pytest.raises(CheckpointError, match="log: cannot be written: No space left"):
                log.append_record({"step": 5})
            assert log.path.read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_in_part)
        patch.setattr(os, "ftruncate", lambda *_: None)
        with pytest.raises(CheckpointError):
            locked.append_record({"step": 5})
    locked.append_record({"step": 6})  # overwrites the torn line
    assert list(read_records(locked.path)) == [*STEPS, {"step": 6}]
    assert locked.path.stat().st_size == locked.end
    locked.close()


def test_a_locked_log_has_one_writer_and_truncates_what_a_killed_one_left(tmp_path):
    path = tmp_path / "folder" / "log"
    log = LockedAppendLog(path)
    log.append_records(STEPS)
    with pytest.raises(FolderBusy, match="log is being written by another run"):
        LockedAppendLog(path)
    with path.open("rb") as file, pytest.raises(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.close()
    log.close()
    assert not log.is_open
    with path.open("ab") as file:
        file.write(b"x" * 200_000)  # longer than a block of the search
    again = LockedAppendLog(path)
    again.append_record({"step": 5})
    again.close()
    assert list(read_records(path)) == [*STEPS, {"step": 5}]


def test_threads_append_whole_lines(tmp_path, monkeypatch):
    pwrite = os.pwrite

    def write_late(descriptor, data, offset):
        """Give other threads time to look up the same end of the file."""
        time.sleep(0.0002)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_late)
    locked = LockedAppendLog(tmp_path / "locked")
    for log in (AppendLog(tmp_path / "log"), locked):
        threads = [
            threading.Thread(
                target=lambda number=number, log=log: [
                    log.append_record({"thread": number, "step": step}) for step in range(50)
                ]
            )
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = {(record["thread"], record["step"]) for record in read_records(log.path)}
        assert seen == {(thread, step) for thread in range(4) for step in range(50)}
    locked.close()


@pytest.mark.parametrize("kind", [AppendLog, LockedAppendLog])
def test_a_signal_handler_may_append_during_an_append(tmp_path, monkeypatch, kind):
    log = kind(tmp_path / "log")
    original = os.pwrite

    def write(descriptor, data, offset):
        if not log._waiting_lines and b"outer" in bytes(data):
            os.kill(os.getpid(), signal.SIGUSR1)  # runs the handler within this append
            time.sleep(0)
        return original(descriptor, data, offset)

    previous = signal.signal(signal.SIGUSR1, lambda *_: log.append_record({"inner": 1}))
    try:
        monkeypatch.setattr(os, "pwrite", write)
        log.append_record({"outer": 1})
    finally:
        signal.signal(signal.SIGUSR1, previous)
    log.append_record({"next": 1})
    assert list(read_records(tmp_path / "log")) == [{"outer": 1}, {"inner": 1}, {"next": 1}]


@pytest.mark.parametrize("kind", [AppendLog, LockedAppendLog])
def test_an_append_that_a_signal_ends_leaves_nothing(tmp_path, monkeypatch, kind):
    log = kind(tmp_path / "log")
    log.append_record({"first": 1})
    original = os.pwrite

    def write(descriptor, data, offset):
        original(descriptor, data, offset)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", write)
        log.append_record({"interrupted": 1})
    assert list(read_records(tmp_path / "log")) == [{"first": 1}]
    log.append_record({"last": 1})
    assert list(read_records(tmp_path / "log")) == [{"first": 1}, {"last": 1}]


def test_files_of_a_rotated_log_are_listed_oldest_first(tmp_path):
    log = AppendLog(tmp_path / "log", max_bytes=30, keep=12)
    for step in range(15):
        log.append_record({"step": step})
    (tmp_path / "log.tmp").write_text("")
    (tmp_path / "log2").write_text("")
    files = list_log_files(log.path)
    assert [file.name for file in files] == [*(f"log.{n}" for n in range(12, 0, -1)), "log"]
    steps = [record["step"] for file in files for record in read_records(file)]
    assert steps == list(range(2, 15))
