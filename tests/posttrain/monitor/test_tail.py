"""Reading growing files: each line once, torn lines later, replaced files from their start."""

import math

from posttrain.monitor.tail import JsonLinesTail, read_json_object, read_last_rows


def test_torn_last_line_is_deferred(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    tail = JsonLinesTail(path)
    assert tail.read_rows() == [{"n": 1}, {"n": 2}]
    assert tail.read_rows() == []
    with path.open("a") as file:
        file.write(": 3}\n")
    assert tail.read_rows() == [{"n": 3}]
    assert tail.num_bad == 0


def test_lines_without_an_object_are_counted_and_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\nnot json\n[1]\n\xff\xfe\n{"n": 2}\n' + b"[" * 100_000 + b"\n")
    tail = JsonLinesTail(path)
    assert tail.read_rows() == [{"n": 1}, {"n": 2}]
    assert tail.num_bad == 4


def test_json_parses_what_orjson_refuses(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": NaN}\n{"n": "\\ud800"}\n')
    tail = JsonLinesTail(path)
    first, second = tail.read_rows()
    assert math.isnan(first["n"]) and second["n"] == "\ud800" and tail.num_bad == 0


def test_missing_file_may_appear_and_disappear(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = JsonLinesTail(path)
    assert tail.read_rows() == []
    path.write_text('{"n": 1}\n')
    assert tail.read_rows() == [{"n": 1}]
    path.unlink()
    assert tail.read_rows() == []


def test_shrunken_or_replaced_file_is_read_from_its_start(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    tail = JsonLinesTail(path)
    tail.read_rows()
    path.write_text('{"n": 3}\n')
    assert tail.read_rows() == [{"n": 3}]
    assert tail.num_restarts == 1
    other = tmp_path / "b.jsonl"
    other.write_text('{"n": 4}\n{"n": 5}\n')
    other.replace(path)  # longer than what was read: only the inode differs
    assert tail.read_rows() == [{"n": 4}, {"n": 5}]
    assert tail.num_restarts == 2


def test_a_large_file_is_read_in_pieces(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {index}}}\n' for index in range(100, 200)))  # 11 bytes each
    tail = JsonLinesTail(path)
    first = tail.read_rows(limit=30)
    assert first == [{"n": 100}, {"n": 101}]
    assert tail.fraction == 22 / 1100
    rows = list(first)
    while next_rows := tail.read_rows(limit=200):
        rows += next_rows
    assert [row["n"] for row in rows] == list(range(100, 200))
    assert tail.fraction == 1.0


def test_line_longer_than_the_limit_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": "' + "x" * 1000 + '"}\n{"n": 2}\n')
    tail = JsonLinesTail(path)
    rows = tail.read_rows(limit=100) + tail.read_rows()
    assert rows == [{"n": "x" * 1000}, {"n": 2}]


def test_last_rows_without_cut_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 100}\n{"n": 101}\n{"n": 102}\n{"n"')
    assert read_last_rows(path) == [{"n": 100}, {"n": 101}, {"n": 102}]
    assert read_last_rows(path, max_bytes=4 + 11 + 5) == [{"n": 102}]
    assert read_last_rows(tmp_path / "none") == []


def test_incomplete_json_file_is_empty(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"done": 1')
    assert read_json_object(path) == {} == read_json_object(tmp_path / "none")
    path.write_text("[1]")
    assert read_json_object(path) == {}
