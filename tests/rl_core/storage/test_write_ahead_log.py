"""SQLite's log is on the disk when `sync_commits` returns; concurrent callers share one sync."""

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
    """Return the bytes of the log that have reached the disk, in a list."""
    synced = [b""]
    real_sync = write_ahead_log._fdatasync

    def sync(descriptor):
        synced[0] = os.pread(descriptor, 1 << 24, 0)
        real_sync(descriptor)

    monkeypatch.setattr(write_ahead_log, "_fdatasync", sync)
    return synced


def read_after_power_cut(tmp_path, log):
    """Read the rows of a machine that restarts with the database file and this much of the log."""
    folder = tmp_path / f"after-{time.monotonic_ns()}"
    folder.mkdir()
    shutil.copyfile(tmp_path / "x.db", folder / "x.db")
    (folder / "x.db-wal").write_bytes(log)
    try:
        return [row[0] for row in connect(folder / "x.db").execute("SELECT value FROM one")]
    except sqlite3.OperationalError:  # no such table
        return None


def test_commits_are_durable_once_synced(tmp_path, database, disk):
    log = WriteAheadLog(tmp_path / "x.db")
    assert read_after_power_cut(tmp_path, disk[0]) is None
    database.execute("INSERT INTO one VALUES (1)")
    log.sync_commits()
    database.execute("INSERT INTO one VALUES (2)")
    assert read_after_power_cut(tmp_path, disk[0]) == [1]
    other = connect(tmp_path / "x.db")  # another process' commit is in the same log
    other.execute("INSERT INTO one VALUES (3)")
    log.sync_commits()
    assert read_after_power_cut(tmp_path, disk[0]) == [1, 2, 3]
    log.close()


def test_a_recreated_log_is_synced(tmp_path, database, disk):
    log = WriteAheadLog(tmp_path / "x.db")
    log.sync_commits()
    database.close()
    assert not (tmp_path / "x.db-wal").exists()
    reopened = connect(tmp_path / "x.db")
    reopened.execute("INSERT INTO one VALUES (7)")
    log.sync_commits()
    assert read_after_power_cut(tmp_path, disk[0]) == [7]
    reopened.close()


def test_concurrent_threads_share_a_sync_that_starts_after_they_arrived(
    tmp_path, database, monkeypatch
):
    waits, calls = [], []

    def sync(descriptor):
        started = time.monotonic()
        time.sleep(0.02)
        waits.append((started, time.monotonic()))

    monkeypatch.setattr(write_ahead_log, "_fdatasync", sync)
    log = WriteAheadLog(tmp_path / "x.db")

    def work(number):
        time.sleep(0.001 * number)
        arrived = time.monotonic()
        log.sync_commits()
        calls.append((arrived, time.monotonic()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 30 and len(waits) < 15
    for arrived, returned in calls:
        assert any(arrived <= started and ended <= returned for started, ended in waits)


def test_a_failed_sync_is_an_error_for_all_waiting_threads(tmp_path, database, monkeypatch):
    started, may_continue = threading.Event(), threading.Event()

    def sync(descriptor):
        started.set()
        may_continue.wait(10)
        raise OSError(5, "the disk fails")

    monkeypatch.setattr(write_ahead_log, "_fdatasync", sync)
    log, errors = WriteAheadLog(tmp_path / "x.db"), []

    def work():
        try:
            log.sync_commits()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    started.wait(10)
    for thread in threads[1:]:
        thread.start()
    waiters = log._condition._waiters
    while len(waiters) < 3:
        time.sleep(0.001)
    may_continue.set()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 4
    monkeypatch.setattr(write_ahead_log, "_fdatasync", os.fsync)
    log.sync_commits()


def test_the_log_of_a_linked_database_is_next_to_the_linked_file(tmp_path, database, disk):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "store.db"
    link.symlink_to(tmp_path / "x.db")
    linked = connect(link)
    linked.execute("INSERT INTO one VALUES (5)")
    log = WriteAheadLog(link)
    log.sync_commits()
    assert read_after_power_cut(tmp_path, disk[0]) == [5]
    log.close()
    linked.close()


class DiskThatFailsOnce:
    """Disk as under Linux: pages of a failed sync count as written, and only new writes reach the disk."""

    def __init__(self, monkeypatch):
        self.durable = self.clean = b""
        self.rewritten = set()  # sectors that were written again with the same bytes
        self.fails_next = False
        self.write = os.pwrite
        monkeypatch.setattr(write_ahead_log, "_fdatasync", self.sync)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor, data, offset):
        self.rewritten.update(range(offset - offset % 512, offset + len(data), 512))
        return self.write(descriptor, data, offset)

    def sync(self, descriptor):
        current = os.pread(descriptor, 1 << 24, 0)
        previous, self.clean = self.clean, current
        if self.fails_next:
            self.fails_next = False
            raise OSError(5, "Input/output error")
        durable = bytearray(self.durable.ljust(len(current), b"\0"))
        for offset in range(0, len(current), 512):
            sector = slice(offset, offset + 512)
            if current[sector] != previous[sector] or offset in self.rewritten:
                durable[sector] = current[sector]
        self.durable = bytes(durable)


def test_pages_that_a_failed_sync_dropped_are_rewritten(tmp_path, database, monkeypatch):
    """Rewrite them: otherwise the next sync would succeed without them, and a power cut lose everything after them."""
    disk, log = DiskThatFailsOnce(monkeypatch), WriteAheadLog(tmp_path / "x.db")
    database.execute("INSERT INTO one VALUES (1)")
    log.sync_commits()
    database.execute("INSERT INTO one VALUES (2)")
    disk.fails_next = True
    with pytest.raises(OSError, match="Input/output error"):
        log.sync_commits()
    database.execute("INSERT INTO one VALUES (3)")
    log.sync_commits()
    assert read_after_power_cut(tmp_path, disk.durable) == [1, 2, 3]
    database.execute("INSERT INTO one VALUES (4)")
    disk.rewritten.clear()
    log.sync_commits()
    assert read_after_power_cut(tmp_path, disk.durable) == [1, 2, 3, 4] and not disk.rewritten, (
        "once is enough"
    )
    log.close()


def test_closing_waits_for_the_sync_because_descriptors_are_reused(tmp_path, database, monkeypatch):
    started, may_continue, synced = threading.Event(), threading.Event(), []

    def sync(descriptor):
        started.set()
        may_continue.wait(10)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(write_ahead_log, "_fdatasync", sync)
    log = WriteAheadLog(tmp_path / "x.db")
    waiting = threading.Thread(target=log.sync_commits)
    waiting.start()
    started.wait(10)
    closing = threading.Thread(target=log.close)
    closing.start()
    closing.join(0.1)
    may_continue.set()
    waiting.join(10)
    closing.join(10)
    assert synced == [(tmp_path / "x.db-wal").stat().st_ino]
