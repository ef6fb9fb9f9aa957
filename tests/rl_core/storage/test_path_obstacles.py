"""Obstacles at the paths of our files: links, pipes, files of other users; their targets are never touched."""

import itertools
import os
import platform
from pathlib import Path

import pytest

from rl_core.errors import CheckpointError, SettingsError
from rl_core.rewards.judges.judge_reward import JudgeReward
from rl_core.rewards.rollout_log import RewardRecord
from rl_core.settings import JudgeSettings
from rl_core.storage import atomic_files
from rl_core.storage.append_log import copy_intact_lines
from rl_core.storage.atomic_files import (
    open_owned_file,
    resolve_cache_folder,
    write_text_atomic,
    write_text_unsynced,
)
from rl_core.storage.folders import clear_leftovers, publish_folder
from rl_core.storage.locks import FolderLock
from rl_core.trackers.local_trackers import CsvTracker, JsonlTracker
from tasks.tracking.journal import DeliveryCursor, LineLog

PRECIOUS = "step,time\nprecious\n"


@pytest.fixture
def victim(tmp_path):
    """Create a file outside the folder that is written to."""
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_text(PRECIOUS)
    return path


def lock_folder(folder):
    with FolderLock(folder):
        pass


APPENDED = {
    ".lock": lock_folder,
    "metrics.jsonl": lambda folder: JsonlTracker(folder / "metrics.jsonl").log_metrics(
        {"x": 1.0}, 1
    ),
    "cut.jsonl": lambda folder: JsonlTracker(folder / "cut.jsonl", cut=True).log_metrics(
        {"x": 1.0}, 1
    ),
    "metrics.csv": lambda folder: CsvTracker(folder / "metrics.csv").log_metrics({}, 1),
    "rewards.jsonl": lambda folder: RewardRecord(folder / "rewards.jsonl")(0, []),
    "events.jsonl": lambda folder: LineLog(folder / "events.jsonl"),
}


@pytest.mark.parametrize("name", APPENDED)
def test_appending_follows_no_link(tmp_path, victim, name):
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(
        CheckpointError, match=rf"{name}: is a symbolic link, and nothing is written through links"
    ):
        APPENDED[name](folder)
    assert victim.read_text() == PRECIOUS
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "absent")
    if name == "metrics.csv":  # a new header: the link is replaced
        APPENDED[name](folder)
    else:
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            APPENDED[name](folder)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("name", [name for name in APPENDED if name != "metrics.csv"])
def test_a_hard_link_where_everybody_may_write_is_refused(tmp_path, victim, name):
    folder = tmp_path / "output"
    folder.mkdir()
    os.link(victim, folder / name)
    folder.chmod(0o1777)
    with pytest.raises(
        CheckpointError, match=rf"{name}: has another name elsewhere \(a hard link\)"
    ):
        APPENDED[name](folder)
    assert victim.read_text() == PRECIOUS
    folder.chmod(0o775)  # hard links are allowed here, because snapshots consist of them
    if name == ".lock":
        APPENDED[name](folder)
        assert victim.read_text() != PRECIOUS


REPLACED = {
    "state.json": lambda folder: write_text_atomic(folder / "state.json", "new"),
    "page": lambda folder: write_text_unsynced(folder / "page", "new"),
    ".tracking/shipped.json": lambda folder: DeliveryCursor().save(folder),
    "rows": lambda folder: copy_intact_lines(
        folder.parent / "elsewhere" / "victim", folder / "rows"
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_link_under_the_name_of_a_temporary_is_replaced(tmp_path, victim, name, monkeypatch):
    monkeypatch.setattr(atomic_files, "_temporary_numbers", itertools.repeat(7))
    folder = tmp_path / "output"
    (folder / ".tracking").mkdir(parents=True)
    path = folder / name
    path.with_name(f".tmp-{path.name}@{platform.node()}-{os.getpid()}.7").symlink_to(victim)
    REPLACED[name](folder)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert victim.read_text() == PRECIOUS and len(written) == 1 and not written[0].is_symlink()


def test_a_link_under_the_name_of_a_temporary_folder_is_replaced(tmp_path, victim, monkeypatch):
    monkeypatch.setattr(atomic_files, "_temporary_numbers", itertools.repeat(7))
    (tmp_path / f".tmp-v1@{platform.node()}-{os.getpid()}.7").symlink_to(victim.parent)
    publish_folder(tmp_path / "v1", lambda folder: (folder / "a").write_text("a") and None)
    assert os.listdir(victim.parent) == ["victim"] and (tmp_path / "v1" / "a").read_text() == "a"
    (tmp_path / ".trash-old").symlink_to(victim.parent)
    assert (
        clear_leftovers(tmp_path) == [".trash-old"]
        and victim.exists()
        and ".trash-old" not in os.listdir(tmp_path)
    )


def test_pipes_and_folders_are_refused_immediately(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDWR):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            open_owned_file(tmp_path / "pipe", flags)
    with pytest.raises(OSError, match="directory"):
        open_owned_file(tmp_path, os.O_RDWR)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_file_of_somebody_else_is_refused_where_others_may_write(tmp_path):
    path = tmp_path / "shared" / "log"
    path.parent.mkdir()
    path.write_text("theirs")
    os.chown(path, 12345, -1)
    os.chmod(path.parent, 0o1777)
    with pytest.raises(
        CheckpointError, match="belongs to user 12345, in a folder that others may write into"
    ):
        open_owned_file(path, os.O_WRONLY | os.O_TRUNC)
    assert path.read_text() == "theirs"
    os.chmod(path.parent, 0o755)  # nobody else could have put it there
    with open(path, "w", opener=open_owned_file) as file:
        file.write("ours")
    assert path.read_text() == "ours"
    os.chown(path.parent, 12345, -1)  # the folder's owner shares it
    os.chmod(path.parent, 0o777)
    with open(path, "a", opener=open_owned_file) as file:
        file.write("!")
    assert path.read_text() == "ours!"


def test_a_user_without_a_home_gets_a_remedy(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    settings = JudgeSettings(url="http://127.0.0.1:9", model="m")
    with pytest.raises(
        SettingsError, match="no home folder for caches; set HOME or XDG_CACHE_HOME"
    ):
        JudgeReward(settings)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cache_folder("judgements") == tmp_path / "posttrain" / "judgements"
    assert JudgeReward(settings).client.cache.folder == tmp_path / "posttrain" / "judgements"
