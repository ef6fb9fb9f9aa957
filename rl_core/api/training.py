"""Training runs of the Python API: run, resume, inspect; for language models also save, generate, reuse."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_core.analysis.curve_figure import CurveFigure, Points, build_curve_figure
from rl_core.api.evaluation import generate
from rl_core.api.notebook import LiveDisplay, wants_live_display
from rl_core.api.policy import ModelSource, Policy, describe_model_source
from rl_core.api.recipes import Recipe
from rl_core.api.trl_arguments import explain_training_attribute, explain_unknown_arguments
from rl_core.data.chat import ChatRenderer
from rl_core.data.records import RowSource
from rl_core.errors import CheckpointError, SettingsError, Stopped
from rl_core.models import causal_lm
from rl_core.rewards.rollout_log import RecentRollouts
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
    TrackerGroup,
    TrackerSource,
    build_tracker_group,
    notify_run_end,
    notify_run_start,
)
from rl_core.training.callbacks import Callback, Trainer, check_callbacks
from rl_core.training.checkpoints import EPOCHS_FOLDER, EpochModelWriter
from rl_core.training.loop_state import HISTORY_LENGTH, LoopMemory, LoopOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.api.result_tables import MetricsFrame, SamplesFrame


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
        state = "ended" if self.outcome else "stopped" if iteration else self._describe_folder()
        return (
            f"{self.name}: {type(self.trainer).__name__} with {type(self.settings).__name__}\n"
            f"  iteration {iteration} of {self.recipe.iterations}, {state}\n"
            f"  output: {self.output if self.output is not None else 'none (nothing is written)'}"
        )

    def _describe_folder(self) -> str:
        """Describe what the first `run` of this training starts from: nothing, or an earlier run in its output."""
        if self.output is None:
            return "not started"
        try:
            newest = CheckpointStore(self.output / CHECKPOINTS_FOLDER).describe_newest()
        except OSError as error:
            return f"not started; its output cannot be read: {error.strerror}"
        if newest is None:
            return "not started"
        if (newest.iteration or 0) >= self.recipe.iterations:
            return "not started; its output holds a finished run, which run() loads"
        start = f"iteration {newest.iteration}" if newest.iteration else "a checkpoint"
        return f"not started; its output holds a run, which run() resumes from {start}"

    if not TYPE_CHECKING:  # type checkers refuse unknown names themselves

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown name; a name of TRL's trainers with what it is here. Raises: AttributeError."""
            advice = "" if name.startswith("_") else explain_training_attribute(name)
            message = f"'{type(self).__name__}' object has no attribute '{name}'"
            raise AttributeError(f"{message}; {advice}" if advice else message, name=name, obj=self)

    @property
    def trainer(self) -> TrainerT:
        """The trainer, for inspection."""
        return self.recipe.trainer

    @explain_unknown_arguments
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
        tracker = self._add_live_display()
        notify_run_start(tracker, self.name, parameters)
        status = "FAILED"
        try:
            self.outcome = self.recipe.run(
                self.settings,
                tracker=tracker,
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
            if not self.memory.is_consistent:
                raise
            if self.output is not None:
                raise Stopped(
                    f"stopped after iteration {self.memory.state.iteration}; saved in {self.output}: run() resumes "
                    "from here, also in a new process",
                    stopped.signum,
                ) from None
            raise Stopped(
                f"stopped after iteration {self.memory.state.iteration}; run() continues from here in this process. "
                "With output=FOLDER a new process could resume",
                stopped.signum,
            ) from None
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            notify_run_end(tracker, status)
        return self.outcome

    @explain_unknown_arguments
    def train(
        self,
        *,
        allow_drift: bool = False,
        fresh: bool = False,
        stop_event: threading.Event | None = None,
    ) -> LoopOutcome:
        """Train, as `run`: the name that other libraries use."""
        return self.run(allow_drift=allow_drift, fresh=fresh, stop_event=stop_event)

    def _add_live_display(self) -> TrackerGroup:
        """Return the trackers of one call of `run`: in a notebook with a display in the cell that called it."""
        trackers = self._tracker.trackers
        if not wants_live_display(self.tracker, trackers):
            return self._tracker
        return TrackerGroup([*trackers, LiveDisplay(lambda: self.memory.history)])

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

    def metrics(self, *, keep_constant: bool = False) -> MetricsFrame:
        """Return the newest values of every metric as a DataFrame, one row per step, the most important ones first.

        A new training whose output folder holds an earlier run's metrics returns those. For all values use
        `rl_core.read_metrics(output)`.
        Args:
            keep_constant: True = metrics that never changed are columns, too. They can be looked up by name either way.
        """
        from rl_core.api.result_tables import MetricsFrame
        from rl_core.readers import build_metrics_frame

        points = [
            (step, {name: value})
            for name, series in self._list_series().items()
            for step, value in series
        ]
        return MetricsFrame(build_metrics_frame(points), keep_constant=keep_constant)

    def plot(self, *names: str) -> CurveFigure:
        """Return curves of this training as a figure that a notebook shows; `.save("curves.svg")` writes it.

        A new training whose output folder holds an earlier run's metrics draws those.
        Args:
            names: metrics, a panel each; `*` matches any characters ("reward/*"). Default: reward, success, KL,
                entropy, length, loss.
        Raises: DataError for a name that was not logged.
        """
        return build_curve_figure({"": self._list_series()}, names)

    def samples(self, limit: int | None = 16) -> SamplesFrame:
        """Return sampled episodes of the newest iterations as a DataFrame: prompt, completion, reward and its parts.

        A notebook shows long texts shortened; the DataFrame holds them complete.
        Args:
            limit: rows, newest iteration first; None = all that are stored (up to 16 of each of the last four
                iterations).
        Raises: SettingsError for a training that samples no episodes.
        """
        raise SettingsError(
            f"samples: {self.name} trains on data and samples no episodes; use generate(prompts)"
        )

    def _list_series(self) -> dict[str, Points]:
        """Return the points of every metric: of this process, or of the output folder if nothing was trained here."""
        from rl_core.readers import read_series

        history = self.memory.history
        if history.names or self.output is None or not (self.output / METRICS_FILE).is_file():
            return {name: history.list_points(name) for name in history.names}
        return {name: points[-HISTORY_LENGTH:] for name, points in read_series(self.output).items()}


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
    recent: RecentRollouts | None = None  # newest sampled episodes; None = nothing is sampled

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

    def samples(self, limit: int | None = 16) -> SamplesFrame:
        """Return sampled episodes as a DataFrame; see `ResumableTraining.samples`."""
        from rl_core.api.result_tables import build_samples_frame
        from rl_core.readers import iter_recent_trajectories

        if self.recent is None:
            return super().samples(limit)
        rows = self.recent.trajectories
        path = self.recent.path
        if not rows and path is not None and path.is_file():  # of an earlier process
            rows = list(iter_recent_trajectories(path))
        return build_samples_frame(rows, limit)

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
    recent: RecentRollouts | None = None,
    **digests: Any,
) -> Training[T]:
    """Build the training of a recipe, with the fingerprint that a checkpoint must match to be resumed.

    Args:
        source: the starting model, as the caller named it.
        model: the trained model, if it is not the policy's.
        recent: record of the newest sampled episodes, if any.
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
        recent=recent,
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
