"""Fingerprint of a run: settings, data and runtime that have to be the same when it resumes.

Checkpoints of the training loop: everything that the next iteration depends on, saved when due and resumed.

Models kept at the end of each epoch: FOLDER/1, FOLDER/2, ..., the newest ones alone.

They are no checkpoints: nothing is resumed from them. A model is written before the checkpoint of its iteration, so a
run that was killed in between writes the same bytes again.
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
from rl_core.storage.checkpoint import CheckpointStore, collect_rng_state, restore_rng_state
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import clear_leftovers, remove_folder
from rl_core.tracking import sync_tracker
from rl_core.training.callbacks import Trainer
from rl_core.training.loop_state import LoopMemory, LoopMetrics, LoopProgress
from rl_core.training.optimizer_step import OptimizerStep

logger = logging.getLogger(__name__)


def collect_runtime_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Properties of the runtime that change float sums: threads, torch version, device."""
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": name}


def _flatten_tree(tree: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> canonical JSON of each leaf, so that tuples equal lists after a round trip."""
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
    """Compare key by key; returns what differs, a line each. Raises ResumeRefused naming all of it, unless allowed.

    Args:
        allow_drift: True = everything may differ; or the dotted keys that may. What differs is logged as a warning.
        besides: dotted keys that may differ without a word.
    """
    old, new = _flatten_tree(saved), _flatten_tree(present)
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in ignored_keys
    ]
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
        "put the old values back; or resume all the same with --allow-drift (in Python run(allow_drift=True)); or "
        "begin anew with --fresh (run(fresh=True))"
    )


UNSAVED_SECONDS_LIMIT = 60.0  # of training that a stop may cost, and
UNSAVED_TO_SAVE_RATIO = 50.0  # as many times the time that saving takes, whichever is longer


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
    saved_position: tuple[int, int] | None = (
        None  # (iteration, evaluated_iteration) of the newest checkpoint
    )
    saved_at: float = 0.0  # by `clock`
    save_seconds: float = 0.0  # of that one

    def save_when_due(self, every: int) -> None:
        """Save after each `every` iterations, and sooner where they are long; 0 = never."""
        if not every or (self.store is None and self.process_group.size == 1):
            return
        # A stop may give up the iteration, so long iterations are saved before their turn: for little of their time.
        unsaved = self.clock() - self.saved_at
        is_late = unsaved > max(UNSAVED_SECONDS_LIMIT, UNSAVED_TO_SAVE_RATIO * self.save_seconds)
        if self.memory.state.iteration % every == 0 or self.process_group.run_on_rank_zero(
            lambda: is_late
        ):
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Save the present state, unless that was done or there is no store."""
        place = (self.memory.state.iteration, self.memory.state.evaluated_iteration)
        if self.store is None or self.saved_position == place:
            return
        started = self.clock()
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
        self.saved_position = place
        self.saved_at = self.metrics.add_overhead("checkpoint", started)
        self.save_seconds = self.saved_at - started
        inject_fault("loop.saved")

    def resume_latest(self, allow_drift: bool | Collection[str]) -> None:
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
        changed = check_fingerprint(
            state["fingerprint"], self.fingerprint, allow_drift=allow_drift, ignored_keys=besides
        )
        if changed and self.process_group.is_rank_zero:
            self.metrics.tracker.set_tag("drift.fingerprint", "; ".join(changed)[:4000])
        try:
            self._load_state(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if not changed or isinstance(error, PosttrainError):
                raise
            raise CheckpointError(
                f"the checkpoint cannot be resumed under the changed settings ({type(error).__name__}: {error}); put "
                "the old ones back, or begin anew"
            ) from error
        self.memory.is_consistent = True
        self.saved_position = (self.memory.state.iteration, self.memory.state.evaluated_iteration)
        # last: building or loading anything may have drawn from the generators
        if same_size:
            restore_rng_state(saved_by["rng"][self.process_group.rank])
        else:
            logger.warning(
                "resumed in %d processes what was saved by %d: the same numbers to rounding, not to the last bit",
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
        """Everything of a checkpoint but the random generators."""
        load_trainable_weights(self.trainer.model, state["model"])
        self.memory.best_weights = state["best_model"]
        self.trainer.optimizer_step.load_state_dict(state["optimizer_step"])
        self.trainer.load_state_dict(state["trainer"])
        if missing := sorted({field.name for field in fields(LoopProgress)} - state["loop"].keys()):
            raise CheckpointError(f"the checkpoint's loop lacks {', '.join(missing)}")
        self.memory.state = LoopProgress(**state["loop"])
        self.memory.history.load_state_dict(state["history"])


EPOCHS_FOLDER = "epochs"  # the folder's name


class EpochModelWriter:
    """Writes the model at the end of each epoch; to be called after each iteration, in every process."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        batches_per_epoch: int,
        optimizer_step: OptimizerStep,
        save: Callable[[Path], None],
    ) -> None:
        """Open the folder.

        Args:
            keep: newest epochs whose models stay.
            batches_per_epoch: iterations of an epoch.
            save: publishes the present weights in the folder it is given, in place of an earlier one; called in every
                process. With `ema_decay` the weights are the averaged ones, as in evaluations.
        """
        self.folder, self.keep, self.batches_per_epoch = folder, keep, batches_per_epoch
        self._optimizer_step, self._save = optimizer_step, save
        if optimizer_step.process_group.is_rank_zero:
            clear_leftovers(folder)

    def __call__(self, iteration: int) -> None:
        """Write the model if an epoch ends with this iteration, and remove one that is too old."""
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
        logger.info(
            "kept the model of epoch %d (iteration %d) in %s",
            epoch,
            iteration,
            self.folder / str(epoch),
        )
