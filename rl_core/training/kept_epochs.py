"""Models kept at the end of each epoch: FOLDER/1, FOLDER/2, ..., the newest ones alone.

They are no checkpoints: nothing is resumed from them. A model is written before the checkpoint of its iteration, so a
run that was killed in between writes the same bytes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, remove_folder
from rl_core.training.optimizer_step import OptimizerStep

__all__ = ["EPOCHS", "KeptEpochs"]

logger = logging.getLogger(__name__)

EPOCHS = "epochs"  # the folder's name


class KeptEpochs:
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
        with self._optimizer_step.ema.swapped_in():
            self._save(self.folder / str(epoch))
        fault("epoch.kept")
        if not self._optimizer_step.process_group.is_rank_zero:
            return
        for path in self.folder.iterdir():
            if path.name.isdecimal() and int(path.name) <= epoch - self.keep:
                remove_folder(path)
        logger.info("kept the model of epoch %d (iteration %d) in %s", epoch, iteration, self.folder / str(epoch))
