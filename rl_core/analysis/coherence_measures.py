"""Coherence measures: similarity band of consecutive turns, repeated actions, retracted answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rl_core.data.reasoning import after_thought
from rl_core.environments.solutions import final_of_solution, same_number
from rl_core.environments.tool_question import ANSWER_WORD, read_answer, same_text
from rl_core.types import Trajectory, Turn

__all__ = ["band_score", "contradictions", "repetitions"]


def band_score(cosine: float, low: float, high: float) -> float:
    """Score 1 inside [low, high], falling linearly to 0 at -1 and at +1."""
    cosine = min(1.0, max(-1.0, cosine))  # rounding
    if cosine < low:
        return (cosine + 1) / (low + 1)
    return (1 - cosine) / (1 - high) if cosine > high else 1.0


def repetitions(trajectory: Trajectory) -> int:
    """Number of turns that repeat an action (ignoring case and white space) within the same part of the episode."""
    count = 0
    for part in _parts(trajectory):
        actions = [" ".join(turn.action.lower().split()) for turn in part]
        count += len(actions) - len(set(actions))
    return count


def contradictions(trajectory: Trajectory) -> int:
    """Number of answers that differ from the previous one in the same part of the episode.

    Any line 'answer X' or '#### X' of an action counts as an answer, drafts before its last line included.
    """
    count = 0
    for part in _parts(trajectory):
        answers = [answer for turn in part for answer in _answers(turn.action)]
        pairs = pairwise(answers)
        count += sum(not (same_text(a, b) or same_number(a, b)) for a, b in pairs)
    return count


def _answers(action: str) -> Iterator[str]:
    if ANSWER_WORD not in action and "####" not in action:  # fast path: nearly every tool call
        return
    for line in after_thought(action).splitlines():  # thoughts do not count
        answer = read_answer(line)
        stated = answer if answer is not None else final_of_solution(line)
        if stated:
            yield stated


def _parts(trajectory: Trajectory) -> list[list[Turn]]:
    """Turns split after each answer accepted by the environment, since the next question may have another answer."""
    parts: list[list[Turn]] = [[]]
    for turn in trajectory.turns:
        parts[-1].append(turn)
        if turn.tool_call is None and not turn.is_error and turn.observation is not None:
            parts.append([])
    return parts
