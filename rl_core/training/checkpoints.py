"""Checkpoints of the training loop, the fingerprint that a resume checks, and models saved after each epoch.

A checkpoint holds everything that the next iteration depends on. The fingerprint holds settings, data and runtime,
which must be the same when a run resumes.

Models of epochs are written to FOLDER/1, FOLDER/2, ...; only the newest ones are kept. They are not checkpoints:
nothing is resumed from them. A model is written before the checkpoint of its iteration, so a run killed in between
writes the same bytes again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_core.distributed import ProcessGroup
from rl_core.errors import CheckpointError, PosttrainError, ResumeRefused
from rl_core.models.trainable_weights import collect_trainable_weights, load_trainable_weights
from rl_core.settings.deprecated_keys import rename_recorded_keys
from rl_core.storage.checkpoint import CheckpointStore, collect_rng_state, restore_rng_state
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, remove_folder
from rl_core.tracking import sync_tracker
from rl_core.training.callbacks import Trainer
from rl_core.training.loop_state import LoopMemory, LoopMetrics, LoopProgress
from rl_core.training.optimizer_step import OptimizerStep

logger = logging.getLogger(__name__)

# A stop may cost this many seconds of training, or this many times the duration of a save, whichever is longer.
UNSAVED_SECONDS_LIMIT = 60.0
UNSAVED_TO_SAVE_RATIO = 50.0
EPOCHS_FOLDER = "epochs"
REPORTED_CHECKPOINT_BYTES = 500_000_000
# Fields of the loop's progress that checkpoints of earlier releases lack.
_LATER_FIELDS = {"unmoved_iterations", "initial_digest", "plateau_evaluations"}


def collect_runtime_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return properties of the runtime that change float sums: threads, torch version, device."""
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": name}


def _flatten_tree(tree: Any, path: str = "") -> dict[str, str]:
    """Map dotted paths to canonical JSON of the leaves, so that tuples equal lists after a round trip."""
    if isinstance(tree, Mapping) and tree:
        leaves: dict[str, str] = {}
        for key, value in tree.items():
            leaves |= _flatten_tree(value, f"{path}.{key}" if path else str(key))
        return leaves
    return {path: json.dumps(tree, sort_keys=True, default=str)}


def check_fingerprint(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    *,
    allow_drift: bool | Collection[str] = False,
    ignored_keys: Collection[str] = (),
) -> list[str]:
    """Compare two fingerprints key by key; return one line per difference.

    Args:
        allow_drift: True = everything may differ; or the dotted keys that may. Differences are logged as a warning.
        ignored_keys: dotted keys that may differ silently.
    Raises: ResumeRefused naming all differences, unless they are allowed.
    """
    new = _flatten_tree(present)
    old = rename_recorded_keys(_flatten_tree(saved), new)
    keys = sorted((old.keys() | new.keys()) - set(ignored_keys))
    changed = [key for key in keys if old.get(key) != new.get(key)]
    lines = [
        f"{key}: {old.get(key, 'absent')} in the checkpoint, {new.get(key, 'absent')} now"
        for key in changed
    ]
    if not changed:
        return lines
    listing = "\n  ".join(lines)
    if allow_drift is True or (allow_drift and all(key in allow_drift for key in changed)):
        logger.warning("resuming although these changed since the checkpoint:\n  %s", listing)
        return lines
    raise ResumeRefused(
        f"the checkpoint belongs to a run that differs from this one:\n  {listing}\n"
        "restore the old values; or resume anyway with --allow-drift (in Python run(allow_drift=True)); or "
        "start over with --fresh (run(fresh=True))"
    )


