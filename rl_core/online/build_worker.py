"""Construction of an update worker from its settings: model, environment, rewards, and its folders.

<folder>/buffer/         the experience log, written by the server
<folder>/checkpoints/    state of the worker
<folder>/snapshots/      weights that may be served, and the pointer to the live ones
<folder>/update_audit.log, update_contribution.jsonl
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.api.policy import Policy, load_policy, resolve_model_folder, select_device_settings
from rl_core.capabilities import refuse_image_model
from rl_core.environments import make_environment
from rl_core.environments.environment import Environment
from rl_core.errors import SettingsError
from rl_core.models import causal_lm, heads
from rl_core.models.hidden_states import compute_turn_embeddings
from rl_core.online.experience import CHAT_ENVIRONMENT
from rl_core.online.fresh_rollouts import FreshRolloutSampler
from rl_core.online.labelled_rewards import ExperienceScorer
from rl_core.online.learning_folder import DEFAULT_REWARDS
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.update_step import GuardedLearner
from rl_core.online.update_worker import UpdateWorker
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.references.pool import get_frozen_models
from rl_core.rewards.mixture_rewards import build_rewards
from rl_core.rewards.model_components import Scorer
from rl_core.settings import (
    EnvironmentSettings,
    OnlineSettings,
    OnlineUpdateSettings,
    RewardSettings,
)
from rl_core.settings.deprecated_keys import restore_former_names
from rl_core.storage.manifest import digest_folder

BUFFER_FOLDER, CHECKPOINTS_FOLDER, SNAPSHOTS_FOLDER = "buffer", "checkpoints", "snapshots"
# Options of judges that checkpoints of earlier versions do not know.
_NEW_JUDGE_OPTIONS = (
    "mode",
    "path",
    "instructions",
    "criteria",
    "orders",
    "opponents",
    "max_calls",
    "labels",
    "min_agreement",
    "cache_entries",
    "structured",
)
# Settings that affect neither weights nor buffer, so they may change between runs of a worker.
_SETTINGS_OUTSIDE_FINGERPRINT = ("folder", "audit", "gate", "voting", "service")


def build_update_worker(
    settings: OnlineSettings,
    folder: Path,
    *,
    log: Path | None = None,
    audit: UpdateAudit | None = None,
) -> UpdateWorker:
    """Build the worker of `folder` with its model loaded; it reads the log there, or `log`.

    Raises: SettingsError for settings without a model, or that contradict each other; CheckpointError for a model that
        cannot be read.
    """
    if settings.model.path is None:
        raise SettingsError("model.path: set it to the folder of the service's initial model")
    if settings.rewards is None:
        settings = dataclasses.replace(settings, rewards=dict(DEFAULT_REWARDS))
    assert settings.rewards is not None
    policy = load_policy(settings.model, seed=settings.seed)
    refuse_image_model(policy.model, "online", "model.path")
    environment = create_online_environment(settings.environment)
    scorer = None
    if settings.reward_model is not None:
        scorer = _load_reward_scorer(settings.reward_model, policy)
    rewards = build_rewards(
        environment,
        settings.rewards,
        scorer=scorer,
        options=settings.reward_options,
        seed=settings.seed,
    )
    rewards.calibrate_judges()
    pad_id = policy.renderer.pad_id
    if pad_id is None:
        raise SettingsError("model.path: its tokenizer has no padding token, which batches need")
    embed = functools.partial(compute_turn_embeddings, policy.model, pad_id=pad_id)
    learner = GuardedLearner(
        policy.model, settings.update, WeightSnapshots(folder / SNAPSHOTS_FOLDER), pad_id=pad_id
    )
    rollouts = None
    if settings.rollouts.samples:
        rollouts = FreshRolloutSampler(policy, environment, settings.rollouts, seed=settings.seed)
    return UpdateWorker(
        folder / CHECKPOINTS_FOLDER,
        log if log is not None else folder / BUFFER_FOLDER,
        learner,
        ExperienceScorer(rewards, environment, embed=embed),
        settings,
        rollouts=rollouts,
        vocab_size=int(policy.model.config.get_text_config().vocab_size),
        audit=audit,
        fingerprint=_compute_fingerprint(settings),
    )


def create_online_environment(settings: EnvironmentSettings | None) -> Environment | None:
    """Create the environment whose episodes are served; None for chat."""
    if settings is None or settings.name == CHAT_ENVIRONMENT:
        return None
    return make_environment(settings.name, settings.options)


def _load_reward_scorer(folder: str, policy: Policy) -> Scorer:
    """Load the reward model as a scorer of token rows. Raises: SettingsError if its tokenizer differs."""
    source, kind = resolve_model_folder(folder), select_device_settings(policy)
    if causal_lm.load_tokenizer(source, kind).get_vocab() != policy.tokenizer.get_vocab():
        raise SettingsError(
            f"reward_model: {folder} has another tokenizer than the policy, so it cannot read its tokens"
        )
    model = get_frozen_models().load_model(source, kind, kind="reward_model")
    return functools.partial(heads.score_rows, model)


def _list_reward_options(options: RewardSettings) -> dict[str, Any]:
    """Return the options without those that earlier versions lack, where these have their defaults."""
    values, defaults = dataclasses.asdict(options), dataclasses.asdict(RewardSettings())
    if values["process"] == defaults["process"]:
        del values["process"]
    for name in _NEW_JUDGE_OPTIONS:
        if values["judge"][name] == defaults["judge"][name]:
            del values["judge"][name]
    return values


def _compute_fingerprint(settings: OnlineSettings) -> dict[str, Any]:
    """Compute digests of the settings by section and of the initial model; other checkpoints are refused."""
    excluded = {*_SETTINGS_OUTSIDE_FINGERPRINT, "model"}
    if not settings.rollouts.samples:
        excluded.add("rollouts")
    fingerprint: dict[str, Any] = {}
    for name, value in dataclasses.asdict(settings).items():
        if name not in excluded:
            is_plain = isinstance(value, int | float | str | None)
            fingerprint[name] = value if is_plain else _digest_settings(value)
    fingerprint["reward_options"] = _digest_settings(_list_reward_options(settings.reward_options))
    # Under the former names, so that the checkpoints of earlier versions are accepted.
    update = restore_former_names(OnlineUpdateSettings, dataclasses.asdict(settings.update))
    update.pop("optimizer_state")  # where moments are stored changes no result
    if update["kl_control"] == "adaptive":
        del update["kl_control"]  # all services of earlier versions
    fingerprint["update"] = _digest_settings(update)
    model = dataclasses.asdict(settings.model)
    path = model.pop("path")
    folder = Path(resolve_model_folder(path))
    fingerprint["model"] = _digest_settings(model)
    fingerprint["model.path"] = digest_folder(folder) if folder.is_dir() else path
    return fingerprint


def _digest_settings(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()[:16]
