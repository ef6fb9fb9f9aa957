"""Crash states: the newest acknowledged version loads after a power cut at any time, and that needs every fsync.

`pytest tests/rl_core/storage/test_crash_states.py -s` prints the number of states; the slow test checks 10,000.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.crash_states import Recorder, crash_states, write_tree

from rl_core.storage.append_log import AppendLog, read_checked_lines
from rl_core.storage.atomic_files import (
    create_file_once,
    make_folder,
    replace_file,
    write_json_atomic,
)
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folders import remove_folder, seal_folder
from rl_core.storage.manifest import verify_folder
from tasks.pipeline.stage_result import load_finished_stage
from tasks.tracking.journal import LineLog

KEEP = 2


def build_state(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "model": {"weight": torch.randn(20, generator=generator)},
        "loop": {"iteration": version},
    }


def is_state(state, version):
    return state["loop"] == {"iteration": version} and torch.equal(
        state["model"]["weight"], build_state(version)["model"]["weight"]
    )


# Each scenario has a function that writes, and one that checks what must hold after a crash during it.


def write_checkpoints(root, mark, versions=5):
    folder = root / "run" / "checkpoints"
    for version in range(1, versions + 1):
        if version == 4:  # a process died; the next one clears its temporary
            dead = subprocess.Popen(["true"])
            dead.wait()
            leftover = folder / f".tmp-checkpoint-00000009@{os.uname().nodename}-{dead.pid}.0"
            leftover.mkdir()
            (leftover / "model-0.safetensors").write_bytes(b"half")
        CheckpointStore(folder, keep=KEEP).save_version(build_state(version))
        mark(version)


def check_checkpoints(root, promised):
    folder = root / "run" / "checkpoints"
    if promised:  # a reader that follows the pointer without repairs
        name = (folder / "LATEST").read_text().strip()
        assert int(name.removeprefix("checkpoint-")) >= promised
        verify_folder(folder / name)
    store = CheckpointStore(folder, keep=KEEP)
    state = store.load_latest()
    loaded = state["loop"]["iteration"] if state is not None else 0
    assert loaded in (promised, promised + 1)
    assert not loaded or is_state(state, loaded)
    if loaded > 1:
        assert is_state(store.load_version(loaded - 1), loaded - 1)  # the fallback
    if folder.is_dir():
        others = {name for name in os.listdir(folder) if not name.startswith("checkpoint-")}
        assert others <= {".lock", "LATEST"}
    assert store.save_version(build_state(loaded + 1)) == loaded + 1
    assert is_state(store.load_latest(), loaded + 1)
    versions = range(max(1, loaded + 2 - KEEP), loaded + 2)
    assert set(os.listdir(folder)) == {
        ".lock",
        "LATEST",
        *(f"checkpoint-{version:08d}" for version in versions),
    }


def write_stages(root, mark):
    home = root / "stages" / "sft"
    for number in (1, 2, 3):
        folder = make_folder(home / f"{number}.open")
        (folder / "model" / "adapter").mkdir(parents=True)
        (folder / "model" / "adapter" / "weights").write_bytes(bytes([number]) * 150)
        (folder / "model" / "config.json").write_bytes(b"{}" * number)
        with replace_file(folder / "rows.jsonl", synced=False) as file:
            file.write(f"row {number}\n" * 20)
        write_json_atomic(folder / "summary.json", {"number": number})
        seal_folder(folder, home / str(number), {"stage": "sft"})
        mark(number)
        if number == 2:
            remove_folder(home / "1")


def check_stages(root, promised):
    home = root / "stages" / "sft"
    for number in (1, 2, 3):
        folder = home / str(number)
        result = load_finished_stage(folder, "sft", "key")  # renames a damaged folder
        if result is not None:
            assert result.summary == {"number": number}
            assert (folder / "model" / "adapter" / "weights").read_bytes() == bytes([number]) * 150
            assert (folder / "rows.jsonl").read_text() == f"row {number}\n" * 20
        is_removed = number == 1 and promised >= 2
        assert result is not None or number > promised or is_removed
    if home.is_dir():
        assert not [name for name in os.listdir(home) if "corrupt" in name]


def write_record(root, mark):
    folder = make_folder(root / "pipeline" / "runs")
    for number in range(1, 7):
        write_json_atomic(folder / "run.json", {"number": number, "text": "x" * 40 * number})
        mark(number)


def check_record(root, promised):
    path = root / "pipeline" / "runs" / "run.json"
    if promised or path.exists():
        record = json.loads(path.read_text())
        assert record["number"] in (promised, promised + 1)
        assert record["text"] == "x" * 40 * record["number"]


def build_line(number):
    return {"number": number, "text": "y" * (7 * number % 90)}


def write_lines(root, mark):
    numbers = itertools.count(1)
    for times in (3, 5, 9):
        log = LineLog(root / "tracking" / "metrics.jsonl")
        for _ in range(times):
            number = next(numbers)
            log.append_record(build_line(number))
        log.flush_pending(sync=True)
        mark(number)
        log.append_record(build_line(next(numbers)))  # not promised
        os.close(log._descriptor)  # killed


def check_lines(root, promised):
    path = root / "tracking" / "metrics.jsonl"
    records = [line.record for line in read_checked_lines(path) if line.is_intact]
    assert records[:promised] == [build_line(number) for number in range(1, promised + 1)]
    numbers = [record["number"] for record in records]
    assert numbers == sorted(set(numbers))
    assert all(record == build_line(record["number"]) for record in records)
    log = LineLog(path)
    log.append_record(build_line(99))
    log.close()
    assert [line.record for line in read_checked_lines(path) if line.is_intact] == [
        *records,
        build_line(99),
    ]


def write_appended(root, mark):
    folder = make_folder(root / "stage")
    for number in (1, 2, 3):
        AppendLog(folder / "rewards", synced=True).append_lines(b"%d" % number * 100 + b"\n")
        mark(number)


def check_appended(root, promised):
    path = root / "stage" / "rewards"
    data = path.read_bytes() if path.exists() else b""
    assert data.startswith(
        b"".join(b"%d" % number * 100 + b"\n" for number in range(1, promised + 1))
    )


def write_password(root, mark):
    assert create_file_once(root / "auth", "posttrain:secret\n", mode=0o600)
    mark(1)
    assert not create_file_once(root / "auth", "another\n")


def check_password(root, promised):
    path = root / "auth"
    assert path.exists() or not promised
    assert not path.exists() or path.read_text() == "posttrain:secret\n"


SCENARIOS = {
    "checkpoints": (write_checkpoints, check_checkpoints),
    "stages": (write_stages, check_stages),
    "record": (write_record, check_record),
    "lines": (write_lines, check_lines),
    "appended": (write_appended, check_appended),
    "password": (write_password, check_password),
}

# Every fsync by scenario: the function, and the line in it.
SYNCS = {
    "checkpoints": [
        "make_folder: fsync_path(folder.parent)",
        "fsync_tree: fsync_path(path)",
        "seal_folder: fsync_path(folder / MANIFEST_FILE)",
        "seal_folder: fsync_path(folder)",
        "seal_folder: fsync_path(final.parent)",
        "replace_file: os.fsync(file.fileno())",
        "replace_file: fsync_path(path.parent)",
    ],
    "stages": [
        "make_folder: fsync_path(folder.parent)",
        "fsync_tree: fsync_path(path)",
        "fsync_tree: fsync_path(Path(root, name))",
        "fsync_tree: fsync_path(root)",
        "seal_folder: fsync_path(folder / MANIFEST_FILE)",
        "seal_folder: fsync_path(folder)",
        "seal_folder: fsync_path(final.parent)",
        "remove_folder: fsync_path(path.parent)",
    ],
    "record": [
        "make_folder: fsync_path(folder.parent)",
        "replace_file: os.fsync(file.fileno())",
        "replace_file: fsync_path(path.parent)",
    ],
    "lines": [
        "make_folder: fsync_path(folder.parent)",
        "__init__: fsync_path(self.path.parent)",
        "sync_lines: os.fsync(self._descriptor)",
    ],
    "appended": [
        "make_folder: fsync_path(folder.parent)",
        "_write_lines: os.fsync(descriptor)",
        "_write_lines: fsync_path(self.path.parent)",
    ],
    "password": [
        "create_file_once: fsync_path(temporary)",
        "create_file_once: fsync_path(path.parent)",
    ],
}
UNNEEDED_SYNCS = {
    # A partly removed version is removed with the next one.
    "checkpoints": {"remove_folder: fsync_path(path.parent)"},
    # summary.json is written into a folder that is sealed afterwards.
    "stages": {"replace_file: os.fsync(file.fileno())", "replace_file: fsync_path(path.parent)"},
}


@pytest.fixture
def scratch():
    """Yield a folder in memory if there is one, because thousands of trees are written into it."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def record_scenario(scenario, scratch, drop=(), **options):
    root = scratch / "recorded"
    root.mkdir()
    with Recorder(root, frozenset(drop)) as recorder:
        SCENARIOS[scenario][0](root, recorder.mark, **options)
    shutil.rmtree(root)
    return recorder


