"""Scalar metrics of an iteration: of its rollouts, and of its optimizer steps combined."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from rl_core.analysis.summary import (
    compute_right_action_rate,
    count_contradictions,
    count_repetitions,
    extract_tool_steps,
    has_called_tool,
)
from rl_core.settings import SamplingSettings
from rl_core.time_limits import count_hung_calls
from rl_core.types import Rollout, RolloutGroup, Trajectory

logger = logging.getLogger(__name__)

TRUNCATED_SHARE = (
    0.4  # of rollouts, from which limits are reported; a game of two loses one of its two players
)
MAX_TOOL_METRICS = 20  # most used tools, one metric each
METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")  # a policy may make up any name


def compute_rollout_metrics(
    groups: Sequence[RolloutGroup],
    *,
    with_success: bool = True,
    tools: Sequence[str] = (),
    visual_tools: Collection[str] = (),
    environments: Sequence[str] = (),
) -> dict[str, float]:
    """Compute success, length, truncation and tool use of one iteration, all as means over its rollouts.

    completion_tokens counts sampled and observed tokens, action_tokens only sampled ones. tool/misuse_rate is the
    share of turns that misused a tool; tool/hung_calls counts late calls of this process that are still running.
    policy/mean_logprob is per sampled token, in nats, under the sampling distribution, softmax(logits / temperature).

    Args:
        with_success: False = omit success rates, for environments without them.
        tools, visual_tools: see `compute_behaviour_metrics`, whose metrics are included.
        environments: of a mixture: also compute success, reward and share of the rollouts of each.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    trajectories = [rollout.trajectory for rollout in rollouts]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    action_tokens = sum(trajectory.num_action_tokens for trajectory in trajectories)
    metrics = {
        "train/completion_tokens": _compute_mean(
            trajectory.num_completion_tokens for trajectory in trajectories
        ),
        "train/action_tokens": _compute_mean(
            trajectory.num_action_tokens for trajectory in trajectories
        ),
        "train/turns": _compute_mean(len(trajectory.turns) for trajectory in trajectories),
        "train/truncation_rate": _compute_mean(rollout.is_truncated for rollout in rollouts),
        "tool/calls": sum(len(turn.calls) for turn in turns) / len(trajectories),
        "tool/misuse_rate": _compute_mean(turn.is_error for turn in turns),
        "tool/hung_calls": float(count_hung_calls()),
        "policy/mean_logprob": math.fsum(t.mean_logprob * t.num_action_tokens for t in trajectories)
        / max(action_tokens, 1),
    }
    metrics |= compute_behaviour_metrics(trajectories, tools, visual_tools)
    metrics |= _compute_environment_metrics(rollouts, environments)
    known = [trajectory for trajectory in trajectories if trajectory.success is not None]
    if not known or not (with_success or environments):
        return metrics
    metrics["train/success_rate"] = _compute_mean(bool(t.success) for t in known)
    by_level: dict[str, list[bool]] = defaultdict(list)
    for trajectory in known:
        by_level[trajectory.level].append(bool(trajectory.success))
    return metrics | {
        f"train/success_rate_by_level/{level}": _compute_mean(by_level[level])
        for level in sorted(by_level)
    }


def _compute_environment_metrics(
    rollouts: Sequence[Rollout], environments: Sequence[str]
) -> dict[str, float]:
    """Compute success, reward and share of the rollouts of each environment; only the share of one without rollouts."""
    metrics: dict[str, float] = {}
    for name in environments:
        played = [rollout for rollout in rollouts if rollout.trajectory.environment == name]
        trajectories = [rollout.trajectory for rollout in played]
        metrics[f"train/rollout_share_by_environment/{name}"] = len(played) / len(rollouts)
        rewards = [rollout.reward for rollout in played if not rollout.is_masked]
        if rewards:
            metrics[f"reward/mean_by_environment/{name}"] = _compute_mean(rewards)
        known = [t for t in trajectories if t.success is not None]
        if known:
            metrics[f"train/success_rate_by_environment/{name}"] = _compute_mean(
                bool(t.success) for t in known
            )
    return metrics


