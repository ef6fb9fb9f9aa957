"""Scalar metrics of an iteration: its rollouts, and its optimizer steps combined."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rl_core.analysis.summary import (
    compute_right_action_rate,
    count_contradictions,
    count_repetitions,
    extract_tool_steps,
)
from rl_core.time_limits import count_hung_calls
from rl_core.types import RolloutGroup, Trajectory

MAX_TOOL_METRICS = 20  # with a metric of their own, the most used ones
METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")  # a name that a policy made up may be anything


def compute_rollout_metrics(
    groups: Sequence[RolloutGroup], *, with_success: bool = True, tools: Sequence[str] = ()
) -> dict[str, float]:
    """Success, length, truncation and tool use of one iteration, all as means over its rollouts.

    completion_tokens counts sampled and observed tokens, action_tokens the sampled ones; tool/misuse_rate is the share
    of turns that misused a tool; tool/hung_calls counts late calls of this process that still run; policy/mean_logprob
    is per sampled token, in nats, under the distribution that it was drawn from, softmax(logits / temperature).
    `with_success` False leaves success rates out, where the environment knows none. Conduct, and `tools`: see
    `compute_behaviour_metrics`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    played = [rollout.trajectory for rollout in rollouts]
    turns = [turn for trajectory in played for turn in trajectory.turns]
    action_tokens = sum(trajectory.num_action_tokens for trajectory in played)
    metrics = {
        "train/success_rate": _compute_mean(rollout.success for rollout in rollouts),
        "train/completion_tokens": _compute_mean(
            trajectory.num_completion_tokens for trajectory in played
        ),
        "train/action_tokens": _compute_mean(trajectory.num_action_tokens for trajectory in played),
        "train/turns": _compute_mean(len(trajectory.turns) for trajectory in played),
        "train/truncation_rate": _compute_mean(rollout.is_truncated for rollout in rollouts),
        "tool/calls": sum(len(turn.calls) for turn in turns) / len(played),
        "tool/misuse_rate": _compute_mean(turn.is_error for turn in turns),
        "tool/hung_calls": float(count_hung_calls()),
        "policy/mean_logprob": math.fsum(t.mean_logprob * t.num_action_tokens for t in played)
        / max(action_tokens, 1),
    }
    metrics |= compute_behaviour_metrics(played, tools)
    if not with_success:
        del metrics["train/success_rate"]
        return metrics
    by_level: dict[str, list[bool]] = defaultdict(list)
    for trajectory in played:
        by_level[trajectory.level].append(trajectory.success)
    return metrics | {
        f"train/success_rate_by_level/{level}": _compute_mean(by_level[level])
        for level in sorted(by_level)
    }


def compute_behaviour_metrics(
    played: Sequence[Trajectory], tools: Sequence[str] = ()
) -> dict[str, float]:
    """Loops, exploration, right actions (`analysis.extract_tool_steps`), coherence, lengths and the use of each tool.

    loop_rate: rollouts with a block of tool steps that is immediately repeated. exploration_efficiency: distinct useful
    steps over steps, mean over rollouts with steps. coherent_rate: rollouts without a repeated action or an answer that
    is taken back. tool/share/NAME: share of all calls; 0 for one of `tools`, the environment's, that was not called
    where others were. action_tokens_p10, _p90: of sampled tokens per rollout.
    """
    steps = [extract_tool_steps(trajectory) for trajectory in played]
    explored = [found.efficiency for found in steps if found.efficiency is not None]
    right = [
        compute_right_action_rate(trajectory, found)
        for trajectory, found in zip(played, steps, strict=True)
    ]
    calls = Counter(
        call.name for trajectory in played for turn in trajectory.turns for call in turn.calls
    )
    lengths = sorted(trajectory.num_action_tokens for trajectory in played)
    metrics = {
        "train/loop_rate": _compute_mean(found.loop_period > 0 for found in steps),
        "train/right_action_rate": _compute_mean(value for value in right if value is not None),
        "train/coherent_rate": _compute_mean(
            not (count_repetitions(t) or count_contradictions(t)) for t in played
        ),
        "train/action_tokens_p10": float(lengths[(len(lengths) - 1) // 10]),
        "train/action_tokens_p90": float(lengths[-(-(len(lengths) - 1) * 9 // 10)]),
        "tool/used_rate": _compute_mean(
            any(turn.calls for turn in trajectory.turns) for trajectory in played
        ),
    }
    if explored:
        metrics["train/exploration_efficiency"] = _compute_mean(explored)
    calls.update(dict.fromkeys(tools[:MAX_TOOL_METRICS] if calls else (), 0))
    named = {
        name: count
        for name, count in calls.most_common(MAX_TOOL_METRICS)
        if METRIC_NAME.fullmatch(name)
    }
    return metrics | {
        f"tool/share/{name}": count / calls.total() for name, count in sorted(named.items())
    }


def aggregate_step_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: _max and _min by extremes, counters of skipped steps the last, others
    the mean.
    """
    columns: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            columns[name].append(value)
    return {name: _aggregate_values(name, values) for name, values in columns.items()}


def _aggregate_values(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    if name in ("train/skipped_steps", "train/learning_rate"):
        return values[-1]
    return math.fsum(values) / len(values)


def _compute_mean(values: Iterable[float]) -> float:
    collected = [float(value) for value in values]
    return math.fsum(collected) / len(collected) if collected else 0.0
