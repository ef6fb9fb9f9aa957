"""Full, failing and read-only disks: the old version loads, one clear error, and the next attempt succeeds."""

import errno
import json
import logging
import os
import re
import resource
import subprocess
import sys

import pytest
import torch

from rl_core.errors import CheckpointError, CorruptError
from rl_core.storage.append_log import AppendLog, read_checked_lines
from rl_core.storage.atomic_files import (
    REMEDIES,
    make_folder,
    replace_file,
    write_json_atomic,
    write_text_unsynced,
)
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folders import clear_leftovers, publish_folder, remove_folder, seal_folder
from rl_core.storage.manifest import read_manifest
from rl_core.trackers.local_trackers import JsonlTracker
from tasks.tracking.journal import DeliveryCursor, LineLog


def build_state(version):
    return {"model": {"weight": torch.full((8,), float(version))}, "loop": {"iteration": version}}


def write_first_run(root):
    """Write the files of an earlier run, all of them acknowledged."""
    CheckpointStore(root / "checkpoints").save_version(build_state(1))
    write_json_atomic(root / "run.json", {"number": 1})
    log = LineLog(root / "journal" / "metrics.jsonl")
    log.append_record({"step": 1})
    log.close()
    JsonlTracker(root / "metrics.jsonl").log_metrics({"loss": 1.0}, 1)


def write_second_run(root):
    """Make the storage calls of a small pipeline."""
    with CheckpointStore(root / "checkpoints") as store:
        store.load_latest()
        store.save_version(build_state(2))
        store.save_version(build_state(3))
    write_json_atomic(root / "run.json", {"number": 2})
    JsonlTracker(root / "metrics.jsonl", cut=True).log_metrics({"loss": 0.5}, 2)
    write_text_unsynced(root / "page", "live")
    folder = make_folder(root / "stages" / "sft.open")
    with replace_file(folder / "rows.jsonl") as file:
        file.write("row\n" * 10)
    seal_folder(folder, root / "stages" / "sft", {"stage": "sft"})
    rewards = AppendLog(root / "rewards.jsonl", synced=True)
    rewards.append_records({"iteration": number} for number in range(20))
    rewards.truncate_tail(lambda row: row["iteration"] >= 1)
    remove_folder(root / "stages" / "sft")
    log = LineLog(root / "journal" / "metrics.jsonl")
    for step in (2, 3):
        log.append_record({"step": step})
    log.flush_pending(sync=True)
    log.close()
    DeliveryCursor(run_id="r").save(make_folder(root / "cursor" / ".tracking").parent)


def assert_old_or_new(root):
    """Check that the old version, or a newer complete one, is there and nothing partial."""
    state = CheckpointStore(root / "checkpoints").load_latest()
    version = state["loop"]["iteration"]
    assert version in (1, 2, 3) and torch.equal(
        state["model"]["weight"], build_state(version)["model"]["weight"]
    )
    assert json.loads((root / "run.json").read_text()) in ({"number": 1}, {"number": 2})
    lines = [line.record["step"] for line in read_checked_lines(root / "journal" / "metrics.jsonl")]
    assert lines in ([1], [1, 2], [1, 2, 3])
    assert all(line.is_intact for line in read_checked_lines(root / "metrics.jsonl"))
    assert not [name for name in os.listdir(root / "checkpoints") if "corrupt" in name]


def assert_retry_succeeds(root):
    """Check that the same calls succeed once the disk works again, and that no leftovers remain."""
    if (root / "stages").is_dir():
        clear_leftovers(root / "stages")
        remove_folder(root / "stages" / "sft")
    clear_leftovers(root)
    if (root / "cursor").is_dir():  # as RunTracker does
        clear_leftovers(root / "cursor" / ".tracking")
    write_second_run(root)
    state = CheckpointStore(root / "checkpoints").load_latest()
    assert state["loop"] == {"iteration": 3}
    leftovers = [path for path in root.rglob(".*") if path.name not in (".lock", ".tracking")]
    assert leftovers == []


CALLS = ("open", "fsync", "rename", "replace", "mkdir", "pwrite", "ftruncate", "unlink", "rmdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FailingDisk:
    """Patch of the calls that change a disk: the n-th call fails, and with `for_good` all later ones."""

    def __init__(self, monkeypatch, code, number, for_good):
        self.code, self.number, self.for_good, self.count = code, number, for_good, 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, call):
        def wrapped(*args, **named):
            if name != "open" or (len(args) > 1 and args[1] & WRITING):
                self.count += 1
                if self.count == self.number or (self.for_good and self.count > self.number):
                    path = args[0] if isinstance(args[0], str | os.PathLike) else None
                    raise OSError(self.code, os.strerror(self.code), path)
            return call(*args, **named)

        return wrapped


def count_calls(root, monkeypatch):
    write_first_run(root)
    with monkeypatch.context() as patch:
        failing = FailingDisk(patch, errno.EIO, 0, for_good=False)
        write_second_run(root)
    return failing.count


