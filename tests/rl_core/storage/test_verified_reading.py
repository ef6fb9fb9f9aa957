"""Files that a library opens: verified, and unchanged during the block."""

import os

import pytest

from rl_core.errors import CorruptError
from rl_core.storage.folders import publish_folder
from rl_core.storage.manifest import verify_while_reading


def write_stage(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "rows.jsonl").write_text("{}\n")


@pytest.fixture
def model(tmp_path):
    """Publish a finished stage and return its model folder, whose files are listed in the stage's manifest."""
    publish_folder(tmp_path / "stage", write_stage)
    return tmp_path / "stage" / "model"


def is_weights(name):
    return name.endswith(".safetensors")


def test_intact_files_are_read_and_links_to_them_change_nothing(model, tmp_path):
    with verify_while_reading(model):
        assert (model / "model.safetensors").read_bytes() == b"weights"
        os.link(model / "model.safetensors", tmp_path / "kept")  # an upload keeps the file
    with verify_while_reading(tmp_path):  # without a manifest nothing is verified
        pass


def test_damage_is_detected_in_the_files_that_are_read(model):
    (model / "model.safetensors").write_bytes(b"weightz")
    message = r"model\.safetensors: differs from the manifest .* remove manifest\.json"
    with pytest.raises(CorruptError, match=message), verify_while_reading(model):
        raise AssertionError("the block must not run")
    with verify_while_reading(model, lambda name: not is_weights(name)):  # the tokenizer is fine
        assert (model / "config.json").read_text() == "{}"
    (model / "model.safetensors").unlink()
    with (
        pytest.raises(CorruptError, match="cannot be read"),
        verify_while_reading(model, is_weights),
    ):
        pass


def test_a_file_that_is_replaced_while_it_is_read_is_refused(model):
    """Detect it: a reader that hashes first and opens again would accept other bytes as verified."""
    other = model / "other"
    other.write_bytes(b"weightz")
    with (
        pytest.raises(CorruptError, match="was changed while it was read"),
        verify_while_reading(model),
    ):
        os.replace(other, model / "model.safetensors")


def test_a_manifest_of_another_tool_is_ignored(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": ["a"]}')
    (tmp_path / "a").write_text("a")
    with verify_while_reading(tmp_path):
        assert (tmp_path / "a").read_text() == "a"


def test_a_damaged_manifest_of_ours_is_named(model):
    path = model.parent / "manifest.json"
    path.write_text(path.read_text().replace('"size": 2', '"size": 3'))
    with (
        pytest.raises(CorruptError, match="differs from its own digest"),
        verify_while_reading(model),
    ):
        pass
