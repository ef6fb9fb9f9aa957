"""A training run of the Python API on a language model: save, ask, hand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl_core.api.evaluation import generate
from rl_core.api.policy import ModelSource, Policy, model_name
from rl_core.api.recipes import Recipe
from rl_core.api.resumable_training import ResumableTraining, decisive, folder_of
from rl_core.data.chat import ChatRenderer
from rl_core.data.records import RowSource
from rl_core.errors import SettingsError
from rl_core.models import causal_lm
from rl_core.settings import (
    DistillationSettings,
    LoopSettings,
    NetworkSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SamplingSettings,
    SFTSettings,
)
from rl_core.trackers import TrackerSource
from rl_core.training.callbacks import Callback
from rl_core.training.kept_epochs import EPOCHS, KeptEpochs
from rl_core.training.trainer_protocol import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Training", "folder_of", "settings_of_kind", "training_of"]

T = TypeVar("T", bound=Trainer)
S = TypeVar(
    "S", PolicySettings, DistillationSettings, SFTSettings, RewardModelSettings, PreferenceSettings, NetworkSettings
)


@dataclass(kw_only=True)
class Training(ResumableTraining[T]):
    """Training of a language model. `run` trains, `save` writes the model; both may be called again."""

    model: PreTrainedModel  # trained in place
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer | None = None  # of the training; None = the tokenizer's, with the default settings

    def after_iteration(self) -> KeptEpochs | None:
        """Keeper of the models of epochs, where the settings ask for some. Raises: SettingsError without a folder."""
        keep = getattr(self.settings, "keep_epochs", 0)
        if not keep:
            return None
        if self.output is None:
            raise SettingsError(
                "keep_epochs: names no place without an output folder; give output=FOLDER, or leave it 0"
            )
        return KeptEpochs(
            self.output / EPOCHS, keep, self.trainer.order.batches_per_epoch, self.trainer.optimizer_step,  # type: ignore[attr-defined]
            lambda folder: causal_lm.publish(self.model, self.tokenizer, folder),
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write the trained model and its tokenizer as a Hugging Face folder; with adapters merged, and `adapter/`.

        A folder that an earlier call wrote is replaced as a whole: a crash leaves the old model or the new one.

        Raises: CheckpointError where nothing was trained yet, or the folder cannot be written.
        """
        self.check_trained()
        causal_lm.publish(self.model, self.tokenizer, folder)
        return Path(folder)

    @property
    def policy(self) -> Policy:
        """The policy in training, for `rl_core.evaluate`, `rl_core.generate` or a next trainer."""
        return Policy(self.model, self.tokenizer, self.renderer or ChatRenderer(self.tokenizer))

    def generate(
        self, prompts: RowSource, *, samples: int = 1, sampling: SamplingSettings | None = None, seed: int = 0
    ) -> list[list[str]]:
        """Completions by the present weights, as `rl_core.generate`."""
        return generate(self.policy, prompts, samples=samples, sampling=sampling, seed=seed)


def training_of(
    algorithm: str,
    recipe: Recipe[T],
    settings: LoopSettings,
    policy: Policy,
    *,
    source: ModelSource,
    seed: int,
    output: str | Path | None,
    tracker: TrackerSource,
    callbacks: Sequence[Callback],
    model: PreTrainedModel | None = None,
    **digests: Any,
) -> Training[T]:
    """The training of a recipe, with what a checkpoint must agree with to be resumed.

    Args:
        source: the model that it starts from, as the caller named it.
        model: what is trained, if it is not the policy's.
        digests: of data, rewards and code, by name.
    """
    fingerprint = {
        "algorithm": algorithm, "settings": decisive(settings), "seed": seed, "model": model_name(source),
        "chat": policy.renderer.digest, **digests,
    }  # fmt: skip
    return Training(
        algorithm, recipe, settings, fingerprint, folder_of(output), tracker, callbacks,
        model=policy.model if model is None else model, tokenizer=policy.tokenizer, renderer=policy.renderer,
    )  # fmt: skip


def settings_of_kind(settings: S | None, kind: type[S]) -> S:
    """The settings, or the defaults. Raises: SettingsError for those of another algorithm, or of several processes."""
    if settings is None:
        return kind()
    if not isinstance(settings, kind):
        raise SettingsError(f"settings: expected rl_core.{kind.__name__}, found {type(settings).__name__}")
    if settings.launch.kind != "in_process":
        raise SettingsError(
            "launch: the Python API trains in this process; for several, run the pipeline (posttrain run CONFIG)"
        )
    return settings
