"""Verdicts in the replies of a judge: scores, rubrics, rankings and choices; and which replies have none.

Every reader raises ValueError for a reply without a complete verdict, so that it is asked for again or excluded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
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
MAX_READ_CHARACTERS = 50_000  # of a reply, from its end
_WHOLE_NUMBER = regex.compile(rf"\s*({_NUMBER})\s*")
_LABEL = regex.compile(r"(?i)\s*(?:answer\s*)?([0-9]{1,4})\s*")
# 'a tie' is a tie, and any other 'a' before a word is the article; 'A or B' and 'A = B' choose none.
_BETTER = regex.compile(
    rf"(?i)\bbetter\b{_MARKS}[:=]{_MARKS}(?:answer\s+)?[(\[]*"
    rf"(?:(?:an?[ \t]+)?(tie|draw)\b|(?!(?-i:a)[ \t]+\w)([AB])\b)"
    rf"(?!{_MARKS}(?:or|and|vs\.?|/|,|\||&|=+){_MARKS}(?:A|B|tie)\b)"
)
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


def read_rubric(reply: str, settings: JudgeSettings) -> dict[str, float]:
    """Return the score of each criterion in the last JSON object that has all of them, scaled as `read_score` does.

    Raises: ValueError without such an object, or for a score that is no number within the scale.
    """
    names = {criterion.name.strip().casefold(): criterion.name for criterion in settings.criteria}
    verdict = _read_last_object(reply, lambda keys: names.keys() <= keys)
    scores: dict[str, float] = {}
    for key, name in names.items():
        score = _read_number(verdict[key], name)
        if not settings.lowest <= score <= settings.highest:
            raise ValueError(
                f"the score {score:g} of '{name}' is not from {settings.lowest:g} to {settings.highest:g}"
            )
        scores[name] = (score - settings.lowest) / (settings.highest - settings.lowest)
    return scores


def read_ranking(reply: str, size: int) -> list[int]:
    """Return the rank of each of `size` answers, 0 = best, equal = tied.

    It is the list "ranking" of the last JSON object that has one: numbers of answers from 1, the best first; those in
    an inner list are tied. Raises: ValueError unless each answer occurs once.
    """
    ranking = _read_last_object(reply, lambda keys: "ranking" in keys)["ranking"]
    if not isinstance(ranking, list):
        raise ValueError("the ranking is no list")
    ranks: dict[int, int] = {}
    for rank, entry in enumerate(ranking):
        for label in entry if isinstance(entry, list) else [entry]:
            match = None if isinstance(label, bool | float) else _LABEL.fullmatch(str(label))
            if match is None or not 1 <= int(match[1]) <= size:
                raise ValueError(
                    f"the ranking names {label!r}, which is no answer from 1 to {size}"
                )
            if int(match[1]) in ranks:
                raise ValueError(f"the ranking names answer {match[1]} twice")
            ranks[int(match[1])] = rank
    if len(ranks) < size:
        raise ValueError(f"the ranking names {len(ranks)} of {size} answers")
    return [ranks[number] for number in range(1, size + 1)]


def read_grades(reply: str, size: int) -> list[int]:
    """Return the rank of each of `size` answers, 0 = best, equal = tied, from a JSON object of their grades.

    Raises: ValueError unless each answer, named by its number from 1, has a grade.
    """
    names = [str(number) for number in range(1, size + 1)]
    verdict = _read_last_object(reply, lambda keys: keys >= set(names))
    grades = [_read_number(verdict[name], f"answer {name}") for name in names]
    return [sum(other > grade for other in set(grades)) for grade in grades]


def read_choice(reply: str) -> float:
    """Return 1 if answer A is better, 0 if B is, 0.5 for a tie: the last 'better: A', after the thought.

    Raises: ValueError without one.
    """
    text = strip_thought(reply)[-MAX_READ_CHARACTERS:]
    try:
        matches = list(_BETTER.finditer(text, timeout=MATCH_TIMEOUT_S))
    except TimeoutError:
        raise ValueError("the verdict was not read in time") from None
    if not matches:
        raise ValueError(f"the reply holds no 'better: A', 'B' or 'tie': {reply[:100]!r}")
    letter = matches[-1][2]
    return 0.5 if letter is None else 1.0 if letter.upper() == "A" else 0.0


def _read_last_object(reply: str, has_verdict: Callable[[set[str]], bool]) -> dict[str, Any]:
    """Return the last JSON object of a reply, alone, in prose or in a fence, whose keys hold a verdict.

    Keys are stripped and case-folded. Raises: ValueError without one, for a repeated key, NaN or infinity in it.
    """
    text = strip_thought(reply).translate(_MINUS_SIGNS)[-MAX_READ_CHARACTERS:]
    decoder = json.JSONDecoder(object_pairs_hook=_fold_keys, parse_constant=_refuse_constant)
    verdict, start = None, text.find("{")
    while start >= 0:
        next_start = start + 1
        try:
            value, end = decoder.raw_decode(text, start)
            if has_verdict(set(value)):
                verdict, next_start = value, end
        except (ValueError, RecursionError):
            pass
        start = text.find("{", next_start)
    if verdict is None:
        raise ValueError(f"the reply holds no JSON object with the verdict: {reply[:100]!r}")
    return verdict


def _fold_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    folded = {name.strip().casefold(): value for name, value in pairs}
    if len(folded) < len(pairs):
        raise ValueError("a key is repeated")
    return folded


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no score")


def _read_number(value: Any, name: str) -> float:
    """Return a number, also one that is written as text. Raises: ValueError."""
    if isinstance(value, str):
        match = _WHOLE_NUMBER.fullmatch(value)
        value = float(match[1]) if match else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the score of '{name}' is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the score of '{name}' is not finite")
    return number
