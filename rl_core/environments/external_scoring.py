"""Single-question episodes scored in a child process; shared by `reasoning_gym` and `verifiers`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable

from rl_core.data.reasoning import after_thought
from rl_core.environments.environment import Episode, Step
from rl_core.environments.subprocess_host import ChildFailed, ChildTimeout
from rl_core.environments.tool_question import ANSWER_WORD, read_answer

__all__ = ["NO_ANSWER", "judge", "read_tagged_answer"]

logger = logging.getLogger(__name__)

NO_ANSWER = f"error: no answer; write <answer>...</answer> or end with the line '{ANSWER_WORD} ...'"

_OPEN, _CLOSE = "<answer>", "</answer>"


def read_tagged_answer(text: str) -> str | None:
    """Text of the last <answer>...</answer>, else the text after `answer` on the last line; None = neither."""
    said = after_thought(text)
    answer, start = None, said.find(_OPEN)
    while start >= 0:  # a search by pattern would take the square of the length where tags are opened and not closed
        end = said.find(_CLOSE, start)
        if end < 0:
            break
        answer = said[start + len(_OPEN) : end].strip()
        start = said.find(_OPEN, end)
    return read_answer(text) if answer is None else answer


@functools.lru_cache(maxsize=64)  # each message is logged once
def _warn(episode: str, trouble: str) -> None:
    logger.warning("%s: %s; the answer earns 0", episode, trouble)


def judge(episode: Episode, answer: str, score: Callable[[], float], success_at: float) -> Step:
    """End `episode` with the score of its answer; an answer that cannot be scored earns 0 and counts as misuse."""
    try:
        value, trouble = float(score()), ""
    except ChildTimeout as error:
        value, trouble = 0.0, f"scoring was given up: {error}"
    except (ChildFailed, TypeError, ValueError, LookupError, ArithmeticError) as error:
        value, trouble = 0.0, f"scoring failed: {error}"
    if not math.isfinite(value):
        value, trouble = 0.0, f"scoring gave {value}"
    if trouble:
        _warn(type(episode).__name__, trouble)
    return Step(
        reward=value,
        terminated=True,
        answer=answer,
        success=not trouble and value >= success_at,
        is_error=bool(trouble),
        info={"scoring": trouble} if trouble else {},
    )
