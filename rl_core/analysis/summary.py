"""Streaming statistics of trajectories, in constant memory."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.analysis.coherence_measures import contradictions, repetitions
from rl_core.analysis.own_measures import OwnMeasure
from rl_core.analysis.statistics import distinct_n, entropy
from rl_core.analysis.tool_steps import right_action_rate, tool_steps
from rl_core.types import StopReason, Trajectory

__all__ = ["OTHER", "LevelTools", "Moments", "Reservoir", "Summary"]

MAX_NAMES = 256  # distinct tools or strategies counted by name; further ones count as OTHER, which bounds memory
OTHER = "(other)"
NO_CALL = "(no tool)"  # misuse by text that names no tool
RESERVOIR = 5000  # reservoir size per distribution: quantile error at most about 0.7 percentage points (1 sd)
KEPT_ACTIONS = 1000  # trajectories used for distinct-n, the same number for every model


@dataclass
class Moments:
    """Count, mean, variance and extremes of a stream (Welford 1962, doi:10.2307/1266577)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Count one value."""
        self.n += 1
        step = value - self.mean
        self.mean += step / self.n
        self.squares += step * (value - self.mean)
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def std(self) -> float:
        """Standard deviation of the sample (n - 1); 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else 0.0


class Reservoir:
    """Uniform sample of bounded size from a stream of any length.

    Source: Vitter 1985, doi:10.1145/3147.3165 (algorithm R).
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._seen = 0
        self.items: list[Any] = []

    def add(self, item: Any) -> None:
        """Add one item."""
        self._seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (place := int(self._random.random() * self._seen)) < self._size:
            self.items[place] = item


class Distribution:
    """Moments of a stream, and a reservoir for quantiles and figures."""

    def __init__(self, seed: int) -> None:
        self.moments = Moments()
        self.reservoir = Reservoir(RESERVOIR, seed)

    def add(self, value: float) -> None:
        """Add one value."""
        self.moments.add(value)
        self.reservoir.add(value)

    def to_json(self) -> dict[str, float]:
        """Mean, standard deviation, extremes and quantiles."""
        values, m = sorted(self.reservoir.items), self.moments
        if not values:
            return {}
        quantiles = {
            f"p{share}": float(values[min(len(values) - 1, len(values) * share // 100)]) for share in (10, 50, 90)
        }
        return {"mean": m.mean, "std": m.std, "min": float(m.low), "max": float(m.high), **quantiles}


@dataclass
class LevelTools:
    """Tool use at one level."""

    trajectories: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by tool
    errors: Counter[str] = field(default_factory=Counter)  # misuse by tool; NO_CALL if the text named none


class Summary:
    """Counts over one model's trajectories: `add` each, then read `metrics` and the attributes."""

    def __init__(
        self, image_tools: Collection[str] | None = None, seed: int = 0, own: Sequence[OwnMeasure] = ()
    ) -> None:
        """`image_tools`: tools that reveal the hidden image; None = all. own: measures of the user's."""
        self.own = {measure.name: (measure, Moments()) for measure in own}
        self._image_tools = image_tools
        self.tools: dict[tuple[str, str], LevelTools] = {}  # by (environment, level)
        names = ("reward", "turns", "action_tokens", "completion_tokens", "tool_calls", "exploration", "right_actions")
        self.distributions = {name: Distribution(seed + index) for index, name in enumerate(names)}
        self.stop_reasons: Counter[str] = Counter()
        self.loop_periods: Counter[int] = Counter()
        self.strategies: Counter[str] = Counter()
        self.rewards: dict[str, Moments] = {}
        self._actions = Reservoir(KEPT_ACTIONS, seed + 100)
        self._counts: Counter[str] = Counter()
        self._nll = 0.0

    @property
    def trajectories(self) -> int:
        """Number of trajectories added."""
        return self._counts["trajectories"]

    def add(self, trajectory: Trajectory) -> dict[str, float | None]:
        """Add one trajectory; returns its measures by the names of `glossary.DIRECTIONS`, None = it has none."""
        counts, turns = self._counts, trajectory.turns
        calls = [turn for turn in turns if turn.tool_call is not None]
        errors = sum(turn.is_error for turn in turns)
        counts["trajectories"] += 1
        counts["turns"] += len(turns)
        counts["calls"] += len(calls)
        counts["errors"] += errors
        counts["with_errors"] += errors > 0
        counts["answered"] += trajectory.answer is not None
        looked = self._looked(trajectory)
        counts["looked"] += looked
        counts["action_tokens"] += trajectory.num_action_tokens
        self._nll -= trajectory.mean_logprob * trajectory.num_action_tokens
        self.stop_reasons[_bounded(self.stop_reasons, trajectory.stop_reason)] += 1
        steps = tool_steps(trajectory)
        if period := steps.loop_period:
            counts["looping"] += 1
            self.loop_periods[min(period, 99)] += 1
        if (efficiency := steps.efficiency) is not None:
            self.distributions["exploration"].add(efficiency)
        if (right := right_action_rate(trajectory, steps)) is not None:
            self.distributions["right_actions"].add(right)
        repeated, taken_back = repetitions(trajectory), contradictions(trajectory)
        counts["repeated"] += repeated
        counts["taken_back"] += taken_back
        counts["coherent"] += not (repeated or taken_back)
        strategy = " > ".join(
            turn.tool_call.name if turn.tool_call else "error" if turn.is_error else "text" for turn in turns
        )
        self.strategies[_bounded(self.strategies, strategy[:200] or "(nothing)")] += 1
        for name, value in (
            ("reward", trajectory.reward), ("turns", len(turns)), ("action_tokens", trajectory.num_action_tokens),
            ("completion_tokens", trajectory.num_completion_tokens), ("tool_calls", len(calls)),
        ):  # fmt: skip
            self.distributions[name].add(value)
        for name, value in trajectory.rewards.items():
            self.rewards.setdefault(_bounded(self.rewards, name), Moments()).add(value)
        for measure, moments in self.own.values():
            if (measured := measure(trajectory)) is not None:
                moments.add(measured)
        self._actions.add(" ".join(turn.action for turn in turns)[:2000])
        self._count_tools(trajectory)
        return {
            "turns_mean": len(turns),
            "tool_calls_mean": len(calls),
            "action_tokens_mean": trajectory.num_action_tokens,
            "looked_rate": looked,
            "answered_rate": trajectory.answer is not None,
            "truncated_rate": trajectory.stop_reason != StopReason.TERMINATED,
            "trajectories_with_misuse": errors > 0,
            "loop_rate": period is not None and period > 0,
            "exploration_efficiency": efficiency,
            "right_action_rate": right,
            "coherent_rate": not (repeated or taken_back),
        }

    def metrics(self) -> dict[str, float]:
        """Scalars over all trajectories; shares are in [0, 1]."""
        counts, total = self._counts, max(1, self.trajectories)
        turns, tokens = max(1, counts["turns"]), max(1, counts["action_tokens"])
        parts = self.distributions
        return {
            "trajectories": float(self.trajectories),
            "reward_mean": parts["reward"].moments.mean,
            "turns_mean": parts["turns"].moments.mean,
            "action_tokens_mean": parts["action_tokens"].moments.mean,
            "completion_tokens_mean": parts["completion_tokens"].moments.mean,
            "tool_calls_mean": parts["tool_calls"].moments.mean,
            "answered_rate": counts["answered"] / total,
            "truncated_rate": 1 - self.stop_reasons[StopReason.TERMINATED] / total,
            "looked_rate": counts["looked"] / total,
            "misuse_rate": counts["errors"] / turns,
            "trajectories_with_misuse": counts["with_errors"] / total,
            "loop_rate": counts["looping"] / total,
            "exploration_efficiency": parts["exploration"].moments.mean,
            "right_action_rate": parts["right_actions"].moments.mean,
            "coherent_rate": counts["coherent"] / total,
            "repetitions_mean": counts["repeated"] / total,
            "contradictions_mean": counts["taken_back"] / total,
            "distinct_1": distinct_n(self._actions.items, 1),
            "distinct_2": distinct_n(self._actions.items, 2),
            "strategy_entropy": entropy(self.strategies.values()),
            "nll_per_token": self._nll / tokens,
        } | {name: moments.mean for name, (_, moments) in self.own.items() if moments.n}

    def to_json(self) -> dict[str, Any]:
        """All counts, for analysis.json."""
        return {
            "metrics": self.metrics(),
            "distributions": {name: distribution.to_json() for name, distribution in self.distributions.items()},
            "stop_reasons": dict(self.stop_reasons.most_common()),
            "loop_periods": {str(period): count for period, count in sorted(self.loop_periods.items())},
            "strategies": dict(self.strategies.most_common(20)),
            "rewards": {
                name: {"mean": m.mean, "std": m.std, "min": m.low, "max": m.high} for name, m in self.rewards.items()
            },
            "tools": [
                {
                    "environment": environment,
                    "level": level,
                    "trajectories": tools.trajectories,
                    "calls": dict(tools.calls.most_common()),
                    "errors": dict(tools.errors.most_common()),
                }
                for (environment, level), tools in self.tools.items()
            ],
        }

    def tool_names(self) -> list[str]:
        """Tools called at any level, most frequent first."""
        total: Counter[str] = sum((tools.calls for tools in self.tools.values()), Counter())
        return [name for name, _ in total.most_common()]

    def _looked(self, trajectory: Trajectory) -> bool:
        """True if a tool revealed a part of the image before the answer."""
        return trajectory.answer is not None and any(
            turn.tool_call is not None
            and not turn.is_error
            and turn.observation is not None
            and (self._image_tools is None or turn.tool_call.name in self._image_tools)
            for turn in trajectory.turns
        )

    def _count_tools(self, trajectory: Trajectory) -> None:
        place = (trajectory.environment, trajectory.level)
        tools = self.tools.setdefault(
            place if place in self.tools or len(self.tools) < MAX_NAMES else (OTHER, OTHER), LevelTools()
        )
        tools.trajectories += 1
        for turn in trajectory.turns:
            name = turn.tool_call.name if turn.tool_call is not None else NO_CALL
            if turn.tool_call is not None:
                tools.calls[_bounded(tools.calls, name)] += 1
            if turn.is_error:
                tools.errors[_bounded(tools.errors, name)] += 1


def _bounded(known: Collection[str], name: str) -> str:
    """The name, or OTHER once MAX_NAMES distinct names are known."""
    return name if name in known or len(known) < MAX_NAMES else OTHER
