"""The newest acknowledged version loads after any failure of the writer, the disk or the files."""

import logging
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from rl_core.errors import CheckpointError, CorruptError, FolderBusy, NonFiniteError
from rl_core.storage import checkpoint, faults
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.manifest import verify_folder


def build_state(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "model": {"weight": torch.randn(30, 30, generator=generator)},
        "best_model": None,
        "optimizer_step": {"moments": {0: torch.full((5,), float(version))}, "betas": (0.9, 0.95)},
        "loop": {"iteration": version},
        "fingerprint": {"settings": {"learning_rate": 0.1}},
    }


def assert_state(state, version):
    expected = build_state(version)
    assert state["loop"] == {"iteration": version}
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(
        state["optimizer_step"]["moments"][0], expected["optimizer_step"]["moments"][0]
    )
    assert state["optimizer_step"]["betas"] == (0.9, 0.95)


def test_save_and_load_keep_the_newest(tmp_path):
    store = CheckpointStore(tmp_path / "run", keep=3)
    assert store.load_latest() is None
    for version in range(1, 6):
        assert store.save_version(build_state(version)) == version
    assert store.list_versions() == [3, 4, 5]
    assert_state(CheckpointStore(tmp_path / "run").load_latest(), 5)
    assert_state(store.load_version(3), 3)
    assert sorted(os.listdir(tmp_path / "run")) == [
        ".lock",
        "LATEST",
        "checkpoint-00000003",
        "checkpoint-00000004",
        "checkpoint-00000005",
    ]
    assert (tmp_path / "run" / "LATEST").read_text() == "checkpoint-00000005\n"


