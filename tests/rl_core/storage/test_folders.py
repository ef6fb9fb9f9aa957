"""Publishing: manifests, digests, verification, and what a hostile or damaged folder does."""

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


def write_two(folder):
    (folder / "a.txt").write_text("alpha")
    (folder / "sub").mkdir()
    (folder / "sub" / "b.bin").write_bytes(b"\x00\x01")


def test_published_folder_verifies_and_says_what_it_holds(tmp_path):
    manifest = publish_folder(tmp_path / "model", write_two, {"stage": "sft"})
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
    publish_folder(tmp_path / "one", write_two, {"stage": "sft"})
    publish_folder(tmp_path / "two", write_two, {"stage": "policy"})
    assert digest_folder(tmp_path / "one") == digest_folder(tmp_path / "two")
    (tmp_path / "plain").mkdir()
    write_two(tmp_path / "plain")
    assert digest_folder(tmp_path / "plain") == digest_folder(tmp_path / "one")
    (tmp_path / "plain" / "a.txt").rename(tmp_path / "plain" / "c.txt")
    assert digest_folder(tmp_path / "plain") != digest_folder(tmp_path / "one")


def test_never_onto_an_existing_folder_even_an_empty_one(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        publish_folder(tmp_path / "model", write_two)
    (tmp_path / "open").mkdir()
    write_two(tmp_path / "open")
    with pytest.raises(CheckpointError, match="exists already"):
        seal_folder(tmp_path / "open", tmp_path / "model")


@pytest.mark.parametrize("point", ["publish.begin", "publish.written", "publish.manifest"])
def test_a_disk_error_leaves_nothing_behind(tmp_path, point):
    faults.configure_faults(f"{point}:1:raise")
    with pytest.raises(CheckpointError, match="cannot be written"):
        publish_folder(tmp_path / "model", write_two)
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
    with pytest.raises(CheckpointError, match="gone was not written"):
        publish_folder(tmp_path / "model", lambda folder: {"gone": digest_bytes(b"")})


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip(folder / "a.txt"), "a.txt: SHA-256"),
        (
            lambda folder: (folder / "a.txt").write_text("alph"),
            "a.txt: 4 bytes, the manifest says 5",
        ),
        (lambda folder: (folder / "sub" / "b.bin").unlink(), "b.bin: missing"),
        (
            lambda folder: (folder / "model.safetensors").write_text("x"),
            "model.safetensors: not in the manifest",
        ),
        (lambda folder: flip(folder / MANIFEST_FILE), "manifest"),
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "cannot be read"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "not a manifest"),
        (
            lambda folder: (folder / MANIFEST_FILE).write_text('{"format_version": NaN}'),
            "NaN is not JSON",
        ),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[" * 100_000), "not a manifest"),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, message):
    publish_folder(tmp_path / "model", write_two)
    damage(tmp_path / "model")
    with pytest.raises(CorruptError, match=message):
        verify_folder(tmp_path / "model")


def test_every_bit_of_the_manifest_is_guarded(tmp_path):
    publish_folder(tmp_path / "model", write_two, {"version": 7})
    path = tmp_path / "model" / MANIFEST_FILE
    whole = path.read_bytes()
    meaning = json.loads(whole)
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1
        path.write_bytes(bytes(data))
        with contextlib.suppress(CorruptError):
            # white space for white space: nothing changed
            assert read_manifest(tmp_path / "model") == meaning


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "..\\secret", ""])
def test_a_forged_file_name_is_refused(tmp_path, name):
    publish_folder(tmp_path / "model", write_two)
    path = tmp_path / "model" / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: {"size": 1, "sha256": "0" * 64}}
    del manifest["manifest_digest"]
    manifest["manifest_digest"] = digest_bytes(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match="unsafe file name"):
        verify_folder(tmp_path / "model")


def test_a_newer_format_is_refused_by_name(tmp_path):
    publish_folder(tmp_path / "model", write_two)
    path = tmp_path / "model" / MANIFEST_FILE
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CorruptError, match="format 2, this version reads 1"):
        verify_folder(tmp_path / "model")


def test_read_verified_gives_the_bytes_it_checked(tmp_path):
    manifest = publish_folder(tmp_path / "model", write_two)
    assert read_verified_file(tmp_path / "model", "a.txt", manifest) == b"alpha"
    flip(tmp_path / "model" / "a.txt")
    with pytest.raises(CorruptError):
        read_verified_file(tmp_path / "model", "a.txt", manifest)
    with pytest.raises(CorruptError, match="not in the manifest"):
        read_verified_file(tmp_path / "model", "b.txt", manifest)


def test_leftovers_of_the_dead_are_cleared_and_those_of_the_living_kept(tmp_path):
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


def test_a_leftover_with_our_own_pid_is_no_obstacle(tmp_path):
    # in a container every run may have the same pid
    (tmp_path / f".tmp-model-{os.getpid()}").mkdir()
    (tmp_path / f".tmp-model-{os.getpid()}" / "old").write_text("x")
    assert sorted(publish_folder(tmp_path / "model", write_two)["files"]) == ["a.txt", "sub/b.bin"]


def test_two_threads_cannot_publish_one_folder(tmp_path):
    inside, go_on = threading.Event(), threading.Event()

    def slow(folder):
        inside.set()
        assert go_on.wait(30)
        write_two(folder)

    thread = threading.Thread(target=publish_folder, args=(tmp_path / "model", slow))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(FolderBusy, match="another thread"):
        publish_folder(tmp_path / "model", write_two)
    go_on.set()
    thread.join()
    verify_folder(tmp_path / "model")


def test_remove_folder(tmp_path):
    publish_folder(tmp_path / "model", write_two)
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
