"""Recipes: one module per algorithm with a function that builds its trainer, and the common way to run it.

The Python API (`rl_core.grpo`, `rl_core.sft`, ...) and the pipeline's stages both train through these functions. None
of the modules is imported here: a stage's key depends on the modules that its recipe imports.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rl_core.settings import LoopSettings
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import Tracker
from rl_core.training import loop
from rl_core.training.callbacks import Callback, Trainer
from rl_core.training.loop_state import LoopMemory, LoopOutcome
from rl_core.types import Rollout

__all__ = ["Recipe", "RolloutRecorder"]

T = TypeVar("T", bound=Trainer)
RolloutRecorder = Callable[[int, Sequence[Rollout]], None]


@dataclass(frozen=True)
class Recipe(Generic[T]):
    """A trainer, its number of iterations, and the evaluation metric that selects its best weights."""

    trainer: T
    iterations: int
    best_metric: str | None = None  # None = the last weights are kept
    larger_is_better: bool = True
    close: Callable[[], None] | None = None  # called at the end of a run, also after an error

    def run(
        self,
        settings: LoopSettings,
        *,
        tracker: Tracker | None = None,
        checkpoints: Path | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        allow_drift: bool | Collection[str] = False,
        stop_event: threading.Event | None = None,
        history: Path | None = None,
        callbacks: Sequence[Callback] = (),
        memory: LoopMemory | None = None,
        after_iteration: Callable[[int], None] | None = None,
    ) -> LoopOutcome:
        """Train to the end, or resume from the folder `checkpoints`. Arguments and errors: `training.loop.run_loop`."""
        store = None
        if checkpoints:
            store = CheckpointStore(checkpoints, keep=settings.keep_checkpoints)
        with contextlib.ExitStack() as stack:
            if self.close is not None:
                stack.callback(self.close)
            return loop.run_loop(
                self.trainer,
                settings,
                iterations=self.iterations,
                tracker=tracker,
                checkpoints=store,
                best_metric=self.best_metric,
                larger_is_better=self.larger_is_better,
                fingerprint=fingerprint,
                allow_drift=allow_drift,
                stop_event=stop_event,
                history=history,
                callbacks=callbacks,
                memory=memory,
                after_iteration=after_iteration,
            )
