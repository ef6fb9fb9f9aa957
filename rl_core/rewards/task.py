"""Reward components that a rollout itself determines."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.types import Rollout

__all__ = ["task_rewards", "tool_use_rewards"]


def task_rewards(rollouts: Sequence[Rollout]) -> list[float]:
    """What the environment gave, summed over the episode."""
    return [rollout.trajectory.rewards["task"] for rollout in rollouts]


def tool_use_rewards(rollouts: Sequence[Rollout]) -> list[float]:
    """Minus 1 for every turn that misused a tool: an action that did not parse, named no tool, or made one fail."""
    return [-float(sum(turn.is_error for turn in rollout.trajectory.turns)) for rollout in rollouts]
