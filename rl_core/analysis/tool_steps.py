"""Tool steps of an episode: which repeat, which are useful, and the share of right actions in the right place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from rl_core.analysis.statistics import find_loop
from rl_core.analysis.trajectories import action_key, state_key
from rl_core.types import Trajectory

__all__ = ["ToolSteps", "right_action_rate", "tool_steps"]


@dataclass(frozen=True, slots=True)
class ToolSteps:
    """Steps other than answers: calls and misuse. Answers end an episode and explore nothing."""

    steps: list[tuple[Hashable, str]]  # (action, state after it)
    useful: set[tuple[Hashable, str]]  # those that worked and told something, each once

    @property
    def efficiency(self) -> float | None:
        """Distinct useful steps over steps; None = there is none."""
        return len(self.useful) / len(self.steps) if self.steps else None

    @property
    def loop_period(self) -> int:
        """Period of a block of steps that is immediately repeated; 0 = none."""
        loop = find_loop(self.steps)
        return loop.period if loop else 0


def tool_steps(trajectory: Trajectory) -> ToolSteps:
    """Tool steps of an episode."""
    steps, useful = [], set()
    for turn in trajectory.turns:
        if turn.tool_call is not None or turn.is_error:
            step = action_key(turn), state_key(turn)
            steps.append(step)
            if turn.tool_call is not None and not turn.is_error and turn.observation is not None:
                useful.add(step)
    return ToolSteps(steps, useful)


def right_action_rate(trajectory: Trajectory, steps: ToolSteps | None = None) -> float | None:
    """Right actions in the right place (RaPR): useful tool steps and a right answer, over all turns; None = no turn.

    A call is right where it worked and told something that no earlier step of the episode had; an answer where the
    environment calls it a success and does not call it a guess (`is_grounded` false). Text that is neither, a repeated
    step, misuse and a wrong answer are not.
    """
    if not trajectory.turns:
        return None
    found = steps if steps is not None else tool_steps(trajectory)
    last = trajectory.turns[-1]
    is_answer = last.tool_call is None and not last.is_error
    right = is_answer and trajectory.success and trajectory.is_grounded is not False
    return (len(found.useful) + right) / len(trajectory.turns)
