"""Exact values, plain digits, and no way to make it slow or to run anything."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.environments.calculator import (
    CALCULATOR,
    CalculatorError,
    calculate_text,
    evaluate_expression,
    format_number,
)
from rl_core.environments.tools import Toolset
from rl_core.types import ToolCall


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", "24"),
        ("0.2*50", "10"),
        ("100-50-30-15", "5"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("2-3-4", "-5"),
        ("100/10/5", "2"),
        ("0.1+0.2", "0.3"),
        (".5*6", "3"),
        ("5.", "5"),
        ("333200.00", "333200"),
        ("1/3", "0.333333"),
        ("2/3", "0.666667"),
        ("-2/3", "-0.666667"),
        ("1/30000", "0.0000333333"),
        ("1/1024", "0.0009765625"),
        ("1/3-1/3", "0"),
        ("560//10", "56"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("20%*50", "10"),
        ("1,250 x 2", "2500"),
        ("$5 \u00d7 3 =", "15"),
        ("6 ÷ 4", "1.5"),
        ("2(3+4)", "14"),
        ("(1+1)(2+2)", "8"),
        ("5 \u2212 8", "-3"),
        ("--5", "5"),
        ("+5", "5"),
        ("-2^2", "-4"),
        ("(-2)^2", "4"),
        ("2^3^2", "512"),
        ("2**-1", "0.5"),
        ("(-1)^99999999999999999999", "-1"),
        ("1^99999999999999999999", "1"),
        ("0^0", "1"),
        ("10^29", "1" + "0" * 29),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate_text(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "empty"),
        ("   =", "empty"),
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("5/(2-2)", "division by zero"),
        ("0^-1", "division by zero"),
        ("1 2", "operator is missing before '2'"),
        ("7%3", "operator is missing before '3'"),
        ("3)", "operator is missing before '\\)'"),
        ("(3", "bracket is not closed"),
        ("3+", "ends too early"),
        ("*3", "number is missing before '\\*'"),
        ("()", "number is missing before '\\)'"),
        ("1,2", "'1,2' is not a number"),
        ("1e5", "'e' is no arithmetic"),
        ("1=1", "'=' is no arithmetic"),
        ("٣+1", "is no arithmetic"),
        ("__import__('os')", "'_' is no arithmetic"),
        ("2^0.5", "whole exponents"),
        ("9^9^9", "too large"),
        ("(2^500)^2", "too large"),
        ("2^-99999999999", "too large"),
        ("10^30", "more than 30 digits"),
        ("1" * 201, "201 characters"),
        ("(" * 31 + "1" + ")" * 31, "more than 30 levels"),
        ("-" * 31 + "1", "more than 30 levels"),
        ("+" * 31 + "1", "more than 30 levels"),
        ("2^" * 40 + "1", "more than 30 levels"),
    ],
)
def test_errors_say_what_is_wrong(expression: str, words: str) -> None:
    with pytest.raises(CalculatorError, match=words):
        calculate_text(expression)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.,+-*/()^% x$", max_size=60))
def test_any_text_gives_a_short_number_or_a_calculator_error(text: str) -> None:
    try:
        value = calculate_text(text)
    except CalculatorError:
        return
    assert len(value) < 100 and math.isfinite(float(value))


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_against_python(a: int, b: int, c: int) -> None:
    assert evaluate_expression(f"({a}+{b})*{a}-{b}/{c}") == (a + b) * a - Fraction(b, c)
    assert format_number(Fraction(a)) == str(a)


@settings(max_examples=100, deadline=None)
@given(st.fractions(max_denominator=10**6))
def test_what_is_shown_is_close(value: Fraction) -> None:
    if abs(value) < 10**20:
        assert abs(Fraction(format_number(value)) - value) <= Fraction(1, 2 * 10**6)


def test_as_a_tool() -> None:
    tools = Toolset([CALCULATOR])
    call = tools.parse("so that makes\ncalculator (3 + 4) * 2")
    assert call == ToolCall("calculator", {"expression": "(3 + 4) * 2"})
    assert tools.run(call) == ("14", False)
    assert tools.run(ToolCall("calculator", {"expression": "1/0"})) == (
        "error: division by zero",
        True,
    )
