"""Calculator on policy output, and worked solutions in GSM8K format that use it.

The calculator is exact: a dedicated parser, never `eval`, with limits on size, depth and digits.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "x" | "/" | "//" | ...) signed)*    "//" rounds down; 2(3+4) is a product too
    signed  = ("-" | "+") signed | power
    power   = percent [("^" | "**") signed]
    percent = value ["%"]                                  20% is 0.2
    value   = number | "(" sum ")"

Worked solutions: extraction of final numbers, and conversion of annotations to calculator calls.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from rl_core.data.model_text import strip_thought
from rl_core.environments.tools import CallFormat, Tool, Toolset
from rl_core.types import Message, ToolCall

MAX_CHARS = 200
MAX_DEPTH = 30  # nested brackets, signs and powers
MAX_BITS = 512  # of a numerator or denominator after a power; other operations grow at most linearly with the input
MAX_DIGITS = 30  # digits before the point of a result
EXACT_DECIMALS = 12  # a decimal expansion of at most this many digits is shown in full,
# Any other is rounded to this many digits (after the leading zeros of a number below 0.1).
DECIMALS = 6
MAX_NUMBER_LENGTH = 40  # characters of a number in an answer

_TOKEN = re.compile(r"\s*([0-9][0-9,]*\.?[0-9]*|\.[0-9]+|\*\*|//|[-+*/^()%x×·÷−])", re.ASCII)  # noqa: RUF001
_GROUPED_TOKEN = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")
_OPERATOR_SYNONYMS = {"x": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "**": "^"}  # noqa: RUF001
_ANNOTATION = re.compile(r"<<([^<>\n]*)>>")
_HASHES = re.compile(r"####(.*)")
_ANSWER_PHRASE = re.compile(r"(?:^\s*\**A\s*:|\banswer\b)(.*)", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"[-+−]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")  # noqa: RUF001
_GROUPED_DIGITS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")


class CalculatorError(ValueError):
    """Invalid expression, or one beyond the limits; the message is shown to the policy."""


def calculate_text(expression: str) -> str:
    """Return the value of an expression as text: '24', '0.2', '0.333333'. Raises: CalculatorError."""
    return format_number(evaluate_expression(expression))


def evaluate_expression(expression: str) -> Fraction:
    """Return the exact value of an expression. Raises: CalculatorError."""
    if len(expression) > MAX_CHARS:
        raise CalculatorError(
            f"the expression has {len(expression)} characters; at most {MAX_CHARS} are read"
        )
    parser = _ExpressionParser(_tokenize_expression(expression))
    value = parser.parse_sum(0)
    if parser.next_token is not None:
        raise CalculatorError(f"an operator is missing before '{parser.next_token}'")
    return value


def format_number(value: Fraction) -> str:
    """Format a number without exponent or trailing zeros; long expansions are rounded half to even.

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


def _tokenize_expression(expression: str) -> list[str]:
    text = expression.replace("$", "").strip().removesuffix("=").rstrip()
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalculatorError(
                f"'{text[position:].strip()[0]}' is no arithmetic; use numbers and + - * / ( )"
            )
        tokens.append(_OPERATOR_SYNONYMS.get(match[1], match[1]))
        position = match.end()
    if not tokens:
        raise CalculatorError("the expression is empty")
    return tokens


class _ExpressionParser:
    """Recursive-descent parser; each rule takes the nesting depth and consumes its tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next_token(self) -> str | None:
        """Next token; None at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take_token(self) -> str:
        token = self.next_token
        if token is None:
            raise CalculatorError("the expression ends too early")
        self._position += 1
        return token

    def parse_sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"more than {MAX_DEPTH} levels of brackets or signs")
        value = self._parse_product(depth)
        while self.next_token in ("+", "-"):
            operator = self._take_token()
            term = self._parse_product(depth)
            value = value + term if operator == "+" else value - term
        return value

    def _parse_product(self, depth: int) -> Fraction:
        value = self._parse_signed(depth)
        while self.next_token in ("*", "/", "//", "("):
            operator = "*" if self.next_token == "(" else self._take_token()
            other = self._parse_signed(depth)
            value = value * other if operator == "*" else _divide_exactly(value, other)
            if operator == "//":
                value = Fraction(math.floor(value))
        return value

    def _parse_signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"more than {MAX_DEPTH} levels of brackets or signs")
        if self.next_token in ("+", "-"):
            sign = self._take_token()
            value = self._parse_signed(depth + 1)
            return value if sign == "+" else -value
        value = self._parse_value(depth)
        if self.next_token == "%":
            self._take_token()
            value /= 100
        if self.next_token == "^":
            self._take_token()
            value = _raise_to_power(value, self._parse_signed(depth + 1))
        return value

    def _parse_value(self, depth: int) -> Fraction:
        token = self._take_token()
        if token == "(":
            value = self.parse_sum(depth + 1)
            if self.next_token != ")":
                raise CalculatorError("a bracket is not closed")
            self._take_token()
            return value
        if token[0].isdigit() or token[0] == ".":
            return _parse_number_token(token)
        raise CalculatorError(f"a number is missing before '{token}'")


