"""Folders of weights for an inference server: two versions at most, none if writing fails."""

import resource

import pytest
from helpers.worker_cluster import compiled_model

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import CheckpointError, SettingsError
from rl_core.models.lora import add_adapter
from rl_core.rollout_workers.server_weights import WeightFolders
from rl_core.settings import LoraSettings


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


@pytest.fixture
def small_files():
    """Limit new files to a kilobyte during the test."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, previous[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, previous)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_failed_write_is_one_line_and_leaves_no_file(
    tokenizer, tmp_path, small_files, is_adapted
):
    model = compiled_model(tokenizer)
    folders = WeightFolders(
        add_adapter(model, LoraSettings(rank=4)) if is_adapted else model, str(tmp_path)
    )
    previous = folders.write_version()
    small_files()
    with pytest.raises(
        CheckpointError, match=r"cannot be written .*; make room, or set rollouts.server.folder"
    ):
        folders.write_version()
    assert [folder.name for folder in previous.path.parent.iterdir() if folder.is_dir()] == [
        "version-0"
    ]
    folders.close()
    assert list(tmp_path.iterdir()) == []


def test_the_newest_version_alone_stays(tokenizer, tmp_path):
    folders = WeightFolders(compiled_model(tokenizer), str(tmp_path))
    first, second = folders.write_version(), folders.write_version()
    assert first.digest == second.digest and not first.path.exists() and second.path.is_dir()
    folders.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder(tokenizer, tmp_path):
    with pytest.raises(
        SettingsError, match=r"rollouts.server.folder: .*/nowhere cannot be written"
    ):
        WeightFolders(compiled_model(tokenizer), str(tmp_path / "nowhere")).write_version()
