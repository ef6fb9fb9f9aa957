"""Readers during publishing: they never see half a version, nor an older one than before."""

import json
import os
import threading

import pytest
import torch

from posttrain.monitor.tail import JsonLinesTail, read_json_object
from rl_core.errors import CheckpointError
from rl_core.storage.append_log import encode_checked_line, read_checked_lines
from rl_core.storage.atomic_files import write_json_atomic, write_text_unsynced
from rl_core.storage.checkpoint import CheckpointStore
from tasks.tracking.journal import LineLog

VERSIONS = 60


def look_while_writing(write, look):
    """Call `look` repeatedly while `write` runs and once afterwards; return its values."""
    writer, seen = threading.Thread(target=write), []
    writer.start()
    while writer.is_alive():
        seen.append(look())
    writer.join()
    seen.append(look())
    return [value for value in seen if value is not None]


def test_json_files_and_live_views(tmp_path):
    def write():
        for number in range(1, VERSIONS + 1):
            write_json_atomic(tmp_path / "run.json", {"number": number, "text": "x" * 5000})
            write_text_unsynced(
                tmp_path / "progress.json", json.dumps({"number": number, "text": "x" * 5000})
            )

    def look():
        values = [read_json_object(tmp_path / name) for name in ("run.json", "progress.json")]
        assert all(not value or len(value["text"]) == 5000 for value in values)
        return [value.get("number", 0) for value in values]

    seen = look_while_writing(write, look)
    for numbers in zip(*seen, strict=True):
        assert list(numbers) == sorted(numbers) and numbers[-1] == VERSIONS


def test_the_pointer_of_checkpoints(tmp_path):
    """Read LATEST without the lock: the version it names loads, unless a newer one has replaced it meanwhile."""
    store = CheckpointStore(tmp_path)

    def write():
        for number in range(1, VERSIONS // 2 + 1):
            store.save_version(
                {
                    "model": {"weight": torch.full((500,), float(number))},
                    "loop": {"iteration": number},
                }
            )

    def read_pointer():
        try:
            return int((tmp_path / "LATEST").read_text().strip().removeprefix("checkpoint-"))
        except FileNotFoundError:
            return 0

    def look():
        version = read_pointer()
        if not version:
            return 0
        try:
            state = CheckpointStore(tmp_path).load_version(version)
        except CheckpointError:
            assert read_pointer() > version  # pruned meanwhile
            return None
        assert state["loop"] == {"iteration": version} and bool(
            (state["model"]["weight"] == version).all()
        )
        return version

    seen = look_while_writing(write, look)
    assert seen == sorted(seen) and seen[-1] == VERSIONS // 2 and len(set(seen)) > 3


def test_a_journal_yields_each_line_once_and_in_order(tmp_path):
    tail, path = JsonLinesTail(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"

    def write():
        for start in range(0, 400, 100):  # each writer is killed within a line, the next continues
            log = LineLog(path)
            for number in range(start, start + 100):
                log.append_record({"number": number})
            os.close(log._descriptor)
            with path.open("ab") as file:
                file.write(b'{"number": 9')

    seen = look_while_writing(write, lambda: [row["number"] for row in tail.read_rows()])
    assert [number for block in seen for number in block] == list(range(400))
    assert tail.num_restarts == 0 and tail.num_bad == 0


def test_a_version_number_is_never_reused(tmp_path):
    """Check that a reader of version 2 never sees another state under that number."""
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        store.save_version({"loop": {"iteration": number}})
    (store.resolve_version_folder(2) / "state.json").write_bytes(b"damaged")
    assert store.load_latest()["loop"] == {"iteration": 1}
    assert store.save_version({"loop": {"iteration": 3}}) == 3
    assert store.list_versions() == [1, 3] and store.load_latest()["loop"] == {"iteration": 3}


@pytest.mark.parametrize("torn", [1, 12, 20])
def test_a_line_that_is_cut_off_and_replaced_during_the_reading(tmp_path, monkeypatch, torn):
    """Simulate a kernel that returns bytes of a torn line followed by those of the line that replaced it."""
    path = tmp_path / "metrics.jsonl"
    append_numbers(path, [1, 2])
    intact_size = path.stat().st_size
    with path.open("ab") as file:
        file.write(encode_checked_line({"number": 9, "text": "torn"})[:torn])
    read, calls = os.pread, []

    def overtaken(fd, length, offset):
        if calls:
            return read(fd, length, offset)
        calls.append(offset)
        first = read(fd, length, offset)
        append_numbers(path, [3, 4])
        return first + read(fd, length - len(first), offset + len(first))

    tail = JsonLinesTail(path)
    monkeypatch.setattr(os, "pread", overtaken)
    assert [row["number"] for row in tail.read_rows()] == [1, 2, 3, 4]
    assert tail.num_bad == 0 and tail.offset == path.stat().st_size > intact_size


@pytest.mark.parametrize("torn", [1, 12, 20])
def test_checked_lines_that_are_cut_off_and_replaced_during_the_reading(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    append_numbers(path, [1, 2])
    with path.open("ab") as file:
        file.write(encode_checked_line({"number": 9, "text": "torn"})[:torn])
    lines = read_checked_lines(path)
    seen = [next(lines)]  # the reader has buffered the complete file, including the torn line
    append_numbers(path, [3, 4])
    seen += list(lines)
    assert [line.record for line in seen] == [{"number": number} for number in (1, 2, 3, 4)]


def append_numbers(path, numbers):
    log = LineLog(path)
    for number in numbers:
        log.append_record({"number": number})
    os.close(log._descriptor)