def _parse_number_token(token: str) -> Fraction:
    if "," in token:
        if not _GROUPED_TOKEN.fullmatch(token):
            raise CalculatorError(f"'{token}' is not a number")
        token = token.replace(",", "")
    return Fraction(token.removesuffix("."))


def _divide_exactly(value: Fraction, other: Fraction) -> Fraction:
    if other == 0:
        raise CalculatorError("division by zero")
    return value / other


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError("only whole exponents are understood")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base == -1:  # these three bases allow any exponent and avoid computing huge ones
        return base ** int(exponent % 2)
    if base in (0, 1):
        return base if exponent else Fraction(1)
    if bits * abs(exponent) > MAX_BITS:
        raise CalculatorError("the power is too large")
    return base ** int(exponent)


CALCULATOR = Tool(
    name="calculator",
    description="the value of an arithmetic expression",
    parameters={"expression": str},
    function=calculate_text,
    max_output_chars=100,
)


def parse_single_number(text: str) -> str | None:
    """Return the only number in a text, in plain digits ('$1,234.50 a year' -> '1234.5'); None for no or several
    numbers.

    Currency signs, units, grouping commas and trailing zeros are ignored.
    """
    numbers = _NUMBER_IN_TEXT.findall(re.sub(r"[$€£¥]\s*", "", text))
    if len(numbers) != 1:
        return None
    number = numbers[0].rstrip(",").replace("−", "-").removeprefix("+")  # noqa: RUF001
    integer, _, decimals = number.lstrip("-").partition(".")
    if len(number) > MAX_NUMBER_LENGTH:
        return None
    if "," in integer and not _GROUPED_DIGITS.fullmatch(integer):
        return None
    integer = integer.replace(",", "").lstrip("0") or "0"
    decimals = decimals.rstrip("0")
    digits = f"{integer}.{decimals}" if decimals else integer
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits


def is_same_number(answer: str, target: str) -> bool:
    """Return whether both texts hold exactly one number and the two are equal; several numbers are never right."""
    number = parse_single_number(answer)
    return number is not None and number == parse_single_number(target)


def extract_solution_final(text: str) -> str | None:
    """Return the text after the last '####'; None without one."""
    finals = _HASHES.findall(text)
    return finals[-1].strip() if finals else None


def extract_final_answer(text: str) -> str | None:
    """Return the final answer of an action, in plain digits if it is one number; None without an answer.

    Read from the last '#### ...', else from the last line with 'A: ...' or '... answer is ...'.
    """
    text = strip_thought(text)
    stated = extract_solution_final(text)
    if stated is None:
        lines = [match[1] for match in map(_ANSWER_PHRASE.search, text.split("\n")) if match]
        stated = lines[-1].strip(" *:=") if lines else None
    if stated is None:
        return None
    return parse_single_number(stated) or stated


@dataclass(slots=True)
class ConvertedSolution:
    """A worked solution converted to a conversation with the calculator."""

    messages: list[Message]  # assistant, tool, assistant, ..., assistant
    # Annotations by outcome: exact and rounded ones became calls; wrong (value differs from the calculator's) and
    # unreadable ones are dropped, with the surrounding text unchanged.
    counts: Counter[str] = field(default_factory=Counter)


def convert_solution(
    answer: str, final: str, tools: Toolset, call_format: CallFormat
) -> ConvertedSolution:
    """Convert each annotation <<expression=value>> into a call with the calculator's actual output.

    An annotation with a wrong value makes no call, since a demonstration must not contradict the tool's output. The
    last message ends in '#### final'.
    """
    conversion = ConvertedSolution(messages=[])
    text = ""  # current assistant message
    position = 0
    for match in _ANNOTATION.finditer(answer):
        text += answer[position : match.start()]
        position = match.end()
        expression, _, value = match[1].rpartition("=")
        verdict = _check_annotation(expression, value)
        conversion.counts[verdict] += 1
        if verdict in ("exact", "rounded"):
            call = ToolCall(CALCULATOR.name, {"expression": expression.strip()})
            call_text = tools.format(call, call_format)
            conversion.messages += [
                Message(role="assistant", content=f"{text.strip()}\n{call_text}".lstrip()),
                Message(role="tool", content=calculate_text(expression)),
            ]
            text = ""
    text = _HASHES.sub("", text + answer[position:]).strip()
    conversion.messages.append(Message(role="assistant", content=f"{text}\n#### {final}".lstrip()))
    return conversion


def _check_annotation(expression: str, value: str) -> str:
    """Compare an annotation's value with the calculator's result."""
    stated = parse_single_number(value)
    try:
        computed = evaluate_expression(expression)
        calculate_text(expression)  # a result too long to display cannot be an observation
    except CalculatorError:
        return "unreadable"
    if stated is None:
        return "unreadable"
    difference = abs(computed - Fraction(stated))
    if difference == 0:
        return "exact"
    decimals = len(value.strip().partition(".")[2])
    return "rounded" if difference < Fraction(1, 10**decimals) else "wrong"
