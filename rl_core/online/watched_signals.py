"""Signals of the traffic for the alarms: KL to the champion, reward components against success.

B rows of a micro-batch, S whole sequence, R rollouts of a request, C reward components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rl_core.errors import NonFiniteTensor
from rl_core.losses.kl import kl_k3
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import check_contexts, completion_logprobs
from rl_core.models.trainable_weights import swapped_weights
from rl_core.online.experience import Experience
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.weight_snapshots import CHAMPION, WeightSnapshots
from rl_core.rollouts.batching import make_batches, train_row
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["champion_kl", "components_against_success"]

TASK = "task"  # the component that is success itself


@torch.no_grad()
def champion_kl(
    model: PreTrainedModel,
    optimizer_step: OptimizerStep,
    snapshots: WeightSnapshots,
    experiences: Sequence[Experience],
    *,
    pad_id: int,
) -> float | None:
    """KL(policy that answered || champion), nats per sampled token: the mean of k3 at the tokens of the answers.

    The answers are samples of the first, whose log-probabilities were recorded, so one pass of the champion tells it.
    Answers of the champion itself count with 0, and take no pass.
    Returns: None without an answer, where the champion's snapshot is gone, or where it gives no finite number.
    Source: Schulman 2020, "Approximating KL divergence" (k3).
    """
    counted = [rollout for one in experiences for rollout in one.rollouts]
    tokens = sum(sum(rollout.loss_mask) for rollout in counted)
    rows = [train_row(r) for one in experiences if one.policy_version != CHAMPION for r in one.rollouts]
    if not rows or not tokens:
        return 0.0 if tokens else None
    weights = snapshots.find_weights(CHAMPION)
    if weights is None:
        return None
    if any(row.context_starts for row in rows):
        check_contexts(model)
    device = next(model.parameters()).device
    batches = make_batches(rows, optimizer_step.settings.micro_batch_tokens, pad_id)

    def of_batch(batch: TrainBatch) -> float:
        batch = batch.to(device)
        mask_BS = batch.loss_mask_BS
        assert batch.sampler_logprobs_BS is not None
        champion_BS = completion_logprobs(model, batch)[0]
        sampler_BS = batch.sampler_logprobs_BS.to(champion_BS)
        return float(kl_k3(sampler_BS[mask_BS], champion_BS[mask_BS]).sum())

    with swapped_weights(model, weights), evaluating(model), optimizer_step.autocast():
        try:
            found = math.fsum(MemoryFit("KL to the champion").compute(batches, of_batch)) / tokens
        except NonFiniteTensor:
            return None
    return found if math.isfinite(found) else None


def components_against_success(table: RewardTable) -> float | None:
    """Share of the pairs of a right and a wrong answer to one request of which the components rank the wrong higher.

    The components are all but the task's own, with their weights; a pair that they rank equal counts half. 0: they
    tell right from wrong; 0.5: nothing; 1: they reward what is wrong.
    Returns: None without such a pair, or without such a component.
    """
    others = [index for index, name in enumerate(table.components) if name != TASK]
    if not others:
        return None
    sums_R = table.weighted_RC[:, others].sum(1)
    right = sums_R[table.is_known_R & table.success_R]
    wrong = sums_R[table.is_known_R & ~table.success_R]
    if not len(right) or not len(wrong):
        return None
    higher = (wrong[None, :] > right[:, None]).sum() + 0.5 * (wrong[None, :] == right[:, None]).sum()
    return float(higher / (len(right) * len(wrong)))
