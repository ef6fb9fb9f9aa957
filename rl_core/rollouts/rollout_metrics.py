"""Scalar metrics of an iteration: its rollouts, and its optimizer steps combined."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rl_core.time_limits import hung_calls
from rl_core.types import RolloutGroup

__all__ = ["mean_metrics", "rollout_metrics"]


def rollout_metrics(groups: Sequence[RolloutGroup], *, with_success: bool = True) -> dict[str, float]:
    """Success, length, truncation and tool use of one iteration, all as means over its rollouts.

    completion_tokens counts sampled and observed tokens, action_tokens the sampled ones; tool/misuse_rate is the share
    of turns that misused a tool; tool/hung_calls counts late calls of this process that still run; policy/mean_logprob
    is per sampled token, in nats, under the distribution that it was drawn from, softmax(logits / temperature).
    `with_success` False leaves success rates out, where the environment knows none.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    played = [rollout.trajectory for rollout in rollouts]
    turns = [turn for trajectory in played for turn in trajectory.turns]
    action_tokens = sum(trajectory.num_action_tokens for trajectory in played)
    metrics = {
        "train/success_rate": _mean(rollout.success for rollout in rollouts),
        "train/completion_tokens": _mean(trajectory.num_completion_tokens for trajectory in played),
        "train/action_tokens": _mean(trajectory.num_action_tokens for trajectory in played),
        "train/turns": _mean(len(trajectory.turns) for trajectory in played),
        "train/truncation_rate": _mean(rollout.is_truncated for rollout in rollouts),
        "tool/calls": sum(len(turn.calls) for turn in turns) / len(played),
        "tool/misuse_rate": _mean(turn.is_error for turn in turns),
        "tool/hung_calls": float(hung_calls()),
        "policy/mean_logprob": math.fsum(t.mean_logprob * t.num_action_tokens for t in played) / max(action_tokens, 1),
    }
    if not with_success:
        del metrics["train/success_rate"]
        return metrics
    by_level: dict[str, list[bool]] = defaultdict(list)
    for trajectory in played:
        by_level[trajectory.level].append(trajectory.success)
    return metrics | {f"train/success_rate_by_level/{level}": _mean(by_level[level]) for level in sorted(by_level)}


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: _max and _min by extremes, counters of skipped steps the last, others
    the mean.
    """
    columns: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            columns[name].append(value)
    return {name: _combine(name, values) for name, values in columns.items()}


def _combine(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    if name in ("train/skipped_steps", "train/learning_rate"):
        return values[-1]
    return math.fsum(values) / len(values)


def _mean(values: Iterable[float]) -> float:
    collected = [float(value) for value in values]
    return math.fsum(collected) / len(collected) if collected else 0.0
