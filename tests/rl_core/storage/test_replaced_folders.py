"""Saving twice to a folder that the user names: complete before and after, without losing files of others."""

import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from rl_core.errors import CheckpointError
from rl_core.storage import folders
from rl_core.storage.folders import remove_folder, replace_folder
from rl_core.storage.manifest import verify_folder


def build_writer(text, *extra_names):
    def write(folder):
        for name in ("config.json", "model.safetensors", *extra_names):
            (folder / name).write_text(text)

    return write


def read_content(folder):
    return {
        name: (folder / name).read_text() for name in os.listdir(folder) if name != "manifest.json"
    }


@pytest.fixture(params=["exchange", "no exchange"])
def file_system(request, monkeypatch):
    """Run with and without renameat2's exchange, which NFS lacks."""
    if request.param == "no exchange":
        monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_, **__: object())
    return request.param


def test_the_second_version_replaces_the_first_as_a_whole(tmp_path, file_system, monkeypatch):
    target, removed = tmp_path / "out" / "model", []
    monkeypatch.setattr(
        folders, "remove_folder", lambda folder: (removed.append(folder), remove_folder(folder))
    )
    replace_folder(target, build_writer("1", "part-2.safetensors"))
    assert read_content(target) == {
        "config.json": "1",
        "model.safetensors": "1",
        "part-2.safetensors": "1",
    }
    replace_folder(target, build_writer("2"))
    assert read_content(target) == {"config.json": "2", "model.safetensors": "2"}
    verify_folder(target)
    assert os.listdir(target.parent) == ["model"]
    # With an exchange, there was a model at all times.
    assert (target in removed) == (file_system == "no exchange")


def test_an_error_keeps_the_first_version(tmp_path, file_system):
    target = tmp_path / "model"
    replace_folder(target, build_writer("1"))

    def broken(folder):
        (folder / "config.json").write_text("2")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError, match="cannot be written: No space left on device; make room"
    ):
        replace_folder(target, broken)
    assert read_content(target) == {"config.json": "1", "model.safetensors": "1"} and os.listdir(
        tmp_path
    ) == ["model"]


def test_somebody_elses_files_are_not_removed(tmp_path):
    target = tmp_path / "model"
    replace_folder(target, build_writer("1"))
    (target / "README.md").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"holds README\.md, which saving would remove; name a new or empty"
    ):
        replace_folder(target, build_writer("2"))
    assert read_content(target)["config.json"] == "1" and os.listdir(tmp_path) == ["model"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="it is a file; name a folder"):
        replace_folder(tmp_path / "file", build_writer("2"))


def test_an_empty_folder_and_one_of_an_older_version_are_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    replace_folder(tmp_path / "empty", build_writer("1"))
    assert read_content(tmp_path / "empty")["config.json"] == "1"
    (tmp_path / "old").mkdir()
    build_writer("0")(tmp_path / "old")  # without a manifest
    replace_folder(tmp_path / "old", build_writer("1"))
    assert read_content(tmp_path / "old") == {"config.json": "1", "model.safetensors": "1"}


def test_a_disk_error_while_saving_weights(tmp_path):
    """Report the disk error that safetensors wraps in an error type of the library."""
    before, weights = resource.getrlimit(resource.RLIMIT_FSIZE), {"a": torch.ones(1000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"cannot be written: File too large; raise the file size limit"
        ):
            replace_folder(
                tmp_path / "model", lambda folder: save_file(weights, folder / "a.safetensors")
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