@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.ENOSPC, False), (errno.EIO, False), (errno.EROFS, True)]
)
def test_an_error_of_any_call_keeps_the_old_version_and_is_one_clear_error(
    tmp_path, monkeypatch, caplog, code, for_good
):
    caplog.set_level(logging.ERROR)
    count = count_calls(tmp_path / "counted", monkeypatch)
    assert count > 80
    refused = 0
    for number in range(1, count + 1):
        root = tmp_path / str(number)
        write_first_run(root)
        with monkeypatch.context() as patch:
            FailingDisk(patch, code, number, for_good)
            try:
                write_second_run(root)
            except CheckpointError as error:  # any other is a bug
                refused += 1
                assert re.search(
                    rf"{re.escape(str(root))}\S*: .*{os.strerror(code)}; {re.escape(REMEDIES[code])}",
                    str(error),
                )
        assert_old_or_new(root)
        assert_retry_succeeds(root)
    assert refused > 0.5 * count  # failures of cleanup and journal lines do not raise


@pytest.mark.slow
def test_a_write_that_the_disk_takes_in_part(tmp_path, monkeypatch):
    """Make writes short with RLIMIT_FSIZE, then EFBIG: in a child, at every size of the files that are written."""
    write_first_run(tmp_path / "sizes")
    write_second_run(tmp_path / "sizes")
    sizes = {path.stat().st_size for path in (tmp_path / "sizes").rglob("*") if path.is_file()}
    limits = sorted({max(1, size - less) for size in sizes for less in (1, size // 2 + 1)})
    assert len(limits) >= 10
    refused = 0
    for limit in limits:
        root = tmp_path / str(limit)
        write_first_run(root)
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            status = 2
            try:
                write_second_run(root)
                status = 0
            except CheckpointError as error:
                status = (
                    1
                    if "File too large; raise the file size limit (ulimit -f)" in str(error)
                    else 3
                )
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 1), limit
        refused += status
        assert_old_or_new(root)
        assert_retry_succeeds(root)
    assert refused > 0.7 * len(limits)


def test_a_journal_continues_when_there_is_space_again(tmp_path, monkeypatch, caplog):
    log = LineLog(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patch:
        FailingDisk(patch, errno.ENOSPC, 1, for_good=True)
        patch.setattr(os, "ftruncate", lambda *_: None)
        log.append_record({"step": 1})
        assert not log.flush_pending(sync=True)  # reported, without an exception
    log.append_record({"step": 2})
    assert log.flush_pending(sync=True)
    log.close()
    assert [line.record for line in read_checked_lines(tmp_path / "metrics.jsonl")] == [
        {"step": 1},
        {"step": 2},
    ]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_temporarily_unreadable_version_is_not_renamed(tmp_path, monkeypatch, code):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    store.save_version(build_state(2))

    def refuse(path):
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", refuse)
        with pytest.raises(
            CheckpointError,
            match=f"checkpoint-00000002/manifest.json: cannot be read: {os.strerror(code)}; ",
        ) as error:
            store.load_latest()
    assert not isinstance(error.value, CorruptError)
    assert store.load_latest()["loop"] == {"iteration": 2} and store.list_versions() == [1, 2]


TMPFS = """
import os, subprocess, sys
from pathlib import Path
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(root)], check=True)
import torch
from rl_core.errors import CheckpointError
from rl_core.storage.checkpoint import CheckpointStore
def state(version):
    return {"model": {"weight": torch.full((200_000,), float(version))}, "loop": {"iteration": version}}  # 0.8 MB
store = CheckpointStore(root / "run")
(root / "ballast").write_bytes(bytes(900_000))
store.save_version(state(1)); store.save_version(state(2))
try:
    store.save_version(state(3))
    print("no error")
except CheckpointError as error:
    print(error)
print(store.load_latest()["loop"], sorted(os.listdir(root / "run")))
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
try:
    store.save_version(state(3))
    print("no error")
except CheckpointError as error:
    print(error)
print(store.load_version(2)["loop"])
subprocess.run(["mount", "-o", "remount,rw", str(root)], check=True)
(root / "ballast").unlink()
print(store.save_version(state(3)), store.load_latest()["loop"])
"""


def test_a_disk_of_3_mb_and_one_that_becomes_read_only(tmp_path):
    mounted = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here (unshare -rm)")
    child = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", TMPFS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    run = tmp_path / "run"
    names = "['.lock', 'LATEST', 'checkpoint-00000001', 'checkpoint-00000002']"
    assert child.stdout.splitlines() == [
        f"{run}/checkpoint-00000003: cannot be written: No space left on device; make room",
        f"{{'iteration': 2}} {names}",
        f"{run}/.lock: cannot be locked: Read-only file system; {REMEDIES[errno.EROFS]}",
        "{'iteration': 2}",
        "3 {'iteration': 3}",
    ]


def test_a_folder_without_its_manifest_is_damaged(tmp_path):
    publish_folder(tmp_path / "model", lambda folder: (folder / "a").write_text("a") and None)
    (tmp_path / "model" / "manifest.json").unlink()
    with pytest.raises(CorruptError, match="No such file"):
        read_manifest(tmp_path / "model")
