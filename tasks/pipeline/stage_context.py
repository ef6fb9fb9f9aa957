"""Settings, inputs, folder, tracker and stop signal of a stage, in one object for its body."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.config import PipelineSettings
from tasks.pipeline.result import EPOCH_MODELS, METRICS_HISTORY
from tasks.stage_registry import entry
from tasks.tracking import RunTracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.api.recipes import Recipe
    from rl_core.distributed import ProcessGroup
    from rl_core.trainers.supervised_trainer import SupervisedTrainer
    from rl_core.training.kept_epochs import KeptEpochs
    from rl_core.training.loop_state import LoopOutcome
    from rl_core.training.optimizer_step import OptimizerStep
    from tasks.pipeline.run import PipelineRun

__all__ = ["StageContext"]


def _alone() -> ProcessGroup:
    from rl_core.distributed import SINGLE_PROCESS  # here, as it loads torch

    return SINGLE_PROCESS


@dataclass
class StageContext:
    """Settings, inputs, folder, tracker and stop signal of a stage, for its body."""

    name: str
    folder: Path  # write here; renamed when finished
    settings: Any  # the stage's own settings
    pipeline: PipelineSettings
    inputs: dict[str, Path | str]  # folders of finished stages, model folders or hub names
    tracker: RunTracker  # in one of several processes a Tracker alone, that tells the stage's own process
    pipeline_run: PipelineRun  # not there in one of several processes
    seed: int
    fingerprint: dict[str, str]  # what has to be equal for a checkpoint to be resumed
    stop: threading.Event
    allow_drift: bool | tuple[str, ...] = False  # resume although the fingerprint differs, in these keys or in any
    threads: int = 1  # of all processes of the stage on this machine together
    process_group: ProcessGroup = field(default_factory=_alone)  # the processes that run this stage's body together

    @property
    def checkpoints(self) -> Path:
        """Folder of the stage's checkpoints; removed when it has finished."""
        return self.folder / "checkpoints"

    def train(self, recipe: Recipe[Any], after_iteration: Callable[[int], None] | None = None) -> LoopOutcome:
        """Run a recipe's trainer to its end, or resume it: tracked, checkpointed and stoppable as every stage is.

        Arguments and errors: as `rl_core.training.loop.run_loop`.
        """
        return recipe.run(
            self.settings,
            tracker=self.tracker,
            checkpoints=self.checkpoints,
            fingerprint=self.fingerprint,
            allow_drift=self.allow_drift,
            stop_event=self.stop,
            history=self.folder / METRICS_HISTORY,
            after_iteration=after_iteration,
        )

    def kept_epochs(
        self,
        trainer: SupervisedTrainer[Any, Any],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        load: Callable[[PipelineSettings], PreTrainedModel],
    ) -> KeptEpochs | None:
        """For `train`: keeps the models of epochs, where the stage's settings ask for some. Arguments: `save_model`."""
        from rl_core.models import causal_lm
        from rl_core.training.kept_epochs import KeptEpochs

        if not self.settings.keep_epochs:
            return None

        def save(folder: Path) -> None:
            whole = self._whole_model(trainer.optimizer_step, model, load)
            if whole is not None:
                causal_lm.publish(whole, tokenizer, folder)

        return KeptEpochs(
            self.folder / EPOCH_MODELS, self.settings.keep_epochs, trainer.order.batches_per_epoch,
            trainer.optimizer_step, save,
        )  # fmt: skip

    def save_model(
        self,
        optimizer_step: OptimizerStep,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        load: Callable[[PipelineSettings], PreTrainedModel],
    ) -> None:
        """Write the trained model into the stage's folder.

        Where several processes share its weights out, the first one puts them together, in a model made anew on the
        CPU: no GPU need hold them all.

        Args:
            optimizer_step: that has trained the model.
            load: gives the model that training started from, for settings with another device.
        """
        from rl_core.models import causal_lm

        if entry(self.name).trains == "policy":
            self._record_logprobs(optimizer_step, model)
        elif entry(self.name).trains == "reward_model":
            self._record_scores(optimizer_step, model)
        whole = self._whole_model(optimizer_step, model, load)
        if whole is not None:
            causal_lm.save(whole, tokenizer, self.folder / "model")

    def _record_logprobs(self, optimizer_step: OptimizerStep, model: PreTrainedModel) -> None:
        """Keep log-probs of the trainer's own model, which the written one has to have (stage `export`)."""
        from rl_core.models.logprob_record import TRAINED, trained_records, write_records

        records = optimizer_step.sharded.with_full_weights_independent(lambda: trained_records(model))
        if self.process_group.is_rank_zero:
            write_records(self.folder / TRAINED, records)

    def _record_scores(self, optimizer_step: OptimizerStep, model: PreTrainedModel) -> None:
        """As `_record_logprobs`, for a reward model."""
        from rl_core.models.score_record import SCORES, fixed_scores, write_scores

        records = optimizer_step.sharded.with_full_weights_independent(lambda: fixed_scores(model))
        if self.process_group.is_rank_zero:
            write_scores(self.folder / SCORES, records)

    def _whole_model(
        self, optimizer_step: OptimizerStep, model: PreTrainedModel, load: Callable[[PipelineSettings], PreTrainedModel]
    ) -> PreTrainedModel | None:
        """The model with all its weights; None in a process that is not the first of several."""
        from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights

        if self.process_group.size == 1:
            return model
        weights = optimizer_step.sharded.gather_state(trainable_weights(model))
        if not self.process_group.is_rank_zero:
            return None
        on_cpu = dataclasses.replace(self.pipeline.model, device="cpu")
        model = load(dataclasses.replace(self.pipeline, model=on_cpu))
        load_trainable_weights(model, weights)
        return model
