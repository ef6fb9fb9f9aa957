"""Exact arithmetic on policy output: a dedicated parser, never `eval`, with limits on size, depth and digits.

sum     = product (("+" | "-") product)*
product = signed (("*" | "x" | "/" | "//" | ...) signed)*    "//" rounds down; 2(3+4) is a product too
signed  = ("-" | "+") signed | power
power   = percent [("^" | "**") signed]
percent = value ["%"]                                  20% is 0.2
value   = number | "(" sum ")"
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from rl_core.environments.tools import Tool

__all__ = ["CALCULATOR", "CalculatorError", "calculate", "evaluate", "format_number"]

MAX_CHARS = 200
MAX_DEPTH = 30  # nested brackets, signs and powers
MAX_BITS = 512  # of a numerator or denominator after a power; other operations grow at most linearly with the input
MAX_DIGITS = 30  # digits before the point of a result
EXACT_DECIMALS = 12  # a decimal expansion of at most this many digits is shown in full,
DECIMALS = 6  # any other is rounded to this many digits (after the leading zeros of a number below 0.1)

_TOKEN = re.compile(r"\s*([0-9][0-9,]*\.?[0-9]*|\.[0-9]+|\*\*|//|[-+*/^()%x×·÷−])", re.ASCII)  # noqa: RUF001
_GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")
_SAME_AS = {"x": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "**": "^"}  # noqa: RUF001


class CalculatorError(ValueError):
    """Invalid expression, or one beyond the limits; the message is shown to the policy."""


def calculate(expression: str) -> str:
    """Value of an expression as text: '24', '0.2', '0.333333'. Raises: CalculatorError."""
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Fraction:
    """Exact value of an expression. Raises: CalculatorError."""
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are read")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.next is not None:
        raise CalculatorError(f"an operator is missing before '{parser.next}'")
    return value


def format_number(value: Fraction) -> str:
    """Decimal notation without exponent or trailing zeros; long expansions are rounded half to even.

    Raises: CalculatorError above MAX_DIGITS digits.
    """
    size = abs(value)
    if size >= 10**MAX_DIGITS:
        raise CalculatorError(f"the result has more than {MAX_DIGITS} digits")
    ends = 10**EXACT_DECIMALS % value.denominator == 0
    decimals = EXACT_DECIMALS if ends else DECIMALS
    while not ends and size < Fraction(1, 10) and decimals < 2 * MAX_DIGITS:
        size *= 10
        decimals += 1
    scaled = round(value * 10**decimals)
    digits = str(abs(scaled)).rjust(decimals + 1, "0")
    text = f"{digits[:-decimals]}.{digits[-decimals:]}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text


def _tokens(expression: str) -> list[str]:
    text = expression.replace("$", "").strip().removesuffix("=").rstrip()
    tokens: list[str] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise CalculatorError(f"'{text[place:].strip()[0]}' is no arithmetic; use numbers and + - * / ( )")
        tokens.append(_SAME_AS.get(match[1], match[1]))
        place = match.end()
    if not tokens:
        raise CalculatorError("the expression is empty")
    return tokens


class _Parser:
    """Recursive-descent parser; each rule takes the nesting depth and consumes its tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def next(self) -> str | None:
        """Next token; None at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise CalculatorError("the expression ends too early")
        self._place += 1
        return token

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"more than {MAX_DEPTH} levels of brackets or signs")
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = value + self._product(depth) if self._take() == "+" else value - self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self.next in ("*", "/", "//", "("):
            operator = "*" if self.next == "(" else self._take()
            other = self._signed(depth)
            value = value * other if operator == "*" else _divide(value, other)
            if operator == "//":
                value = Fraction(math.floor(value))
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"more than {MAX_DEPTH} levels of brackets or signs")
        if self.next in ("+", "-"):
            return self._signed(depth + 1) if self._take() == "+" else -self._signed(depth + 1)
        value = self._value(depth)
        if self.next == "%":
            self._take()
            value /= 100
        if self.next == "^":
            self._take()
            value = _power(value, self._signed(depth + 1))
        return value

    def _value(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum(depth + 1)
            if self.next != ")":
                raise CalculatorError("a bracket is not closed")
            self._take()
            return value
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        raise CalculatorError(f"a number is missing before '{token}'")


def _number(token: str) -> Fraction:
    if "," in token:
        if not _GROUPED.fullmatch(token):
            raise CalculatorError(f"'{token}' is not a number")
        token = token.replace(",", "")
    return Fraction(token.removesuffix("."))


def _divide(value: Fraction, other: Fraction) -> Fraction:
    if other == 0:
        raise CalculatorError("division by zero")
    return value / other


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("only whole exponents are understood")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (-1, 0, 1) and bits * abs(exponent) > MAX_BITS:
        raise CalculatorError("the power is too large")
    if base in (-1, 0, 1):  # avoids computing huge exponents
        return base ** int(exponent % 2) if base == -1 else (base if exponent else Fraction(1))
    return base ** int(exponent)


CALCULATOR = Tool(
    name="calculator",
    description="the value of an arithmetic expression",
    parameters={"expression": str},
    function=calculate,
    max_output_chars=100,
)