def compute_behaviour_metrics(
    trajectories: Sequence[Trajectory],
    tools: Sequence[str] = (),
    visual_tools: Collection[str] = (),
) -> dict[str, float]:
    """Compute loops, exploration, right actions (`analysis.extract_tool_steps`), coherence, lengths and the use of
    each tool.

    loop_rate: share of rollouts with a block of tool steps that is immediately repeated. exploration_efficiency:
    distinct useful steps over steps, mean over rollouts with steps. coherent_rate: share of rollouts without a
    repeated action or a retracted answer. action_tokens_p10, _p90: percentiles of sampled tokens per rollout.
    tool/share/NAME: share of all calls. tool/rapr: rate of pixel-space reasoning, the share of rollouts that call a
    visual tool (Su et al. 2025, arXiv:2505.15966).

    Args:
        tools: of the environment; those never called get tool/share 0 if any tool was called.
        visual_tools: those that look at an image (`Tool.is_visual`); () = no tool/rapr.
    """
    steps = [extract_tool_steps(trajectory) for trajectory in trajectories]
    efficiencies = [
        tool_steps.efficiency for tool_steps in steps if tool_steps.efficiency is not None
    ]
    right = [
        compute_right_action_rate(trajectory, tool_steps)
        for trajectory, tool_steps in zip(trajectories, steps, strict=True)
    ]
    calls = Counter(
        call.name for trajectory in trajectories for turn in trajectory.turns for call in turn.calls
    )
    lengths = sorted(trajectory.num_action_tokens for trajectory in trajectories)
    metrics = {
        "train/loop_rate": _compute_mean(tool_steps.loop_period > 0 for tool_steps in steps),
        "train/right_action_rate": _compute_mean(value for value in right if value is not None),
        "train/coherent_rate": _compute_mean(
            not (count_repetitions(t) or count_contradictions(t)) for t in trajectories
        ),
        "train/action_tokens_p10": float(lengths[(len(lengths) - 1) // 10]),
        "train/action_tokens_p90": float(lengths[-(-(len(lengths) - 1) * 9 // 10)]),
        "tool/used_rate": _compute_mean(
            any(turn.calls for turn in trajectory.turns) for trajectory in trajectories
        ),
    }
    if visual_tools:
        metrics["tool/rapr"] = _compute_mean(has_called_tool(t, visual_tools) for t in trajectories)
    if efficiencies:
        metrics["train/exploration_efficiency"] = _compute_mean(efficiencies)
    calls.update(dict.fromkeys(tools[:MAX_TOOL_METRICS] if calls else (), 0))
    counts = {
        name: count
        for name, count in calls.most_common(MAX_TOOL_METRICS)
        if METRIC_NAME.fullmatch(name)
    }
    return metrics | {
        f"tool/share/{name}": count / calls.total() for name, count in sorted(counts.items())
    }


def aggregate_step_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several optimizer steps.

    Extremes of _max and _min, the last value of skipped steps and learning rate, otherwise the mean.
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


def describe_limits(sampling: SamplingSettings) -> str:
    """Describe the limits that cut rollouts, with what to change."""
    return (
        f"raise sampling.max_completion_tokens ({sampling.max_completion_tokens}; observations count, too), "
        f"sampling.max_turns ({sampling.max_turns}) or the model's context"
    )


class TruncationMonitor:
    """A single warning when limits cut many rollouts of several iterations in a row.

    Such rollouts end without an answer, so success says more about the limits than about the policy. The count is not
    checkpointed, as it decides nothing.
    """

    def __init__(self, sampling: SamplingSettings, iterations: int = 5) -> None:
        """Warn after this many `iterations` in a row."""
        self._sampling, self._iterations = sampling, iterations
        self._num_truncated = 0

    def observe_iteration(self, metrics: Mapping[str, float]) -> None:
        """Count one iteration by its `train/truncation_rate`."""
        share = metrics.get("train/truncation_rate", 0.0)
        self._num_truncated = self._num_truncated + 1 if share >= TRUNCATED_SHARE else 0
        if self._num_truncated == self._iterations:
            logger.warning(
                "limits cut at least %.0f%% of the rollouts in each of the last %d iterations (%.0f%% in the last): %s",
                100 * TRUNCATED_SHARE,
                self._iterations,
                100 * share,
                describe_limits(self._sampling),
            )
