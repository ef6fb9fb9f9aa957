"""Lock of a folder: one holder, named to others, released when it dies, with a bounded wait."""

import os
import subprocess
import sys
import threading

import pytest

from rl_core.errors import FolderBusy
from rl_core.storage.locks import FolderLock


def test_lock_refuses_a_second_writer_and_names_the_first(tmp_path):
    with FolderLock(tmp_path):
        with pytest.raises(FolderBusy, match=f"process {os.getpid()}"), FolderLock(tmp_path):
            pass
        code = "import sys; from rl_core.storage.locks import FolderLock\nwith FolderLock(sys.argv[1]): pass"
        child = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
        )
        assert child.returncode == 1
        assert f"locked by process {os.getpid()}" in child.stderr
    with FolderLock(tmp_path):
        pass


def test_lock_of_a_killed_holder_is_free(tmp_path):
    code = (
        "import os, sys, signal; from rl_core.storage.locks import FolderLock\n"
        "FolderLock(sys.argv[1]).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert child.returncode == -9
    with FolderLock(tmp_path):
        pass


def test_lock_path_is_a_folder_unless_it_ends_in_lock(tmp_path):
    with FolderLock(tmp_path / "new"):
        assert (tmp_path / "new" / ".lock").is_file()
    with FolderLock(tmp_path / "stages" / "key.lock"):
        assert (tmp_path / "stages" / "key.lock").is_file()


def test_a_lock_waits_for_its_holder_and_no_longer(tmp_path):
    first = FolderLock(tmp_path).__enter__()
    assert first.is_held
    threading.Timer(0.3, first.__exit__, (None, None, None)).start()
    with FolderLock(tmp_path, wait_s=60.0) as second:
        assert second.is_held and not first.is_held
        with pytest.raises(FolderBusy), FolderLock(tmp_path, wait_s=0.1):
            pass
    assert not second.is_held