def check_states(scenario, recorder, scratch, tries, *, stop_at_first=False, seed=0):
    """Return the number of states and the bad ones with their errors; the disk is simulated, so nothing is synced."""
    states, bad = 0, []
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        for tree, promises in crash_states(recorder.ops, tries, seed):
            states += 1
            root = scratch / "state"
            write_tree(tree, root)
            try:
                SCENARIOS[scenario][1](root, promises[-1] if promises else 0)
            except Exception as error:
                bad.append((tree, promises, repr(error)[:500]))
            shutil.rmtree(root)
            if bad and stop_at_first:
                break
    return states, bad


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_crash_state_is_bad(scratch, scenario, caplog):
    recorder = record_scenario(scenario, scratch)
    states, bad = check_states(scenario, recorder, scratch, tries=1)
    assert bad == [] and states >= 8
    assert set(recorder.sites) == set(SYNCS[scenario]) | UNNEEDED_SYNCS.get(scenario, set())


@pytest.mark.parametrize(
    ("scenario", "site"), [(name, site) for name, sites in SYNCS.items() for site in sites]
)
def test_every_fsync_is_needed(scratch, scenario, site, caplog):
    recorder = record_scenario(scenario, scratch, drop={site})
    assert site in recorder.sites
    _, bad = check_states(scenario, recorder, scratch, tries=20, stop_at_first=True)
    assert bad, (
        f"without {site} nothing is lost: it is not needed, or the model of the disk is too weak"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_crash_states(scratch, caplog, capsys):
    counts = {}
    for scenario in SCENARIOS:
        options = {"versions": 26} if scenario == "checkpoints" else {}
        recorder = record_scenario(scenario, scratch, **options)
        counts[scenario], bad = check_states(scenario, recorder, scratch, tries=200)
        assert bad == []
    with capsys.disabled(), contextlib.suppress(OSError):
        details = ", ".join(f"{scenario} {count:,}" for scenario, count in counts.items())
        print(f"\ncrash states: {sum(counts.values()):,} ({details}), 0 bad")
    assert sum(counts.values()) >= 10_000
