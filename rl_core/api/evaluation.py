"""Evaluating and sampling a policy: held-out episodes, validation while training, and plain generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rl_core.api.custom_functions import RewardSource, parse_reward
from rl_core.api.data import check_prompt_lengths, resolve_environment
from rl_core.api.policy import ModelSource, Policy, load_policy
from rl_core.data.records import RowSource, read_prompts
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, StoreFailedEpisode
from rl_core.environments.prompts import Prompts
from rl_core.errors import SettingsError
from rl_core.evaluation import Evaluation, summarize_trajectories
from rl_core.evaluation import evaluate as play
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_heldout_requests
from rl_core.settings import EvaluationSettings, SamplingSettings, resolve_defaults
from rl_core.types import RolloutGroup

TIMING_METRICS = ("eval/seconds", "eval/tokens_per_second")  # the loop times evaluations itself
SUCCESS_METRICS = ("eval/success_rate", "eval/pass_at_")


def evaluate(
    model: ModelSource,
    environment: Environment | None = None,
    *,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    settings: EvaluationSettings | None = None,
    system: str = "",
    seed: int = 0,
) -> Evaluation:
    """Play held-out episodes of an environment, or answer prompts, and summarise with 95% intervals.

    Args:
        prompts: rows, a JSONL or a Parquet file, all of which are answered, in place of an environment.
        reward: scores the episodes in place of the environment (`reward_mean`); success is the environment's.
        settings: episodes, levels, samples and sampling; `greedy` is not used (set sampling.temperature to 0).
        seed: of the sampling and of the choice of episodes.
    Raises: SettingsError, DataError, EnvironmentFault, RewardError.
    """
    given = settings or EvaluationSettings()
    acting, _ = resolve_environment(environment, prompts, prompts, system)
    parts = parse_reward(reward) if reward is not None else None
    policy = load_policy(model)
    check_prompt_lengths(acting, policy.renderer, policy.context, ["heldout"])
    given = resolve_defaults(given, policy.default_settings, policy.context)
    if isinstance(acting, Prompts):
        requests = [EpisodeRequest(level, row) for level, row in acting.list_heldout_episodes()]
    else:
        requests = draw_heldout_requests(
            acting, given, seed if given.episodes_seed is None else given.episodes_seed
        )
    result = play(
        acting,
        policy.backend(),
        policy.renderer,
        requests,
        samples=given.samples,
        sampling=given.sampling,
        seed=seed,
    )
    if not isinstance(acting, Prompts):
        result.held_out = _describe_heldout_levels(acting, result)
    if parts is None:
        return result
    rewards = RewardOrchestrator(parts.weights, functions=parts.functions)
    return _apply_rewards(result, rewards)


def evaluate_heldout(
    policy: Policy,
    environment: Environment,
    requests: Sequence[EpisodeRequest],
    settings: EvaluationSettings,
    seed: int,
    keep: StoreFailedEpisode | None = None,
) -> tuple[Evaluation, Evaluation | None]:
    """The sampled evaluation, and the greedy one where the settings ask for it. `keep`: keeps failed episodes.

    Raises: SettingsError for a reward that needs a model.
    """
    backend = policy.backend()
    rewards = RewardOrchestrator(settings.rewards) if settings.rewards else None
    if rewards is not None and rewards.needs_states:
        raise SettingsError(
            "rewards: curiosity and coherence look at a model while it trains; leave them out"
        )

    def once(samples: int, sampling: SamplingSettings) -> Evaluation:
        result = play(
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

    sampled = once(settings.samples, settings.sampling)
    if not settings.greedy or settings.sampling.temperature == 0:
        return sampled, None
    return sampled, once(1, dataclasses.replace(settings.sampling, temperature=0.0))


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
    """A function that plays the same validation episodes at every call and gives `eval/...` metrics.

    Args:
        rewards: scores the episodes in place of the environment.
    """
    backend = policy.backend()

    def measure() -> dict[str, float]:
        backend.refresh_weights()
        result = play(
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
        hidden = (
            TIMING_METRICS if environment.knows_success else (*TIMING_METRICS, *SUCCESS_METRICS)
        )
        return {
            name: value for name, value in result.metrics().items() if not name.startswith(hidden)
        }

    return measure


def generate(
    model: ModelSource,
    prompts: RowSource,
    *,
    samples: int = 1,
    sampling: SamplingSettings | None = None,
    system: str = "",
    seed: int = 0,
) -> list[list[str]]:
    """Completions of every prompt: `samples` texts for each, in the order given.

    Args:
        prompts: texts, rows with a `prompt` (text or messages), or a JSONL or Parquet file of such rows.
        seed: the same seed, model and prompts give the same texts.
    """
    if (
        isinstance(prompts, str)
        and "\n" not in prompts
        and not prompts.endswith((".jsonl", ".parquet", ".pq"))
    ):
        raise SettingsError(
            f"prompts: {prompts!r} is one text; hand in a list of them, [{prompts!r}]"
        )
    if samples < 1:
        raise SettingsError(f"samples: {samples} must be at least 1")
    policy = load_policy(model)
    environment = Prompts(
        [{**row, "level": "all"} for row in read_prompts(prompts).rows], system=system
    )
    requests = [EpisodeRequest("all", index) for index in environment.seeds("train")]
    groups = collect_rollouts(
        environment,
        policy.backend(),
        policy.renderer,
        requests,
        group_size=samples,
        sampling=resolve_defaults(
            sampling or SamplingSettings(), policy.default_settings, policy.context
        ),
        seed=seed,
    )
    return [[rollout.trajectory.turns[0].action for rollout in group.rollouts] for group in groups]


def _apply_rewards(result: Evaluation, rewards: RewardOrchestrator) -> Evaluation:
    """The same episodes with the rewards of these components."""
    by_episode: dict[tuple[str, int], list[Any]] = {}
    for rollout in result.rollouts:
        by_episode.setdefault((rollout.trajectory.level, rollout.trajectory.seed), []).append(
            rollout
        )
    rewards.failures.reset()  # each evaluation counts for itself
    rewards.score([RolloutGroup(rollouts) for rollouts in by_episode.values()])
    scored = summarize_trajectories(
        (rollout.trajectory for rollout in result.rollouts), result.seconds
    )
    scored.rollouts, scored.held_out = result.rollouts, result.held_out
    scored.failed_episodes = result.failed_episodes
    return scored


def _describe_heldout_levels(
    environment: Environment, result: Evaluation
) -> dict[str, dict[str, Any]]:
    """`Environment.held_out` of each level that was played."""
    return {level: environment.held_out(level).to_json() for level in result.by_level}
