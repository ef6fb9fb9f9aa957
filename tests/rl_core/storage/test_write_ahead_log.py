"""SQLite's log is on the disk when `sync` returns; those who come together wait together."""

import os
import shutil
import sqlite3
import threading
import time

import pytest

from rl_core.storage import write_ahead_log
from rl_core.storage.write_ahead_log import WriteAheadLog


def connect(path):
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


@pytest.fixture
def database(tmp_path):
    connection = connect(tmp_path / "x.db")
    connection.execute("CREATE TABLE one (value)")
    yield connection
    connection.close()


@pytest.fixture
def disk(monkeypatch):
    """Bytes of the log that have reached the disk."""
    held = [b""]
    real = write_ahead_log._fdatasync

    def to_disk(descriptor):
        held[0] = os.pread(descriptor, 1 << 24, 0)
        real(descriptor)

    monkeypatch.setattr(write_ahead_log, "_fdatasync", to_disk)
    return held


def after_power_cut(tmp_path, log):
    """Rows of a machine that starts again with the database file and this much of the log."""
    folder = tmp_path / f"after-{time.monotonic_ns()}"
    folder.mkdir()
    shutil.copyfile(tmp_path / "x.db", folder / "x.db")
    (folder / "x.db-wal").write_bytes(log)
    try:
        return [row[0] for row in connect(folder / "x.db").execute("SELECT value FROM one")]
    except sqlite3.OperationalError:  # no such table
        return None


def test_what_was_committed_outlives_the_machine_once_it_is_synced(tmp_path, database, disk):
    log = WriteAheadLog(tmp_path / "x.db")
    assert after_power_cut(tmp_path, disk[0]) is None
    database.execute("INSERT INTO one VALUES (1)")
    log.sync_commits()
    database.execute("INSERT INTO one VALUES (2)")
    assert after_power_cut(tmp_path, disk[0]) == [1]
    other = connect(tmp_path / "x.db")  # another process' commit is in the same log
    other.execute("INSERT INTO one VALUES (3)")
    log.sync_commits()
    assert after_power_cut(tmp_path, disk[0]) == [1, 2, 3]
    log.close()


def test_a_log_that_was_removed_and_made_again_is_synced(tmp_path, database, disk):
    log = WriteAheadLog(tmp_path / "x.db")
    log.sync_commits()
    database.close()
    assert not (tmp_path / "x.db-wal").exists()
    again = connect(tmp_path / "x.db")
    again.execute("INSERT INTO one VALUES (7)")
    log.sync_commits()
    assert after_power_cut(tmp_path, disk[0]) == [7]
    again.close()


def test_threads_that_come_together_share_a_wait_that_begins_after_they_came(
    tmp_path, database, monkeypatch
):
    waits, calls = [], []

    def to_disk(descriptor):
        begun = time.monotonic()
        time.sleep(0.02)
        waits.append((begun, time.monotonic()))

    monkeypatch.setattr(write_ahead_log, "_fdatasync", to_disk)
    log = WriteAheadLog(tmp_path / "x.db")

    def work(number):
        time.sleep(0.001 * number)
        came = time.monotonic()
        log.sync_commits()
        calls.append((came, time.monotonic()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 30 and len(waits) < 15
    for came, left in calls:
        assert any(came <= begun and ended <= left for begun, ended in waits)


def test_a_disk_that_refuses_is_an_error_for_all_who_wait(tmp_path, database, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def to_disk(descriptor):
        begun.set()
        go_on.wait(10)
        raise OSError(5, "the disk fails")

    monkeypatch.setattr(write_ahead_log, "_fdatasync", to_disk)
    log, errors = WriteAheadLog(tmp_path / "x.db"), []

    def work():
        try:
            log.sync_commits()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    begun.wait(10)
    for thread in threads[1:]:
        thread.start()
    while log._state._waiters is None or len(log._state._waiters) < 3:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4
    monkeypatch.setattr(write_ahead_log, "_fdatasync", os.fsync)
    log.sync_commits()


def test_the_log_of_a_linked_database_is_beside_the_file_itself(tmp_path, database, disk):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "store.db"
    link.symlink_to(tmp_path / "x.db")
    linked = connect(link)
    linked.execute("INSERT INTO one VALUES (5)")
    log = WriteAheadLog(link)
    log.sync_commits()
    assert after_power_cut(tmp_path, disk[0]) == [5]
    log.close()
    linked.close()


class DiskThatRefusesOnce:
    """As Linux: what was not written when the disk refused counts as written, and only new writes reach the disk."""

    def __init__(self, monkeypatch):
        self.held = self.clean = b""
        self.again = set()  # places that were written over with the bytes that they had
        self.refuses = False
        self.write = os.pwrite
        monkeypatch.setattr(write_ahead_log, "_fdatasync", self.to_disk)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor, data, place):
        self.again.update(range(place - place % 512, place + len(data), 512))
        return self.write(descriptor, data, place)

    def to_disk(self, descriptor):
        now = os.pread(descriptor, 1 << 24, 0)
        before, self.clean = self.clean, now
        if self.refuses:
            self.refuses = False
            raise OSError(5, "Input/output error")
        held = bytearray(self.held.ljust(len(now), b"\0"))
        for place in range(0, len(now), 512):
            part = slice(place, place + 512)
            if now[part] != before[part] or place in self.again:
                held[part] = now[part]
        self.held = bytes(held)


def test_what_a_disk_dropped_when_it_refused_is_written_again(tmp_path, database, monkeypatch):
    """Else the next wait would succeed without it, and a power cut lose all behind it."""
    disk, log = DiskThatRefusesOnce(monkeypatch), WriteAheadLog(tmp_path / "x.db")
    database.execute("INSERT INTO one VALUES (1)")
    log.sync_commits()
    database.execute("INSERT INTO one VALUES (2)")
    disk.refuses = True
    with pytest.raises(OSError, match="Input/output error"):
        log.sync_commits()
    database.execute("INSERT INTO one VALUES (3)")
    log.sync_commits()
    assert after_power_cut(tmp_path, disk.held) == [1, 2, 3]
    database.execute("INSERT INTO one VALUES (4)")
    disk.again.clear()
    log.sync_commits()
    assert after_power_cut(tmp_path, disk.held) == [1, 2, 3, 4] and not disk.again, "once is enough"
    log.close()


def test_closing_waits_for_the_disk_as_the_number_of_the_file_may_be_used_again(
    tmp_path, database, monkeypatch
):
    begun, go_on, synced = threading.Event(), threading.Event(), []

    def to_disk(descriptor):
        begun.set()
        go_on.wait(10)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(write_ahead_log, "_fdatasync", to_disk)
    log = WriteAheadLog(tmp_path / "x.db")
    waiting = threading.Thread(target=log.sync_commits)
    waiting.start()
    begun.wait(10)
    closing = threading.Thread(target=log.close)
    closing.start()
    closing.join(0.1)
    go_on.set()
    waiting.join(10)
    closing.join(10)
    assert synced == [(tmp_path / "x.db-wal").stat().st_ino]
