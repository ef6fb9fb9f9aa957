"""Session folders to which other programs still write while they are removed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_core.storage import session_resources
from rl_core.storage.session_resources import (
    RAY_PREFIX,
    SessionFolder,
    remove_stale_session_folders,
)


class Writer(threading.Thread):
    """Program that keeps writing files into a folder, and recreates missing folders."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__()
        self._folder, self._end = folder, time.monotonic() + seconds

    def run(self) -> None:
        number = 0
        while time.monotonic() < self._end:
            number += 1
            try:
                (self._folder / "logs").mkdir(exist_ok=True)
                (self._folder / "logs" / f"{number}.log").write_text("a line")
            except OSError:
                continue


def test_a_folder_is_removed_although_others_write_to_it(tmp_path: Path) -> None:
    session = SessionFolder(root=tmp_path)
    writer = Writer(session.path, 0.5)
    writer.start()
    session.close()
    writer.join()
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_could_not_be_removed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the lock until nothing else is left: a folder without one looks like one that is being created."""
    monkeypatch.setattr(session_resources, "REMOVAL_TIMEOUT_S", 0.1)
    session = SessionFolder(root=tmp_path)
    writer = Writer(session.path, 0.6)
    writer.start()
    session.close()
    is_left = session.path.exists()
    writer.join()
    if is_left:
        assert (session.path / "lock").exists()
    remove_stale_session_folders(root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_lost_its_lock_is_removed_when_it_is_old(tmp_path: Path) -> None:
    young, old = (tmp_path / f"{RAY_PREFIX}{os.getuid()}-{name}" for name in ("young", "old"))
    for folder in (young, old):
        (folder / "session_latest").mkdir(parents=True)
        (folder / "session_latest" / "gcs.log").write_text("a line")
    os.utime(old, (time.time() - 3600,) * 2)
    assert remove_stale_session_folders(root=tmp_path) == [old.name]
    assert list(tmp_path.iterdir()) == [young]


def test_a_link_in_a_session_folder_is_removed_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("data")
    session = SessionFolder(root=tmp_path)
    (session.path / "session_latest").symlink_to(target)
    session.close()
    assert (target / "kept").read_text() == "data" and not session.path.exists()


def test_a_killed_owners_folder_is_removed_and_a_living_ones_stays(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from rl_core.storage.session_resources import SessionFolder\n"
        "session = SessionFolder(root=Path(sys.argv[1])); (session.path / 'a').write_text('b'); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    living = SessionFolder(root=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(remove_stale_session_folders(root=tmp_path)) == 1
    assert list(tmp_path.iterdir()) == [living.path]
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_closed_ends_with_its_object_or_process(tmp_path: Path) -> None:
    session = SessionFolder(root=tmp_path)
    (session.path / "version-1").mkdir()
    gc.collect()  # files that other tests left open would otherwise close in between
    num_files = len(os.listdir("/proc/self/fd"))
    del session
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_files - 1
    code = (
        "import os, sys; from pathlib import Path; from rl_core.storage.session_resources import SessionFolder\n"
        "session = SessionFolder(root=Path(sys.argv[1])); (session.path / 'a').write_text('b')\n"
        "if child := os.fork(): os.waitpid(child, 0); print(session.path.exists())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert result.stdout == "True\n", "a forked child removed its parent's folder"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_lock_file_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(session_resources.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks"):
        SessionFolder(root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_being_created_is_not_removed(tmp_path):
    """Other runs remove stale folders all the time; a new folder stays whole for its owner."""
    has_ended = threading.Event()

    def remove_folders():
        while not has_ended.is_set():
            remove_stale_session_folders(root=tmp_path)

    def use_folder(_):
        folder = SessionFolder(root=tmp_path)
        (folder.path / "work").mkdir()
        is_whole = (folder.path / "work").is_dir()
        folder.close()
        return is_whole

    removers = [threading.Thread(target=remove_folders) for _ in range(2)]
    for remover in removers:
        remover.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(use_folder, range(400)))
    finally:
        has_ended.set()
        for remover in removers:
            remover.join()
    assert list(tmp_path.iterdir()) == []
