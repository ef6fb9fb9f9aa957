"""Entry points of the Python API for training on data: supervised, preferences, reward models."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rl_core.api.data import load_conversations, load_preference_pairs
from rl_core.api.policy import (
    ModelSource,
    Policy,
    build_model_settings,
    load_policy,
    resolve_model_folder,
    select_device_settings,
)
from rl_core.api.recipes import Recipe
from rl_core.api.recipes.reward_model import build_reward_model_recipe
from rl_core.api.training import Training, build_training, resolve_output_folder, resolve_settings
from rl_core.api.trl_arguments import explain_unknown_arguments
from rl_core.data.chat import ChatRenderer
from rl_core.data.records import RowSource
from rl_core.errors import SettingsError
from rl_core.models import heads
from rl_core.settings import (
    ModelSettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
    resolve_defaults,
)
from rl_core.trackers import TrackerSource
from rl_core.trainers.preference import PreferenceTrainer
from rl_core.trainers.reward_model import (
    RewardModelTrainer,
    RewardRegressionTrainer,
    StepRewardTrainer,
)
from rl_core.trainers.sft import SFTTrainer
from rl_core.training.callbacks import Callback, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


T = TypeVar("T", bound=Trainer)


@explain_unknown_arguments
def sft(
    model: ModelSource,
    data: RowSource,
    *,
    heldout: RowSource | float = 0.1,
    settings: SFTSettings | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[SFTTrainer]:
    """Fine-tune on demonstrations; only the assistant's messages carry loss.

    Args:
        data: rows {"messages": [...]} or {"prompt", "completion"}: a JSONL, CSV or Parquet file, or a list.
        heldout: share of the prompts that is held out, 0 for none; or separate rows, as `data`.
        others: as in `policy_gradient`.
    Raises: SettingsError, CheckpointError; RecordsError listing the rows that cannot be used.
    """
    settings = resolve_settings(settings, SFTSettings)
    _check_heldout(heldout, settings)
    policy = load_policy(model, seed=seed)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    rows = load_conversations(
        data,
        heldout,
        policy.renderer,
        policy.context,
        seed,
        settings.loss_on,
        _resolve_tokens_folder(output),
    )
    trainer = SFTTrainer(
        policy.model, policy.renderer.pad_id, rows.train, rows.heldout, settings, seed
    )
    return build_training(
        "sft",
        Recipe(trainer, trainer.total_steps, trainer.best_metric, larger_is_better=False),
        settings,
        policy,
        source=model,
        seed=seed,
        data=rows.digest,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
    )


@explain_unknown_arguments
def dpo(
    model: ModelSource,
    data: RowSource,
    *,
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] | None = None,
    heldout: RowSource | float = 0.1,
    settings: PreferenceSettings | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[PreferenceTrainer]:
    """Optimise preferences by DPO or another loss; the reference, if the loss has one, is `model`.

    Args:
        data: rows {"prompt", "chosen", "rejected"}: a JSONL, CSV or Parquet file, or a list. For `kto` also rows
            {"prompt", "completion", "label"}, true = desirable.
        loss: replaces `settings.loss`.
        others: as in `sft`.
    Raises: SettingsError, CheckpointError; RecordsError listing the rows that cannot be used; DataError for rows that
        the loss cannot use.
    """
    settings = resolve_settings(settings, PreferenceSettings)
    if loss is not None:
        settings = dataclasses.replace(settings, loss=loss)
    _check_heldout(heldout, settings)
    policy = load_policy(model, seed=seed)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    pairs = load_preference_pairs(
        data,
        heldout,
        policy.renderer,
        policy.context,
        seed,
        settings.loss,
        _resolve_tokens_folder(output),
    )
    trainer = PreferenceTrainer(
        policy.model, policy.renderer.pad_id, pairs.train, pairs.heldout, settings, seed
    )
    return build_training(
        "dpo",
        Recipe(trainer, trainer.total_steps, trainer.best_metric, larger_is_better=False),
        settings,
        policy,
        source=model,
        seed=seed,
        data=pairs.digest,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
    )


@explain_unknown_arguments
def reward_model(
    model: ModelSource,
    data: RowSource,
    *,
    heldout: RowSource | float = 0.1,
    settings: RewardModelSettings | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    tracker: TrackerSource = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
) -> Training[RewardModelTrainer | RewardRegressionTrainer | StepRewardTrainer]:
    """Train a reward model on preference pairs or scores: `model` with a new scalar head, every weight trained.

    Args:
        data: rows {"prompt", "chosen", "rejected"}: a JSONL, CSV or Parquet file, or a list. A `margin` (at least 0) is
            subtracted from the difference of the scores before the sigmoid; `tie: true` says that neither side is
            better. With `settings.loss` "mse": rows {"prompt", "completion", "score"}; with "process": rows {"prompt",
            "completions": steps, "labels": true or false for each}.
        others: as in `sft`. A loaded model is copied, not changed.
    Raises: SettingsError, CheckpointError; RecordsError listing the rows that cannot be used.
    """
    settings = resolve_settings(settings, RewardModelSettings)
    _check_heldout(heldout, settings)
    shape = heads.HeadShape(settings.head_layers, settings.head_width)
    classifier, policy = _load_classifier(model, seed, shape)
    settings = resolve_defaults(settings, policy.kind, policy.context)
    pairs = load_preference_pairs(
        data,
        heldout,
        policy.renderer,
        policy.context,
        seed,
        settings.use,
        _resolve_tokens_folder(output),
    )
    recipe = build_reward_model_recipe(
        classifier, policy.renderer.pad_id, pairs.train, pairs.heldout, settings, seed
    )
    return build_training(
        "reward_model",
        recipe,
        settings,
        policy,
        source=model,
        seed=seed,
        data=pairs.digest,
        model=classifier,
        output=output,
        tracker=tracker,
        callbacks=callbacks,
    )


def _check_heldout(
    heldout: RowSource | float, settings: SFTSettings | RewardModelSettings | PreferenceSettings
) -> None:
    if (
        isinstance(heldout, int | float)
        and heldout == 0
        and (settings.eval_every or settings.selects_best)
    ):
        raise SettingsError(
            "heldout: 0 leaves nothing to evaluate on; set eval_every to 0 and patience to None, or hold out rows"
        )


def _resolve_tokens_folder(output: str | Path | None) -> Path | None:
    folder = resolve_output_folder(output)
    return None if folder is None else folder / "tokens"


def _load_classifier(
    source: ModelSource, seed: int, shape: heads.HeadShape
) -> tuple[PreTrainedModel, Policy]:
    """Build a reward model that starts from `source`, and a policy with its tokenizer and context."""
    source = build_model_settings(source)
    if isinstance(source, ModelSettings | str | Path):
        settings = source if isinstance(source, ModelSettings) else ModelSettings()
        if settings.lora is not None:
            raise SettingsError("model: a reward model trains all its weights; leave lora out")
        path = settings.path if isinstance(source, ModelSettings) else source
        if path is None:
            raise SettingsError(
                "model: ModelSettings without a path; name a folder or hub name in `path`"
            )
        model, tokenizer = heads.create_reward_model(
            resolve_model_folder(path), settings, seed=seed, shape=shape
        )
        renderer = ChatRenderer(tokenizer, settings)
        origin = dataclasses.replace(settings, path=str(path))
        return model, Policy(model, tokenizer, renderer, origin)
    policy = load_policy(source)
    # transformers can create a classifier only from files.
    with tempfile.TemporaryDirectory() as folder:
        policy.save(folder)
        model, _ = heads.create_reward_model(
            folder, select_device_settings(policy), seed=seed, shape=shape
        )
    return model, policy
