"""Errors of data files and rows, and their messages."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.data.files import BadRow, _build_unique_object, list_data_files
from rl_core.data.records import (
    Records,
    RowProblem,
    read_demonstrations,
    read_preferences,
    read_questions,
    report_row_problems,
)
from rl_core.errors import DataError, RecordsError, SettingsError

GOOD = {"prompt": "Who?", "chosen": "Ada", "rejected": "Bob"}
GOOD_LINE = json.dumps(GOOD).encode()


def write_rows(folder: Path, content: bytes | list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    if isinstance(content, list):
        content = b"".join(json.dumps(row).encode() + b"\n" for row in content)
    path.write_bytes(content)
    return path


def read_problem(
    path: Path, read_rows: Callable[..., Records] = read_preferences, **options: Any
) -> tuple[int, str, str]:
    """Return the only problem of a file whose other rows are valid: line, field, reason."""
    records = read_rows(path, on_bad_row="skip", **options)
    assert records.num_skipped == len(records.problems) == 1
    assert len(records.rows) == records.num_rows - 1
    problem = records.problems[0]
    assert problem.file == str(path)
    with pytest.raises(RecordsError):
        read_rows(path, **options)
    return problem.line, problem.field, problem.reason


BAD_PREFERENCES = [
    (b"not json", "", "is not JSON: Expecting value at character 1"),
    (b'{"prompt": "a"', "", "is not JSON: Expecting ',' delimiter at character 15"),
    (b'{"prompt": "\xff"}', "", "is not UTF-8: byte 12 of the line is 0xff"),
    (b'{"prompt": "a", "chosen": "b"}', "rejected", "is missing"),
    (b'{"prompt": "", "chosen": "b", "rejected": "c"}', "prompt", "is empty"),
    (b'{"prompt": "a", "chosen": " \\n", "rejected": "c"}', "chosen", "is empty"),
    (
        b'{"prompt": 3, "chosen": "b", "rejected": "c"}',
        "prompt",
        "must be text, found a number (3)",
    ),
    (b'{"prompt": "a", "chosen": null, "rejected": "c"}', "chosen", "must be text, found null"),
    (
        b'{"prompt": "a", "chosen": true, "rejected": "c"}',
        "chosen",
        "must be text, found a truth value (True)",
    ),
    (
        b'{"prompt": "a", "chosen": ["b"], "rejected": "c"}',
        "chosen",
        "must be text, found a list (['b'])",
    ),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "b "}',
        "chosen",
        "is equal to rejected, so there is no preference",
    ),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1}',
        "margin",
        "must be finite and at least 0, found -1",
    ),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}',
        "margin",
        "must be a number, found text",
    ),
    (b'{"prompt": "a", "completion": "b"}', "label", "is missing"),
    (
        b'{"prompt": "a", "completion": "b", "label": 1}',
        "label",
        "must be true or false, found a number (1)",
    ),
    (b'{"prompt": "a", "label": true}', "completion", "is missing"),
    (
        b'{"prompt": NaN, "chosen": "b", "rejected": "c"}',
        "prompt",
        "nan is not a valid JSON number",
    ),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "x": {"y": [-Infinity]}}',
        "x.y[0]",
        "-inf is not a valid",
    ),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "x": 1e999}',
        "x",
        "inf is not a valid JSON number",
    ),
    (
        b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}',
        "prompt",
        "half of a surrogate pair (\\ud800 at character",
    ),
    (
        b'{"prompt": "a", "prompt": "z", "chosen": "b", "rejected": "c"}',
        "prompt",
        "appears twice in one object",
    ),
    (b'["a", "b", "c"]', "", "must be an object, found a list (['a', 'b', 'c'])"),
    (b"null", "", "must be an object, found null"),
    (b"[" * 100_000, "", "is nested too deeply"),
    (b'{"x": ' + b"9" * 5000 + b"}", "", "is not readable as JSON"),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "seed": "7"}',
        "seed",
        "must be an integer, found text ('7')",
    ),
    (
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "level": 7}',
        "level",
        "must be text, found a number (7)",
    ),
]


@pytest.mark.parametrize(("line", "field", "reason"), BAD_PREFERENCES)
def test_a_bad_row_is_named_with_line_field_and_reason(
    tmp_path: Path, line: bytes, field: str, reason: str
) -> None:
    path = write_rows(tmp_path, b"\n".join([GOOD_LINE, line, GOOD_LINE]))
    problem = read_problem(path)
    assert problem[:2] == (2, field)
    assert reason in problem[2]


def test_equal_problems_are_one_line(tmp_path: Path) -> None:
    bad = [{**GOOD, "chosen": ""}] * 13
    path = write_rows(tmp_path, [GOOD, *bad, {**GOOD, "level": 7}, {**GOOD, "chosen": ""}])
    with pytest.raises(RecordsError) as caught:
        read_preferences(path)
    lines = str(caught.value).splitlines()
    assert lines[:3] == [
        f"{path}: 15 of 16 rows cannot be used:",
        f"  {path}:2: chosen: is empty (14 rows; also 3, 4, 5, 6, 7 and 8 more)",
        f"  {path}:15: level: must be text, found a number (7)",
    ]
    assert len(lines) == 4 and "on_bad_row: skip" in lines[3]
    problems = [RowProblem("data[3]", 0, "", "is bad"), RowProblem("data[5]", 0, "", "is bad")]
    problems += [RowProblem("b.jsonl", 4, "", "is bad")]
    with pytest.raises(
        RecordsError, match=r"data\[3\]: is bad \(3 rows; also data\[5\], b.jsonl:4\)"
    ):
        report_row_problems("rows", problems, 9, "stop")


def test_rows_of_a_prompt_and_a_right_answer_are_recognised(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1", "answer": str(number + 1)} for number in range(3)]
    with pytest.raises(RecordsError) as caught:
        read_demonstrations(write_rows(tmp_path, rows))
    line = str(caught.value).splitlines()[1]
    assert "completion: is missing: these are prompts with a right answer" in line
    assert "environment: {name: prompts, options: {path: FILE, verifier: exact}}" in line
    assert "jq -c '{prompt, completion: .answer}' FILE > NEW.jsonl" in line
    assert "(3 rows; also 2, 3)" in line
    with pytest.raises(RecordsError, match=r"completion: is missing$|completion: is missing\n"):
        read_demonstrations(write_rows(tmp_path, [{"prompt": "a", "colour": "red"}]))


def test_stop_lists_the_first_ten_and_the_count(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [GOOD] + [{**GOOD, "level": number} for number in range(100, 113)])
    with pytest.raises(RecordsError) as caught:
        read_preferences(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 13 of 14 rows cannot be used:"
    assert lines[1:11] == [
        f"  {path}:{line}: level: must be text, found a number ({98 + line})"
        for line in range(2, 12)
    ]
    assert lines[11] == "  and 3 more"
    assert "on_bad_row: skip" in lines[12] and len(lines) == 13


def test_skip_leaves_out_counts_and_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(tmp_path, [GOOD, {**GOOD, "chosen": "Bob"}, {**GOOD, "prompt": "Where?"}])
    with caplog.at_level(logging.WARNING):
        records = read_preferences(path, on_bad_row="skip")
    assert [row["prompt"] for row in records.rows] == ["Who?", "Where?"]
    assert (records.num_rows, records.num_skipped, records.lines) == (3, 1, [1, 3])
    assert records.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"{path}:2: chosen: is equal to rejected" in caplog.text
    with pytest.raises(RecordsError, match="so none is left"):
        read_preferences(write_rows(tmp_path, b"x\n"), on_bad_row="skip")
    with pytest.raises(SettingsError, match="on_bad_row: 'ignore'"):
        read_preferences(path, on_bad_row="ignore")


def test_problems_from_elsewhere_are_reported_the_same_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = RowProblem("demonstrations of x", 3, "", "is 9 tokens long, the context holds 8")
    report_row_problems("demonstrations of x", [], 5, "stop")
    with pytest.raises(
        RecordsError,
        match="demonstrations of x: 1 of 5 rows cannot be used:\n  demonstrations of x:3: is 9",
    ):
        report_row_problems("demonstrations of x", [problem], 5, "stop")
    with pytest.raises(RecordsError, match="so none is left"):
        report_row_problems("demonstrations of x", [problem], 1, "skip")
    with caplog.at_level(logging.WARNING):
        report_row_problems("demonstrations of x", [problem], 5, "skip")
    assert "1 of 5 rows cannot be used and are skipped" in caplog.text


WHOLE_FILES = [
    (b"", "is empty"),
    (b"\xef\xbb\xbf\n \r\n", "holds no row"),
    (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
        "Git LFS pointer.*git lfs pull",
    ),
    (gzip.compress(GOOD_LINE, mtime=0), "gzip-compressed"),
    (b"PK\x03\x04 and so on", "zip archive"),
    (GOOD_LINE.decode().encode("utf-16"), "UTF-16"),
    (GOOD_LINE.decode().encode("utf-16-le"), "UTF-16"),
    (b"\xfe\xff" + GOOD_LINE.decode().encode("utf-16-be"), "UTF-16"),
    (b"[" + GOOD_LINE + b",\n" + GOOD_LINE + b"]\n", ":1: here one JSON array begins"),
    (json.dumps([GOOD], indent=2).encode(), ":1: here one JSON array begins"),
    (b"\n[\n" + GOOD_LINE, ":2: here one JSON array begins"),
    (json.dumps(GOOD, indent=2).encode(), "one JSON document over many lines"),
    (b"PAR1 and so on", "is Parquet under another name; rename it to rows.parquet"),
]


@pytest.mark.parametrize(("content", "words"), WHOLE_FILES)
@pytest.mark.parametrize("on_bad_row", ["stop", "skip"])
def test_a_file_that_is_no_jsonl(
    tmp_path: Path, content: bytes, words: str, on_bad_row: str
) -> None:
    path = write_rows(tmp_path, content)
    with pytest.raises(DataError, match=words) as caught:
        read_preferences(path, on_bad_row=on_bad_row)
    assert str(caught.value).startswith(str(path)) and not isinstance(caught.value, RecordsError)


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_preferences(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        read_preferences(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")  # opening it would block forever
    with pytest.raises(DataError, match="not a regular file"):
        read_preferences(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"cannot be read|no such file"):
        read_preferences("a\0b")


def test_only_line_feeds_split_lines(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\u000bfive"
    row = json.dumps({**GOOD, "prompt": text}, ensure_ascii=False).encode()
    records = read_preferences(write_rows(tmp_path, row + b"\n" + GOOD_LINE))
    assert [row["prompt"] for row in records.rows] == [text, "Who?"]


def test_bom_crlf_and_blank_lines_are_fine(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + GOOD_LINE + b"\r\n\r\n" + GOOD_LINE + b"\r\n"
    records = read_preferences(write_rows(tmp_path, content))
    assert records.rows == [GOOD, GOOD] and records.lines == [1, 3]


def test_unknown_columns_are_ignored_and_known_ones_preserved(tmp_path: Path) -> None:
    row = {**GOOD, "source": [1, None], "level": "easy", "kind": "k", "seed": 7}
    records = read_preferences(write_rows(tmp_path, [row, {**GOOD, "seed": None}]))
    assert records.rows == [{**GOOD, "level": "easy", "kind": "k", "seed": 7}, GOOD]


def test_max_rows_stops_before_later_problems(tmp_path: Path) -> None:
    path = write_rows(tmp_path, GOOD_LINE + b"\n" + GOOD_LINE + b"\nbroken")
    records = read_preferences(path, max_rows=2)
    assert (records.num_rows, len(records.rows)) == (2, 2)
    assert records.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_rows_too_long_for_the_context(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [GOOD, {**GOOD, "chosen": "a b c d"}])

    def find_refusals(rows: Sequence[dict[str, Any]]) -> list[str]:
        return ["is too long" if " " in row["chosen"] else "" for row in rows]

    assert read_problem(path, check_rows=find_refusals) == (2, "", "is too long")
    records = read_preferences(path, on_bad_row="skip", check_rows=find_refusals)
    assert [row["chosen"] for row in records.rows] == [GOOD["chosen"]] and records.lines == [1]
    path = write_rows(
        tmp_path, [{**GOOD, "chosen": "a b"}, {"prompt": "p"}, {**GOOD, "chosen": "c d"}, GOOD]
    )
    records = read_preferences(path, on_bad_row="skip", check_rows=find_refusals)
    assert [problem.line for problem in records.problems] == [
        1,
        2,
        3,
    ] and records.num_skipped == 3  # in order
    with pytest.raises(RecordsError, match=r"data\[1\]: is too long"):
        read_preferences([GOOD, {**GOOD, "chosen": "a b"}], check_rows=find_refusals)


def test_demonstrations_come_as_messages(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "cell?"},
        {"role": "assistant", "content": "zoom 1 2"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "answer red"},
    ]
    path = write_rows(
        tmp_path, [{"messages": messages, "seed": 3}, {"prompt": "p", "completion": "c"}]
    )
    assert read_demonstrations(path).rows == [
        {"messages": messages, "seed": 3},
        {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]},
    ]


USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("row", "field", "reason"),
    [
        ({"x": 1}, "messages", "is missing, and so are prompt and completion"),
        ({"prompt": "p"}, "completion", "is missing"),
        ({"messages": "hi"}, "messages", "must be a list of objects, found text ('hi')"),
        ({"messages": []}, "messages", "is empty"),
        (
            {"messages": ["hi"]},
            "messages[0]",
            "must be an object with role and content, found text ('hi')",
        ),
        ({"messages": [USER, {"content": "a"}]}, "messages[1].role", "is missing"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "must be one of"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages[1].content",
            "found null",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "messages[1].content",
            "is empty",
        ),
        ({"messages": [USER]}, "messages[0].role", "must be assistant at the end, found 'user'"),
    ],
)
def test_bad_demonstrations(tmp_path: Path, row: dict[str, Any], field: str, reason: str) -> None:
    path = write_rows(tmp_path, [{"prompt": "p", "completion": "c"}, row])
    problem = read_problem(path, read_demonstrations)
    assert problem[:2] == (2, field) and reason in problem[2]


def test_questions(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "2\n#### 2", "final": "2"}
    path = write_rows(tmp_path, [row, {**row, "final": 2}])
    assert read_problem(path, read_questions) == (2, "final", "must be text, found a number (2)")
    assert read_questions(path, max_rows=1).rows == [row]


def write_parquet(folder: Path, columns: dict[str, Any], name: str = "rows.parquet") -> Path:
    pq.write_table(pa.table(columns), folder / name)
    return folder / name


def test_parquet_is_read_with_row_numbers(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path,
        {
            "prompt": ["a", "b", None, "d"],
            "chosen": ["1", "2", "3", "4"],
            "rejected": pa.array(["x", "2", "y", "z"]).dictionary_encode(),
            "score": [float("nan")] * 4,
        },
    )
    records = read_preferences(path, on_bad_row="skip")
    assert records.rows == [
        {"prompt": "a", "chosen": "1", "rejected": "x"},
        {"prompt": "d", "chosen": "4", "rejected": "z"},
    ]
    assert [(problem.line, problem.field) for problem in records.problems] == [
        (2, "chosen"),
        (3, "prompt"),
    ]
    assert records.problems[1].reason == "must be text, found null"
    assert records.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parquet_holds_messages_and_wrong_types(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]]
    records = read_demonstrations(write_parquet(tmp_path, {"messages": messages, "level": [None]}))
    assert records.rows == [{"messages": messages[0]}]
    path = write_parquet(
        tmp_path, {"prompt": ["a", "b"], "chosen": [float("nan"), 1.0], "rejected": ["x", "y"]}
    )
    with pytest.raises(
        RecordsError, match=r"rows.parquet:1: chosen: must be text, found a number \(nan\)"
    ):
        read_preferences(path)


def test_parquet_with_broken_text_loses_one_row(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe", b"good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    path = write_parquet(
        tmp_path, {"prompt": text, "chosen": ["1", "2", "3"], "rejected": ["x", "y", "z"]}
    )
    assert read_problem(path) == (2, "prompt", "is not UTF-8: byte 0 of the text is 0xff")


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not Parquet despite its name"):
        read_preferences(write_rows(tmp_path, GOOD_LINE, "rows.parquet"))
    content = write_parquet(tmp_path, {"prompt": ["a"] * 100}, "whole.parquet").read_bytes()
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read_preferences(write_rows(tmp_path, content[:-20], "cut.parquet"))
    with pytest.raises(DataError, match="none of the columns chosen, "):
        read_preferences(write_parquet(tmp_path, {"text": ["a"]}))
    with pytest.raises(DataError, match="holds no row"):
        read_preferences(write_parquet(tmp_path, {"prompt": pa.array([], pa.string())}))


def test_a_folder_stands_for_its_data_files_by_name(tmp_path):
    for name in (
        "b.jsonl",
        "a.parquet",
        "inner/c.jsonl",
        "notes.txt",
        ".hidden.jsonl",
        ".git/d.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in list_data_files(tmp_path)] == [
        "a.parquet",
        "b.jsonl",
        "inner/c.jsonl",
    ]
    assert list_data_files(tmp_path / "b.jsonl") == [tmp_path / "b.jsonl"]


def test_copies_and_contradictions_are_counted_and_named(tmp_path, caplog):
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "b", "rejected": "c"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "b", "rejected": "a"},
        {"prompt": "q", "chosen": "b", "rejected": "a"},
        {"prompt": "p", "completion": "x", "label": True},
        {"prompt": "p", "completion": "x", "label": False},
        {"prompt": "p", "completion": "y", "label": False},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    records = read_preferences(path)
    assert records.repeats.copies == [(2, 0)] and records.repeats.contradictions == [(3, 0), (6, 5)]
    assert (
        f"{path}: 1 of 8 rows are exact copies of earlier ones and count more than once"
        in caplog.text
    )
    assert "(line 4 and line 2)" in caplog.text
    assert (
        "2 of 8 rows contradict earlier ones" in caplog.text
        and "(line 5 and line 2; line 8 and line 7)" in caplog.text
    )
    caplog.clear()
    same = [
        {"prompt": "p", "completion": "x"},
        {"prompt": "p", "completion": "y"},
    ]  # two right answers are no conflict
    assert read_demonstrations(same).repeats.contradictions == [] and caplog.text == ""
    assert (
        read_demonstrations([*same, same[0]]).repeats.copies == [(2, 0)]
        and "(row 2 and row 0)" in caplog.text
    )


class CountedName(str):
    """Name that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedName.compared += 1
        return str.__eq__(self, other)


def test_a_duplicate_key_among_thousands_is_detected_in_one_pass():
    """Check 16,000 keys: comparing each with every other took 10.7 s."""
    names = [CountedName(f"key {number}") for number in range(2000)]
    CountedName.compared = 0
    with pytest.raises(BadRow, match="key 1999: appears twice in one object"):
        _build_unique_object([(name, 0) for name in [*names, CountedName("key 1999")]])
    assert CountedName.compared < 20 * len(names)
