"""Evaluation and sampling of a policy: held-out episodes, validation during training, and plain generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.api.custom_functions import RewardSource, parse_reward
from rl_core.api.data import (
    AgentSource,
    EnvironmentSource,
    check_prompt_lengths,
    resolve_environment,
)
from rl_core.api.policy import ModelSource, Policy, load_policy
from rl_core.data.records import RowSource, read_prompts
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, StoreFailedEpisode
from rl_core.environments.prompts import Prompts
from rl_core.errors import SettingsError
from rl_core.evaluation import Evaluation, summarize_trajectories
from rl_core.evaluation import evaluate as play_episodes
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_heldout_requests
from rl_core.settings import EvaluationSettings, SamplingSettings, build_settings, resolve_defaults
from rl_core.types import RolloutGroup

TIMING_METRICS: tuple[str, ...] = (
    "eval/seconds",
    "eval/tokens_per_second",
)  # left out: the loop times evaluations


def evaluate(
    model: ModelSource,
    environment: EnvironmentSource | None = None,
    *,
    agent: AgentSource | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    settings: EvaluationSettings | Mapping[str, Any] | None = None,
    system: str = "",
    seed: int = 0,
) -> Evaluation:
    """Play held-out episodes of an environment, or answer prompts, and summarise with 95% intervals.

    Args:
        environment: an environment, or several: see `policy_gradient`.
        agent: plays the prompts, which are its tasks; see `policy_gradient`.
        prompts: rows, a JSONL or a Parquet file, instead of an environment. Without settings, or if `episodes` are as
            many, all of them are answered.
        reward: scores the episodes instead of the environment (`reward_mean`); success is still the environment's, and
            None for prompts without a verifier.
        settings: episodes, levels, samples and sampling; `greedy` is not used (set sampling.temperature to 0).
        seed: of the sampling and of the choice of episodes.
    Raises: SettingsError, DataError, EnvironmentFault, RewardError.
    """
    takes_all = settings is None
    settings = build_settings(settings or {}, EvaluationSettings)
    environment, _ = resolve_environment(
        environment, prompts, prompts, system, agent=agent, requires_reward=reward is None
    )
    rewards = None
    if reward is not None:
        reward_spec = parse_reward(reward)
        rewards = RewardOrchestrator(reward_spec.weights, functions=reward_spec.functions)
        rewards.check_rows(environment.iter_target_rows())
    policy = load_policy(model)
    check_prompt_lengths(environment, policy.renderer, policy.context, ["heldout"])
    settings = resolve_defaults(settings, policy.kind, policy.context)
    rows = environment.heldout_levels() if isinstance(environment, Prompts) else []
    if rows and (takes_all or _includes_all_rows(settings, len(rows))):
        requests = [EpisodeRequest(level, row) for level, row in rows]
    else:
        episodes_seed = seed if settings.episodes_seed is None else settings.episodes_seed
        requests = draw_heldout_requests(environment, settings, episodes_seed)
    result = play_episodes(
        environment,
        policy.backend(),
        policy.renderer,
        requests,
        samples=settings.samples,
        sampling=settings.sampling,
        seed=seed,
    )
    if not isinstance(environment, Prompts):
        result.held_out = _describe_heldout_levels(environment, result)
    if rewards is None:
        return result
    return _apply_rewards(result, rewards)


def _includes_all_rows(settings: EvaluationSettings, num_rows: int) -> bool:
    """Return whether the settings choose no part of the rows."""
    return settings.episodes >= num_rows and not settings.levels and not settings.episodes_draw


def evaluate_heldout(
    policy: Policy,
    environment: Environment,
    requests: Sequence[EpisodeRequest],
    settings: EvaluationSettings,
    seed: int,
    keep: StoreFailedEpisode | None = None,
) -> tuple[Evaluation, Evaluation | None]:
    """Run the sampled evaluation, and the greedy one if the settings ask for it.

    Args:
        keep: stores failed episodes.
    Raises: SettingsError for a reward that needs a model.
    """
    backend = policy.backend()
    rewards = RewardOrchestrator(settings.rewards) if settings.rewards else None
    if rewards is not None and rewards.needs_states:
        raise SettingsError(
            "rewards: curiosity and coherence need a model in training; leave them out"
        )
    if rewards is not None:
        rewards.check_rows(environment.iter_target_rows())

    def run_evaluation(samples: int, sampling: SamplingSettings) -> Evaluation:
        result = play_episodes(
            environment,
            backend,
            policy.renderer,
            requests,
            samples=samples,
            sampling=sampling,
            seed=seed,
            failures=EpisodeFailureMonitor(sampling.max_failed_share, store_episode=keep),
        )
        result.held_out = _describe_heldout_levels(environment, result)
        return result if rewards is None else _apply_rewards(result, rewards)

    sampled = run_evaluation(settings.samples, settings.sampling)
    if not settings.greedy or settings.sampling.temperature == 0:
        return sampled, None
    return sampled, run_evaluation(1, dataclasses.replace(settings.sampling, temperature=0.0))


def build_validator(
    policy: Policy,
    environment: Environment,
    requests: Sequence[EpisodeRequest],
    sampling: SamplingSettings,
    seed: int,
    *,
    rewards: RewardOrchestrator | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Callable[[], dict[str, float]]:
    """Build a function that plays the same validation episodes at every call and returns `eval/...` metrics.

    Args:
        rewards: scores the episodes instead of the environment.
    """
    backend = policy.backend()

    def measure() -> dict[str, float]:
        backend.refresh_weights()
        result = play_episodes(
            environment,
            backend,
            policy.renderer,
            requests,
            samples=1,
            sampling=sampling,
            seed=seed,
            process_group=process_group,
        )
        if rewards is not None:
            result = _apply_rewards(result, rewards)
        metrics = result.metrics()
        return {name: value for name, value in metrics.items() if name not in TIMING_METRICS}

    return measure


def generate(
    model: ModelSource,
    prompts: RowSource,
    *,
    samples: int = 1,
    sampling: SamplingSettings | Mapping[str, Any] | None = None,
    system: str = "",
    seed: int = 0,
) -> list[list[str]]:
    """Generate `samples` completions of every prompt, in the order of the prompts.

    Args:
        prompts: texts, rows with a `prompt` (text or messages), or a JSONL or Parquet file of such rows.
        seed: the same seed, model and prompts give the same texts.
    """
    file_suffixes = (".jsonl", ".parquet", ".pq")
    if isinstance(prompts, str) and "\n" not in prompts and not prompts.endswith(file_suffixes):
        raise SettingsError(f"prompts: {prompts!r} is a single text; pass a list, [{prompts!r}]")
    if samples < 1:
        raise SettingsError(f"samples: {samples} must be at least 1")
    policy = load_policy(model)
    rows = [{**row, "level": "all"} for row in read_prompts(prompts).rows]
    environment = Prompts(rows, system=system)
    requests = [EpisodeRequest("all", index) for index in environment.seeds("train")]
    sampling = build_settings(sampling or {}, SamplingSettings, "sampling")
    sampling = resolve_defaults(sampling, policy.kind, policy.context)
    groups = collect_rollouts(
        environment,
        policy.backend(),
        policy.renderer,
        requests,
        group_size=samples,
        sampling=sampling,
        seed=seed,
    )
    return [[rollout.trajectory.turns[0].action for rollout in group.rollouts] for group in groups]


def _apply_rewards(result: Evaluation, rewards: RewardOrchestrator) -> Evaluation:
    """Score the episodes of an evaluation with other rewards, and summarise them again."""
    by_episode: dict[tuple[str, int], list[Any]] = {}
    for rollout in result.rollouts:
        episode = (rollout.trajectory.level, rollout.trajectory.seed)
        by_episode.setdefault(episode, []).append(rollout)
    rewards.failures.reset()  # each evaluation has its own limit
    rewards.score([RolloutGroup(rollouts) for rollouts in by_episode.values()])
    trajectories = (rollout.trajectory for rollout in result.rollouts)
    scored = summarize_trajectories(trajectories, result.seconds)
    scored.rollouts, scored.held_out = result.rollouts, result.held_out
    scored.failed_episodes = result.failed_episodes
    return scored


def _describe_heldout_levels(
    environment: Environment, result: Evaluation
) -> dict[str, dict[str, Any]]:
    """Return `Environment.held_out` of each level that was played."""
    levels = dict.fromkeys(episode.level for episode in result.episodes)
    return {level: environment.held_out(level).to_json() for level in levels}
