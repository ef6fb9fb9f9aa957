"""Entry points of the Python API for on-policy training: policy gradients and distillation."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.api.custom_functions import (
    FunctionSource,
    RewardSource,
    RewardSpec,
    apply_custom_functions,
    apply_reward_spec,
    parse_reward,
)
from rl_core.api.data import (
    AgentSource,
    EnvironmentSource,
    check_prompt_lengths,
    resolve_environment,
)
from rl_core.api.evaluation import build_validator
from rl_core.api.policy import (
    ModelSource,
    Policy,
    build_model_settings,
    describe_model_source,
    load_policy,
    resolve_model_folder,
    select_device_settings,
)
from rl_core.api.recipes import RolloutRecorder
from rl_core.api.recipes.policy_gradient import (
    build_distillation_recipe,
    build_policy_gradient_recipe,
    load_teacher,
)
from rl_core.api.training import (
    CHECKPOINTS_FOLDER,
    Training,
    build_training,
    resolve_output_folder,
    resolve_settings,
)
from rl_core.api.trl_arguments import explain_unknown_arguments
from rl_core.data.records import RowSource
from rl_core.environments.environment import Environment
from rl_core.environments.mixture import describe_parts, list_rewarded_parts
from rl_core.environments.prompts import Prompts
from rl_core.errors import SettingsError
from rl_core.models import causal_lm, heads
from rl_core.models.lora import is_fresh_adapter
from rl_core.references.pool import get_frozen_models
from rl_core.rewards.mixture_rewards import build_rewards
from rl_core.rewards.rollout_log import RecentRollouts, RewardRecord, build_combined_record
from rl_core.rewards.user_function import RewardFunction
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import draw_validation_requests
from rl_core.settings import (
    GROUP_ALGORITHMS,
    DistillationSettings,
    ModelSettings,
    PolicySettings,
    resolve_defaults,
)
from rl_core.trackers import TrackerSource
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.training.callbacks import Callback
from rl_core.training.opponent_pool import OPPONENTS_FOLDER
from rl_core.user_code.digest import digest_settings_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel


REWARDS_FILE = "rewards.jsonl"
RECENT_FILE = "recent_rollouts.jsonl"
SERVER_LOG = "server.log"


@explain_unknown_arguments
def grpo(
    model: ModelSource,
    *,
    environment: EnvironmentSource | None = None,
    agent: AgentSource | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    loss: FunctionSource | None = None,
    advantages: FunctionSource | None = None,
    settings: PolicySettings | Mapping[str, Any] | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    reward_model: str | Path | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """Train with GRPO, or the related algorithm in `settings.algorithm`.

    They are dr_grpo, dapo, gspo, cispo, sapo, dppo, maxrl, gdpo and rloo.

    `settings.turn_credit` gives each turn of a rollout its advantage (GiGPO).
    Arguments and errors: `policy_gradient`.
    """
    settings = resolve_settings(settings, PolicySettings)
    if settings.algorithm not in GROUP_ALGORITHMS:
        raise SettingsError(
            f"settings.algorithm: '{settings.algorithm}' does not compare within groups; use rl_core.ppo or "
            "rl_core.policy_gradient"
        )
    return policy_gradient(
        model,
        environment=environment,
        agent=agent,
        prompts=prompts,
        reward=reward,
        loss=loss,
        advantages=advantages,
        settings=settings,
        heldout_prompts=heldout_prompts,
        system=system,
        reward_model=reward_model,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
        seed=seed,
    )


@explain_unknown_arguments
def ppo(
    model: ModelSource,
    *,
    environment: EnvironmentSource | None = None,
    agent: AgentSource | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    loss: FunctionSource | None = None,
    advantages: FunctionSource | None = None,
    settings: PolicySettings | Mapping[str, Any] | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    reward_model: str | Path | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """Train with PPO and a learned value function. Arguments and errors: `policy_gradient`."""
    settings = resolve_settings(settings, PolicySettings)
    if settings.algorithm not in ("ppo", PolicySettings().algorithm):
        raise SettingsError(
            f"settings.algorithm: '{settings.algorithm}' is not ppo; use rl_core.policy_gradient"
        )
    settings = dataclasses.replace(settings, algorithm="ppo")
    return policy_gradient(
        model,
        environment=environment,
        agent=agent,
        prompts=prompts,
        reward=reward,
        loss=loss,
        advantages=advantages,
        settings=settings,
        heldout_prompts=heldout_prompts,
        system=system,
        reward_model=reward_model,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
        seed=seed,
    )


@explain_unknown_arguments
def policy_gradient(
    model: ModelSource,
    *,
    environment: EnvironmentSource | None = None,
    agent: AgentSource | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    loss: FunctionSource | None = None,
    advantages: FunctionSource | None = None,
    settings: PolicySettings | Mapping[str, Any] | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    reward_model: str | Path | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """Train a policy on the rewards of its rollouts, with the algorithm in `settings.algorithm`.

    Args:
        model: folder, hub name, (model, tokenizer) pair, policy, ModelSettings or a dict of them (adapters, device).
        environment: one, or several (a list, or a mapping from labels: training.md); `prompts` need only one answer.
        agent: your agent, which plays `prompts` as its tasks: a function of (task, client) or a command (agents.md).
        prompts: a file of rows with a `prompt` (text or messages; JSONL, JSON array, Parquet, CSV) or a folder of them,
            or a list of rows or texts. All other columns reach the reward function by name.
        reward: a function that takes a list of `Trajectory`, and columns of the rows by name, and returns one number
            for each (a TRL reward function works unchanged); a component's name; several; or a mapping from them to
            weights. It replaces the environment's reward, the component "task". None = it, or `settings.rewards`.
        loss: your policy loss, which replaces the algorithm's: a function or its import path (bring-your-own.md).
        advantages: your advantage estimator, which replaces the comparison of rewards; likewise.
        settings: every option of the algorithm, of the optimizer and of the loop.
        heldout_prompts: rows for validation (`settings.eval_every`); an environment has its own held-out episodes.
        system: a system message before every prompt. seed: of everything random.
        reward_model: folder of a reward model, for the component "learned", or of one of steps, for "process".
        output: folder of metrics, rewards and checkpoints; a stopped run resumes there. None = nothing is written.
        tracker: where else metrics go (see `rl_core.trackers`): "terminal", "mlflow:URI", a tracker, or several.
        callbacks: called after every iteration and evaluation (see `rl_core.TrainingEvent`).
    Raises: SettingsError, DataError, CheckpointError, before anything is played.
    """
    settings = resolve_settings(settings, PolicySettings)
    settings, custom_functions = apply_custom_functions(settings, loss=loss, advantages=advantages)
    environment, prompts_digest = resolve_environment(
        environment, prompts, heldout_prompts, system, agent=agent, requires_reward=reward is None
    )
    reward_spec = _resolve_reward_spec(reward, reward_model, settings, environment)
    settings = apply_reward_spec(settings, reward_spec)
    functions = reward_spec.functions if reward_spec is not None else {}
    policy = load_policy(model, seed=seed)
    check_prompt_lengths(environment, policy.renderer, policy.context)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    folder = resolve_output_folder(output)
    recent, reference = _build_recent_rollouts(folder), _load_reference(model, policy, settings)
    scorers = _load_scorers(reward_model, policy, environment, settings)
    recipe = build_policy_gradient_recipe(
        policy,
        reference,
        environment,
        settings,
        seed,
        **scorers,
        functions=functions,
        evaluator=_build_validator(policy, environment, settings, seed, functions, scorers),
        best_metric="eval/reward_mean" if functions else "eval/success_rate",
        record=_build_rollout_record(folder, recent),
        custom_functions=custom_functions,
        server_log=folder / SERVER_LOG if folder is not None else None,
        opponents_folder=_resolve_opponents_folder(folder),
    )
    return build_training(
        settings.algorithm,
        recipe,
        settings,
        policy,
        source=model,
        seed=seed,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
        recent=recent,
        environment=_describe_environment(environment),
        prompts=prompts_digest,
        reward=reward_spec.digest_functions() if reward_spec is not None else {},
        code=digest_settings_code(settings, custom_functions),
    )


@explain_unknown_arguments
def distill(
    model: ModelSource,
    teacher: ModelSource | None = None,
    *,
    environment: EnvironmentSource | None = None,
    prompts: RowSource | None = None,
    settings: DistillationSettings | Mapping[str, Any] | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """Distil a teacher on-policy: each token of the policy's rollouts is rewarded by log p_teacher - log p_policy.

    A teacher with another vocabulary reads the rollouts as text; `settings.divergence` compares whole distributions.

    Args:
        teacher: folder, hub name, pair or policy; None = `settings.teacher`, which may also name a server, or the
            policy itself as `settings.self_teacher` says.
        others: as in `policy_gradient`; rewards are only measured.
    Raises: as `policy_gradient`; SettingsError for a teacher whose tokens cannot be aligned.
    """
    settings = resolve_settings(settings, DistillationSettings)
    environment, prompts_digest = resolve_environment(environment, prompts, heldout_prompts, system)
    if isinstance(environment, Prompts) and settings.selects_best:
        name = "plateau_patience" if settings.patience is None else "patience"
        raise SettingsError(
            f"{name}: prompts have no success metric to select the best weights by; set it to None"
        )
    policy = load_policy(model, seed=seed)
    check_prompt_lengths(environment, policy.renderer, policy.context)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    folder = resolve_output_folder(output)
    recent = _build_recent_rollouts(folder)
    if settings.self_teacher is not None and teacher is not None:
        raise SettingsError(
            "teacher: settings.self_teacher makes the policy its own teacher; set one of the two"
        )
    loaded = None
    if settings.self_teacher is None:
        loaded = load_teacher(
            settings.teacher,
            policy,
            teacher,
            compares_distributions=settings.policy().compares_distributions,
        )
    recipe = build_distillation_recipe(
        policy,
        loaded,
        environment,
        settings,
        seed,
        evaluator=_build_validator(policy, environment, settings.policy(), seed, {}),
        record=_build_rollout_record(folder, recent),
    )
    return build_training(
        "distill",
        recipe,
        settings,
        policy,
        source=model,
        seed=seed,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
        recent=recent,
        teacher=describe_model_source(teacher) if teacher is not None else "",
        environment=_describe_environment(environment),
        prompts=prompts_digest,
    )


def _resolve_opponents_folder(folder: Path | None) -> Path | None:
    """Return where the past versions of self-play go; None without an output folder."""
    return None if folder is None else folder / CHECKPOINTS_FOLDER / OPPONENTS_FOLDER


def _describe_environment(environment: Environment) -> dict[str, Any]:
    """Describe the environment for the record that a resumed run is compared with."""
    parts = describe_parts(environment)
    return {
        "name": environment.name,
        "class": type(environment).__qualname__,
        **({"parts": parts} if parts else {}),
    }


def _resolve_reward_spec(
    reward: RewardSource | None,
    reward_model: str | Path | None,
    settings: PolicySettings,
    environment: Environment,
) -> RewardSpec | None:
    """Return the reward's parts; None = those of the settings. Raises: SettingsError if nothing rewards anything."""
    model_components = {"learned", "process"}
    if reward is None and reward_model is not None and not model_components & set(settings.rewards):
        reward = "learned"
    spec = parse_reward(reward) if reward is not None else None
    weights = spec.weights if spec is not None else settings.rewards
    rewarded = list_rewarded_parts(environment, weights)
    if reward_model is not None and not any(model_components & set(used) for _, used in rewarded):
        raise SettingsError(
            'reward_model: the reward does not use it; add the component "learned", or "process" for one of steps'
        )
    if reward_model is None and any(used.get("learned") for _, used in rewarded):
        raise SettingsError('reward: the component "learned" needs reward_model=FOLDER')
    for part, used in rewarded:
        has_reward = {name for name, weight in used.items() if weight} - {"task"}
        if isinstance(part, Prompts) and not part.knows_success and not has_reward:
            raise SettingsError(
                "reward: prompts have no reward; pass reward=function, which takes a list of trajectories and returns "
                "a number for each"
            )
    return spec


