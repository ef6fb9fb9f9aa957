"""The distribution that an experience was sampled from: exact from a snapshot, or what was recorded of it.

N loss tokens of a rollout, K recorded tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rl_core.losses.kl import exact_forward_kl
from rl_core.losses.recorded_kl import recorded_forward_kl
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import vocabulary_logprobs
from rl_core.models.trainable_weights import swapped_weights
from rl_core.online.experience import RecordedTop
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.rollouts.batching import TrainRow, make_batches
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["OldDistribution", "forward_kl", "old_distributions"]


@dataclass(frozen=True, slots=True)
class OldDistribution:
    """One rollout's old distribution at its loss tokens; one of the two forms."""

    logprobs_NV: torch.Tensor | None = None  # exact
    top_ids_NK: torch.Tensor | None = None  # recorded
    top_logprobs_NK: torch.Tensor | None = None
    rest_N: torch.Tensor | None = None

    @property
    def is_exact(self) -> bool:
        """False = a divergence from it is a lower bound."""
        return self.logprobs_NV is not None


def forward_kl(old: OldDistribution, new_logprobs_NV: torch.Tensor) -> torch.Tensor:
    """KL(old || new) [N] at each loss token, with gradient to the new policy; a lower bound unless `old.is_exact`."""
    if old.logprobs_NV is not None:
        return exact_forward_kl(old.logprobs_NV.to(new_logprobs_NV), new_logprobs_NV)
    assert old.top_ids_NK is not None and old.top_logprobs_NK is not None and old.rest_N is not None
    device = new_logprobs_NV.device
    new_NK = new_logprobs_NV.gather(1, old.top_ids_NK.to(device))
    return recorded_forward_kl(old.top_logprobs_NK.to(device), old.rest_N.to(device), new_NK)


def recorded_distribution(top: RecordedTop, loss_mask: Sequence[bool]) -> OldDistribution:
    """The recorded tokens at the loss tokens."""
    mask_T = np.asarray(loss_mask, dtype=bool)
    return OldDistribution(
        top_ids_NK=torch.from_numpy(top.ids_TK[mask_T].astype(np.int64)),
        top_logprobs_NK=torch.from_numpy(top.logprobs_TK[mask_T].astype(np.float32)),
        rest_N=torch.from_numpy(top.rest_T[mask_T].astype(np.float32)),
    )


def old_distributions(
    model: PreTrainedModel,
    optimizer_step: OptimizerStep,
    snapshots: WeightSnapshots,
    rows: Sequence[TrainRow],
    versions: Sequence[int],
    recorded: Sequence[RecordedTop | None],
    *,
    pad_id: int,
) -> list[OldDistribution | None]:
    """The old distribution of each row: of the snapshot of its version, else as recorded, else None.

    Args:
        rows, versions, recorded: of each rollout.
    """
    found: list[OldDistribution | None] = [None] * len(rows)
    for version in sorted(set(versions)):
        members = [index for index, other in enumerate(versions) if other == version]
        weights = snapshots.find_weights(version)
        if weights is None:
            for index in members:
                top = recorded[index]
                found[index] = recorded_distribution(top, rows[index].loss_mask) if top is not None else None
            continue
        with swapped_weights(model, weights):
            _fill_exact(model, optimizer_step, rows, members, pad_id, found)
    return found


@torch.no_grad()
def _fill_exact(
    model: PreTrainedModel,
    optimizer_step: OptimizerStep,
    rows: Sequence[TrainRow],
    members: Sequence[int],
    pad_id: int,
    found: list[OldDistribution | None],
) -> None:
    device = next(model.parameters()).device
    batches = make_batches([rows[index] for index in members], optimizer_step.settings.micro_batch_tokens, pad_id)

    def fill(batch: TrainBatch) -> None:
        logprobs_NV = vocabulary_logprobs(model, batch.to(device))
        counts = batch.loss_mask_BS.sum(1).tolist()
        for place, part_NV in zip(batch.rows, logprobs_NV.split(counts), strict=True):
            found[members[place]] = OldDistribution(logprobs_NV=part_NV.clone())

    with evaluating(model), optimizer_step.autocast():
        MemoryFit("old distributions").compute(batches, fill)