def test_manifest_says_version_parent_and_settings(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    store.save_version(build_state(2))
    store.save_version({**build_state(3), "fingerprint": {"settings": {"learning_rate": 0.2}}})
    two, three = (
        verify_folder(store.resolve_version_folder(2)),
        verify_folder(store.resolve_version_folder(3)),
    )
    assert (three["version"], three["parent"], two["parent"]) == (3, 2, 1)
    assert two["settings_digest"] != three["settings_digest"]
    assert sorted(two["files"]) == [
        "model-0.safetensors",
        "optimizer_step-0.safetensors",
        "state.json",
    ]


def test_the_newest_version_alone_is_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for number in range(3):
        store.save_version({"model": {"w": torch.full((2,), float(number))}})
        assert store.list_versions() == [number + 1]
        assert store.load_latest()["model"]["w"].tolist() == [number, number]
    assert store.measure_newest() > 2 * 4
    with pytest.raises(CheckpointError, match="keep: 0 must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


def flip_last_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def forge_version(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("checkpoint-00000001"), folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: flip_last_bit(folder / "model-0.safetensors"), "SHA-256"),
        (lambda folder: flip_last_bit(folder / "state.json"), "SHA-256"),
        (lambda folder: os.truncate(folder / "optimizer_step-0.safetensors", 20), "20 bytes"),
        (lambda folder: os.truncate(folder / "state.json", 0), "0 bytes"),
        (lambda folder: (folder / "model-0.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "manifest.json").unlink(), "cannot be read"),
        (lambda folder: flip_last_bit(folder / "manifest.json"), "manifest"),
        (forge_version, "belongs to checkpoint 1"),  # an old version under a new name
    ],
)
def test_a_damaged_version_is_renamed_and_the_previous_one_loads(tmp_path, caplog, damage, reason):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    store.save_version(build_state(2))
    damage(store.resolve_version_folder(2))
    with caplog.at_level(logging.WARNING):
        assert_state(store.load_latest(), 1)
    assert "set aside" in caplog.text and reason in caplog.text
    assert [
        name for name in os.listdir(tmp_path) if name.startswith(".corrupt-checkpoint-00000002-")
    ]
    assert (tmp_path / "LATEST").read_text() == "checkpoint-00000001\n"
    assert store.save_version(build_state(2)) == 3  # numbers are not reused
    assert_state(store.load_latest(), 2)


def test_with_every_version_damaged_the_run_starts_cold(tmp_path):
    store = CheckpointStore(tmp_path)
    for version in (1, 2):
        store.save_version(build_state(version))
        flip_last_bit(store.resolve_version_folder(version) / "state.json")
    assert store.load_latest() is None
    assert not (tmp_path / "LATEST").exists()
    store.save_version(build_state(1))
    assert_state(store.load_latest(), 1)


@pytest.mark.parametrize(
    "pointer", ["../x", "/etc", "checkpoint-00000001/../../x", "", "checkpoint-00000099", "\0"]
)
def test_a_forged_or_stale_pointer_leads_nowhere(tmp_path, caplog, pointer):
    outside = CheckpointStore(tmp_path / "x")
    outside.save_version(build_state(9))
    store = CheckpointStore(tmp_path / "run")
    store.save_version(build_state(1))
    store.save_version(build_state(2))
    (tmp_path / "run" / "LATEST").write_text(pointer)
    with caplog.at_level(logging.WARNING):
        assert_state(store.load_latest(), 2)
    if not pointer.startswith("checkpoint-0000009"):
        assert "not a checkpoint name" in caplog.text
    assert (tmp_path / "run" / "LATEST").read_text() == "checkpoint-00000002\n"


def test_bytes_that_equal_a_forged_manifest_but_are_no_safetensors(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    with pytest.raises(CorruptError, match="not a safetensors file"):
        checkpoint._parse_tensors(tmp_path / "x", b"\x80\x04pickle")


def test_non_finite_weights_are_refused_by_name_and_nothing_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    bad = build_state(2)
    bad["model"]["weight"][3, 4] = float("nan")
    with pytest.raises(NonFiniteError, match=r"model\.weight"):
        store.save_version(bad)
    bad = {**build_state(2), "best_model": {"weight": torch.tensor([float("inf")])}}
    with pytest.raises(NonFiniteError, match=r"best_model\.weight"):
        store.save_version(bad)
    assert store.list_versions() == [1]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]
    state = build_state(2)
    state["loop"]["best_value"] = float("-inf")  # only weights must be finite
    store.save_version(state)
    assert store.load_latest()["loop"]["best_value"] == float("-inf")


def test_a_second_writer_is_refused(tmp_path):
    with CheckpointStore(tmp_path) as store:
        store.save_version(build_state(1))
        with pytest.raises(FolderBusy, match=str(os.getpid())):
            CheckpointStore(tmp_path).save_version(build_state(2))
        with pytest.raises(FolderBusy):
            CheckpointStore(tmp_path).load_latest()
    CheckpointStore(tmp_path).save_version(build_state(2))


def test_everything_is_synced_before_it_is_named_and_the_name_before_it_is_acknowledged(
    tmp_path, monkeypatch
):
    """Check the order of syncs, because no test can cut the power. A power cut may lose only unsynced data."""
    events = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record(name, call):
        def wrapped(*args):
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[1])
            # Without machine, process and number.
            relative = re.sub(r"@[^/]*", "", str(Path(path).relative_to(tmp_path)))
            events.append((name, relative))
            return call(*args)

        return wrapped

    monkeypatch.setattr(os, "fsync", record("fsync", fsync))
    monkeypatch.setattr(os, "rename", record("rename", rename))
    monkeypatch.setattr(os, "replace", record("replace", replace))
    CheckpointStore(tmp_path).save_version(build_state(1))
    temporary = ".tmp-checkpoint-00000001"
    renamed = events.index(("rename", "checkpoint-00000001"))
    before, after = events[:renamed], events[renamed + 1 :]
    for name in (
        "model-0.safetensors",
        "optimizer_step-0.safetensors",
        "state.json",
        "manifest.json",
    ):
        assert ("fsync", f"{temporary}/{name}") in before
    assert before[-2:] == [("fsync", f"{temporary}/manifest.json"), ("fsync", temporary)]
    assert after == [
        ("fsync", "."),
        ("fsync", ".tmp-LATEST"),
        ("replace", "LATEST"),
        ("fsync", "."),
    ]


def test_weights_above_the_shard_size_are_split_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    store = CheckpointStore(tmp_path)
    # 400 bytes each, so two fit a file.
    weights = {f"layer{i}": torch.full((100,), float(i)) for i in range(5)}
    store.save_version({"model": weights})
    assert sorted(verify_folder(store.resolve_version_folder(1))["files"]) == [
        *(f"model-{i}.safetensors" for i in range(3)),
        "state.json",
    ]
    loaded = store.load_latest()["model"]
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def run_in_child(work):
    """Run `work(acknowledge)` in a forked child; return (acknowledged numbers, wait status)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            work(lambda number: os.write(writer, bytes([number])))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    acknowledged = []
    while data := os.read(reader, 64):
        acknowledged.extend(data)
    os.close(reader)
    return acknowledged, os.waitpid(pid, 0)[1]


# The points of one save, in order.
WRITE_POINTS = (
    "checkpoint.encoded",
    "publish.begin",
    "publish.file",
    "publish.written",
    "publish.manifest",
    "publish.renamed",
    "publish.done",
    "pointer.written",
    "text.done",
    "pointer.done",
    "prune.renamed",
    "prune.done",
)


@pytest.mark.parametrize("hit", [1, 2, 4])
@pytest.mark.parametrize("point", WRITE_POINTS)
def test_kill_9_in_the_middle_of_a_write(tmp_path, point, hit):
    """Load the newest acknowledged version, or the next one, whatever step of the write the kill hits."""

    def work(acknowledge):
        faults.configure_faults(f"{point}:{hit}:kill")
        with CheckpointStore(tmp_path) as store:
            for version in range(1, 8):
                store.save_version(build_state(version))
                acknowledge(version)

    acknowledged, status = run_in_child(work)
    assert os.WTERMSIG(status) == signal.SIGKILL
    newest = acknowledged[-1] if acknowledged else 0
    store = CheckpointStore(tmp_path)
    with store:
        assert not [name for name in os.listdir(tmp_path) if name.startswith((".tmp-", ".trash-"))]
        state = store.load_latest()
    loaded = state["loop"]["iteration"] if state else 0
    assert loaded in (newest, newest + 1)
    # A renamed version is complete, so it loads although it was not acknowledged.
    assert loaded == newest + (WRITE_POINTS.index(point) >= WRITE_POINTS.index("publish.renamed"))
    if loaded:
        assert_state(state, loaded)
        assert (tmp_path / "LATEST").read_text() == f"checkpoint-{loaded:08d}\n"
    assert store.save_version(build_state(loaded + 1)) == loaded + 1
    assert_state(store.load_latest(), loaded + 1)


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_disk_error_at_any_step_keeps_the_old_version(tmp_path, point):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    store.save_version(build_state(2))
    faults.configure_faults(f"{point}:1:raise")
    with store, pytest.raises((CheckpointError, OSError)):
        store.save_version(build_state(3))
    faults.configure_faults(None)
    state = store.load_latest()
    assert state["loop"]["iteration"] in (2, 3)
    assert_state(state, state["loop"]["iteration"])
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]
    store.save_version(build_state(4))
    assert_state(store.load_latest(), 4)


def test_a_full_disk_is_a_clear_error_and_the_old_version_still_loads(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save_version(build_state(1))
    message = tmp_path / "message.txt"

    def work(acknowledge):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # the weights alone are 3,600 bytes
        try:
            store.save_version(build_state(2))
        except CheckpointError as error:
            message.write_text(str(error))

    assert run_in_child(work)[1] == 0
    assert "checkpoint-00000002: cannot be written" in message.read_text()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]
    assert_state(store.load_latest(), 1)


def test_a_fault_point_follows_the_renaming_of_a_damaged_version(tmp_path):
    store = CheckpointStore(tmp_path)
    for version in (1, 2):
        store.save_version(build_state(version))
    (store.resolve_version_folder(2) / "state.json").write_bytes(b"{}")
    assert [name for name, point in faults.FAULT_POINTS.items() if point.run == "damage"] == [
        "checkpoint.aside"
    ]
    faults.configure_faults("checkpoint.aside:1:raise")
    with pytest.raises(faults.InjectedFault):
        store.load_latest()
    faults.configure_faults(None)
    assert store.load_latest()["loop"]["iteration"] == 1
