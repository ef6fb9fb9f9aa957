"""Held-out evaluation on the same episodes for every model: success with intervals, pass@k, paired comparison."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from rl_core.analysis.statistics import (
    Difference,
    Rate,
    bootstrap_paired_difference,
    compute_clustered_rate,
    compute_mean_pass_at_k,
    sign_test,
)
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.errors import DataError, SettingsError
from rl_core.rollouts.episode_sequence import EpisodeRequest, Renderer
from rl_core.settings import SamplingSettings
from rl_core.storage.faults import inject_fault
from rl_core.types import Rollout, StopReason, Trajectory

if TYPE_CHECKING:
    from rl_core.distributed import ProcessGroup
    from rl_core.inference.sampling import RolloutBackend


_SEPARATE_FIELDS = ("trajectories", "rollouts")  # of an Evaluation, stored in separate files
_TIMING_FIELDS = ("tokens_per_second", "seconds")  # vary between evaluations of the same model


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """Result of a model on one held-out episode."""

    level: str
    kind: str
    seed: int
    samples: int  # rollouts of this episode
    successes: int | None  # successful rollouts; None = success is unknown
    reward: float  # mean over the rollouts
    environment: str = ""  # "" = unknown, of evaluations by earlier versions

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the episode across models."""
        return self.level, self.seed

    @property
    def success(self) -> float | None:
        """Success rate over the samples; None = unknown."""
        return None if self.successes is None else self.successes / self.samples


@dataclass
class Evaluation:
    """Results of one model on the held-out episodes.

    An environment without a notion of success gives `success_rate` and `interval` None and no rates: its measure is the
    reward.
    """

    success_rate: float | None
    # Wilson 95%, at the effective sample size if episodes were sampled several times.
    interval: tuple[float, float] | None
    by_level: dict[str, Rate]
    by_kind: dict[str, Rate]
    pass_at_k: dict[int, float]
    reward_mean: float
    turns_mean: float
    tool_calls_mean: float
    action_tokens_mean: float
    misuse_rate: float  # share of turns with misuse of a tool
    truncated_rate: float  # share of rollouts cut by a limit
    tokens_per_second: float  # sampled tokens / seconds of all rollouts; 0 = unknown
    seconds: float  # 0 = unknown
    episodes: list[EpisodeResult] = field(repr=False)  # in the order of the requests
    # Level -> `HeldOutSeparation.to_json`; {} = not known.
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed_episodes: int = 0  # rollouts whose environment failed; excluded from all results
    # Not part of `to_json`; rollouts are the trajectories with token ids.
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    rollouts: list[Rollout] = field(default_factory=list, repr=False)

    @property
    def samples(self) -> int:
        """Total number of rollouts."""
        return sum(episode.samples for episode in self.episodes)

    @property
    def total(self) -> Rate | None:
        """Success rate with its interval and the number of rollouts; None = unknown."""
        if self.success_rate is None or self.interval is None:
            return None
        return Rate(self.success_rate, *self.interval, self.samples)

    @property
    def environments(self) -> tuple[str, ...]:
        """Environments of a mixture, in order of their first episode; () = the episodes are of one environment."""
        names = tuple(dict.fromkeys(episode.environment for episode in self.episodes))
        return names if len(names) > 1 else ()

    def select_environment(self, name: str) -> list[EpisodeResult]:
        """Return the episodes of one environment."""
        return [episode for episode in self.episodes if episode.environment == name]

    @property
    def by_environment(self) -> dict[str, Rate]:
        """Success rate of each environment of a mixture; without those of an unknown success."""
        if not self.environments:
            return {}
        return _compute_rates_by(self.episodes, lambda episode: episode.environment)

    @property
    def reward_by_environment(self) -> dict[str, float]:
        """Mean reward of each environment of a mixture, over its rollouts."""
        groups = {name: self.select_environment(name) for name in self.environments}
        return {
            name: sum(episode.reward * episode.samples for episode in group)
            / sum(episode.samples for episode in group)
            for name, group in groups.items()
        }

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return scalars for tracking, named `eval/...`; without those of an unknown success."""
        values: dict[str, float] = {}
        if (total := self.total) is not None:
            values = {
                "success_rate": total.rate,
                "success_rate_low": total.low,
                "success_rate_high": total.high,
            }
        values |= {"episodes": float(len(self.episodes)), "samples": float(self.samples)}
        for name in (
            "reward_mean",
            "turns_mean",
            "tool_calls_mean",
            "action_tokens_mean",
            "misuse_rate",
            "truncated_rate",
            "failed_episodes",
            "tokens_per_second",
            "seconds",
        ):
            values[name] = float(getattr(self, name))
        values |= {f"pass_at_{k}": value for k, value in self.pass_at_k.items()}
        for level, rate in self.by_level.items():
            values[f"success_rate_by_level/{level}"] = rate.rate
        for kind, rate in self.by_kind.items():
            values[f"success_rate_by_kind/{kind}"] = rate.rate
        for name, rate in self.by_environment.items():
            values[f"success_rate_by_environment/{name}"] = rate.rate
        for name, reward in self.reward_by_environment.items():
            values[f"reward_mean_by_environment/{name}"] = reward
        return {f"{prefix}/{name}": value for name, value in values.items()}

    def to_json(self) -> dict[str, Any]:
        """Convert the results to a JSON-serialisable dict, equal for equal episodes.

        Without trajectories and rollouts, which are stored in trajectories.jsonl and tokens.jsonl, and without
        timings, which `metrics` returns.
        """
        row = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in _SEPARATE_FIELDS + _TIMING_FIELDS
        }
        row["interval"] = None if self.interval is None else list(self.interval)
        row["by_level"] = {level: rate._asdict() for level, rate in self.by_level.items()}
        row["by_kind"] = {kind: rate._asdict() for kind, rate in self.by_kind.items()}
        row["pass_at_k"] = {str(k): value for k, value in self.pass_at_k.items()}
        row["episodes"] = [dataclasses.asdict(episode) for episode in self.episodes]
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        """Build an evaluation from the result of `to_json`; `trajectories` and `rollouts` are empty, timings 0.

        Raises: DataError if the row was not written by `to_json`.
        """
        try:
            values = {**dict.fromkeys(_TIMING_FIELDS, 0.0), **row}
            if row["interval"] is not None:
                values["interval"] = (float(row["interval"][0]), float(row["interval"][1]))
            values["by_level"] = {level: Rate(**rate) for level, rate in row["by_level"].items()}
            values["by_kind"] = {kind: Rate(**rate) for kind, rate in row["by_kind"].items()}
            values["pass_at_k"] = {int(k): float(value) for k, value in row["pass_at_k"].items()}
            values["episodes"] = [EpisodeResult(**episode) for episode in row["episodes"]]
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(f"not a stored evaluation ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class PairedResult:
    """Challenger minus champion on their common episodes."""

    success: Difference | None  # None = unknown for one of the two
    reward: Difference
    episodes: int  # number of compared episodes
    unpaired: int  # number of episodes that only one of the two played
    wins: int  # episodes with a higher success rate of the challenger; with a higher reward if success is unknown
    losses: int
    p_value: float  # exact sign test of wins against losses

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON-serialisable dict."""
        return {
            **dataclasses.asdict(self),
            "success": None if self.success is None else self.success._asdict(),
            "reward": self.reward._asdict(),
        }


