"""A training run of the Python API, whatever it trains: run, resume, look at."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_core.api.recipes import Recipe
from rl_core.errors import CheckpointError, SettingsError, Stopped
from rl_core.settings import LoopSettings
from rl_core.settings.rollouts import decisive_rollouts
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.folder_removal import set_aside
from rl_core.storage.single_files import make_folder
from rl_core.trackers import JsonlTracker, TrackerSource, begin, close, several
from rl_core.training.callbacks import Callback, check_callbacks
from rl_core.training.loop_state import LoopMemory, LoopOutcome
from rl_core.training.trainer_protocol import Trainer

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ResumableTraining", "decisive", "folder_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Trainer)

CHECKPOINTS, METRICS, HISTORY = "checkpoints", "metrics.jsonl", "metrics_history.json"
# Settings that change no number of the iterations already done: a resumed run may have others.
FREE = ("launch", "checkpoint_every", "keep_checkpoints", "keep_epochs")
LENGTHS = ("iterations", "epochs", "max_steps")  # free as well under a constant schedule


@dataclass
class ResumableTraining(Generic[T]):
    """One training run. `run` trains; it may be called again.

    With `output`, metrics, rewards and checkpoints are kept in that folder, and a run that was stopped or killed
    resumes there when the same script is started again.
    """

    name: str  # of the algorithm
    recipe: Recipe[T]
    settings: LoopSettings
    fingerprint: Mapping[str, Any]  # what must be equal for a resume
    output: Path | None = None
    tracker: TrackerSource = None
    callbacks: Sequence[Callback] = ()
    outcome: LoopOutcome | None = None  # of the run, once it has ended
    memory: LoopMemory = field(default_factory=LoopMemory)

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
                after_iteration=self.after_iteration(),
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

    def after_iteration(self) -> Callable[[int], None] | None:
        """Function of the number of iterations done, called after each one beside the callbacks; None = none."""
        return None

    def _set_aside(self) -> None:
        """Keep the checkpoints of an earlier process under another name, so that training begins anew."""
        if self.memory.state.iteration:
            raise SettingsError("fresh: this training has begun in this process; make a new one to begin anew")
        if self.output is None or not (self.output / CHECKPOINTS).exists():
            return
        with CheckpointStore(self.output / CHECKPOINTS):  # no other process trains there
            aside = set_aside(self.output / CHECKPOINTS, f"{CHECKPOINTS}.aside")
        logger.warning("%s begins anew; its checkpoints are kept in %s", self.name, aside)

    def check_trained(self) -> None:
        """Raise CheckpointError where nothing was trained yet."""
        if not self.memory.state.iteration:
            raise CheckpointError("nothing was trained yet; call run() before save()")

    def evaluate(self) -> dict[str, float]:
        """Evaluation metrics of the present weights; {} where nothing is held out."""
        return {name: float(value) for name, value in self.trainer.evaluate().items()}

    def metrics(self) -> pd.DataFrame:
        """The newest values of every metric, one row a step; all of them: `rl_core.read_metrics(output)`."""
        from rl_core.readers import metrics_frame

        history = self.memory.history
        points = [(step, {name: value}) for name in history.names for step, value in history.points(name)]
        return metrics_frame(points)


def decisive(settings: LoopSettings, lengths: Sequence[str] = LENGTHS) -> dict[str, Any]:
    """Settings that must be equal for a resume. `lengths`: those that say how long it trains."""
    free = (*FREE, *(lengths if getattr(settings, "schedule", None) == "constant" else ()))
    kept = {name: value for name, value in dataclasses.asdict(settings).items() if name not in free}
    if isinstance(rollouts := kept.pop("rollouts", None), dict) and (chosen := decisive_rollouts(rollouts)):
        kept["rollouts"] = chosen
    return kept


def folder_of(output: str | Path | None) -> Path | None:
    """The folder of a run as a path; None = nothing is kept."""
    return Path(output) if output is not None else None
