"""What coherence is made of: a band for the likeness of neighbouring turns, repeated actions, answers taken back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rl_core.environments.solutions import final_of_solution, same_number
from rl_core.environments.tool_question import ANSWER_WORD, read_answer, same_text
from rl_core.types import Trajectory, Turn

__all__ = ["band_score", "contradictions", "repetitions"]


def band_score(cosine: float, low: float, high: float) -> float:
    """1 inside [low, high], falling linearly to 0 at -1 and at +1."""
    cosine = min(1.0, max(-1.0, cosine))  # rounding
    if cosine < low:
        return (cosine + 1) / (low + 1)
    return (1 - cosine) / (1 - high) if cosine > high else 1.0


def repetitions(trajectory: Trajectory) -> int:
    """Turns whose action, up to case and blanks, was written before in the same part of the episode."""
    count = 0
    for part in _parts(trajectory):
        actions = [" ".join(turn.action.lower().split()) for turn in part]
        count += len(actions) - len(set(actions))
    return count


def contradictions(trajectory: Trajectory) -> int:
    """Stated answers that differ from the one stated before them in the same part of the episode.

    An answer is what an environment may read as one: a line 'answer X', or '#### X', in an action or in a draft before
    its last line.
    """
    count = 0
    for part in _parts(trajectory):
        answers = [answer for turn in part for answer in _answers(turn.action)]
        pairs = pairwise(answers)
        count += sum(not (same_text(a, b) or same_number(a, b)) for a, b in pairs)
    return count


def _answers(action: str) -> Iterator[str]:
    if ANSWER_WORD not in action and "####" not in action:  # nearly every call of a tool
        return
    for line in action.rpartition("</think>")[2].splitlines():  # what is merely thought is not stated
        answer = read_answer(line)
        stated = answer if answer is not None else final_of_solution(line)
        if stated:
            yield stated


def _parts(trajectory: Trajectory) -> list[list[Turn]]:
    """The turns up to each answer that the environment took before it asked on; the next question may want another."""
    parts: list[list[Turn]] = [[]]
    for turn in trajectory.turns:
        parts[-1].append(turn)
        if turn.tool_call is None and not turn.is_error and turn.observation is not None:
            parts.append([])
    return parts