def evaluate(
    environment: Environment,
    backend: RolloutBackend,
    renderer: Renderer,
    requests: Sequence[EpisodeRequest],
    *,
    samples: int,
    sampling: SamplingSettings,
    seed: int,
    policy_version: int = 0,
    process_group: ProcessGroup | None = None,
    failures: EpisodeFailureMonitor | None = None,
) -> Evaluation:
    """Evaluate a model: play every requested episode `samples` times.

    Args:
        requests: from `rollouts.draw_heldout_requests`. samples: rollouts of each, at least 1.
        sampling: temperature 0 = greedy, with log-probabilities at temperature 1. seed: of the sampling.
        process_group: processes that each play a share of the episodes; None = only this one.
        failures: counts the episodes whose environment failed; None = up to `sampling.max_failed_share` of this call.
    Raises: DataError without requests; SettingsError for samples below 1; EnvironmentFault if too many episodes failed.
    """
    # Imported here because they load torch, which results do not need.
    from rl_core.distributed import SINGLE_PROCESS
    from rl_core.rollouts.collect import collect_rollouts

    if not requests:
        raise DataError("evaluate: there are no episodes to play")
    if samples < 1:
        raise SettingsError(f"samples: {samples} must be at least 1")
    failures = failures or EpisodeFailureMonitor(sampling.max_failed_share)
    num_failed_before = failures.total
    start_time = time.perf_counter()
    groups = collect_rollouts(
        environment,
        backend,
        renderer,
        requests,
        group_size=samples,
        sampling=sampling,
        seed=seed,
        policy_version=policy_version,
        process_group=process_group or SINGLE_PROCESS,
        failures=failures,
    )
    seconds = time.perf_counter() - start_time
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    result = summarize_trajectories((rollout.trajectory for rollout in rollouts), seconds)
    result.failed_episodes = failures.total - num_failed_before
    result.rollouts = rollouts
    inject_fault("evaluation.played")
    return result


