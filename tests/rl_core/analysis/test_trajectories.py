import gzip
import json

import pytest
from helpers.handmade_trajectories import generate_trajectories, trajectory, zoom

from rl_core.analysis import read_trajectories, write_trajectories
from rl_core.analysis.trajectories import (
    build_action_key,
    find_turning_point,
    read_trajectories_with_offsets,
    read_trajectory_at,
)
from rl_core.errors import DataError
from rl_core.types import ToolCall, Turn

GOOD = json.dumps(trajectory(7).to_json()) + "\n"


def build_changed_line(**fields):
    return json.dumps({**trajectory(7).to_json(), **fields}) + "\n"


def with_turn(**fields):
    return build_changed_line(turns=[{"action": "x", **fields}])


def test_round_trip_with_odd_text(tmp_path):
    rows = [
        *generate_trajectories(20, 0.4),
        trajectory(5, prompt="line\u2028separator \ud800 <script> ü\n\0", answer=None),
    ]
    assert write_trajectories(tmp_path / "t.jsonl", rows) == 21
    assert list(read_trajectories(tmp_path / "t.jsonl")) == rows


def test_offsets_lead_back_to_their_rows(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + GOOD.encode()
        + b"\r\n\n"
        + build_changed_line(seed=8).replace("\n", "\r\n").encode()
    )
    rows = list(read_trajectories_with_offsets(path))
    assert [row.seed for _, row in rows] == [7, 8]
    for offset, row in rows:
        assert read_trajectory_at(path, offset) == row


def test_reading_is_lazy(tmp_path):
    (tmp_path / "t.jsonl").write_text(GOOD + "torn")
    rows = read_trajectories(tmp_path / "t.jsonl")
    assert next(rows).seed == 7
    with pytest.raises(DataError):
        next(rows)


def test_unwritable_number_names_the_trajectory(tmp_path):
    with pytest.raises(DataError, match=r"trajectory 2 \(pixel_grid/easy/3\)"):
        write_trajectories(
            tmp_path / "t.jsonl", [trajectory(2), trajectory(3, reward=float("nan"))]
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no trajectories"),
        (b"\n \n", "holds no trajectories"),
        (GOOD.encode() + GOOD.encode()[:50], r"t.jsonl:2: the last line is cut off after 50 bytes"),
        (GOOD.encode() + b"{]\n", r"t.jsonl:2: this is not JSON"),
        (GOOD.encode() + b'{"a": "\xff"}\n', r"t.jsonl:2: byte 8 of the line is not UTF-8"),
        (b"[" * 100_000 + b"\n", "JSON array"),
        (
            b'{"a":' + b"[" * 100_000 + b"\n",
            r"t.jsonl:1: the JSON is nested too deeply|t.jsonl:1: this is not JSON",
        ),
        (gzip.compress(GOOD.encode()), "gzip"),
        (GOOD.encode("utf-16"), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"3\n", r"t.jsonl:1: found the number 3, expected an object"),
        (b'{"level": "easy"}\n', "field 'environment' is missing"),
        (build_changed_line(seed="7").encode(), "field 'seed': found text, expected int"),
        (build_changed_line(seed=2**63).encode(), "64 bits"),
        (build_changed_line(seed=True).encode(), "field 'seed': found true or false, expected int"),
        (
            build_changed_line(success=1).encode(),
            "field 'success': found the number 1, expected bool",
        ),
        (build_changed_line(reward=None).encode(), "field 'reward': found null, expected float"),
        (GOOD.replace('"reward": 1.0', '"reward": NaN').encode(), "NaN is not a JSON number"),
        (
            GOOD.replace('"reward": 1.0', '"reward": 1e999').encode(),
            "field 'reward': found the number inf",
        ),
        (build_changed_line(rewards={"task": "1"}).encode(), "field 'rewards'"),
        (build_changed_line(colour="red").encode(), "field 'colour' is unknown"),
        (build_changed_line(turns={}).encode(), "field 'turns': found an object, expected a list"),
        (build_changed_line(turns=[3]).encode(), r"field 'turns\[0\]': found the number 3"),
        (build_changed_line(turns=[{}]).encode(), r"field 'turns\[0\].action' is missing"),
        (
            with_turn(is_error=0).encode(),
            r"field 'turns\[0\].is_error': found the number 0, expected bool",
        ),
        (
            with_turn(observation=3).encode(),
            r"field 'turns\[0\].observation': found the number 3, expected str",
        ),
        (with_turn(tool_call={"name": "zoom"}).encode(), r"field 'turns\[0\].tool_call'"),
    ],
)
def test_bad_files_name_file_line_and_reason(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_trajectories(path))
    assert str(path) in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(read_trajectories(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is a folder; name"):
        list(read_trajectories(tmp_path))


def test_overlong_line_is_refused_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_core.analysis.trajectories.MAX_LINE", 1000)
    (tmp_path / "t.jsonl").write_text(build_changed_line(prompt="x" * 5000))
    with pytest.raises(DataError, match=r"t.jsonl:1: the line is longer"):
        list(read_trajectories(tmp_path / "t.jsonl"))


def test_action_key_sees_through_spelling():
    hermes = Turn('<tool_call>{"name": "zoom"...', ToolCall("zoom", {"column": 2, "row": 1}))
    assert build_action_key(zoom(1, 2)) == build_action_key(hermes)
    assert build_action_key(zoom(1, 2)) != build_action_key(zoom(2, 1))
    assert build_action_key(Turn(" Answer   RED\n")) == build_action_key(Turn("answer red"))


def test_turning_point():
    end = Turn("answer red")
    a = trajectory(turns=[zoom(1, 1), zoom(2, 2), end])
    assert find_turning_point(a, trajectory(turns=[zoom(1, 1), zoom(2, 2), end])) is None
    assert find_turning_point(a, trajectory(turns=[zoom(1, 1), zoom(2, 3), end])) == 1
    assert (
        find_turning_point(a, trajectory(turns=[zoom(1, 1), zoom(2, 2)])) == 2
    )  # the other reader stops there
    assert find_turning_point(trajectory(turns=[]), a) == 0
