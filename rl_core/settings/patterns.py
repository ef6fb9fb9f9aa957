"""Regular expressions that users write, compiled within bounds of size, depth and memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError

if TYPE_CHECKING:
    import regex

# The compiler writes out every required repeat: 'a{999}' is 999 steps, '(a{999}){999}' a million. A step takes up to
# two kilobytes.
MAX_COMPILED_STEPS = 100_000
_CLASS_CHARACTERS_OF_A_STEP = 64
_MOST = 10**18  # nested repeats are not multiplied further

_CHARACTER_CLASS = re.compile(r"\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]", re.DOTALL)
_BRACES = re.compile(r"\{(\s*\d*)[^{}]*\}")
_COMMENT = re.compile(r"\(\?#[^)]*\)")
# Flags under which groups and classes are written differently: verbose (x), nested sets (V1).
_SYNTAX_FLAG = re.compile(r"\(\?[A-Za-z]*[xV]")


def compile_pattern(pattern: str, flags: int = 0) -> regex.Pattern[str]:
    """Compile a user's regular expression.

    Raises: SettingsError, which begins with the pattern, if it is invalid or takes too much memory to compile.
    """
    import regex  # imported here: a configuration without patterns does not need it

    shown = repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
    num_steps = bound_compiled_steps(pattern)
    if num_steps > MAX_COMPILED_STEPS:
        raise SettingsError(
            f"{shown} compiles to up to {num_steps:.3g} steps, more than {MAX_COMPILED_STEPS}: every repeat that is "
            "required counts, and nested ones multiply; require fewer, as with {1,999} for {999}"
        )
    try:
        return regex.compile(pattern, flags)
    except RecursionError:
        raise SettingsError(f"{shown} nests too many groups to be compiled") from None
    except (regex.error, ValueError, OverflowError, LookupError) as error:
        raise SettingsError(f"{shown} is not a regular expression: {error}") from None


def bound_compiled_steps(pattern: str) -> int:
    """Compute an upper bound of the characters, classes and groups of a pattern with its required repeats written out.

    Unbalanced parentheses count as if the missing ones were at the ends.
    """
    if _SYNTAX_FLAG.search(pattern):
        return _bound_any_nesting(pattern)
    totals, last = [0], 0  # steps of the open groups so far; of what a quantifier repeats
    position = 0
    while position < len(pattern):
        character = pattern[position]
        end = position + 1
        if character == "\\":
            size, end = 1, position + 2
        elif character == "[" and (match := _CHARACTER_CLASS.match(pattern, position)):
            end = match.end()
            size = 1 + (end - position) // _CLASS_CHARACTERS_OF_A_STEP
        elif character == "(" and (match := _COMMENT.match(pattern, position)):
            position = match.end()
            continue
        elif character == "(":
            totals.append(1)
            last, position = 0, end + 2 * pattern.startswith("?:", end)
            continue
        elif character == ")":
            size = totals.pop() if len(totals) > 1 else 1
        elif character == "{" and (match := _BRACES.match(pattern, position)):
            added = min(last * (_parse_count(match[1]) - 1), _MOST)
            totals[-1] += added + match.end() - position
            last, position = last + added, match.end()
            continue
        else:
            size = 1
        totals[-1] += size
        last = size
        position = end
    return sum(totals)


def _bound_any_nesting(pattern: str) -> int:
    """Compute the bound as if every repeat contained the complete pattern."""
    steps = len(pattern)
    for part in pattern.split("{")[1:]:
        steps *= _parse_count(re.split(r"[,}]", part, maxsplit=1)[0])
        if steps > MAX_COMPILED_STEPS:
            break
    return steps


def _parse_count(text: str) -> int:
    """Parse the required repeats of a quantifier from its digits; at least 1, and bounded."""
    digits = re.sub(r"\D", "", text)
    return max(1, int(digits[:10] or 1))
