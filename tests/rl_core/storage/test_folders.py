"""Publishing: manifests, digests, verification, and the effects of a hostile or damaged folder."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest

from rl_core.errors import CheckpointError, CorruptError, FolderBusy
from rl_core.storage import faults
from rl_core.storage.atomic_files import write_json_atomic
from rl_core.storage.folders import clear_leftovers, publish_folder, remove_folder, seal_folder
from rl_core.storage.manifest import (
    MANIFEST_FILE,
    digest_bytes,
    digest_file,
    digest_folder,
    read_manifest,
    read_verified_file,
    verify_folder,
)


def write_two_files(folder):
    (folder / "a.txt").write_text("alpha")
    (folder / "sub").mkdir()
    (folder / "sub" / "b.bin").write_bytes(b"\x00\x01")


def test_published_folder_verifies_and_says_what_it_holds(tmp_path):
    manifest = publish_folder(tmp_path / "model", write_two_files, {"stage": "sft"})
    assert verify_folder(tmp_path / "model") == manifest
    assert manifest["stage"] == "sft"
    # sha256("alpha"), from any sha256sum
    assert manifest["files"]["a.txt"] == {
        "size": 5,
        "sha256": "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8",
    }
    assert sorted(manifest["files"]) == ["a.txt", "sub/b.bin"]
    assert manifest["content_digest"] == digest_folder(tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]


def test_content_digest_depends_on_names_and_bytes_only(tmp_path):
    publish_folder(tmp_path / "one", write_two_files, {"stage": "sft"})
    publish_folder(tmp_path / "two", write_two_files, {"stage": "policy"})
    assert digest_folder(tmp_path / "one") == digest_folder(tmp_path / "two")
    (tmp_path / "unpublished").mkdir()
    write_two_files(tmp_path / "unpublished")
    assert digest_folder(tmp_path / "unpublished") == digest_folder(tmp_path / "one")
    (tmp_path / "unpublished" / "a.txt").rename(tmp_path / "unpublished" / "c.txt")
    assert digest_folder(tmp_path / "unpublished") != digest_folder(tmp_path / "one")


def test_never_onto_an_existing_folder_even_an_empty_one(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        publish_folder(tmp_path / "model", write_two_files)
    (tmp_path / "open").mkdir()
    write_two_files(tmp_path / "open")
    with pytest.raises(CheckpointError, match="exists already"):
        seal_folder(tmp_path / "open", tmp_path / "model")


@pytest.mark.parametrize("point", ["publish.begin", "publish.written", "publish.manifest"])
def test_a_disk_error_leaves_nothing_behind(tmp_path, point):
    faults.configure_faults(f"{point}:1:raise")
    with pytest.raises(CheckpointError, match="cannot be written"):
        publish_folder(tmp_path / "model", write_two_files)
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_writer_leaves_nothing_behind(tmp_path):
    def write(folder):
        (folder / "half").write_text("x")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        publish_folder(tmp_path / "model", write)
    assert os.listdir(tmp_path) == []


def test_digest_known_from_memory_wins_over_the_disk(tmp_path):
    def write(folder):
        (folder / "w").write_bytes(b"wrong")  # as if the disk had changed it
        return {"w": digest_bytes(b"right")}

    publish_folder(tmp_path / "model", write)
    with pytest.raises(CorruptError, match="w: SHA-256"):
        verify_folder(tmp_path / "model")


def test_a_file_that_was_promised_but_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="absent was not written"):
        publish_folder(tmp_path / "model", lambda folder: {"absent": digest_bytes(b"")})


def flip_middle_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip_middle_bit(folder / "a.txt"), "a.txt: SHA-256"),
        (
            lambda folder: (folder / "a.txt").write_text("alph"),
            "a.txt: 4 bytes, the manifest says 5",
        ),
        (lambda folder: (folder / "sub" / "b.bin").unlink(), "b.bin: missing"),
        (
            lambda folder: (folder / "model.safetensors").write_text("x"),
            "model.safetensors: not in the manifest",
        ),
        (lambda folder: flip_middle_bit(folder / MANIFEST_FILE), "manifest"),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "cannot be read"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "not a manifest"),
        (
            lambda folder: (folder / MANIFEST_FILE).write_text('{"format_version": NaN}'),
            "NaN is not JSON",
        ),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[" * 100_000), "not a manifest"),
    ],
)
def test_damage_is_detected_and_named(tmp_path, damage, message):
    publish_folder(tmp_path / "model", write_two_files)
    damage(tmp_path / "model")
    with pytest.raises(CorruptError, match=message):
        verify_folder(tmp_path / "model")


def test_every_bit_of_the_manifest_is_guarded(tmp_path):
    publish_folder(tmp_path / "model", write_two_files, {"version": 7})
    path = tmp_path / "model" / MANIFEST_FILE
    original = path.read_bytes()
    content = json.loads(original)
    for position in range(len(original)):
        data = bytearray(original)
        data[position] ^= 1
        path.write_bytes(bytes(data))
        with contextlib.suppress(CorruptError):
            # The flipped bit may replace white space by white space.
            assert read_manifest(tmp_path / "model") == content


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..\\secret", ""])
def test_a_forged_file_name_is_refused(tmp_path, name):
    publish_folder(tmp_path / "model", write_two_files)
    path = tmp_path / "model" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: {"size": 1, "sha256": "0" * 64}}
    del manifest["manifest_digest"]
    manifest["manifest_digest"] = digest_bytes(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match="unsafe file name"):
        verify_folder(tmp_path / "model")


def test_a_newer_format_is_refused_by_name(tmp_path):
    publish_folder(tmp_path / "model", write_two_files)
    path = tmp_path / "model" / MANIFEST_FILE
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CorruptError, match="format 2, this version reads 1"):
        verify_folder(tmp_path / "model")


def test_read_verified_returns_the_bytes_it_checked(tmp_path):
    manifest = publish_folder(tmp_path / "model", write_two_files)
    assert read_verified_file(tmp_path / "model", "a.txt", manifest) == b"alpha"
    flip_middle_bit(tmp_path / "model" / "a.txt")
    with pytest.raises(CorruptError):
        read_verified_file(tmp_path / "model", "a.txt", manifest)
    with pytest.raises(CorruptError, match="not in the manifest"):
        read_verified_file(tmp_path / "model", "b.txt", manifest)


def test_leftovers_of_dead_processes_are_cleared_and_others_stay(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for name in (
        f".tmp-model-{child.pid}",
        ".trash-model-1-2",
        f".tmp-model-{os.getppid()}",
        "model",
        ".lock",
    ):
        (tmp_path / name).mkdir()
    assert clear_leftovers(tmp_path) == [f".tmp-model-{child.pid}", ".trash-model-1-2"]
    assert clear_leftovers(tmp_path, locked=True) == [f".tmp-model-{os.getppid()}"]
    assert sorted(os.listdir(tmp_path)) == [".lock", "model"]


def test_a_leftover_with_our_pid_is_replaced(tmp_path):
    # In a container every run may have the same pid.
    (tmp_path / f".tmp-model-{os.getpid()}").mkdir()
    (tmp_path / f".tmp-model-{os.getpid()}" / "old").write_text("x")
    assert sorted(publish_folder(tmp_path / "model", write_two_files)["files"]) == [
        "a.txt",
        "sub/b.bin",
    ]


def test_two_threads_cannot_publish_one_folder(tmp_path):
    started, may_continue = threading.Event(), threading.Event()

    def write_slowly(folder):
        started.set()
        assert may_continue.wait(30)
        write_two_files(folder)

    thread = threading.Thread(target=publish_folder, args=(tmp_path / "model", write_slowly))
    thread.start()
    assert started.wait(30)
    with pytest.raises(FolderBusy, match="another thread"):
        publish_folder(tmp_path / "model", write_two_files)
    may_continue.set()
    thread.join()
    verify_folder(tmp_path / "model")


def test_remove_folder(tmp_path):
    publish_folder(tmp_path / "model", write_two_files)
    remove_folder(tmp_path / "model")
    remove_folder(tmp_path / "model")  # not there: fine
    assert os.listdir(tmp_path) == []


def test_write_json_atomic_keeps_the_old_file_on_error(tmp_path):
    write_json_atomic(tmp_path / "x.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "x.json", {"a": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]
    assert digest_file(tmp_path / "x.json") == digest_bytes((tmp_path / "x.json").read_bytes())
