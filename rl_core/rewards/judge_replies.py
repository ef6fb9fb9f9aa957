"""Scores in the replies of a judge: which number of a text is the score, and which replies have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import regex

from rl_core.data.model_text import strip_thought
from rl_core.settings import JudgeSettings
from rl_core.settings.patterns import compile_pattern
from rl_core.settings.rewards import DEFAULT_SCORE_PATTERN

MATCH_TIMEOUT_S = 1.0
_CUT_REASONS = frozenset({"length", "max_tokens", "content_filter", "abort", "error", "timeout"})
_MARKS = r"[\s*_`\"'“”]*"  # emphasis, quotation marks, white space
_NUMBER = (
    r"(?>[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?)(?![\w]|[,.:-][0-9]|\s*-\s*[0-9])"
)
# 'maximal score: 10' is no score; 'score (0-10)', 'score out of 10' and 'score for the answer' are followed by one.
_SCORE = (
    r"(?<!\b(?:max|maximal|maximum|min|minimal|minimum|highest|lowest|possible|best|perfect|full|top|passing)\W{1,3})"
    rf"\bscore\b{_MARKS}(?:[(\[][^()\[\]\n]{{0,80}}[)\]]{_MARKS}|(?:out of|from|of|for|on)\b[^\n:=.;]{{0,80}})?"
)
_STATED = regex.compile(rf"(?i){_SCORE}[:=]{_MARKS}[$({{\[]*({_NUMBER})")
_ALONE = regex.compile(rf"(?im)^\W*{_SCORE}({_NUMBER})\W*$")
_SAID = regex.compile(rf"(?i){_SCORE}(?:is|was)\b{_MARKS}:?{_MARKS}({_NUMBER})")
_SCALE_END = regex.compile(r"\W{0,3}(?:/|out of)\s*([0-9]+(?:\.[0-9]+)?)")
_MINUS_SIGNS = str.maketrans(dict.fromkeys("−‐‑‒–﹣－", "-"))  # noqa: RUF001


def read_reply(answer: Any) -> tuple[str, str | None]:
    """Return text and finish reason of a chat completion.

    Raises: KeyError, IndexError, TypeError, ValueError for another answer, and for a text that was cut.
    """
    choice = answer["choices"][0]
    reason = choice.get("finish_reason")
    if str(reason).lower() in _CUT_REASONS:
        hint = "; raise max_tokens" if str(reason).lower() in ("length", "max_tokens") else ""
        raise ValueError(f"the reply was cut (finish_reason {reason}){hint}")
    content = choice["message"]["content"]
    if isinstance(content, list):  # parts, of which thoughts have another type
        content = "".join(
            part["text"]
            for part in content
            if isinstance(part, Mapping) and part.get("type") == "text"
        )
    if not isinstance(content, str):
        raise ValueError("the reply holds no text")
    return content, reason


def read_score(reply: str, settings: JudgeSettings) -> float:
    """Return the score in a reply, after its thought, scaled to (score - lowest) / (highest - lowest).

    With the default pattern it is the last number after 'score:' or 'score =', else one that stands as 'score 7' on a
    line of its own, else one in 'score is 7'. Raises: ValueError without a score within the scale.
    """
    text = strip_thought(reply).translate(_MINUS_SIGNS)
    lowest, highest = settings.lowest, settings.highest
    try:
        number = _find_score(text, settings)
    except TimeoutError:
        raise ValueError("the pattern was not matched in time") from None
    if number is None:
        raise ValueError(f"the reply holds no score: {reply[:100]!r}")
    score = float(number)
    if not lowest <= score <= highest:
        raise ValueError(f"the score {score:g} is not from {lowest:g} to {highest:g}")
    return (score - lowest) / (highest - lowest)


def _find_score(text: str, settings: JudgeSettings) -> str | None:
    """Return the score's text; None without one. Raises: TimeoutError; ValueError for another scale."""
    if settings.pattern != DEFAULT_SCORE_PATTERN:
        pattern = compile_pattern(settings.pattern)
        found = [match[1] for match in pattern.finditer(text, timeout=MATCH_TIMEOUT_S)]
        return found[-1] if found else None
    for pattern in (_STATED, _ALONE, _SAID):
        matches = list(pattern.finditer(text, timeout=MATCH_TIMEOUT_S))
        if matches:
            scale = _SCALE_END.match(text, matches[-1].end(1))
            if scale and float(scale[1]) != settings.highest:
                raise ValueError(f"the score is of {scale[1]}, not of {settings.highest:g}")
            return str(matches[-1][1])
    return None