def summarize_trajectories(trajectories: Iterable[Trajectory], seconds: float = 0.0) -> Evaluation:
    """Compute an evaluation from existing trajectories.

    Args:
        trajectories: grouped into episodes by (level, seed). seconds: duration of the rollouts; 0 = unknown.
    Raises: DataError if there are none.
    """
    trajectories = list(trajectories)
    if not trajectories:
        raise DataError("summarize: there are no trajectories")
    grouped: dict[tuple[str, int], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        grouped[trajectory.level, trajectory.seed].append(trajectory)
    episodes = [
        EpisodeResult(
            level,
            group[0].kind,
            seed,
            len(group),
            _count_successes(group),
            _compute_mean(t.reward for t in group),
            group[0].environment,
        )
        for (level, seed), group in grouped.items()
    ]
    total = _compute_rate(episodes)
    turns = [turn for t in trajectories for turn in t.turns]
    tokens = sum(t.num_action_tokens for t in trajectories)
    return Evaluation(
        success_rate=None if total is None else total.rate,
        interval=None if total is None else (total.low, total.high),
        by_level=_compute_rates_by(episodes, lambda episode: episode.level),
        by_kind=_compute_rates_by(episodes, lambda episode: episode.kind),
        pass_at_k=_compute_pass_at_ks(episodes),
        reward_mean=_compute_mean(t.reward for t in trajectories),
        turns_mean=len(turns) / len(trajectories),
        tool_calls_mean=sum(len(turn.calls) for turn in turns) / len(trajectories),
        action_tokens_mean=tokens / len(trajectories),
        misuse_rate=sum(turn.is_error for turn in turns) / max(1, len(turns)),
        truncated_rate=_compute_mean(t.stop_reason != StopReason.TERMINATED for t in trajectories),
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        seconds=seconds,
        episodes=episodes,
        trajectories=trajectories,
    )


def compare(
    challenger: Evaluation,
    champion: Evaluation,
    *,
    bootstrap_samples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> PairedResult:
    """Compare challenger and champion, paired by episode, with bootstrap intervals over episodes.

    Raises: DataError without common episodes.
    """
    pairs = _pair_episodes(challenger, champion)
    successes = [
        (new.success, old.success)
        for new, old in pairs
        if new.success is not None and old.success is not None
    ]
    rewards = [(new.reward, old.reward) for new, old in pairs]
    knows_success = len(successes) == len(pairs)
    compared = successes if knows_success else rewards
    wins = sum(new > old for new, old in compared)
    losses = sum(new < old for new, old in compared)
    bootstrap = functools.partial(
        bootstrap_paired_difference, samples=bootstrap_samples, seed=seed, confidence=confidence
    )
    success = None
    if knows_success:
        success = bootstrap([new for new, _ in successes], [old for _, old in successes])
    reward = bootstrap([new for new, _ in rewards], [old for _, old in rewards])
    unpaired = len(challenger.episodes) + len(champion.episodes) - 2 * len(pairs)
    return PairedResult(
        success, reward, len(pairs), unpaired, wins, losses, sign_test(wins, losses)
    )


def compute_paired_differences(
    challenger: Evaluation, champion: Evaluation, metric: Literal["success", "reward"] = "success"
) -> list[float]:
    """Compute challenger minus champion on each common episode, averaged over the samples of an episode.

    Raises: DataError without common episodes, or where success is unknown.
    """
    differences = []
    for new, old in _pair_episodes(challenger, champion):
        values = getattr(new, metric), getattr(old, metric)
        if None in values:
            raise DataError(
                "success is unknown: the environment has no verifier that tells it; compare by reward (metric: reward)"
            )
        differences.append(values[0] - values[1])
    return differences


def _pair_episodes(
    challenger: Evaluation, champion: Evaluation
) -> list[tuple[EpisodeResult, EpisodeResult]]:
    champion_episodes = {episode.key: episode for episode in champion.episodes}
    pairs = [
        (new, champion_episodes[new.key])
        for new in challenger.episodes
        if new.key in champion_episodes
    ]
    if not pairs:
        raise DataError(
            f"the two evaluations have no episode in common ({len(challenger.episodes)} and {len(champion.episodes)} "
            "episodes); evaluate both with the same environment, levels, number of episodes and seed"
        )
    return pairs


def _count_successes(trajectories: Sequence[Trajectory]) -> int | None:
    known = [t.success for t in trajectories if t.success is not None]
    return sum(known) if len(known) == len(trajectories) else None


def _compute_rate(episodes: Iterable[EpisodeResult]) -> Rate | None:
    """Compute the success rate over the episodes that know it; None = there are none."""
    counts = [(e.successes, e.samples) for e in episodes if e.successes is not None]
    if not counts:
        return None
    return compute_clustered_rate([s for s, _ in counts], [n for _, n in counts])


def _compute_rates_by(
    episodes: Sequence[EpisodeResult], group: Callable[[EpisodeResult], str]
) -> dict[str, Rate]:
    """Compute the success rate of each level or kind; without those of an unknown success."""
    rates = {
        name: _compute_rate(e for e in episodes if group(e) == name)
        for name in dict.fromkeys(map(group, episodes))
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def _compute_pass_at_ks(episodes: Sequence[EpisodeResult]) -> dict[int, float]:
    """Compute pass@1, pass@2, pass@4, ... and pass@n, n the fewest samples of an episode."""
    known = [(e.samples, e.successes) for e in episodes if e.successes is not None]
    if not known:
        return {}
    samples, successes = [n for n, _ in known], [c for _, c in known]
    fewest = min(samples)
    ks = sorted({2**i for i in range(fewest.bit_length()) if 2**i <= fewest} | {fewest})
    values = {k: compute_mean_pass_at_k(samples, successes, k) for k in ks}
    return {k: value for k, value in values.items() if value is not None}


def _compute_mean(values: Iterable[float]) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)
