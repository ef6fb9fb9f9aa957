"""Model-written text made safe to tokenise, store and show; thoughts in plain text; patterns with a time limit.

A policy may write anything, and JSON escapes give it what its tokens cannot spell: half of a surrogate pair, NUL,
numbers of thousands of digits, brackets nested a thousand deep. Tokenizers, UTF-8 files, databases and recursive
encoders refuse some of these; `convert_to_plain_json` and `replace_unprintable` replace exactly those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from rl_core.settings.patterns import compile_pattern

# (opening, closing) of a thought: DeepSeek-R1, QwQ, Qwen3 and others; Magistral; Command A.
THOUGHT_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_BAR, _BLOCK = "\uff5c", "\u2581"  # of DeepSeek's tokens
# Texts that a policy may write as single tokens, if its tokenizer has them, in addition to those that its chat template
# writes into an assistant message; `environments/tool_dialects.py` reads them.
TURN_MARKERS = (
    *(marker for pair in THOUGHT_MARKERS for marker in pair),
    *("<answer>", "</answer>"),
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<function_call>", "</function_call>"),
    *("<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|recipient|>", "<|content|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<TOOLCALL>", "</TOOLCALL>"),
    *("<|tools_prefix|>", "<|tools_suffix|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    *(
        f"<{_BAR}tool{_BLOCK}{name}{_BLOCK}{end}{_BAR}>"
        for name in ("calls", "call")
        for end in ("begin", "end")
    ),
    *(f"<{_BAR}tool{_BLOCK}sep{_BAR}>", f"{_BAR}DSML{_BAR}"),
)


def split_thought(text: str, markers: tuple[str, str]) -> tuple[str | None, str]:
    """Return (thought, rest) of a text that begins with a thought, or closes one that its prompt opened; else (None,
    text).

    White space around the thought and before the rest is dropped.
    """
    opening, closing = markers
    thought, separator, rest = text.partition(closing)
    if not separator:
        return None, text
    return thought.strip().removeprefix(opening).strip(), rest.lstrip()


def strip_thought(text: str) -> str:
    """Return an action's text after its thought, where calls and answers count; "" if the thought is not closed."""
    for opening, closing in THOUGHT_MARKERS:
        if closing in text:
            return text.rpartition(closing)[2]
        if text.lstrip().startswith(opening):
            return ""
    return text


MAX_DEPTH = 32  # levels of lists and objects
MAX_BITS = 1024  # of an integer; Python refuses to write one of more than 4300 digits
OMITTED = "…"


def replace_unprintable(text: str) -> str:
    """Replace lone surrogates by '?' (UTF-8 cannot encode them) and NUL by U+FFFD (PostgreSQL cannot store it)."""
    return replace_surrogates(text).replace("\0", "\ufffd")


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates by '?'; a tokenizer written in Python may decode to them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def convert_to_plain_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a copy that every JSON writer and reader accepts.

    Texts pass `replace_unprintable`; numbers that JSON does not have, and integers above MAX_BITS bits, become texts;
    values
    deeper than `depth` levels are dropped; anything else becomes its str().
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return replace_unprintable(value)
    if isinstance(value, Integral):
        number = int(value)
        return (
            number
            if number.bit_length() <= MAX_BITS
            else f"(an integer of {number.bit_length()} bits)"
        )
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping | list | tuple) and depth <= 0:
        return OMITTED
    if isinstance(value, Mapping):
        return {
            replace_unprintable(str(name)): convert_to_plain_json(item, depth - 1)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [convert_to_plain_json(item, depth - 1) for item in value]
    return replace_unprintable(str(value))


MATCH_TIME_LIMIT_S = (
    1.0  # processor time of one match; texts of ten thousand characters take milliseconds
)
MAX_TIMED_OUT = 10


class TimeLimitedPattern:
    """A pattern in which '.' matches line breaks.

    Nested repeats, as in (a+)+b, may try a number of ways that doubles with each character: a text that is not matched
    within MATCH_S seconds of processor time does not match, and is counted in `timed_out`.
    """

    def __init__(self, pattern: str, match_s: float = MATCH_TIME_LIMIT_S) -> None:
        """Raises: SettingsError, which begins with the pattern."""
        # Not `re`, whose matching cannot be stopped, not even by a signal.
        import regex  # here: tools and environments import this module without it

        self._compiled = compile_pattern(pattern, regex.DOTALL)
        self.pattern, self.timed_out, self._match_s = pattern, 0, match_s

    def matches_text(self, text: str, *, match_entire_text: bool) -> bool:
        """Return whether the entire text matches, or any part of it."""
        # Texts that keep running out of time get less for each: ten limits in all, then a tenth of one.
        limit = self._match_s if self.timed_out < MAX_TIMED_OUT else self._match_s / 10
        match = self._compiled.fullmatch if match_entire_text else self._compiled.search
        try:
            return match(text, timeout=limit) is not None
        except TimeoutError:
            self.timed_out += 1
            return False
