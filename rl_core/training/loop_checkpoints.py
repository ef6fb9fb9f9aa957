"""Checkpoints of the training loop: everything that the next iteration depends on, saved when due and resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rl_core.distributed import ProcessGroup
from rl_core.errors import CheckpointError, PosttrainError
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.storage.faults import fault
from rl_core.storage.rng_state import restore_rng, rng_state
from rl_core.tracking import sync_tracker
from rl_core.training.loop_metrics import LoopMetrics
from rl_core.training.loop_state import LoopMemory, LoopProgress
from rl_core.training.resume import check_fingerprint
from rl_core.training.trainer_protocol import Trainer

__all__ = ["LoopCheckpoints"]

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0  # of training that a stop may cost, and
SAVE_TIMES = 50.0  # as many times the time that saving takes, whichever is longer


@dataclass
class LoopCheckpoints:
    """Saving and resuming of a trainer together with its loop's memory. Rank 0 alone reads and writes."""

    trainer: Trainer
    store: CheckpointStore | None  # None = nothing is saved
    memory: LoopMemory
    metrics: LoopMetrics  # told how long saving took
    fingerprint: dict[str, Any]
    process_group: ProcessGroup
    clock: Callable[[], float]
    saved: tuple[int, int] | None = None  # (iteration, evaluated_iteration) of the newest checkpoint
    saved_at: float = 0.0  # by `clock`
    save_seconds: float = 0.0  # of that one

    def save_when_due(self, every: int) -> None:
        """Save after each `every` iterations, and sooner where they are long; 0 = never."""
        if not every or (self.store is None and self.process_group.size == 1):
            return
        # A stop may give up the iteration, so long iterations are saved before their turn: for little of their time.
        unsaved = self.clock() - self.saved_at
        is_late = unsaved > max(SAVE_SECONDS, SAVE_TIMES * self.save_seconds)
        if self.memory.state.iteration % every == 0 or self.process_group.on_rank_zero(lambda: is_late):
            self.save()

    def save(self) -> None:
        """Save the present state, unless that was done or there is no store."""
        place = (self.memory.state.iteration, self.memory.state.evaluated_iteration)
        if self.store is None or self.saved == place:
            return
        started = self.clock()
        state = {
            "model": trainable_weights(self.trainer.model),
            "best_model": self.memory.best_weights,
            "optimizer_step": self.trainer.optimizer_step.state_dict(),
            "trainer": self.trainer.state_dict(),
            "loop": asdict(self.memory.state),
            "history": self.memory.history.state_dict(),
            "fingerprint": self.fingerprint,
            "rng": rng_state(),
        }
        if self.process_group.size > 1:
            state = self.trainer.optimizer_step.sharded.gather_state(state)
            state["workers"] = {"size": self.process_group.size, "rng": self.process_group.all_gather(state["rng"])}
        if self.process_group.is_rank_zero:
            sync_tracker(self.metrics.tracker)
            self.store.save(state)
        self.saved = place
        self.saved_at = self.metrics.spent("checkpoint", started)
        self.save_seconds = self.saved_at - started
        fault("loop.saved")

    def resume(self, allow_drift: bool | Collection[str]) -> None:
        """Take the newest checkpoint over, where there is one. Raises: ResumeRefused; CheckpointError."""
        if self.store is None:
            return
        state = self.store.load_latest() if self.process_group.is_rank_zero else None
        state = self.trainer.optimizer_step.sharded.scatter_state(state, self.trainer.model)
        if state is None:
            return
        saved_by = state.get("workers", {"size": 1, "rng": [state["rng"]]})
        same_size = saved_by["size"] == self.process_group.size
        # Threads decide the last bits, and so does the number of processes, which may change.
        besides = () if same_size else ("runtime.threads",)
        changed = check_fingerprint(state["fingerprint"], self.fingerprint, allow_drift=allow_drift, besides=besides)
        if changed and self.process_group.is_rank_zero:
            self.metrics.tracker.set_tag("drift.fingerprint", "; ".join(changed)[:4000])
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if not changed or isinstance(error, PosttrainError):
                raise
            raise CheckpointError(
                f"the checkpoint cannot be resumed under the changed settings ({type(error).__name__}: {error}); put "
                "the old ones back, or begin anew"
            ) from error
        self.memory.is_whole = True
        self.saved = (self.memory.state.iteration, self.memory.state.evaluated_iteration)
        # last: building or loading anything may have drawn from the generators
        if same_size:
            restore_rng(saved_by["rng"][self.process_group.rank])
        else:
            logger.warning(
                "resumed in %d processes what was saved by %d: the same numbers to rounding, not to the last bit",
                self.process_group.size,
                saved_by["size"],
            )
            if self.process_group.is_rank_zero:
                restore_rng(state["rng"])
        fault("loop.resumed")
        logger.info(
            "resumed after iteration %d, step %d", self.memory.state.iteration, self.trainer.optimizer_step.num_steps
        )

    def _load(self, state: Mapping[str, Any]) -> None:
        """Everything of a checkpoint but the random generators."""
        load_trainable_weights(self.trainer.model, state["model"])
        self.memory.best_weights = state["best_model"]
        self.trainer.optimizer_step.load_state_dict(state["optimizer_step"])
        self.trainer.load_state_dict(state["trainer"])
        if missing := sorted({field.name for field in fields(LoopProgress)} - state["loop"].keys()):
            raise CheckpointError(f"the checkpoint's loop lacks {', '.join(missing)}")
        self.memory.state = LoopProgress(**state["loop"])
        self.memory.history.load_state_dict(state["history"])
