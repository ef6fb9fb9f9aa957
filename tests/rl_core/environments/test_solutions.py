"""Reading final answers leniently in form and strictly in content; turning annotations into calls."""

from __future__ import annotations

import pytest

from rl_core.environments.calculator import (
    CALCULATOR,
    convert_solution,
    extract_final_answer,
    is_same_number,
    parse_single_number,
)
from rl_core.environments.tools import Toolset

TOOLS = Toolset([CALCULATOR])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("26", "26"),
        ("$26", "26"),
        ("-$26", "-26"),
        ("26.0", "26"),
        ("26.", "26"),
        ("26.50", "26.5"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("007", "7"),
        ("-0", "0"),
        ("+26", "26"),
        ("\u221226", "-26"),
        ("1,234,567.80 dollars", "1234567.8"),
        ("26, because", "26"),
        ("26%", "26"),
        ("26km", "26"),
        ("€ 5 a day", "5"),
        ("none", None),
        ("", None),
        ("26 or 27", None),
        ("26 = 26", None),
        ("1,2", None),
        ("12,34", None),
        ("3/4", None),
        ("5-6", None),
        ("1e3", None),
        ("1.2.3", None),
        ("9" * 41, None),
    ],
)
def test_single_number(text: str, number: str | None) -> None:
    assert parse_single_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 26", "26"),
        ("####26 clips", "26"),
        ("in May. #### $1,026.00\nDone in 3 steps.", "1026"),
        ("A: 26", "26"),
        ("**A:** 26", "26"),
        ("answer 26", "26"),
        ("The answer is 26.", "26"),
        ("**Answer:** 26 apples", "26"),
        ("Final answer = -26", "-26"),
        ("<think>answer 5</think>answer 26", "26"),
        ("#### 5\n#### 26", "26"),
        ("#### 26\nthe answer was checked 3 times", "26"),
        ("answer 5\nanswer 26", "26"),
        ("#### 26 or 27", "26 or 27"),
        ("#### ", ""),
        ("24 + 2 = 26", None),
        ("A 26", None),
        ("", None),
    ],
)
def test_read_final(text: str, answer: str | None) -> None:
    assert extract_final_answer(text) == answer


def test_same_number_is_exact() -> None:
    assert (
        is_same_number("26.0", "26")
        and is_same_number("1,000", "1000")
        and is_same_number("$7", "7")
    )
    assert not is_same_number("26.01", "26") and not is_same_number("-26", "26")
    assert not is_same_number("26 27", "26") and not is_same_number("x", "x")


def test_conversion_of_a_real_solution() -> None:
    answer = (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
        "Natalia sold 48+24 = $<<48+24=72>>72 clips altogether.\n#### 1,072"
    )
    conversion = convert_solution(answer, "1072", TOOLS, "line")
    assert [(message["role"], message["content"]) for message in conversion.messages] == [
        ("assistant", "Natalia sold 48/2 =\ncalculator 48/2"),
        ("tool", "24"),
        ("assistant", "24 clips in May.\nNatalia sold 48+24 = $\ncalculator 48+24"),
        ("tool", "72"),
        ("assistant", "72 clips altogether.\n#### 1072"),
    ]
    assert conversion.counts == {"exact": 2}


def test_conversion_to_json_calls() -> None:
    messages = convert_solution("It is <<6*7=42>>42.\n#### 42", "42", TOOLS, "hermes").messages
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    assert messages[0]["content"] == f"It is\n{call}"
    assert messages[1]["content"] == "42"


def test_solutions_without_annotations_are_one_message() -> None:
    conversion = convert_solution("Just count.\n#### 3", "3", TOOLS, "line")
    assert conversion.messages == [{"role": "assistant", "content": "Just count.\n#### 3"}]
    assert not conversion.counts
    assert convert_solution("#### 3", "3", TOOLS, "line").messages[0]["content"] == "#### 3"


def test_an_annotation_at_the_very_start() -> None:
    messages = convert_solution("<<1+1=2>><<2+2=4>>4 it is\n#### 4", "4", TOOLS, "line").messages
    assert [message["content"] for message in messages] == [
        "calculator 1+1",
        "2",
        "calculator 2+2",
        "4",
        "4 it is\n#### 4",
    ]


@pytest.mark.parametrize(
    ("annotation", "verdict", "observation"),
    [
        ("1/3=.33", "rounded", "0.333333"),  # cut, as people do
        ("2/3=0.67", "rounded", "0.666667"),
        ("7/2=3", "rounded", "3.5"),
        ("2/3=0.65", "wrong", None),
        ("2+2=5", "wrong", None),
        ("two+2=4", "unreadable", None),
        ("2+2", "unreadable", None),
        ("2+2=four", "unreadable", None),
        ("10^31=10", "unreadable", None),
    ],
)
def test_annotations_that_differ_from_the_calculator(
    annotation: str, verdict: str, observation: str | None
) -> None:
    conversion = convert_solution(f"So <<{annotation}>>it is.\n#### 1", "1", TOOLS, "line")
    assert conversion.counts == {verdict: 1}
    if observation is None:
        assert [message["content"] for message in conversion.messages] == ["So it is.\n#### 1"]
    else:
        assert conversion.messages[1]["content"] == observation