def _load_reference(
    source: ModelSource, policy: Policy, settings: PolicySettings
) -> PreTrainedModel | None:
    """Load the starting model for the KL term: the policy without its new adapters, or a copy.

    Returns: None without that term.
    """
    if settings.kl_coef <= 0:
        return None
    precision = settings.reference_precision
    source = build_model_settings(source)
    if isinstance(source, str | Path):
        folder = resolve_model_folder(source)
        return get_frozen_models().load_model(folder, ModelSettings(), precision=precision)
    if is_fresh_adapter(policy.model):
        return policy.model
    if isinstance(source, ModelSettings):
        folder = resolve_model_folder(str(source.path))
        return get_frozen_models().load_model(folder, source, precision=precision)
    if precision != "full":
        raise SettingsError(
            "reference_precision: a model that is already loaded is copied unchanged; pass its folder instead"
        )
    return copy.deepcopy(policy.model)


def _load_scorers(
    folder: str | Path | None, policy: Policy, environment: Environment, settings: PolicySettings
) -> dict[str, Any]:
    """Load the reward model in a folder, if any, as `scorer` of token rows and `step_scorer` of steps, where used.

    Raises: SettingsError for another tokenizer, or a model that was not trained on steps.
    """
    if folder is None:
        return {}
    subfolder = Path(folder) / "model"
    source = subfolder if subfolder.is_dir() else folder
    device = select_device_settings(policy)
    if causal_lm.load_tokenizer(source, device).get_vocab() != policy.tokenizer.get_vocab():
        raise SettingsError(
            f"reward_model: {folder} has another tokenizer than the policy, so it cannot read its tokens"
        )
    model = get_frozen_models().load_model(source, device, kind="reward_model")
    scorers: dict[str, Any] = {}
    used = {n for _, part in list_rewarded_parts(environment, settings.rewards) for n in part}
    if "process" in used:
        if not heads.scores_steps(model):
            raise SettingsError(
                f"reward_model: {folder} scores whole completions; the component process needs one that was trained "
                "with `loss: process`"
            )
        scorers["step_scorer"] = functools.partial(heads.score_steps, model)
    if "learned" in used:
        scorers["scorer"] = functools.partial(heads.score_rows, model)
    return scorers


