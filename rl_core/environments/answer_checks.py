"""Verifiers of answers (exact, numeric, regex, math, code) for environments over rows and for rewards.

A verifier takes the text of an action, the right answer as text and the episode's data row, and returns a number from
0 to 1. It raises on unusable data (a numeric target without a number), never because of what a policy wrote.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from rl_core.data.files import describe_value, list_field_names, read_field
from rl_core.data.model_text import TimeLimitedPattern, strip_thought
from rl_core.environments.calculator import extract_solution_final
from rl_core.environments.code_tests import ProgramTests, read_program_tests
from rl_core.environments.number_values import (
    FoundValue,
    find_last_value,
    find_marked_value,
    read_value,
)
from rl_core.environments.optional_packages import require_package
from rl_core.environments.subprocess_host import ChildFailed, ChildPool, ChildTimeout
from rl_core.errors import DataError, SettingsError, suggest_name
from rl_core.settings import (
    CodeSettings,
    ExactSettings,
    MathSettings,
    NumericSettings,
    RegexSettings,
)
from rl_core.settings.rewards import AnswerLocation

_FENCE = "```"
MAX_PATTERNS = 1024  # compiled patterns kept in memory


class AnswerCheck(ABC):
    """One verifier. Thread-safe."""

    name: ClassVar[str]
    blocking: ClassVar[bool] = False  # True = waits for a child process

    def __init__(self, column: str | None) -> None:
        self.column = column  # None = the environment's target
        self.counts: dict[str, int] = {}  # events since the counts were last cleared

    @abstractmethod
    def score_action(self, text: str, target: str, row: Mapping[str, Any]) -> float:
        """Return the score of an action, 0 to 1. Raises: DataError for an unusable target or row."""

    def check_columns(self, columns: tuple[str, ...] | None) -> None:
        """Raise SettingsError if no row has the column."""
        if columns is None or self.column is None or self.column in columns:
            return
        if self.column.partition(".")[0] in columns:  # a field; each row is looked at when scored
            return
        raise SettingsError(
            f"verifier '{self.name}' reads the column '{self.column}', but the rows have {', '.join(columns)}; "
            f"{suggest_name(self.column, columns)}"
            if columns
            else f"verifier '{self.name}' reads the column '{self.column}', but the environment's episodes are no rows"
        )

    def check_row(self, target: str, row: Mapping[str, Any]) -> None:
        """Check a target and its row before any answer. Raises: DataError for what `score_action` would refuse."""
        self._read_target(target, row)

    @property
    def needs_target(self) -> bool:
        """True = compares with the environment's target."""
        return self.column is None

    def _count_event(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _read_target(self, target: str, row: Mapping[str, Any]) -> str:
        value = target if self.column is None else read_field(row, self.column)
        if isinstance(value, Mapping | list):
            raise DataError(
                f"verifier '{self.name}': the column '{self.column}' holds {describe_value(value)}, no right answer; "
                f"name a field of it: {list_field_names({self.column or '': value})[1:]}"
            )
        if value is None or not str(value).strip():
            problem = (
                "no target" if self.column is None else f"nothing in the column '{self.column}'"
            )
            raise DataError(
                f"verifier '{self.name}': the row of {str(row.get('prompt', ''))[:60]!r} has {problem} to compare "
                "with; name the column of the right answer (options.target, or `column` of the verifier)"
            )
        return str(value)


class ExactCheck(AnswerCheck):
    """Equal text, ignoring white space and, by default, case."""

    name = "exact"

    def __init__(self, settings: ExactSettings) -> None:
        super().__init__(settings.column)
        self._settings = settings

    def score_action(self, text: str, target: str, row: Mapping[str, Any]) -> float:
        """Return 1 for equal text, else 0."""
        answer = " ".join(extract_answer(text, self._settings.find).split())
        expected = " ".join(self._read_target(target, row).split())
        if self._settings.ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        return float(answer == expected)


class NumericCheck(AnswerCheck):
    """Equal numbers, compared exactly or within a share of the target."""

    name = "numeric"

    def __init__(self, settings: NumericSettings) -> None:
        super().__init__(settings.column)
        self._settings = settings

    def score_action(self, text: str, target: str, row: Mapping[str, Any]) -> float:
        """Return 1 for equal numbers, else 0."""
        expected = self._read_expected_value(target, row)
        found = _find_answer_value(text, self._settings.find)
        if found is None:
            return 0.0
        right, tolerance = [expected.value], Fraction(self._settings.tolerance)
        if expected.is_percent and not found.is_percent:
            right.append(expected.value / 100)
        elif found.is_percent and not expected.is_percent:
            right.append(expected.value * 100)
        return float(any(abs(found.value - value) <= tolerance * abs(value) for value in right))

    def check_row(self, target: str, row: Mapping[str, Any]) -> None:
        """Refuse a target that is not one number, see `AnswerCheck`."""
        self._read_expected_value(target, row)

    def _read_expected_value(self, target: str, row: Mapping[str, Any]) -> FoundValue:
        text = self._read_target(target, row)
        answer = extract_solution_final(text) or _extract_boxed_answer(text) or text
        value = read_value(answer)
        if value is None:
            raise DataError(
                f"verifier 'numeric': the target {answer[:60]!r} is not one number; write it as 0.75, 3/4, 1 1/2 or "
                "2^10, or use the verifier 'math' or 'exact'"
            )
        return value


class RegexCheck(AnswerCheck):
    """A pattern from the settings or from each row, matched within a limit of processor time."""

    name = "regex"

    def __init__(self, settings: RegexSettings) -> None:
        super().__init__(None if settings.pattern is not None else settings.column)
        self._settings = settings
        self._patterns: dict[str, TimeLimitedPattern] = {}

    @property
    def needs_target(self) -> bool:
        """True = neither a pattern nor its column is set."""
        return self._settings.pattern is None and self.column is None

    def score_action(self, text: str, target: str, row: Mapping[str, Any]) -> float:
        """Return 1 for a match, else 0; a match that takes too long scores 0 and is counted in timed_out."""
        compiled = self._compile_pattern(self._settings.pattern or self._read_target(target, row))
        timed_out = compiled.timed_out
        matches = compiled.matches_text(strip_thought(text), match_entire_text=self._settings.whole)
        if compiled.timed_out > timed_out:
            self._count_event("timed_out")
        return float(matches)

    def check_row(self, target: str, row: Mapping[str, Any]) -> None:
        """Refuse a row without a pattern that compiles, see `AnswerCheck`."""
        if self._settings.pattern is None:
            self._compile_pattern(self._read_target(target, row))

    def _compile_pattern(self, pattern: str) -> TimeLimitedPattern:
        if pattern not in self._patterns:
            if len(self._patterns) >= MAX_PATTERNS:
                self._patterns.clear()
            try:
                self._patterns[pattern] = TimeLimitedPattern(pattern)
            except SettingsError as error:
                raise DataError(f"verifier 'regex': {error}") from None
        return self._patterns[pattern]


class _ChildProcessCheck(AnswerCheck):
    """A verifier that runs in child processes, started with the first answer."""

    blocking = True
    _script: ClassVar[str]
    # A request and its expected reply, which detect a child that cannot work at all.
    _probe: ClassVar[tuple[dict[str, Any], Any]]

    def __init__(self, settings: MathSettings | CodeSettings, timeout_s: float) -> None:
        super().__init__(settings.column)
        self._settings = settings
        self._works, self._lock = False, threading.Lock()
        self._children = ChildPool(
            Path(__file__).with_name(self._script),
            setup=dataclasses.asdict(settings),
            count=settings.workers,
            timeout_s=timeout_s,
            memory_gib=settings.memory_gib if isinstance(settings, MathSettings) else None,
        )

    def _request_child(self, request: dict[str, Any]) -> Any:
        """Return the child's reply; None, counted, if it timed out or died because of what the policy wrote.

        Raises: SettingsError if it cannot work at all, which is not the fault of any answer.
        """
        with self._lock:
            if not self._works:
                self._verify_children_work()
        try:
            return self._children.request_reply(request)
        except ChildTimeout:
            self._count_event("timed_out")
        except ChildFailed:
            self._count_event("failed")
        return None

    def _verify_children_work(self) -> None:
        request, expected = self._probe
        try:
            reply = self._children.request_reply(request)
        except ChildFailed as error:
            reply = error
        if reply != expected:
            raise SettingsError(
                f"verifier '{self.name}' does not work here: its first request gave {reply}"
            )
        self._works = True


class MathCheck(_ChildProcessCheck):
    """Mathematical equality by math-verify: LaTeX, expressions, sets, intervals."""

    name = "math"
    _script = "math_child.py"
    _probe = ({"target": "2", "text": "$2$"}, True)

    def __init__(self, settings: MathSettings) -> None:
        """Raises: SettingsError without the package math-verify."""
        require_package("math_verify", "math", "verifier 'math'")
        super().__init__(settings, settings.timeout_s)

    def score_action(self, text: str, target: str, row: Mapping[str, Any]) -> float:
        """Return 1 or 0; a comparison that times out or fails scores 0 and is counted in timed_out or failed."""
        expected = self._read_target(target, row)
        reply = self._request_child(
            {"target": extract_solution_final(expected) or expected, "text": strip_thought(text)}
        )
        if reply == "unreadable target":
            raise DataError(
                f"verifier 'math': math-verify reads nothing in the target {expected[:60]!r}"
            )
        return float(reply is True)


class CodeCheck(_ChildProcessCheck):
    """A program and its tests, see `environments.code_tests`."""

    name = "code"
    _script = "code_child.py"
    _probe = (
        ProgramTests(steps=[("assert x == 1", True)]).build_request("x = 1"),
        {"passed": [True], "timed_out": False},
    )

    def __init__(self, settings: CodeSettings) -> None:
        super().__init__(settings, 2**20)  # the child itself limits the time of each program
        self._partial = settings.partial
        self.column: str = settings.column

    def score_action(self, text: str, target: str, row: Mapping[str, Any]) -> float:
        """Return the share of tests that pass, or 1 if all do; timed_out counts programs that ran out of time."""
        tests = self._read_tests(row)
        reply = self._request_child(tests.build_request(_extract_program(strip_thought(text))))
        if reply is None:
            return 0.0
        if reply["timed_out"]:
            self._count_event("timed_out")
        passed = sum(reply["passed"])
        return passed / tests.num_tests if self._partial else float(passed == tests.num_tests)

    def check_row(self, target: str, row: Mapping[str, Any]) -> None:
        """Refuse tests in no known form, and tests that every program passes, see `AnswerCheck`."""
        self._read_tests(row)

    def _read_tests(self, row: Mapping[str, Any]) -> ProgramTests:
        try:
            return read_program_tests(read_field(row, self.column), row)
        except DataError as error:
            raise DataError(
                f"verifier 'code': the tests in column '{self.column}' of the row of "
                f"{str(row.get('prompt', ''))[:60]!r} cannot be used: {error}"
            ) from None


ANSWER_CHECKS: dict[str, tuple[type[Any], type[Any]]] = {
    "exact": (ExactCheck, ExactSettings),
    "numeric": (NumericCheck, NumericSettings),
    "regex": (RegexCheck, RegexSettings),
    "math": (MathCheck, MathSettings),
    "code": (CodeCheck, CodeSettings),
}


def build_answer_check(name: str, options: Any = None) -> AnswerCheck:
    """Build a verifier by name; `options`: its settings, or a mapping of them. Raises: SettingsError."""
    if name not in ANSWER_CHECKS:
        raise SettingsError(f"no verifier '{name}'; {suggest_name(name, ANSWER_CHECKS)}")
    cls, settings = ANSWER_CHECKS[name]
    check: AnswerCheck = cls(
        options if isinstance(options, settings) else settings(**dict(options or {}))
    )
    return check


def extract_answer(text: str, find: AnswerLocation) -> str:
    """Return the answer in an action, after its thought; "" if it is not where `find` says."""
    text = strip_thought(text).strip()
    if find == "auto":
        for marker in ("tag", "boxed", "hashes"):
            answer = _extract_marked_answer(text, marker)
            if answer is not None:
                return answer
        return text
    return _extract_marked_answer(text, find) or ""


def _extract_marked_answer(text: str, marker: str) -> str | None:
    if marker == "tag":
        start = text.rfind("<answer>")
        end = text.find("</answer>", start)
        return None if start < 0 or end < 0 else text[start + len("<answer>") : end].strip()
    if marker == "boxed":
        return _extract_boxed_answer(text)
    if marker == "hashes":
        return extract_solution_final(text)
    if marker == "last_line":
        return text.splitlines()[-1].strip() if text else ""
    if marker == "last_number":
        found = find_last_value(text)
        return found.text if found else None
    return text


def _find_answer_value(text: str, find: AnswerLocation) -> FoundValue | None:
    """Return the number of an answer: of a marked one all of it if that is a number, else the last number."""
    answer = extract_answer(text, "whole" if find == "last_number" else find)
    is_marked = find in ("tag", "boxed", "hashes") or (
        find == "auto" and answer != strip_thought(text).strip()
    )
    return find_marked_value(answer) if is_marked else read_value(answer) or find_last_value(answer)


def _extract_boxed_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, including inner braces."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for index in range(start + len(r"\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : index].strip()
    return None


def _extract_program(text: str) -> str:
    """Return the program in an answer: its last fenced block, else the entire text."""
    end = text.rfind(_FENCE)
    start = text.rfind(_FENCE, 0, end) if end > 0 else -1
    if start < 0:
        return text.lstrip(" ")  # a SentencePiece model's first token
    _language, _, program = text[start + len(_FENCE) : end].partition("\n")
    return program
