"""A training run of the Python API: run, resume, look at, save."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_core.api.evaluation import generate
from rl_core.api.policy import ModelSource, Policy, model_name
from rl_core.api.recipes import Recipe
from rl_core.data.chat import ChatRenderer
from rl_core.data.records import RowSource
from rl_core.errors import CheckpointError, SettingsError, Stopped
from rl_core.models import causal_lm
from rl_core.settings import (
    DistillationSettings,
    LoopSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SamplingSettings,
    SFTSettings,
)
from rl_core.settings.rollouts import decisive_rollouts
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folder_removal import set_aside
from rl_core.storage.single_files import make_folder
from rl_core.trackers import JsonlTracker, TrackerSource, begin, close, several
from rl_core.training.callbacks import Callback, check_callbacks
from rl_core.training.kept_epochs import EPOCHS, KeptEpochs
from rl_core.training.loop_state import LoopMemory, LoopOutcome
from rl_core.training.trainer_protocol import Trainer

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Training", "folder_of", "settings_of_kind", "training_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Trainer)
S = TypeVar("S", PolicySettings, DistillationSettings, SFTSettings, RewardModelSettings, PreferenceSettings)

CHECKPOINTS, METRICS, HISTORY = "checkpoints", "metrics.jsonl", "metrics_history.json"
# Settings that change no number of the iterations already done: a resumed run may have others.
FREE = ("launch", "checkpoint_every", "keep_checkpoints", "keep_epochs")
LENGTHS = ("iterations", "epochs", "max_steps")  # free as well under a constant schedule


@dataclass
class Training(Generic[T]):
    """One training run. `run` trains, `save` writes the model; both may be called again.

    With `output`, metrics, rewards and checkpoints are kept in that folder, and a run that was stopped or killed
    resumes there when the same script is started again.
    """

    name: str  # of the algorithm
    recipe: Recipe[T]
    settings: LoopSettings
    model: PreTrainedModel  # trained in place
    tokenizer: PreTrainedTokenizerBase
    fingerprint: Mapping[str, Any]  # what must be equal for a resume
    output: Path | None = None
    tracker: TrackerSource = None
    callbacks: Sequence[Callback] = ()
    outcome: LoopOutcome | None = None  # of the run, once it has ended
    memory: LoopMemory = field(default_factory=LoopMemory)
    renderer: ChatRenderer | None = None  # of the training; None = the tokenizer's, with the default settings

    def __post_init__(self) -> None:
        self.callbacks = check_callbacks(self.callbacks)
        if self.output is not None:
            self.output = Path(self.output)
            if self.output.exists() and not self.output.is_dir():
                raise SettingsError(f"output: {self.output} is a file; name a folder")
        own = [JsonlTracker(self.output / METRICS, cut=True)] if self.output is not None else []
        self._tracker = several(self.tracker, own, folder=self.output)

    @property
    def trainer(self) -> T:
        """The trainer itself, for whoever wants to look inside."""
        return self.recipe.trainer

    def run(
        self, *, allow_drift: bool = False, fresh: bool = False, stop_event: threading.Event | None = None
    ) -> LoopOutcome:
        """Train to the end, or go on where an earlier call or an earlier process stopped.

        A run that has ended is not run again: the same outcome is returned. Ctrl-C and SIGTERM finish the iteration,
        save, and raise Stopped; a later `run` goes on from there.
        Args:
            allow_drift: resume although settings, data or code differ from those of the checkpoint.
            fresh: begin anew; checkpoints that are there are kept aside, under another name.
            stop_event: set by another thread to ask for a stop.
        Raises: Stopped; CallbackError; RewardError; EnvironmentFault; ResumeRefused; NonFiniteError; FolderBusy.
        """
        if self.outcome is not None:
            return self.outcome
        if fresh:
            self._set_aside()
        if self.output is not None:
            make_folder(self.output)
        begin(self._tracker, self.name, {"settings": dataclasses.asdict(self.settings), **self.fingerprint})
        status = "FAILED"
        try:
            self.outcome = self.recipe.run(
                self.settings,
                tracker=self._tracker,
                checkpoints=self.output / CHECKPOINTS if self.output is not None else None,
                fingerprint=self.fingerprint,
                allow_drift=allow_drift,
                stop_event=stop_event,
                history=self.output / HISTORY if self.output is not None else None,
                callbacks=self.callbacks,
                memory=self.memory,
                after_iteration=self._kept_epochs(),
            )
            status = "FINISHED"
        except Stopped as stopped:
            status = "KILLED"
            if self.output is not None or not self.memory.is_whole:
                raise
            raise Stopped(
                f"stopped after iteration {self.memory.state.iteration}; run() goes on from here as long as this "
                "process lives. With output=FOLDER a new process could resume",
                stopped.signum,
            ) from None
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            close(self._tracker, status)
        return self.outcome

    def _kept_epochs(self) -> KeptEpochs | None:
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

    def _set_aside(self) -> None:
        """Keep the checkpoints of an earlier process under another name, so that training begins anew."""
        if self.memory.state.iteration:
            raise SettingsError("fresh: this training has begun in this process; make a new one to begin anew")
        if self.output is None or not (self.output / CHECKPOINTS).exists():
            return
        with CheckpointStore(self.output / CHECKPOINTS):  # no other process trains there
            aside = set_aside(self.output / CHECKPOINTS, f"{CHECKPOINTS}.aside")
        logger.warning("%s begins anew; its checkpoints are kept in %s", self.name, aside)

    def save(self, folder: str | Path) -> Path:
        """Write the trained model and its tokenizer as a Hugging Face folder; with adapters merged, and `adapter/`.

        A folder that an earlier call wrote is replaced as a whole: a crash leaves the old model or the new one.

        Raises: CheckpointError where nothing was trained yet, or the folder cannot be written.
        """
        if not self.memory.state.iteration:
            raise CheckpointError("nothing was trained yet; call run() before save()")
        causal_lm.publish(self.model, self.tokenizer, folder)
        return Path(folder)

    def evaluate(self) -> dict[str, float]:
        """Evaluation metrics of the present weights; {} where nothing is held out."""
        return {name: float(value) for name, value in self.trainer.evaluate().items()}

    def metrics(self) -> pd.DataFrame:
        """The newest values of every metric, one row a step; all of them: `rl_core.read_metrics(output)`."""
        from rl_core.readers import metrics_frame

        history = self.memory.history
        points = [(step, {name: value}) for name in history.names for step, value in history.points(name)]
        return metrics_frame(points)

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
    free = FREE + (LENGTHS if getattr(settings, "schedule", None) == "constant" else ())
    kept = {name: value for name, value in dataclasses.asdict(settings).items() if name not in free}
    if isinstance(rollouts := kept.pop("rollouts", None), dict) and (decisive := decisive_rollouts(rollouts)):
        kept["rollouts"] = decisive
    fingerprint = {
        "algorithm": algorithm, "settings": kept, "seed": seed, "model": model_name(source),
        "chat": policy.renderer.digest, **digests,
    }  # fmt: skip
    return Training(
        algorithm, recipe, settings, policy.model if model is None else model, policy.tokenizer, fingerprint,
        folder_of(output), tracker, callbacks, renderer=policy.renderer,
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


def folder_of(output: str | Path | None) -> Path | None:
    """The folder of a run as a path; None = nothing is kept."""
    return Path(output) if output is not None else None