def _build_validator(
    policy: Policy,
    environment: Environment,
    settings: PolicySettings,
    seed: int,
    functions: Mapping[str, RewardFunction],
    scorers: Mapping[str, Any] | None = None,
) -> Callable[[], dict[str, float]] | None:
    """Build the evaluator of the loop; None if the settings ask for none."""
    if not settings.eval_every:
        if settings.selects_best:
            name = "plateau_patience" if settings.patience is None else "patience"
            raise SettingsError(f"{name}: counts evaluations, so it needs eval_every above 0")
        return None
    if isinstance(environment, Prompts):
        rows = environment.heldout_levels()
        if not rows:
            raise SettingsError("eval_every: needs heldout_prompts to evaluate on")
        training_rows = {
            seed for level in environment.levels for seed in environment.held_out(level).shared
        }
        if len(training_rows) < len(rows):
            rows = [(level, row) for level, row in rows if row not in training_rows]
        requests = [EpisodeRequest(level, row) for level, row in rows[: settings.eval_episodes]]
    else:
        stage_levels = sorted({level for stage in settings.curriculum for level in stage.levels})
        levels = stage_levels or environment.levels
        requests = draw_validation_requests(environment, settings.eval_episodes, levels, seed, ())
    rewards = None
    if functions:
        rewards = build_rewards(
            environment,
            settings.rewards,
            options=settings.reward_options,
            functions=functions,
            decode=policy.renderer.action_text,
            **(scorers or {}),
        )
    return build_validator(policy, environment, requests, settings.sampling, seed, rewards=rewards)


def _build_recent_rollouts(folder: Path | None) -> RecentRollouts:
    """Build the record that `Training.samples` reads; without a folder it is in memory alone."""
    return RecentRollouts(folder / RECENT_FILE if folder is not None else None)


def _build_rollout_record(folder: Path | None, recent: RecentRollouts) -> RolloutRecorder:
    if folder is None:
        return recent
    return build_combined_record(RewardRecord(folder / REWARDS_FILE), recent)
