"""Training runs of the Python API: run, resume, inspect; for language models also save, generate, reuse."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_core.api.evaluation import generate
from rl_core.api.policy import ModelSource, Policy, describe_model_source
from rl_core.api.recipes import Recipe
from rl_core.data.chat import ChatRenderer
from rl_core.data.records import RowSource
from rl_core.errors import CheckpointError, SettingsError, Stopped
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
    build_settings,
)
from rl_core.settings.rollouts import select_decisive_rollouts
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folders import move_aside
from rl_core.trackers import (
    JsonlTracker,
    TrackerSource,
    build_tracker_group,
    notify_run_end,
    notify_run_start,
)
from rl_core.training.callbacks import Callback, Trainer, check_callbacks
from rl_core.training.checkpoints import EPOCHS_FOLDER, EpochModelWriter
from rl_core.training.loop_state import LoopMemory, LoopOutcome

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

TrainerT = TypeVar("TrainerT", bound=Trainer)

CHECKPOINTS_FOLDER = "checkpoints"
METRICS_FILE = "metrics.jsonl"
HISTORY_FILE = "metrics_history.json"
# Settings that may differ in a resumed run, as they change no number of the iterations already done.
FREE_SETTINGS = ("launch", "checkpoint_every", "keep_checkpoints", "keep_epochs")
LENGTH_SETTINGS = ("iterations", "epochs", "max_steps")  # also free under a constant schedule


@dataclass(repr=False)
class ResumableTraining(Generic[TrainerT]):
    """One training run. `run` trains; it may be called again.

    With `output`, metrics, rewards and checkpoints are written to that folder, and a stopped or killed run resumes
    there when the same script is started again.
    """

    name: str  # of the algorithm
    recipe: Recipe[TrainerT]
    settings: LoopSettings
    fingerprint: Mapping[str, Any]  # what must be equal for a resume
    output: Path | None = None
    tracker: TrackerSource = None
    callbacks: Sequence[Callback] = ()
    outcome: LoopOutcome | None = None  # set when the run has ended
    memory: LoopMemory = field(default_factory=LoopMemory)

    def __post_init__(self) -> None:
        self.callbacks = check_callbacks(self.callbacks)
        if self.output is not None:
            self.output = Path(self.output)
            if self.output.exists() and not self.output.is_dir():
                raise SettingsError(f"output: {self.output} is a file; name a folder")
        file_trackers = []
        if self.output is not None:
            file_trackers.append(JsonlTracker(self.output / METRICS_FILE, cut=True))
        self._tracker = build_tracker_group(self.tracker, file_trackers, folder=self.output)

    def __repr__(self) -> str:
        """Say in three lines what is trained, how far it is, and where its files are."""
        iteration = self.memory.state.iteration
        progress = f"iteration {iteration} of {self.recipe.iterations}"
        state = "not started" if not iteration else "ended" if self.outcome else "stopped"
        return (
            f"{self.name}: {type(self.trainer).__name__} with {type(self.settings).__name__}\n"
            f"  {progress}, {state}\n"
            f"  output: {self.output if self.output is not None else 'none (nothing is written)'}"
        )

    @property
    def trainer(self) -> TrainerT:
        """The trainer, for inspection."""
        return self.recipe.trainer

    def run(
        self,
        *,
        allow_drift: bool = False,
        fresh: bool = False,
        stop_event: threading.Event | None = None,
    ) -> LoopOutcome:
        """Train to the end, or continue where an earlier call or an earlier process stopped.

        A finished run is not repeated: the same outcome is returned. Ctrl-C and SIGTERM finish the iteration, save,
        and raise Stopped; a later `run` continues from there.
        Args:
            allow_drift: resume although settings, data or code differ from those of the checkpoint.
            fresh: start over; existing checkpoints are kept under another name.
            stop_event: set by another thread to request a stop.
        Raises: Stopped; CallbackError; RewardError; EnvironmentFault; ResumeRefused; NonFiniteError; FolderBusy.
        """
        if self.outcome is not None:
            return self.outcome
        if fresh:
            self._archive_checkpoints()
        if self.output is not None:
            make_folder(self.output)
        parameters = {"settings": dataclasses.asdict(self.settings), **self.fingerprint}
        notify_run_start(self._tracker, self.name, parameters)
        status = "FAILED"
        try:
            self.outcome = self.recipe.run(
                self.settings,
                tracker=self._tracker,
                checkpoints=self.output / CHECKPOINTS_FOLDER if self.output is not None else None,
                fingerprint=self.fingerprint,
                allow_drift=allow_drift,
                stop_event=stop_event,
                history=self.output / HISTORY_FILE if self.output is not None else None,
                callbacks=self.callbacks,
                memory=self.memory,
                after_iteration=self.after_iteration(),
            )
            status = "FINISHED"
        except Stopped as stopped:
            status = "KILLED"
            if self.output is not None or not self.memory.is_consistent:
                raise
            raise Stopped(
                f"stopped after iteration {self.memory.state.iteration}; run() continues from here in this process. "
                "With output=FOLDER a new process could resume",
                stopped.signum,
            ) from None
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            notify_run_end(self._tracker, status)
        return self.outcome

    def after_iteration(self) -> Callable[[int], None] | None:
        """Return a function to call after each iteration with the number of iterations done; None = no hook."""
        return None

    def _archive_checkpoints(self) -> None:
        """Move the checkpoints of an earlier process aside, so that training starts over."""
        if self.memory.state.iteration:
            raise SettingsError(
                "fresh: this training has already started in this process; create a new one to start over"
            )
        if self.output is None or not (self.output / CHECKPOINTS_FOLDER).exists():
            return
        folder = self.output / CHECKPOINTS_FOLDER
        with CheckpointStore(folder):  # locks the folder: no other process trains there
            new_path = move_aside(folder, f"{CHECKPOINTS_FOLDER}.aside")
        logger.warning("%s starts over; its checkpoints are kept in %s", self.name, new_path)

    def check_trained(self) -> None:
        """Raise CheckpointError if nothing was trained yet."""
        if not self.memory.state.iteration:
            raise CheckpointError("nothing was trained yet; call run() before save()")

    def evaluate(self) -> dict[str, float]:
        """Return evaluation metrics of the current weights; {} without held-out data."""
        return {name: float(value) for name, value in self.trainer.evaluate().items()}

    def metrics(self) -> pd.DataFrame:
        """Return the newest values of every metric, one row per step; for all values use
        `rl_core.read_metrics(output)`.
        """
        from rl_core.readers import build_metrics_frame

        history = self.memory.history
        points = [
            (step, {name: value})
            for name in history.names
            for step, value in history.list_points(name)
        ]
        return build_metrics_frame(points)


def select_decisive_settings(
    settings: LoopSettings, length_settings: Sequence[str] = LENGTH_SETTINGS
) -> dict[str, Any]:
    """Return the settings that must be equal for a resume. `length_settings`: those that set the length of training."""
    free = set(FREE_SETTINGS)
    if getattr(settings, "schedule", None) == "constant":
        free.update(length_settings)
    decisive = {
        name: value for name, value in dataclasses.asdict(settings).items() if name not in free
    }
    rollouts = decisive.pop("rollouts", None)
    if isinstance(rollouts, dict):
        decisive_rollouts = select_decisive_rollouts(rollouts)
        if decisive_rollouts:
            decisive["rollouts"] = decisive_rollouts
    return decisive


def resolve_output_folder(output: str | Path | None) -> Path | None:
    """Return the folder of a run as a path; None = nothing is written."""
    return Path(output) if output is not None else None


T = TypeVar("T", bound=Trainer)
S = TypeVar(
    "S",
    PolicySettings,
    DistillationSettings,
    SFTSettings,
    RewardModelSettings,
    PreferenceSettings,
    NetworkSettings,
)


@dataclass(kw_only=True, repr=False)
class Training(ResumableTraining[T]):
    """Training of a language model. `run` trains, `save` writes the model; both may be called again."""

    model: PreTrainedModel  # trained in place
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer | None = None  # None = the tokenizer's, with the default settings

    def after_iteration(self) -> EpochModelWriter | None:
        """Return the writer of epoch models, if the settings ask for one. Raises: SettingsError without an output
        folder.
        """
        keep = getattr(self.settings, "keep_epochs", 0)
        if not keep:
            return None
        if self.output is None:
            raise SettingsError(
                "keep_epochs: needs an output folder; pass output=FOLDER, or leave it 0"
            )
        return EpochModelWriter(
            self.output / EPOCHS_FOLDER,
            keep,
            self.trainer.order.batches_per_epoch,  # type: ignore[attr-defined]
            self.trainer.optimizer_step,
            lambda folder: causal_lm.publish_model(self.model, self.tokenizer, folder),
        )

    def save(self, folder: str | Path) -> Path:
        """Write the trained model and its tokenizer as a Hugging Face folder; with adapters, the merged model and
        `adapter/`.

        A folder written earlier is replaced as a whole: a crash leaves the old model or the new one.

        Raises: CheckpointError if nothing was trained yet, or the folder cannot be written.
        """
        self.check_trained()
        causal_lm.publish_model(self.model, self.tokenizer, folder)
        return Path(folder)

    @property
    def policy(self) -> Policy:
        """The policy in training, for `rl_core.evaluate`, `rl_core.generate` or another trainer."""
        return Policy(self.model, self.tokenizer, self.renderer or ChatRenderer(self.tokenizer))

    def generate(
        self,
        prompts: RowSource,
        *,
        samples: int = 1,
        sampling: SamplingSettings | Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> list[list[str]]:
        """Generate completions with the current weights, as `rl_core.generate`."""
        return generate(self.policy, prompts, samples=samples, sampling=sampling, seed=seed)


def build_training(
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
    """Build the training of a recipe, with the fingerprint that a checkpoint must match to be resumed.

    Args:
        source: the starting model, as the caller named it.
        model: the trained model, if it is not the policy's.
        digests: of data, rewards and code, by name.
    """
    fingerprint = {
        "algorithm": algorithm,
        "settings": select_decisive_settings(settings),
        "seed": seed,
        "model": describe_model_source(source),
        "chat": policy.renderer.digest,
        **digests,
    }
    return Training(
        algorithm,
        recipe,
        settings,
        fingerprint,
        resolve_output_folder(output),
        tracker,
        callbacks,
        model=policy.model if model is None else model,
        tokenizer=policy.tokenizer,
        renderer=policy.renderer,
    )


def resolve_settings(settings: S | Mapping[str, Any] | None, kind: type[S]) -> S:
    """Return the settings, built from a dict, or the defaults.

    Raises: SettingsError for another algorithm's, or for several processes.
    """
    settings = build_settings({} if settings is None else settings, kind)
    if settings.launch.kind != "in_process":
        raise SettingsError(
            "launch: the Python API trains in this process; for several processes use posttrain run CONFIG"
        )
    return settings
