"""Two machines on one network folder: locks that do not reach the other machine, and temporaries of other machines."""

import fcntl
import os
import platform
import subprocess

import pytest

from rl_core.errors import FolderBusy
from rl_core.storage import atomic_files, locks
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folders import clear_leftovers
from rl_core.storage.locks import FolderLock, has_cross_machine_locks

MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2,local_lock=none,addr=10.0.0.1
31 22 0:27 / /old rw,relatime - nfs server:/old rw,vers=3,nolock,local_lock=all
32 22 0:28 / /flock rw,relatime - nfs server:/old rw,vers=3,local_lock=flock
33 22 0:29 / /scratch rw - lustre mgs:/scratch rw,flock
34 22 0:30 / /scratch2 rw - lustre mgs:/scratch2 rw,localflock
35 22 0:31 / /bucket rw - fuse.gcsfuse bucket rw
36 22 0:32 / /mnt/my\040share rw - cifs //server/share rw,nobrl
37 22 0:33 / /mnt/other rw - cifs //server/share rw
38 22 0:34 / /shm rw - tmpfs tmpfs rw
39 35 0:35 / /bucket/fast rw - ext4 /dev/vdb rw
40 22 0:36 / /over rw - fuse.fuse-overlayfs overlay rw
41 22 0:37 / /twice rw - ext4 /dev/vdc rw
42 22 0:38 / /twice rw - fuse.sshfs host: rw
a broken line
"""


@pytest.mark.parametrize(
    ("path", "reach"),
    [
        ("/work/run", True),
        ("/home/me/run", True),
        ("/homes", True),
        ("/old/run", False),
        ("/flock", False),
        ("/scratch/run", True),
        ("/scratch2/run", False),
        ("/bucket/run", False),
        ("/bucket/fast/run", True),
        ("/mnt/my share/run", False),
        ("/mnt/other/run", True),
        ("/shm/x", True),
        ("/over/x", True),
        ("/twice/x", False),
    ],
)
def test_which_locks_reach_other_machines(path, reach):
    assert has_cross_machine_locks(path, MOUNTS) is reach


def test_local_folders_are_locked_by_the_kernel(tmp_path):
    assert has_cross_machine_locks(tmp_path)


@pytest.fixture
def on_machine(monkeypatch):
    """Return a function that makes this process one of several machines, on a folder with machine-local flocks."""
    holder = {"machine": ""}
    flock = fcntl.flock

    def local_flock(descriptor, operation):
        if platform.node() == holder["machine"] or operation == fcntl.LOCK_UN:
            flock(descriptor, operation)  # locks of other machines are invisible

    def become(name, local=True):
        holder["machine"] = holder["machine"] or name
        monkeypatch.setattr(platform, "node", lambda: name)
        monkeypatch.setattr(fcntl, "flock", local_flock if local else flock)
        monkeypatch.setattr(locks, "has_cross_machine_locks", lambda path: not local)

    return become


def test_another_machine_is_refused_though_its_flock_succeeds(tmp_path, on_machine):
    on_machine("a")
    with FolderLock(tmp_path):
        with pytest.raises(FolderBusy, match=r"process \d+ on a"), FolderLock(tmp_path):
            pass
        on_machine("b")
        with (
            pytest.raises(FolderBusy, match=r"locked by machine a; .* remove .*\.lock\.holder"),
            FolderLock(tmp_path),
        ):
            pass
        on_machine("a")
    on_machine("b")
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock.holder").read_text() == "b\n"
    assert sorted(os.listdir(tmp_path)) == [".lock"]


def test_after_a_crash_only_the_same_machine_continues(tmp_path, on_machine):
    on_machine("a")
    (tmp_path / ".lock").write_text("17 on a\n")  # left by a killed process
    (tmp_path / ".lock.holder").write_text("a\n")
    on_machine("b")
    with pytest.raises(FolderBusy, match="if it crashed, remove"), FolderLock(tmp_path):
        pass
    on_machine("a")
    with FolderLock(tmp_path) as lock:
        assert lock.is_held
    (tmp_path / ".lock.holder").write_text("a\n")
    os.unlink(tmp_path / ".lock.holder")  # as the message says
    on_machine("b")
    with FolderLock(tmp_path) as lock:
        assert lock.is_held


def test_with_server_locks_a_crashed_machine_blocks_nobody(tmp_path, on_machine):
    (tmp_path / ".lock").write_text("17 on a\n")
    on_machine("b", local=False)
    with FolderLock(tmp_path):
        assert (
            os.listdir(tmp_path) == [".lock"]
            and (tmp_path / ".lock").read_text() == f"{os.getpid()} on b\n"
        )


def test_temporaries_of_another_machine_are_left_alone(tmp_path, on_machine):
    dead = subprocess.Popen(["true"])
    dead.wait()
    theirs, ours = f".tmp-model@b-{dead.pid}.0", f".tmp-model@a-{dead.pid}.0"
    on_machine("a")
    for name in (theirs, ours):
        (tmp_path / name).mkdir()
    assert clear_leftovers(tmp_path) == [ours]
    assert clear_leftovers(tmp_path, locked=True) == [theirs]


def test_active_temporaries_are_not_leftovers(tmp_path):
    with atomic_files.reserve_temporary(tmp_path / "model") as temporary:
        temporary.mkdir()
        assert clear_leftovers(tmp_path, locked=True) == [] and temporary.is_dir()
    assert clear_leftovers(tmp_path) == [temporary.name]


def test_a_checkpoint_folder_on_two_machines(tmp_path, on_machine):
    state = {"loop": {"iteration": 1}}
    on_machine("a")
    with CheckpointStore(tmp_path) as store:
        store.save_version(state)
        on_machine("b")
        with pytest.raises(FolderBusy, match="locked by machine a"):
            CheckpointStore(tmp_path).save_version(state)
        assert CheckpointStore(tmp_path).load_version(1) == state  # reading is free
        on_machine("a")
    on_machine("b")
    assert CheckpointStore(tmp_path).load_latest() == state
