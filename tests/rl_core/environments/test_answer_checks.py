"""Answer verifiers on cases worked by hand: extraction, equality, and what a program must not do."""

import contextlib
import os
from pathlib import Path

import pytest
from helpers.waiting import wait_for

from rl_core.data.model_text import TimeLimitedPattern
from rl_core.environments.answer_checks import build_answer_check, extract_answer
from rl_core.errors import DataError, SettingsError


@pytest.mark.parametrize(
    ("text", "find", "expected"),
    [
        ("<think>5</think>so <answer> a </answer> and <answer>b</answer>", "auto", "b"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", "auto", r"\frac{1}{2}"),
        ("sum\n#### 42", "auto", "42"),
        ("just this ", "auto", "just this"),
        ("<think>never closed <answer>3</answer>", "auto", ""),
        ("one\ntwo\n", "last_line", "two"),
        ("no tag", "tag", ""),
        (r"\boxed{open", "boxed", ""),
        ("3 apples, 4 pears", "last_number", "4"),
        ("", "last_line", ""),
    ],
)
def test_where_an_answer_stands(text, find, expected):
    assert extract_answer(text, find) == expected


@pytest.mark.parametrize(
    ("name", "options", "text", "target", "expected"),
    [
        ("exact", {}, "<answer>New  York</answer>", "new york", 1.0),
        ("exact", {"ignore_case": False}, "<answer>New York</answer>", "new york", 0.0),
        ("exact", {}, "It is New York", "new york", 0.0),
        ("exact", {"find": "last_line"}, "It is\nnew york", "New York", 1.0),
        ("numeric", {}, "so 3, thus 1,234.50 dollars", "$1234.5", 1.0),
        ("numeric", {}, "#### 41", "some solution\n#### 42", 0.0),
        ("numeric", {}, "2e3", "2000", 1.0),
        ("numeric", {}, "−5", "-5.0", 1.0),  # noqa: RUF001
        ("numeric", {}, "none", "5", 0.0),
        ("numeric", {"tolerance": 0.01}, "100.9", "100", 1.0),
        ("numeric", {"tolerance": 0.01}, "101.1", "100", 0.0),
        ("regex", {"pattern": r"^\d+$"}, "12", "", 1.0),
        ("regex", {"pattern": "a.c"}, "x a\nc x", "", 1.0),
        ("regex", {"pattern": "a.c", "whole": True}, "x a\nc x", "", 0.0),
        ("regex", {}, "abc", "b+", 1.0),
    ],
)
def test_what_counts_as_equal(name, options, text, target, expected):
    assert build_answer_check(name, options).score_action(text, target, {}) == expected


def test_a_column_takes_the_place_of_the_target():
    check = build_answer_check("exact", {"column": "gold"})
    assert check.score_action("x", "y", {"gold": "x"}) == 1.0
    check.check_columns(("prompt", "gold"))
    with pytest.raises(
        SettingsError,
        match="reads the column 'gold', but the rows have prompt, golden; did you mean",
    ):
        check.check_columns(("prompt", "golden"))


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("exact", "", "has no target to compare with"),
        ("numeric", "many", "'many' is not one number"),
        ("regex", "a(b", "'a[(]b' is not a regular expression"),
    ],
)
def test_data_that_cannot_be_used_is_no_zero(name, target, message):
    with pytest.raises(DataError, match=message):
        build_answer_check(name).score_action("1", target, {"prompt": "p"})


def test_a_pattern_that_blows_up_does_not_match(monkeypatch):
    monkeypatch.setattr(TimeLimitedPattern.__init__, "__defaults__", (0.05,))
    check = build_answer_check("regex", {"pattern": "(a|a)*b$", "whole": True})
    assert check.score_action("a" * 60 + "bc", "", {}) == 0.0
    assert check.counts == {"timed_out": 1}


@pytest.fixture(scope="module")
def code():
    return build_answer_check("code", {"timeout_s": 5.0, "memory_gib": 0.5})


FORGER = """
import os
for n in range(3, 30):
    try: os.write(n, b'["", [true, true]]')
    except OSError: pass
os._exit(0)
"""
SHOUTER = "import sys\nprint(sys.stdin.buffer.read().decode().upper() + '  ')\nsys.exit()"
ADDS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("def add(a, b):\n    return a + b", ADDS, 1.0),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", ADDS, 1.0),
        ("def add(a, b):\n    return 3", ADDS, 0.0),
        ("def add(a, b) return a", ADDS, 0.0),
        ("import os\nos._exit(0)", ADDS, 0.0),
        ("raise SystemExit(0)", ADDS, 0.0),
        ("import __main__\n__main__.report([True, True])", ADDS, 0.0),
        (FORGER, ADDS, 0.0),
        ("x = [0] * 10**9", "assert len(x)", 0.0),  # beyond the memory
        ("print(int(input()) + int(input()))", [{"input": "1\n2\n", "output": "3"}], 1.0),
        (SHOUTER, [{"input": "a", "output": "A\n"}], 1.0),
        ("print(4)\nraise ValueError", [{"input": "", "output": "4"}], 0.0),
        ("while True: print('flood' * 1000)", [{"input": "", "output": "4"}], 0.0),
    ],
)
def test_programs_and_their_tests(code, program, tests, expected):
    assert code.score_action(program, "", {"tests": tests}) == expected


def is_running(marker):
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in place.read_bytes().split(b"\0"):
                return True
    return False


def test_partial_credit_and_time():
    """A program beyond its time is killed with what it started, which a sleep of ten minutes would outlive."""
    check = build_answer_check("code", {"timeout_s": 2.0, "partial": True})
    assert check.score_action("def add(a, b):\n    return 3", "", {"tests": ADDS}) == 0.5
    marker = f"600.{os.getpid()}"
    program = f"import subprocess\nsubprocess.Popen(['sleep', '{marker}'])\nwhile True: pass"
    assert check.score_action(program, "", {"tests": ADDS}) == 0.0
    assert check.counts == {"timed_out": 1}  # so the sleep was started
    wait_for(lambda: not is_running(marker), "the end of what the program started")
    assert (
        check.score_action("def add(a, b):\n    return a + b", "", {"tests": ADDS}) == 1.0
    )  # the child continues


def test_a_row_without_tests_is_no_zero(code):
    with pytest.raises(
        DataError,
        match=r"column .tests. of the row of .p. cannot be used: they must be Python statements",
    ):
        code.score_action("x", "", {"prompt": "p", "tests": [1]})


def test_names_and_options_are_checked():
    with pytest.raises(SettingsError, match="no verifier 'numerc'; did you mean 'numeric'"):
        build_answer_check("numerc")
    with pytest.raises(SettingsError, match="tolerence: NumericSettings has no such setting"):
        build_answer_check("numeric", {"tolerence": 1})
