"""Copies of registered versions on this machine: complete, or downloaded again."""

import contextlib
import os
from types import SimpleNamespace

import pytest

from tasks.tracking.registry import ModelRegistry, ModelVersion

VERSION = ModelVersion("policy", 3, "run", "m-0123456789")


class Client:
    """Registry on another machine."""

    def get_model_version_download_uri(self, name, version):
        return "mlflow-artifacts:/models/policy"


@pytest.fixture
def downloads(monkeypatch):
    """Create a registry that counts downloads. An artifact arrives directly, or in a folder of its name (`inner`)."""
    import mlflow.artifacts

    counted = SimpleNamespace(number=0, inner="")

    def fetch(artifact_uri, dst_path, tracking_uri):
        counted.number += 1
        folder = os.path.join(dst_path, counted.inner)
        os.makedirs(os.path.join(folder, "model"))
        for name in ("config.json", "model.safetensors"):
            with open(os.path.join(folder, "model", name), "w") as file:
                file.write("{}")
        return folder

    @contextlib.contextmanager
    def translate_errors(action):
        yield

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", fetch)
    store = SimpleNamespace(
        client=Client(), translate_errors=translate_errors, uri="http://elsewhere"
    )
    counted.registry = ModelRegistry(store)
    return counted


@pytest.mark.parametrize("inner", ["", "policy"])
def test_a_version_is_downloaded_once(downloads, tmp_path, inner):
    downloads.inner = inner
    for _ in range(2):
        folder = downloads.registry.download_version(VERSION, tmp_path / "base_models")
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert downloads.number == 1
    assert os.listdir(tmp_path / "base_models") == ["policy-v3-23456789"]


def test_a_damaged_copy_is_downloaded_again(downloads, tmp_path):
    """A power cut after a rename without a sync leaves empty files under the final name."""
    folder = downloads.registry.download_version(VERSION, tmp_path)
    (folder / "model.safetensors").write_text("")
    assert (
        downloads.registry.download_version(VERSION, tmp_path) / "model.safetensors"
    ).read_text() == "{}"
    assert downloads.number == 2 and os.listdir(tmp_path) == ["policy-v3-23456789"]


def test_what_a_killed_download_left_is_removed(downloads, tmp_path):
    (tmp_path / ".tmp-policy-v3-23456789-999999999").mkdir()
    downloads.registry.download_version(VERSION, tmp_path)
    assert os.listdir(tmp_path) == ["policy-v3-23456789"]
