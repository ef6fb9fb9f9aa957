"""Settings of ready-made verifiers: answers compared with a column of the data, by rule, by tests or by a judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = [
    "CodeSettings",
    "ExactSettings",
    "Find",
    "JudgeSettings",
    "MathSettings",
    "NumericSettings",
    "RegexSettings",
    "check_pattern",
]

Find = Literal["auto", "whole", "tag", "boxed", "hashes", "last_line", "last_number"]

_FIND = (
    "where the answer stands in the text after the thought: tag (<answer>...</answer>), boxed (\\boxed{...}), hashes "
    "(after ####), last_line, last_number, whole; auto: the first of tag, boxed, hashes that is there, else whole"
)
_SCORE = r"(?i)score\W*(-?\d+(?:\.\d+)?)"
_COLUMN = "column of the right answer; default: the environment's target"


def check_pattern(pattern: str | None) -> None:
    """Raises SettingsError unless the setting `pattern`, where there is one, is a regular expression."""
    if not pattern:
        return
    import regex  # here, as a check of a configuration without patterns needs none of it

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise SettingsError(f"pattern: {pattern!r} is not a regular expression: {error}") from None


@dataclass(frozen=True, kw_only=True)
class ExactSettings(Settings):
    """Verifier exact: the answer equals the target."""

    find: Find = setting("auto", doc=_FIND)
    column: str | None = setting(None, doc=_COLUMN)
    ignore_case: bool = setting(True, doc="case counts for nothing; white space never does")


@dataclass(frozen=True, kw_only=True)
class NumericSettings(Settings):
    """Verifier numeric: the answer's number equals the target's."""

    find: Find = setting("auto", doc=f"{_FIND}; of several numbers found the last one counts")
    column: str | None = setting(None, doc=f"{_COLUMN}; after #### where it has that, as in GSM8K")
    tolerance: float = setting(0.0, ge=0, doc="largest difference, as a share of the target; 0: equal")


@dataclass(frozen=True, kw_only=True)
class RegexSettings(Settings):
    """Verifier regex: the text after the thought matches a pattern."""

    pattern: str | None = setting(None, doc="regular expression; default: the column holds one for each row")
    column: str | None = setting(None, doc="column of patterns; default: the environment's target")
    whole: bool = setting(False, doc="the whole text must match; default: any part of it")

    def check(self) -> None:
        """The pattern must compile."""
        check_pattern(self.pattern)


@dataclass(frozen=True, kw_only=True)
class MathSettings(Settings):
    """Verifier math: the answer is mathematically equal to the target, by the package math-verify."""

    column: str | None = setting(None, doc=_COLUMN)
    timeout_s: float = setting(10.0, gt=0, doc="limit of one comparison in seconds; beyond it the answer is wrong")
    workers: int = setting(2, ge=1, doc="child processes")
    memory_gib: float = setting(2.0, gt=0, doc="address space of a child process in GiB")


@dataclass(frozen=True, kw_only=True)
class CodeSettings(Settings):
    """Verifier code: the program in the answer passes the row's tests, in child processes with limits (no sandbox)."""

    column: str = setting(
        "tests", doc='column of tests: Python statements as text or a list of them, or [{"input": ..., "output": ...}]'
    )
    partial: bool = setting(False, doc="share of the tests that pass; default: 1 if all do, else 0")
    timeout_s: float = setting(10.0, gt=0, doc="limit of one program in seconds")
    memory_gib: float = setting(1.0, gt=0, doc="address space of a program in GiB")
    workers: int = setting(2, ge=1, doc="programs that run at once")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """Judge: a model behind an OpenAI-compatible URL that scores answers."""

    url: str | None = setting(None, doc="address of the server, as http://127.0.0.1:8000/v1")
    model: str | None = setting(None, doc="name that the server knows the model by")
    prompt: str = setting(
        "Question:\n{prompt}\n\nReference answer:\n{target}\n\nAnswer to grade:\n{completion}\n\n"
        "Grade the answer from 0 (wrong) to 10 (right and complete). End with a line 'score: NUMBER'.",
        doc="what the judge is asked; {prompt}, {completion}, {target} and the row's columns by name",
    )
    system: str = setting("", doc="system message of the judge")
    lowest: float = setting(0.0, doc="score that becomes reward 0")
    highest: float = setting(10.0, doc="score that becomes reward 1")
    pattern: str = setting(_SCORE, doc="regular expression whose first group is the score; its last match counts")
    max_tokens: int = setting(512, ge=1, doc="length of a judgement")
    temperature: float = setting(0.0, ge=0, doc="temperature of the judge")
    concurrency: int = setting(8, ge=1, le=256, doc="requests at once")
    timeout_s: float = setting(60.0, gt=0, doc="limit of one request in seconds, however it trickles in")
    retries: int = setting(3, ge=0, le=20, doc="further tries of a request that failed, or whose reply has no score")
    retry_delay_s: float = setting(1.0, gt=0, doc="wait before the first further try; doubled each time")
    key_variable: str | None = setting(
        None, doc="environment variable that holds the API key; the key itself is never stored"
    )
    cache: str | None = setting(
        None, doc="folder of judgements, found again by content; default: posttrain/judgements in the user's cache"
    )

    def check(self) -> None:
        """The scale must not be empty, and the pattern needs a group."""
        if self.lowest >= self.highest:
            raise SettingsError(f"lowest: {self.lowest} must be below highest {self.highest}")
        if self.pattern == _SCORE:
            return
        import regex  # as in `check_pattern`

        try:
            groups = regex.compile(self.pattern).groups
        except regex.error as error:
            raise SettingsError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None
        if groups < 1:
            raise SettingsError(f"pattern: {self.pattern!r} has no group; write the score's part in brackets")
