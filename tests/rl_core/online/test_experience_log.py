"""The log on disk: durable appends, torn ends, damaged records, readers that follow a writer."""

import os
import resource
import signal
import threading

import pytest
from helpers.online import experience

from rl_core.errors import CheckpointError, DataError, FolderBusy
from rl_core.online.experience_log import (
    ExperienceLog,
    ExperienceLogReader,
    find_oldest_number,
    list_segments,
)
from rl_core.online.labels import Label
from rl_core.storage import faults

LABEL = Label("answer", "feedback", text="a")


def read_numbers(folder, after=0):
    return [record.number for record in ExperienceLogReader(folder, after).read_records()]


def write_experiences(folder, names, **options):
    with ExperienceLog(folder, **options) as log:
        return [log.append_experience(experience(name)) for name in names]


def test_records_come_back_in_order_over_segments(tmp_path):
    folder = tmp_path / "buffer with ünïcode"
    assert write_experiences(folder, ["r1", "r2", "r3"], segment_bytes=2000) == [1, 2, 3]
    with ExperienceLog(folder, segment_bytes=2000) as log:
        assert log.append_label("r1", LABEL) == 4
        assert log.append(
            [("control", {"order": "resume"}), ("label", {"request_id": "r2", "label": {}})]
        ) == [5, 6]
    records = list(ExperienceLogReader(folder).read_records())
    assert [record.number for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[1].parse_experience().rollouts == experience("r2").rollouts
    assert records[3].parse_label() == ("r1", LABEL) and records[4].value == {"order": "resume"}
    assert len(list_segments(folder)) > 1 and read_numbers(folder, after=4) == [5, 6]
    with pytest.raises(DataError):
        records[5].parse_label()


def test_a_torn_end_is_cut_at_every_byte(tmp_path):
    write_experiences(tmp_path, ["r1", "r2"])
    path = list_segments(tmp_path)[0][1]
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for size in [*range(first, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        assert read_numbers(tmp_path) == [1]
        with ExperienceLog(tmp_path) as log:
            assert log.append_experience(experience("again")) == 2
        assert [r.value["request_id"] for r in ExperienceLogReader(tmp_path).read_records()] == [
            "r1",
            "again",
        ]


def test_a_damaged_record_loses_no_other(tmp_path, caplog):
    write_experiences(tmp_path, ["r1", "r2", "r3"])
    path = list_segments(tmp_path)[0][1]
    data = bytearray(path.read_bytes())
    data[data.index(b"\n") + 40] ^= 1
    path.write_bytes(bytes(data))
    reader = ExperienceLogReader(tmp_path)
    assert [record.number for record in reader.read_records()] == [1, 3] and reader.num_damaged == 1
    assert "skipped" in caplog.text
    with ExperienceLog(tmp_path) as log:
        assert log.append_experience(experience("r4")) == 4  # numbers are unique


def test_a_reader_follows_the_writer(tmp_path):
    reader = ExperienceLogReader(tmp_path)
    assert list(reader.read_records()) == []
    with ExperienceLog(tmp_path, segment_bytes=1500) as log:
        for name in ("r1", "r2", "r3"):
            log.append_experience(experience(name))
            assert [record.value["request_id"] for record in reader.read_records()] == [name]
    assert list(reader.read_records()) == [] and reader.last_number == 3


def test_a_reader_parallel_to_a_writer_sees_every_record_once(tmp_path):
    seen, done = [], threading.Event()

    def follow():
        reader = ExperienceLogReader(tmp_path)
        while True:
            is_last = done.is_set()
            seen.extend(record.number for record in reader.read_records())
            if is_last:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    with ExperienceLog(tmp_path, segment_bytes=5000) as log:
        for turn in range(40):
            log.append([("control", {"turn": turn, "text": "x" * 300})] * 3)
    done.set()
    thread.join()
    assert seen == list(range(1, 121))


def test_a_full_log_refuses_and_a_removed_segment_makes_room(tmp_path):
    with ExperienceLog(tmp_path, segment_bytes=1000, max_bytes=6000) as log:
        while log.append([("control", {"text": "x" * 900})]) is not None:
            pass
        assert log.num_refused_records == 1 and len(list_segments(tmp_path)) == 3
        size = sum(path.stat().st_size for _, path in list_segments(tmp_path))
        assert size <= 6000
        list_segments(tmp_path)[0][1].unlink()
        assert log.append([("control", {"text": "x" * 900})]) is not None
    assert find_oldest_number(tmp_path) == 3


def test_one_writer_and_values_that_json_knows(tmp_path):
    with ExperienceLog(tmp_path) as log:
        with pytest.raises(FolderBusy):
            ExperienceLog(tmp_path).__enter__()
        with pytest.raises(DataError, match="JSON"):
            log.append([("control", {"value": float("nan")})])
        with pytest.raises(DataError, match="kind"):
            log.append([("other", {})])
        assert log.append([]) == [] and log.append([("control", {})]) == [1]


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path):
    with ExperienceLog(tmp_path) as log:
        log.append_experience(experience("r1"))
        path = list_segments(tmp_path)[0][1]
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
        try:
            with pytest.raises(CheckpointError, match="file size limit"):
                log.append_experience(experience("r2"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert path.read_bytes() == before
        assert log.append_experience(experience("r2")) == 2
    assert read_numbers(tmp_path) == [1, 2]


def run_killed_writer(folder, fault="", lines=0):
    """Run a forked writer that is killed after `lines` acknowledgements, or at a fault.

    Returns: the acknowledged numbers.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            faults.configure_faults(fault)
            with ExperienceLog(folder, segment_bytes=4000) as log:
                while True:
                    number = log.append_experience(experience(f"r{log.next_number}"))
                    os.write(writing, b"%d\n" % number)
        finally:
            os._exit(1)
    os.close(writing)
    acknowledged = []
    with os.fdopen(reading, "rb") as pipe:
        for line in pipe:
            acknowledged.append(int(line))
            if lines and len(acknowledged) >= lines:
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    return acknowledged


def test_a_killed_writer_loses_no_acknowledged_record(tmp_path):
    acknowledged = run_killed_writer(tmp_path, fault="online.appended:5:kill")
    assert acknowledged == [1, 2, 3, 4]
    assert read_numbers(tmp_path) == [1, 2, 3, 4, 5]  # the fifth is stored but not acknowledged
    acknowledged += run_killed_writer(tmp_path, lines=3)
    stored = read_numbers(tmp_path)
    assert set(acknowledged) <= set(stored) and stored == list(range(1, len(stored) + 1))


def test_a_torn_record_is_cut_once(tmp_path):
    write_experiences(tmp_path, ["r1", "r2"])
    path = list_segments(tmp_path)[0][1]
    path.write_bytes(path.read_bytes()[:-20])
    faults.configure_faults("online.cut:1:raise")
    with pytest.raises(OSError, match="injected"):
        ExperienceLog(tmp_path).__enter__()
    assert write_experiences(tmp_path, ["r3"]) == [2]  # the lock was released
