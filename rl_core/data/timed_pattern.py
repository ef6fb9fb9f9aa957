"""A regular expression whose matching is stopped after a limit of processor time."""

from __future__ import annotations

import regex

__all__ = ["MATCH_S", "TimedPattern"]

MATCH_S = 1.0  # processor time of one match; texts of ten thousand characters take milliseconds
MAX_TIMED_OUT = 10


class TimedPattern:
    """A pattern in which '.' matches line breaks.

    Nested repeats, as in (a+)+b, may try a number of ways that doubles with each character: a text that is not matched
    within MATCH_S seconds of processor time does not match, and is counted in `timed_out`.
    """

    def __init__(self, pattern: str, match_s: float = MATCH_S) -> None:
        """Raises: regex.error."""
        # Not `re`, whose matching cannot be stopped, not even by a signal.
        self._compiled = regex.compile(pattern, regex.DOTALL)
        self.pattern, self.timed_out, self._match_s = pattern, 0, match_s

    def matches(self, text: str, *, whole: bool) -> bool:
        """True if the whole text matches, or any part of it."""
        # Texts that keep running out of time get less for each: ten limits in all, then a tenth of one.
        limit = self._match_s if self.timed_out < MAX_TIMED_OUT else self._match_s / 10
        match = self._compiled.fullmatch if whole else self._compiled.search
        try:
            return match(text, timeout=limit) is not None
        except TimeoutError:
            self.timed_out += 1
            return False
