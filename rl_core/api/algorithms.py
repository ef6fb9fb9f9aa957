"""Entry points of the Python API for training: policy gradients, distillation, supervised, reward models, DPO."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from transformers import PreTrainedModel

from rl_core.api import recipes
from rl_core.api.data import as_environment, check_prompts, conversations, preference_pairs
from rl_core.api.evaluation import validation
from rl_core.api.policy import ModelSource, Policy, load_policy, model_folder, model_name
from rl_core.api.rewards import RewardParts, RewardSource, reward_parts, with_rewards
from rl_core.api.teacher_source import make_teacher
from rl_core.api.training import Training, check_in_process, run_fingerprint
from rl_core.data.chat import ChatRenderer
from rl_core.data.records import RowSource
from rl_core.environments.environment import Environment
from rl_core.environments.prompts import Prompts
from rl_core.errors import SettingsError
from rl_core.evaluation import validation_requests
from rl_core.models import heads
from rl_core.rewards.learned import Scorer
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.rollout_log import RecentRollouts, RewardRecord, record_all
from rl_core.rollouts.collect import EpisodeRequest
from rl_core.settings import (
    GROUP_ALGORITHMS,
    DistillationSettings,
    ModelSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
    resolve_defaults,
)
from rl_core.trackers import TrackerSource
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import RewardModelTrainer
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.callbacks import Callback

__all__ = ["distill", "dpo", "grpo", "policy_gradient", "ppo", "reward_model", "sft"]

REWARDS, RECENT = "rewards.jsonl", "recent_rollouts.jsonl"
S = TypeVar("S", PolicySettings, DistillationSettings, SFTSettings, RewardModelSettings, PreferenceSettings)


def grpo(
    model: ModelSource,
    *,
    environment: Environment | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    settings: PolicySettings | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    reward_model: str | Path | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """GRPO, or the algorithm of its kin that `settings.algorithm` names (dr_grpo, dapo, gspo, cispo, sapo, rloo).

    Arguments and errors: `policy_gradient`.
    """
    settings = _of_kind(settings, PolicySettings)
    if settings.algorithm not in GROUP_ALGORITHMS:
        raise SettingsError(
            f"settings.algorithm: '{settings.algorithm}' does not compare within groups; use rl_core.ppo or "
            "rl_core.policy_gradient"
        )
    return policy_gradient(
        model, environment=environment, prompts=prompts, reward=reward, settings=settings,
        heldout_prompts=heldout_prompts, system=system, reward_model=reward_model, output=output, tracker=tracker,
        callbacks=callbacks, seed=seed,
    )  # fmt: skip


def ppo(
    model: ModelSource,
    *,
    environment: Environment | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    settings: PolicySettings | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    reward_model: str | Path | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """PPO with a learned value function. Arguments and errors: `policy_gradient`."""
    settings = _of_kind(settings, PolicySettings)
    if settings.algorithm not in ("ppo", PolicySettings().algorithm):
        raise SettingsError(f"settings.algorithm: '{settings.algorithm}' is not ppo; use rl_core.policy_gradient")
    settings = dataclasses.replace(settings, algorithm="ppo")
    return policy_gradient(
        model, environment=environment, prompts=prompts, reward=reward, settings=settings,
        heldout_prompts=heldout_prompts, system=system, reward_model=reward_model, output=output, tracker=tracker,
        callbacks=callbacks, seed=seed,
    )  # fmt: skip


def policy_gradient(
    model: ModelSource,
    *,
    environment: Environment | None = None,
    prompts: RowSource | None = None,
    reward: RewardSource | None = None,
    settings: PolicySettings | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    reward_model: str | Path | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """Train a policy on the rewards of its own rollouts, by the algorithm that `settings.algorithm` names.

    Args:
        model: folder, hub name, ModelSettings (for adapters, dtype, device), (model, tokenizer) pair, or policy.
        environment: what the policy acts in; or else `prompts`, which it answers in a single turn.
        prompts: a JSONL or Parquet file of rows with a `prompt` (text or messages), or a list of rows or texts. All
            other columns reach the reward function as `trajectory.row`.
        reward: a function that takes a list of `Trajectory` and gives as many numbers; a component's name; several of
            them; or a mapping from them to weights. It takes the place of the environment's own reward, which is the
            component "task". None = the environment's, or what `settings.rewards` says.
        settings: every option of the algorithm, of the optimizer and of the loop.
        heldout_prompts: rows for validation (`settings.eval_every`); an environment has held-out episodes of its own.
        system: a system message before every prompt.
        reward_model: folder of a reward model, for the component "learned".
        output: folder of metrics, rewards and checkpoints; a run that was stopped resumes there. None = nothing kept.
        tracker: where metrics go besides (see `rl_core.trackers`): "terminal", "mlflow:URI", a tracker, or several.
        callbacks: called after every iteration and evaluation (see `rl_core.TrainingEvent`).
        seed: of everything that is drawn.
    Raises: SettingsError, DataError, CheckpointError, before anything is played.
    """
    settings = _of_kind(settings, PolicySettings)
    acting, digest = as_environment(environment, prompts, heldout_prompts, system)
    parts = _rewards_of(reward, reward_model, settings, acting)
    settings = with_rewards(settings, parts)
    functions = parts.functions if parts is not None else {}
    policy = load_policy(model, seed=seed)
    check_prompts(acting, policy.renderer, policy.context)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    folder = _folder(output)
    rewards = None
    if functions:
        rewards = RewardOrchestrator(settings.rewards, options=settings.reward_options, functions=functions)
    recipe = recipes.policy_gradient(
        policy,
        _reference(model, policy) if settings.kl_coef > 0 else None,
        acting,
        settings,
        seed,
        scorer=_scorer(reward_model, policy) if reward_model is not None else None,
        functions=functions,
        evaluator=_validation(policy, acting, settings, seed, rewards),
        best_metric="eval/success_rate" if rewards is None else "eval/reward_mean",
        record=_record(folder),
    )
    fingerprint = run_fingerprint(
        settings.algorithm,
        settings,
        seed,
        model=model_name(model),
        chat=policy.renderer.digest,
        environment={"name": acting.name, "class": type(acting).__qualname__},
        prompts=digest,
        reward=parts.fingerprint() if parts is not None else {},
    )
    return Training(
        settings.algorithm,
        recipe,
        settings,
        policy.model,
        policy.tokenizer,
        fingerprint,
        folder,
        tracker,
        callbacks,
        renderer=policy.renderer,
    )


def distill(
    model: ModelSource,
    teacher: ModelSource | None = None,
    *,
    environment: Environment | None = None,
    prompts: RowSource | None = None,
    settings: DistillationSettings | None = None,
    heldout_prompts: RowSource | None = None,
    system: str = "",
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PolicyGradientTrainer]:
    """On-policy distillation: each token of the policy's own rollouts is rewarded by log p_teacher - log p_policy.

    Args:
        teacher: a model with the policy's vocabulary: folder, hub name, pair or policy; None = `settings.teacher`,
            which may also name a server.
        others: as in `policy_gradient`; rewards are measured alone.
    Raises: as `policy_gradient`; SettingsError for a teacher with another vocabulary.
    """
    settings = _of_kind(settings, DistillationSettings)
    acting, digest = as_environment(environment, prompts, heldout_prompts, system)
    if isinstance(acting, Prompts) and settings.patience is not None:
        raise SettingsError("patience: prompts alone have no success to choose the best weights by; set it to None")
    policy = load_policy(model, seed=seed)
    check_prompts(acting, policy.renderer, policy.context)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    folder = _folder(output)
    recipe = recipes.distillation(
        policy,
        make_teacher(settings.teacher, policy, teacher),
        acting,
        settings,
        seed,
        evaluator=_validation(policy, acting, settings.policy(), seed, None),
        record=_record(folder),
    )
    fingerprint = run_fingerprint(
        "distill",
        settings,
        seed,
        model=model_name(model),
        chat=policy.renderer.digest,
        teacher=model_name(teacher) if teacher is not None else "",
        environment={"name": acting.name, "class": type(acting).__qualname__},
        prompts=digest,
    )
    return Training(
        "distill",
        recipe,
        settings,
        policy.model,
        policy.tokenizer,
        fingerprint,
        folder,
        tracker,
        callbacks,
        renderer=policy.renderer,
    )


def sft(
    model: ModelSource,
    data: RowSource,
    *,
    heldout: RowSource | float = 0.1,
    settings: SFTSettings | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[SFTTrainer]:
    """Supervised fine-tuning on demonstrations; the loss is on the assistant's messages alone.

    Args:
        data: rows {"messages": [...]} or {"prompt", "completion"}: a JSONL or Parquet file, or a list.
        heldout: share of the prompts that is held out, 0 for none; or rows of their own, as `data`.
        others: as in `policy_gradient`.
    Raises: SettingsError, CheckpointError; RecordsError listing the rows that cannot be used.
    """
    settings = _of_kind(settings, SFTSettings)
    _check_heldout(heldout, settings)
    policy = load_policy(model, seed=seed)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    rows = conversations(data, heldout, policy.renderer, policy.context, seed, settings.loss_on)
    recipe = recipes.sft(policy, rows.train, rows.heldout, settings, seed)
    fingerprint = run_fingerprint(
        "sft", settings, seed, model=model_name(model), chat=policy.renderer.digest, data=rows.digest
    )
    return Training(
        "sft",
        recipe,
        settings,
        policy.model,
        policy.tokenizer,
        fingerprint,
        _folder(output),
        tracker,
        callbacks,
        renderer=policy.renderer,
    )


def dpo(
    model: ModelSource,
    data: RowSource,
    *,
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] | None = None,
    heldout: RowSource | float = 0.1,
    settings: PreferenceSettings | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PreferenceTrainer]:
    """Preference optimisation by DPO or another loss; the reference, where the loss has one, is `model`.

    Args:
        data: rows {"prompt", "chosen", "rejected"}: a JSONL or Parquet file, or a list. For `kto` also rows
            {"prompt", "completion", "label"}, true = desirable.
        loss: in place of `settings.loss`.
        others: as in `sft`.
    Raises: SettingsError, CheckpointError; RecordsError listing the rows that cannot be used; DataError for rows that
        do not go with the loss.
    """
    settings = _of_kind(settings, PreferenceSettings)
    if loss is not None:
        settings = dataclasses.replace(settings, loss=loss)
    _check_heldout(heldout, settings)
    policy = load_policy(model, seed=seed)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    pairs = preference_pairs(data, heldout, policy.renderer, policy.context, seed, settings.loss)
    recipe = recipes.preference(policy, pairs.train, pairs.heldout, settings, seed)
    fingerprint = run_fingerprint(
        "dpo", settings, seed, model=model_name(model), chat=policy.renderer.digest, data=pairs.digest
    )
    return Training(
        "dpo",
        recipe,
        settings,
        policy.model,
        policy.tokenizer,
        fingerprint,
        _folder(output),
        tracker,
        callbacks,
        renderer=policy.renderer,
    )


def reward_model(
    model: ModelSource,
    data: RowSource,
    *,
    heldout: RowSource | float = 0.1,
    settings: RewardModelSettings | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[RewardModelTrainer]:
    """A Bradley-Terry reward model on preference pairs: `model` with a new scalar head, every weight trained.

    Args:
        data: rows {"prompt", "chosen", "rejected"}: a JSONL or Parquet file, or a list. A `margin` (at least 0) is
            subtracted from the difference of the scores before the sigmoid.
        others: as in `sft`. A model that is loaded already is copied, not changed.
    Raises: SettingsError, CheckpointError; RecordsError listing the rows that cannot be used.
    """
    settings = _of_kind(settings, RewardModelSettings)
    _check_heldout(heldout, settings)
    classifier, policy = _classifier(model, seed)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    pairs = preference_pairs(data, heldout, policy.renderer, policy.context, seed, "reward_model")
    recipe = recipes.reward_model(classifier, policy.renderer.pad_id, pairs.train, pairs.heldout, settings, seed)
    fingerprint = run_fingerprint(
        "reward_model", settings, seed, model=model_name(model), chat=policy.renderer.digest, data=pairs.digest
    )
    return Training(
        "reward_model",
        recipe,
        settings,
        classifier,
        policy.tokenizer,
        fingerprint,
        _folder(output),
        tracker,
        callbacks,
        renderer=policy.renderer,
    )


def _of_kind(settings: S | None, kind: type[S]) -> S:
    """The settings, or the defaults. Raises: SettingsError for those of another algorithm, or of several processes."""
    if settings is None:
        return kind()
    if not isinstance(settings, kind):
        raise SettingsError(f"settings: expected rl_core.{kind.__name__}, found {type(settings).__name__}")
    check_in_process(settings)
    return settings


def _folder(output: str | Path | None) -> Path | None:
    return Path(output) if output is not None else None


def _check_heldout(
    heldout: RowSource | float, settings: SFTSettings | RewardModelSettings | PreferenceSettings
) -> None:
    if heldout == 0 and (settings.eval_every or settings.patience):
        raise SettingsError(
            "heldout: 0 leaves nothing to evaluate on; set eval_every to 0 and patience to None, or hold rows out"
        )


def _rewards_of(
    reward: RewardSource | None, reward_model: str | Path | None, settings: PolicySettings, environment: Environment
) -> RewardParts | None:
    """The reward's parts; None = those of the settings. Raises: SettingsError where nothing would reward anything."""
    if reward is None and reward_model is not None and "learned" not in settings.rewards:
        reward = "learned"
    parts = reward_parts(reward) if reward is not None else None
    names = parts.weights if parts is not None else settings.rewards
    if reward_model is not None and "learned" not in names:
        raise SettingsError('reward_model: no part of the reward uses it; add the component "learned"')
    if "learned" in names and reward_model is None and names["learned"]:
        raise SettingsError('reward: the component "learned" needs reward_model=FOLDER')
    if isinstance(environment, Prompts) and not {name for name, weight in names.items() if weight} - {"task"}:
        raise SettingsError(
            "reward: prompts alone reward nothing; hand in reward=function, which takes a list of trajectories and "
            "gives as many numbers"
        )
    return parts


