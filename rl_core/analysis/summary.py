"""Coherence measures: similarity band of consecutive turns, repeated actions, retracted answers.

Tool steps of an episode: which repeat, which are useful, and the share of right actions in the right place.

Streaming statistics of trajectories, in constant memory.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rl_core.analysis.custom_metrics import CustomMetric
from rl_core.analysis.statistics import (
    compute_distinct_words,
    compute_entropy,
    compute_same_opening_rate,
    find_loop,
)
from rl_core.analysis.trajectories import build_action_key, build_state_key
from rl_core.data.model_text import strip_thought
from rl_core.environments.calculator import extract_solution_final, is_same_number
from rl_core.environments.question_episodes import ANSWER_WORD, is_same_text, read_answer
from rl_core.types import StopReason, Trajectory, Turn


def score_similarity_band(cosine: float, low: float, high: float) -> float:
    """Score 1 inside [low, high], falling linearly to 0 at -1 and at +1."""
    cosine = min(1.0, max(-1.0, cosine))  # rounding
    if cosine < low:
        return (cosine + 1) / (low + 1)
    return (1 - cosine) / (1 - high) if cosine > high else 1.0


def count_repetitions(trajectory: Trajectory) -> int:
    """Count turns that repeat an action (ignoring case and white space) within the same part of the episode."""
    count = 0
    for part in _split_turns_by_question(trajectory):
        actions = [" ".join(turn.action.lower().split()) for turn in part]
        count += len(actions) - len(set(actions))
    return count


def count_contradictions(trajectory: Trajectory) -> int:
    """Count answers that differ from the previous one in the same part of the episode.

    Any line 'answer X' or '#### X' of an action counts as an answer, drafts before its last line included.
    """
    count = 0
    for part in _split_turns_by_question(trajectory):
        answers = [answer for turn in part for answer in _iter_answers(turn.action)]
        pairs = pairwise(answers)
        count += sum(not (is_same_text(a, b) or is_same_number(a, b)) for a, b in pairs)
    return count


def _iter_answers(action: str) -> Iterator[str]:
    if ANSWER_WORD not in action and "####" not in action:  # fast path: nearly every tool call
        return
    for line in strip_thought(action).splitlines():  # thoughts do not count
        answer = read_answer(line)
        stated = answer if answer is not None else extract_solution_final(line)
        if stated:
            yield stated


def _split_turns_by_question(trajectory: Trajectory) -> list[list[Turn]]:
    """Split turns after each answer accepted by the environment, since the next question may have another answer."""
    parts: list[list[Turn]] = [[]]
    for turn in trajectory.turns:
        parts[-1].append(turn)
        if turn.tool_call is None and not turn.is_error and turn.observation is not None:
            parts.append([])
    return parts


@dataclass(frozen=True, slots=True)
class ToolSteps:
    """Steps other than answers: calls and misuse. Answers end an episode and explore nothing."""

    steps: list[tuple[Hashable, str]]  # (action, state after it)
    useful: set[tuple[Hashable, str]]  # those that worked and returned new information, each once

    @property
    def efficiency(self) -> float | None:
        """Distinct useful steps over steps; None = there is none."""
        return len(self.useful) / len(self.steps) if self.steps else None

    @property
    def loop_period(self) -> int:
        """Period of a block of steps that is immediately repeated; 0 = none."""
        loop = find_loop(self.steps)
        return loop.period if loop else 0


def extract_tool_steps(trajectory: Trajectory) -> ToolSteps:
    """Extract the tool steps of an episode."""
    steps, useful = [], set()
    for turn in trajectory.turns:
        if turn.tool_call is not None or turn.is_error:
            step = build_action_key(turn), build_state_key(turn)
            steps.append(step)
            if turn.tool_call is not None and not turn.is_error and turn.observation is not None:
                useful.add(step)
    return ToolSteps(steps, useful)


def compute_right_action_rate(
    trajectory: Trajectory, steps: ToolSteps | None = None
) -> float | None:
    """Compute the share of right actions: useful tool steps and a right answer, over all turns; None = no turn.

    A call is right if it worked and returned information that no earlier step of the episode had. An answer is right if
    the
    environment calls it a success and does not call it a guess (`is_grounded` false). Text that is neither, a repeated
    step, misuse and a wrong answer are not.
    """
    if not trajectory.turns:
        return None
    tool_steps = steps if steps is not None else extract_tool_steps(trajectory)
    last = trajectory.turns[-1]
    is_answer = last.tool_call is None and not last.is_error
    right = is_answer and bool(trajectory.success) and trajectory.is_grounded is not False
    return (len(tool_steps.useful) + right) / len(trajectory.turns)


def has_called_tool(trajectory: Trajectory, names: Collection[str] | None = None) -> bool:
    """Return whether the policy called one of these tools; None = any tool."""
    calls = (call for turn in trajectory.turns for call in turn.calls)
    return any(names is None or call.name in names for call in calls)


MAX_NAMES = 256  # distinct tools or strategies counted by name; further ones count as OTHER, which bounds memory
OTHER_NAME = "(other)"
NO_CALL = "(no tool)"  # misuse by text that names no tool
RESERVOIR_SIZE = 5000  # reservoir size per distribution: quantile error at most about 0.7 percentage points (1 sd)
DIVERSITY_SAMPLE_SIZE = 1000  # trajectories used for diversity, the same number for every model


@dataclass
class StreamMoments:
    """Count, mean, variance and extremes of a stream (Welford 1962, doi:10.2307/1266577)."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    low: float = math.inf
    high: float = -math.inf

    def add_value(self, value: float) -> None:
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

    def add_item(self, item: Any) -> None:
        """Add one item."""
        self._seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (place := int(self._random.random() * self._seen)) < self._size:
            self.items[place] = item