@dataclass
class LoopCheckpoints:
    """Saving and resuming of a trainer together with its loop's memory. Only rank 0 reads and writes."""

    trainer: Trainer
    store: CheckpointStore | None  # None = nothing is saved
    memory: LoopMemory
    metrics: LoopMetrics  # records how long saving took
    fingerprint: dict[str, Any]
    process_group: ProcessGroup
    clock: Callable[[], float]
    # Of the newest checkpoint: (iteration, evaluated_iteration), time by `clock`, seconds that it took.
    saved_position: tuple[int, int] | None = None
    saved_at: float = 0.0
    save_seconds: float = 0.0

    def save_when_due(self, every: int) -> None:
        """Save after each `every` iterations, and sooner if iterations are long; 0 = never."""
        if not every or (self.store is None and self.process_group.size == 1):
            return
        # A stop may abandon an iteration, so long iterations are saved early, at a small cost of their time.
        limit = max(UNSAVED_SECONDS_LIMIT, UNSAVED_TO_SAVE_RATIO * self.save_seconds)
        is_late = self.clock() - self.saved_at > limit
        is_due = self.memory.state.iteration % every == 0
        if is_due or self.process_group.run_on_rank_zero(lambda: is_late):
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Save the current state, unless it is saved already or there is no store."""
        position = (self.memory.state.iteration, self.memory.state.evaluated_iteration)
        if self.store is None or self.saved_position == position:
            return
        start_time = self.clock()
        state = {
            "model": collect_trainable_weights(self.trainer.model),
            "best_model": self.memory.best_weights,
            "optimizer_step": self.trainer.optimizer_step.state_dict(),
            "trainer": self.trainer.state_dict(),
            "loop": asdict(self.memory.state),
            "history": self.memory.history.state_dict(),
            "fingerprint": self.fingerprint,
            "rng": collect_rng_state(),
        }
        if self.process_group.size > 1:
            state = self.trainer.optimizer_step.sharded.gather_state(state)
            state["workers"] = {
                "size": self.process_group.size,
                "rng": self.process_group.all_gather(state["rng"]),
            }
        if self.process_group.is_rank_zero:
            sync_tracker(self.metrics.tracker)
            self.store.save_version(state)
            if self.saved_position is None:
                self._report_size(self.store)
        self.saved_position = position
        self.saved_at = self.metrics.add_overhead("checkpoint", start_time)
        self.save_seconds = self.saved_at - start_time
        inject_fault("loop.saved")

    def _report_size(self, store: CheckpointStore) -> None:
        """Log what checkpoints take on the disk, if that is much."""
        size = store.measure_newest()
        if size >= REPORTED_CHECKPOINT_BYTES:
            logger.info(
                "a checkpoint takes %.1f GB, and the newest %d stay in %s: %.1f GB in all. keep_checkpoints: 1 keeps "
                "the newest alone; checkpoint_every: 0 saves only when the run is stopped",
                size / 1e9,
                store.keep,
                store.folder,
                size * store.keep / 1e9,
            )

    def resume_latest(self, allow_drift: bool | Collection[str]) -> None:
        """Resume from the newest checkpoint, if there is one. Raises: ResumeRefused; CheckpointError."""
        if self.store is None:
            return
        state = self.store.load_latest() if self.process_group.is_rank_zero else None
        state = self.trainer.optimizer_step.sharded.scatter_state(state, self.trainer.model)
        if state is None:
            return
        saved_by = state.get("workers", {"size": 1, "rng": [state["rng"]]})
        same_size = saved_by["size"] == self.process_group.size
        # The number of threads affects the last bits, as does the number of processes, which may change.
        ignored_keys = () if same_size else ("runtime.threads",)
        changed = check_fingerprint(
            state["fingerprint"],
            self.fingerprint,
            allow_drift=allow_drift,
            ignored_keys=ignored_keys,
        )
        if changed and self.process_group.is_rank_zero:
            self.metrics.tracker.set_tag("drift.fingerprint", "; ".join(changed)[:4000])
        try:
            self._load_state(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if not changed or isinstance(error, PosttrainError):
                raise
            raise CheckpointError(
                f"the checkpoint cannot be resumed under the changed settings ({type(error).__name__}: {error}); "
                "restore the old ones, or start over"
            ) from error
        self.memory.is_consistent = True
        self.saved_position = (self.memory.state.iteration, self.memory.state.evaluated_iteration)
        # Last, because building or loading anything may have drawn from the generators.
        if same_size:
            restore_rng_state(saved_by["rng"][self.process_group.rank])
        else:
            logger.warning(
                "resumed with %d processes from a checkpoint of %d: results are equal up to rounding, not bit for bit",
                self.process_group.size,
                saved_by["size"],
            )
            if self.process_group.is_rank_zero:
                restore_rng_state(state["rng"])
        inject_fault("loop.resumed")
        logger.info(
            "resumed after iteration %d, step %d",
            self.memory.state.iteration,
            self.trainer.optimizer_step.num_steps,
        )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Load everything in a checkpoint except the random generators."""
        load_trainable_weights(self.trainer.model, state["model"])
        self.memory.best_weights = state["best_model"]
        self.trainer.optimizer_step.load_state_dict(state["optimizer_step"])
        self.trainer.load_state_dict(state["trainer"])
        expected = {field.name for field in fields(LoopProgress)} - _LATER_FIELDS
        missing = sorted(expected - state["loop"].keys())
        if missing:
            raise CheckpointError(f"the checkpoint's loop lacks {', '.join(missing)}")
        self.memory.state = LoopProgress(**state["loop"])
        self.memory.history.load_state_dict(state["history"])


class EpochModelWriter:
    """Writer of the model at the end of each epoch; call it after each iteration, in every process."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        batches_per_epoch: int,
        optimizer_step: OptimizerStep,
        save: Callable[[Path], None],
    ) -> None:
        """Store the settings and clear what a killed run left in the folder.

        Args:
            keep: number of newest epochs whose models are kept.
            batches_per_epoch: iterations of an epoch.
            save: writes the current weights to the folder it is called with, replacing an earlier model; called in
                every process. With `ema_decay` the weights are the averaged ones, as in evaluations.
        """
        self.folder, self.keep, self.batches_per_epoch = folder, keep, batches_per_epoch
        self._optimizer_step, self._save = optimizer_step, save
        if optimizer_step.process_group.is_rank_zero:
            clear_leftovers(folder)

    def __call__(self, iteration: int) -> None:
        """Write the model if an epoch ends with this iteration, and remove models that are too old."""
        if iteration % self.batches_per_epoch:
            return
        epoch = iteration // self.batches_per_epoch
        with self._optimizer_step.ema.use_averages():
            self._save(self.folder / str(epoch))
        inject_fault("epoch.kept")
        if not self._optimizer_step.process_group.is_rank_zero:
            return
        for path in self.folder.iterdir():
            if path.name.isdecimal() and int(path.name) <= epoch - self.keep:
                remove_folder(path)
        path = self.folder / str(epoch)
        logger.info("saved the model of epoch %d (iteration %d) to %s", epoch, iteration, path)