def _reference(source: ModelSource, policy: Policy) -> PreTrainedModel:
    """The starting model, frozen, for the KL term."""
    if isinstance(source, str | Path):
        return load_policy(source).model
    if isinstance(source, ModelSettings):
        return load_policy(dataclasses.replace(source, lora=None)).model
    return copy.deepcopy(policy.model)


def _scorer(folder: str | Path, policy: Policy) -> Scorer:
    """Scores token rows with the reward model in a folder. Raises: SettingsError where it reads other tokens."""
    source = Path(folder) / "model" if (Path(folder) / "model").is_dir() else folder
    model, tokenizer = heads.load_reward_model(source, _on_device_of(policy))
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise SettingsError(
            f"reward_model: {folder} has another tokenizer than the policy, so it cannot read its tokens"
        )
    return functools.partial(heads.score, model)


def _validation(
    policy: Policy, environment: Environment, settings: PolicySettings, seed: int, rewards: RewardOrchestrator | None
) -> Callable[[], dict[str, float]] | None:
    """The evaluator of the loop; None where the settings ask for none."""
    if not settings.eval_every:
        if settings.patience is not None:
            raise SettingsError("patience: counts evaluations, so it needs eval_every above 0")
        return None
    if isinstance(environment, Prompts):
        rows = environment.heldout_levels()
        if not rows:
            raise SettingsError("eval_every: needs heldout_prompts to evaluate on")
        shared = {seed for level in environment.levels for seed in environment.held_out(level).shared}
        if len(shared) < len(rows):
            rows = [(level, row) for level, row in rows if row not in shared]
        requests = [EpisodeRequest(level, row) for level, row in rows[: settings.eval_episodes]]
    else:
        levels = sorted({level for stage in settings.curriculum for level in stage.levels}) or environment.levels
        requests = validation_requests(environment, settings.eval_episodes, levels, seed, ())
    return validation(policy, environment, requests, settings.sampling, seed, rewards=rewards)


