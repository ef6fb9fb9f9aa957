"""Worked solutions in GSM8K format: extraction of final numbers, conversion of annotations to calculator calls."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from rl_core.data.reasoning import after_thought
from rl_core.environments.calculator import CALCULATOR, CalculatorError, calculate, evaluate
from rl_core.environments.tools import CallFormat, Toolset
from rl_core.types import Message, ToolCall

__all__ = ["Conversion", "convert_solution", "final_of_solution", "read_final", "same_number", "single_number"]

_ANNOTATION = re.compile(r"<<([^<>\n]*)>>")
_HASHES = re.compile(r"####(.*)")
_WORDED = re.compile(r"(?:^\s*\**A\s*:|\banswer\b)(.*)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+−]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")  # noqa: RUF001
_GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
_MAX_DIGITS = 40


def single_number(text: str) -> str | None:
    """The only number in a text, in plain digits: '$1,234.50 a year' -> '1234.5'; None if there is none or several.

    Currency signs, units, grouping commas and trailing zeros are ignored.
    """
    found = _NUMBER.findall(re.sub(r"[$€£¥]\s*", "", text))
    if len(found) != 1:
        return None
    number = found[0].rstrip(",").replace("−", "-").removeprefix("+")  # noqa: RUF001
    whole, _, decimals = number.lstrip("-").partition(".")
    if len(number) > _MAX_DIGITS or ("," in whole and not _GROUPED.fullmatch(whole)):
        return None
    whole = whole.replace(",", "").lstrip("0") or "0"
    decimals = decimals.rstrip("0")
    plain = f"{whole}.{decimals}" if decimals else whole
    return f"-{plain}" if number.startswith("-") and plain != "0" else plain


def same_number(answer: str, target: str) -> bool:
    """True if both texts hold exactly one number and the two are equal; several numbers are never right."""
    number = single_number(answer)
    return number is not None and number == single_number(target)


def final_of_solution(text: str) -> str | None:
    """Text after the last '####'; None without one."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def read_final(text: str) -> str | None:
    """Final answer of an action, in plain digits if it is one number; None without an answer.

    Read from the last '#### ...', else from the last line with 'A: ...' or '... answer is ...'.
    """
    text = after_thought(text)
    stated = final_of_solution(text)
    if stated is None:
        lines = [match[1] for match in map(_WORDED.search, text.split("\n")) if match]
        stated = lines[-1].strip(" *:=") if lines else None
    if stated is None:
        return None
    return single_number(stated) or stated


@dataclass(slots=True)
class Conversion:
    """A worked solution converted to a conversation with the calculator."""

    messages: list[Message]  # assistant, tool, assistant, ..., assistant
    # Annotations by outcome: exact and rounded ones became calls; wrong (value differs from the calculator's) and
    # unreadable ones are dropped, with the surrounding text unchanged.
    counts: Counter[str] = field(default_factory=Counter)


def convert_solution(answer: str, final: str, tools: Toolset, call_format: CallFormat) -> Conversion:
    """Conversion of each annotation <<expression=value>> into a call with the calculator's actual output.

    An annotation with a wrong value makes no call, since a demonstration must not contradict the tool's output. The
    last message ends in '#### final'.
    """
    conversion = Conversion(messages=[])
    text = ""  # current assistant message
    place = 0
    for match in _ANNOTATION.finditer(answer):
        text += answer[place : match.start()]
        place = match.end()
        expression, _, value = match[1].rpartition("=")
        verdict = _judge(expression, value)
        conversion.counts[verdict] += 1
        if verdict in ("exact", "rounded"):
            call = tools.format(ToolCall(CALCULATOR.name, {"expression": expression.strip()}), call_format)
            conversion.messages += [
                Message(role="assistant", content=f"{text.strip()}\n{call}".lstrip()),
                Message(role="tool", content=calculate(expression)),
            ]
            text = ""
    text = _HASHES.sub("", text + answer[place:]).strip()
    conversion.messages.append(Message(role="assistant", content=f"{text}\n#### {final}".lstrip()))
    return conversion


def _judge(expression: str, value: str) -> str:
    """Comparison of an annotation's value with the calculator's result."""
    stated = single_number(value)
    try:
        computed = evaluate(expression)
        calculate(expression)  # a result too long to display cannot be an observation
    except CalculatorError:
        return "unreadable"
    if stated is None:
        return "unreadable"
    difference = abs(computed - Fraction(stated))
    if difference == 0:
        return "exact"
    decimals = len(value.strip().partition(".")[2])
    return "rounded" if difference < Fraction(1, 10**decimals) else "wrong"
