"""Lines with checksums: any change is detected, only the changed line is lost, and older files stay readable."""

import json
import random
import zlib

import pytest
from helpers.reward_rollouts import rollout

import rl_core
from rl_core.analysis.training_curves import read_training_curves
from rl_core.rewards.contribution import iter_compared_groups
from rl_core.rewards.rollout_log import RewardRecord
from rl_core.storage.append_log import (
    copy_intact_lines,
    encode_checked_line,
    has_valid_checksum,
    read_checked_lines,
)
from rl_core.trackers.local_trackers import JsonlTracker


def read_records(path):
    return [line.record for line in read_checked_lines(path)]


def replace_bytes(path, old, new):
    text = path.read_bytes()
    assert text.count(old) == 1
    path.write_bytes(text.replace(old, new))


def test_a_line_by_hand():
    line = encode_checked_line({"step": 3, "x": [1, "é"]})
    body = b'{"step":3,"x":[1,"\\u00e9"]'
    assert line == body + b',"crc":"%08x"}\n' % zlib.crc32(body)
    assert json.loads(line)["step"] == 3  # any JSON reader can read it
    # A line of an older version cannot be checked.
    assert has_valid_checksum(line) and has_valid_checksum(b'{"step": 3}\n')


def test_every_change_of_up_to_four_bytes_is_detected(tmp_path):
    line = encode_checked_line({"step": 3, "metrics": {"train/loss": 0.123456}})
    path = tmp_path / "lines"
    other, rng = encode_checked_line({"step": 2}), random.Random(0)
    for start in range(len(line) - 1):
        for width in range(1, min(4, len(line) - 1 - start) + 1):
            bad = bytearray(line)
            for index in range(start, start + width):
                bad[index] ^= rng.choice([bit for bit in range(1, 256) if bad[index] ^ bit != 10])
            path.write_bytes(other + bytes(bad) + other)
            assert read_records(path) == [{"step": 2}, None, {"step": 2}], bytes(bad)


def test_lines_of_older_versions_are_read_until_the_first_with_a_checksum(tmp_path):
    path, old_line = tmp_path / "lines", b'{"step": 1}\n'
    path.write_bytes(
        old_line
        + old_line
        + encode_checked_line({"step": 2})
        + old_line
        + encode_checked_line({"step": 3})
        + b'{"step": 4'
    )
    assert read_records(path) == [{"step": 1}, {"step": 1}, {"step": 2}, None, {"step": 3}]
    rest = list(read_checked_lines(path, offset=len(old_line)))
    assert [line.record for line in rest] == [{"step": 1}, {"step": 2}, None, {"step": 3}]
    assert rest[-1].end == path.stat().st_size - len(b'{"step": 4')
    path.write_bytes(encode_checked_line({"step": 2}) + old_line)
    assert [
        line.is_intact
        for line in read_checked_lines(path, offset=len(encode_checked_line({"step": 2})))
    ] == [False]


def test_intact_lines_are_copied_in_place_or_elsewhere(tmp_path):
    path = tmp_path / "lines"
    lines = [encode_checked_line({"step": step}) for step in range(4)]
    path.write_bytes(
        b"".join(
            [lines[0], lines[1].replace(b"1", b"7", 1), lines[2], b"\xff\n", lines[3], b"{torn"]
        )
    )
    assert [line.start for line in copy_intact_lines(path, tmp_path / "other")] == [
        len(lines[0]),
        3 * len(lines[0]),
    ]
    assert (tmp_path / "other").read_bytes() == lines[0] + lines[2] + lines[3]
    assert len(copy_intact_lines(path, path)) == 2 and copy_intact_lines(path, path) == []
    assert (
        path.read_bytes() == lines[0] + lines[2] + lines[3] and len(list(tmp_path.iterdir())) == 2
    )


@pytest.fixture
def rewards(tmp_path):
    """Write the rewards of three iterations of two rollouts; the second line has a bad byte."""
    path = tmp_path / "rewards.jsonl"
    record = RewardRecord(path)
    for iteration in range(3):
        record(
            iteration, [rollout(task=10.0 * iteration + sample, seed=sample) for sample in range(2)]
        )
    replace_bytes(path, b'"reward":1.0', b'"reward":\xff.0')
    return path


def test_one_bad_byte_in_the_rewards_costs_one_row(rewards, caplog):
    """Check that resuming drops one row.

    A former version dropped all later rows and could not read the file at the end.
    """
    RewardRecord(rewards)(2, [rollout(task=99.0)])  # a resumed run repeats iteration 2
    stored = [line.record and line.record["reward"] for line in read_checked_lines(rewards)]
    assert stored == [0.0, None, 10.0, 11.0, 99.0]
    assert (
        "rewards.jsonl: the line of bytes" in caplog.text
        and "the reward of one rollout is lost" in caplog.text
    )
    assert [
        [row["reward"] for row in group]
        for group in iter_compared_groups(rewards, by_iteration=True)
    ] == [
        [0.0],
        [10.0, 11.0],
        [99.0],
    ]
    table = rl_core.read_rewards(rewards)
    assert list(table["reward"]) == [0.0, 10.0, 11.0, 99.0] and "crc" not in table.columns


def test_changed_digits_of_a_metric_are_seen_by_every_reader(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for step in range(4):
        tracker.log_metrics({"train/loss": 0.5 + step}, step)
    replace_bytes(path, b"1.5", b"9.9")
    assert list(rl_core.read_metrics(path)["train/loss"]) == [0.5, 2.5, 3.5]
    assert "line 2, damaged (its checksum does not match)" in caplog.text
    assert read_training_curves(path, frozenset(["train/loss"])).num_skipped == 1
    JsonlTracker(path, cut=True).log_metrics({"train/loss": 7.0}, 2)  # resumes after step 2
    assert list(rl_core.read_metrics(path)["train/loss"]) == [0.5, 7.0]
