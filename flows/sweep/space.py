"""The settings that a sweep varies: lists and ranges in the values of `--set`.

    --set stages.policy.learning_rate=1e-4,3e-4,1e-3     a list
    --set stages.policy.learning_rate=1e-5..1e-3:5:log   a range: 5 points, spaced evenly in the logarithm
    --set stages.policy.group_size=4..8                  a range of whole numbers: each of them
    --set stages.policy.learning_rate=1e-5..1e-3:log     a range to draw from (random, bayes, halving)

A value without a comma outside of brackets and quotes, and without "..", is an ordinary override.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rl_core.errors import SettingsError

__all__ = ["Dimension", "Params", "as_number", "grid", "parse_set", "split_list"]

Params: TypeAlias = dict[str, str]  # key -> value as YAML text

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(\d+))?(:log)?")
MOST = 10_000  # configurations of a grid


@dataclass(frozen=True)
class Dimension:
    """One setting that varies, over a list of values or a range of numbers."""

    key: str
    choices: tuple[str, ...] = ()  # YAML texts; () = a range
    low: float = 0.0
    high: float = 0.0
    points: int | None = None  # of a range in a grid
    is_log: bool = False
    is_whole: bool = False

    @property
    def is_range(self) -> bool:
        """True = numbers between `low` and `high`."""
        return not self.choices

    def text(self, value: float | str) -> str:
        """A value as YAML text."""
        if isinstance(value, str):
            return value
        return str(int(value)) if self.is_whole else repr(float(value))

    def samples(self) -> tuple[str, ...]:
        """All values of a list; the middle of a range and its ends."""
        if not self.is_range:
            return self.choices
        middle = math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2
        return tuple(self.text(value) for value in (middle, self.low, self.high))

    def grid_values(self) -> tuple[str, ...]:
        """All values of a list; the points of a range. Raises: SettingsError for a range without points."""
        if not self.is_range:
            return self.choices
        if self.points is None and not self.is_whole:
            raise SettingsError(
                f"--set {self.key}: a grid needs the number of points of a range, as in "
                f"{self.low:g}..{self.high:g}:5{':log' * self.is_log}; or draw from it with --method random"
            )
        count = self.points or int(self.high - self.low) + 1
        shares = [index / max(1, count - 1) for index in range(count)]
        if self.is_log:
            values = [math.exp(math.log(self.low) + s * (math.log(self.high) - math.log(self.low))) for s in shares]
            values[0], values[-1] = (self.low, self.high) if count > 1 else (self.low, self.low)
        else:
            values = [self.low + s * (self.high - self.low) for s in shares]
        rounded = [round(value) if self.is_whole else float(f"{value:.6g}") for value in values]
        return tuple(dict.fromkeys(self.text(value) for value in rounded))


def parse_set(texts: Iterable[str]) -> tuple[list[str], list[Dimension]]:
    """Ordinary overrides, and the settings that vary, of `--set` texts. Raises: SettingsError."""
    plain: list[str] = []
    dimensions: list[Dimension] = []
    for text in texts:
        key, equals, value = text.partition("=")
        found = _dimension(key.strip(), value.strip()) if equals else None
        if found is None:
            plain.append(text)
        elif any(known.key == found.key for known in dimensions):
            raise SettingsError(f"--set {found.key}: varies twice; give all its values in one list")
        else:
            dimensions.append(found)
    return plain, dimensions


def _dimension(key: str, value: str) -> Dimension | None:
    match = _RANGE.fullmatch(value)
    if match:
        return _range(key, *match.groups())
    if ".." in value and re.match(rf"{_NUMBER}\.\.", value):
        raise SettingsError(f"--set {key}={value}: a range is LOW..HIGH, LOW..HIGH:POINTS or either with :log")
    parts = split_list(value)
    if len(parts) < 2:
        return None
    if "" in parts:
        raise SettingsError(f"--set {key}={value}: a value of the list is empty")
    if len(set(parts)) < len(parts):
        raise SettingsError(f"--set {key}={value}: lists a value twice")
    return Dimension(key, tuple(parts))


def _range(key: str, low: str, high: str, points: str | None, log: str | None) -> Dimension:
    bounds = float(low), float(high)
    if bounds[0] >= bounds[1]:
        raise SettingsError(f"--set {key}={low}..{high}: the first number must be below the second")
    if log and bounds[0] <= 0:
        raise SettingsError(f"--set {key}={low}..{high}:log: the logarithm needs numbers above 0")
    if points is not None and not 2 <= int(points) <= MOST:
        raise SettingsError(f"--set {key}: a range has at least 2 points and at most {MOST}")
    is_whole = all(re.fullmatch(r"[-+]?\d+", text) for text in (low, high))
    return Dimension(key, (), *bounds, int(points) if points else None, bool(log), is_whole)


def split_list(text: str) -> list[str]:
    """Parts of a text between commas that stand outside of brackets, braces and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth <= 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def grid(dimensions: Sequence[Dimension]) -> list[Params]:
    """Every combination, the last setting changing fastest. Raises: SettingsError for more than MOST."""
    values = [dimension.grid_values() for dimension in dimensions]
    if (count := math.prod(map(len, values))) > MOST:
        raise SettingsError(f"the grid has {count:,} configurations, at most {MOST:,} are taken; use --method random")
    keys = [dimension.key for dimension in dimensions]
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*values)]


def as_number(text: str) -> float | None:
    """A value as a number, for axes; None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