class StreamDistribution:
    """Moments of a stream, and a reservoir for quantiles and figures."""

    def __init__(self, seed: int) -> None:
        self.moments = StreamMoments()
        self.reservoir = Reservoir(RESERVOIR_SIZE, seed)

    def add_value(self, value: float) -> None:
        """Add one value."""
        self.moments.add_value(value)
        self.reservoir.add_item(value)

    def to_json(self) -> dict[str, float]:
        """Mean, standard deviation, extremes and quantiles."""
        values, m = sorted(self.reservoir.items), self.moments
        if not values:
            return {}
        quantiles = {
            f"p{share}": float(values[min(len(values) - 1, len(values) * share // 100)])
            for share in (10, 50, 90)
        }
        return {
            "mean": m.mean,
            "std": m.std,
            "min": float(m.low),
            "max": float(m.high),
            **quantiles,
        }


@dataclass
class LevelToolCounts:
    """Tool use at one level."""

    trajectories: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by tool
    errors: Counter[str] = field(
        default_factory=Counter
    )  # misuse by tool; NO_CALL if the text named none


class TrajectorySummary:
    """Counts over one model's trajectories: `add` each, then read `metrics` and the attributes."""

    def __init__(
        self,
        image_tools: Collection[str] | None = None,
        seed: int = 0,
        custom_metrics: Sequence[CustomMetric] = (),
    ) -> None:
        """Start with no trajectories; `image_tools`: tools that reveal the hidden image; None = all."""
        self.custom_metrics = {
            measure.name: (measure, StreamMoments()) for measure in custom_metrics
        }
        self._image_tools = image_tools
        self._has_image = image_tools is None or len(image_tools) > 0
        self.tools: dict[tuple[str, str], LevelToolCounts] = {}  # by (environment, level)
        names = (
            "reward",
            "turns",
            "action_tokens",
            "completion_tokens",
            "tool_calls",
            "exploration",
            "right_actions",
        )
        self.distributions = {
            name: StreamDistribution(seed + index) for index, name in enumerate(names)
        }
        self.stop_reasons: Counter[str] = Counter()
        self.loop_periods: Counter[int] = Counter()
        self.strategies: Counter[str] = Counter()
        self.rewards: dict[str, StreamMoments] = {}
        self._actions = Reservoir(DIVERSITY_SAMPLE_SIZE, seed + 100)
        self._counts: Counter[str] = Counter()
        self._nll = 0.0

    @property
    def trajectories(self) -> int:
        """Number of trajectories added."""
        return self._counts["trajectories"]

    def add_trajectory(self, trajectory: Trajectory) -> dict[str, float | None]:
        """Add one trajectory; return its measures by the names of PAIRED_METRIC_DIRECTIONS, None = it has none."""
        counts, turns = self._counts, trajectory.turns
        calls = [turn for turn in turns if turn.tool_call is not None]
        errors = sum(turn.is_error for turn in turns)
        counts["trajectories"] += 1
        counts["turns"] += len(turns)
        counts["calls"] += len(calls)
        counts["errors"] += errors
        counts["with_errors"] += errors > 0
        counts["answered"] += trajectory.answer is not None
        looked = self._has_looked(trajectory)
        counts["looked"] += looked
        is_visual = has_called_tool(trajectory, self._image_tools)
        counts["visual"] += is_visual
        counts["action_tokens"] += trajectory.num_action_tokens
        self._nll -= trajectory.mean_logprob * trajectory.num_action_tokens
        self.stop_reasons[_limit_names(self.stop_reasons, trajectory.stop_reason)] += 1
        steps = extract_tool_steps(trajectory)
        if period := steps.loop_period:
            counts["looping"] += 1
            self.loop_periods[min(period, 99)] += 1
        if (efficiency := steps.efficiency) is not None:
            self.distributions["exploration"].add_value(efficiency)
        if (right := compute_right_action_rate(trajectory, steps)) is not None:
            self.distributions["right_actions"].add_value(right)
        repeated, taken_back = count_repetitions(trajectory), count_contradictions(trajectory)
        counts["repeated"] += repeated
        counts["taken_back"] += taken_back
        counts["coherent"] += not (repeated or taken_back)
        strategy = " > ".join(
            turn.tool_call.name if turn.tool_call else "error" if turn.is_error else "text"
            for turn in turns
        )
        self.strategies[_limit_names(self.strategies, strategy[:200] or "(nothing)")] += 1
        for name, value in (
            ("reward", trajectory.reward),
            ("turns", len(turns)),
            ("action_tokens", trajectory.num_action_tokens),
            ("completion_tokens", trajectory.num_completion_tokens),
            ("tool_calls", len(calls)),
        ):
            self.distributions[name].add_value(value)
        for name, value in trajectory.rewards.items():
            self.rewards.setdefault(_limit_names(self.rewards, name), StreamMoments()).add_value(
                value
            )
        for measure, moments in self.custom_metrics.values():
            if (measured := measure(trajectory)) is not None:
                moments.add_value(measured)
        self._actions.add_item(" ".join(turn.action for turn in turns)[:2000])
        self._count_tools(trajectory)
        return {
            "turns_mean": len(turns),
            "tool_calls_mean": len(calls),
            "action_tokens_mean": trajectory.num_action_tokens,
            "looked_rate": looked,
            "rapr": is_visual if self._has_image else None,
            "answered_rate": trajectory.answer is not None,
            "truncated_rate": trajectory.stop_reason != StopReason.TERMINATED,
            "trajectories_with_misuse": errors > 0,
            "loop_rate": period is not None and period > 0,
            "exploration_efficiency": efficiency,
            "right_action_rate": right,
            "coherent_rate": not (repeated or taken_back),
        }

    def compute_metrics(self) -> dict[str, float]:
        """Compute scalars over all trajectories; shares are in [0, 1]."""
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
            "distinct_1": compute_distinct_words(self._actions.items, 1),
            "distinct_2": compute_distinct_words(self._actions.items, 2),
            "same_opening_rate": compute_same_opening_rate(self._actions.items),
            "strategy_entropy": compute_entropy(self.strategies.values()),
            "nll_per_token": self._nll / tokens,
            **({"rapr": counts["visual"] / total} if self._has_image else {}),
        } | {name: moments.mean for name, (_, moments) in self.custom_metrics.items() if moments.n}

    def to_json(self) -> dict[str, Any]:
        """Return all counts, for analysis.json."""
        return {
            "metrics": self.compute_metrics(),
            "distributions": {
                name: distribution.to_json() for name, distribution in self.distributions.items()
            },
            "stop_reasons": dict(self.stop_reasons.most_common()),
            "loop_periods": {
                str(period): count for period, count in sorted(self.loop_periods.items())
            },
            "strategies": dict(self.strategies.most_common(20)),
            "rewards": {
                name: {"mean": m.mean, "std": m.std, "min": m.low, "max": m.high}
                for name, m in self.rewards.items()
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

    def list_tool_names(self) -> list[str]:
        """List tools called at any level, most frequent first."""
        total: Counter[str] = sum((tools.calls for tools in self.tools.values()), Counter())
        return [name for name, _ in total.most_common()]

    def _has_looked(self, trajectory: Trajectory) -> bool:
        """Return whether a tool revealed a part of the image before the answer."""
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
            place
            if place in self.tools or len(self.tools) < MAX_NAMES
            else (OTHER_NAME, OTHER_NAME),
            LevelToolCounts(),
        )
        tools.trajectories += 1
        for turn in trajectory.turns:
            name = turn.tool_call.name if turn.tool_call is not None else NO_CALL
            if turn.tool_call is not None:
                tools.calls[_limit_names(tools.calls, name)] += 1
            if turn.is_error:
                tools.errors[_limit_names(tools.errors, name)] += 1


def _limit_names(known: Collection[str], name: str) -> str:
    """Return the name, or OTHER once MAX_NAMES distinct names are known."""
    return name if name in known or len(known) < MAX_NAMES else OTHER_NAME
