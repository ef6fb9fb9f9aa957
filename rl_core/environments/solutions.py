"""Worked solutions in the style of GSM8K: their final numbers, and their annotations as calculator calls."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

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
    """The one number in a text, in plain digits: '$1,234.50 a year' -> '1234.5'; None where there is none or several.

    Currency signs, units, grouping commas and trailing zeros are passed over.
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
    """Whether both texts hold one number, and the same. An answer that lists several numbers is never right."""
    number = single_number(answer)
    return number is not None and number == single_number(target)


def final_of_solution(text: str) -> str | None:
    """What follows the last '####'; None where there is none."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def read_final(text: str) -> str | None:
    """The final answer that an action states, in plain digits where it is one number; None where it states none.

    Read from the last '#### ...', else from the last line with 'A: ...' or '... answer is ...'.
    """
    text = text.rpartition("</think>")[2]
    stated = final_of_solution(text)
    if stated is None:
        lines = [match[1] for match in map(_WORDED.search, text.split("\n")) if match]
        stated = lines[-1].strip(" *:=") if lines else None
    if stated is None:
        return None
    return single_number(stated) or stated


@dataclass(slots=True)
class Conversion:
    """A worked solution as a conversation with the calculator."""

    messages: list[Message]  # assistant, tool, assistant, ..., assistant
    # One count per annotation: exact and rounded ones became calls; wrong (the text has another value than the
    # calculator) and unreadable ones are left out, and the text around them stays as it is.
    counts: Counter[str] = field(default_factory=Counter)


def convert_solution(answer: str, final: str, tools: Toolset, call_format: CallFormat) -> Conversion:
    """Turn each annotation <<expression=value>> into a call whose observation is what the calculator really says.

    A demonstration must not teach to write another number than the tool gave, so an annotation with a wrong value makes
    no call. The last message ends in '#### final'.
    """
    conversion = Conversion(messages=[])
    text = ""  # of the assistant message that is being written
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
    """How the value in an annotation compares with the calculator's."""
    stated = single_number(value)
    try:
        computed = evaluate(expression)
        calculate(expression)  # a value too long to be shown is no observation
    except CalculatorError:
        return "unreadable"
    if stated is None:
        return "unreadable"
    difference = abs(computed - Fraction(stated))
    if difference == 0:
        return "exact"
    decimals = len(value.strip().partition(".")[2])
    return "rounded" if difference < Fraction(1, 10**decimals) else "wrong"