def _record(folder: Path | None) -> recipes.Record | None:
    if folder is None:
        return None
    return record_all(RewardRecord(folder / REWARDS), RecentRollouts(folder / RECENT))


def _classifier(source: ModelSource, seed: int) -> tuple[PreTrainedModel, Policy]:
    """A reward model that starts from `source`, and a policy that has its tokenizer and context."""
    if isinstance(source, ModelSettings | str | Path):
        settings = source if isinstance(source, ModelSettings) else ModelSettings()
        if settings.lora is not None:
            raise SettingsError("model: a reward model trains all its weights; leave lora out")
        path = settings.path if isinstance(source, ModelSettings) else source
        if path is None:
            raise SettingsError("model: ModelSettings without a path; name a folder or hub name in `path`")
        model, tokenizer = heads.reward_model_from(model_folder(path), settings, seed=seed)
        renderer = ChatRenderer(tokenizer, settings)
        return model, Policy(model, tokenizer, renderer, dataclasses.replace(settings, path=str(path)))
    policy = load_policy(source)
    with tempfile.TemporaryDirectory() as folder:  # transformers makes a classifier from files alone
        policy.save(folder)
        model, _ = heads.reward_model_from(folder, _on_device_of(policy), seed=seed)
    return model, policy


def _on_device_of(policy: Policy) -> ModelSettings:
    return ModelSettings(device="cuda" if next(policy.model.parameters()).device.type == "cuda" else "cpu")
