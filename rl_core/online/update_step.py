"""One guarded update: policy loss and KL to the old policy, with a hard KL limit, clipping and an average of weights.

B rows of a micro-batch, S whole sequence, N loss tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import NonFiniteTensor
from rl_core.losses.kl import banded_kl_coef
from rl_core.losses.policy import clipped_policy_loss
from rl_core.memory import MemoryFit
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import check_contexts, vocabulary_logprobs
from rl_core.models.trainable_weights import load_trainable_weights, trainable_weights
from rl_core.online.old_policy import OldDistribution, forward_kl, old_distributions
from rl_core.online.update_task import UpdateTask
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.rollouts.batching import TrainRow, make_batches, train_row
from rl_core.settings import OnlineUpdateSettings
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GuardedLearner", "UpdateReport"]

_ENDLESS = 2**31  # optimizer steps of a service without an end; its schedule is constant after the warm-up


@dataclass(slots=True)
class UpdateReport:
    """Outcome of one update."""

    number: int
    refused: str = ""  # empty, kl, nonfinite or paused; "" = taken
    learning_rate: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)  # rl, kl (with its coefficient), total
    gradients: dict[str, float] = field(default_factory=dict)  # norm, clipped
    kl_control: dict[str, float] = field(default_factory=dict)  # coefficient, mean_kl, target_kl, before
    is_lower_bound: bool = False  # True = the KL is of recorded tokens, in part at least
    num_tokens: int = 0  # loss tokens
    num_rollouts: int = 0
    without_old: int = 0  # rollouts left out, because nothing is known of their old distribution
    error: float = 0.0
    requests: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as written to update_contribution.jsonl; what is not finite is a text there."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        for name in ("losses", "gradients", "kl_control"):
            plain[name] = {key: value if math.isfinite(value) else str(value) for key, value in plain[name].items()}
        return plain


@dataclass(slots=True)
class _UpdateRows:
    """Rollouts of an update as rows."""

    rows: list[TrainRow]
    advantages: list[float]  # with the importance weight of the draw
    old: list[OldDistribution]
    without_old: int

    @property
    def num_tokens(self) -> int:
        return sum(sum(row.loss_mask) for row in self.rows)


class GuardedLearner:
    """The policy, its optimizer and its three guardrails.

    L = clipped policy loss against the sampler's log-probs + coefficient KL(old || policy), both means over the loss
    tokens. A step whose mean KL(old || policy) lies beyond the limit, or that is not finite, leaves weights, moments
    and average as they were. The coefficient is steered by the KL measured after the step, refused or not, unless
    the update has no error: then nothing drives the KL.
    """

    def __init__(
        self, model: PreTrainedModel, settings: OnlineUpdateSettings, snapshots: WeightSnapshots, *, pad_id: int
    ) -> None:
        self.model = model
        self.settings = settings
        self.snapshots = snapshots
        self.pad_id = pad_id
        self.kl_coef = settings.kl_coef
        self.taken = 0
        self.refused = {"empty": 0, "kl": 0, "nonfinite": 0, "paused": 0}
        self.refused_in_row = 0
        self.optimizer_step = self._optimizer_step()
        self.device = next(model.parameters()).device

    def _optimizer_step(self) -> OptimizerStep:
        return OptimizerStep(self.model, self.settings, _ENDLESS, max_nonfinite=_ENDLESS)

    def update(self, task: UpdateTask) -> UpdateReport:
        """Take the update, or refuse it."""
        report = UpdateReport(
            task.number, learning_rate=task.learning_rate, error=task.error,
            requests=[item.kept.experience.request_id for item in task.items],
        )  # fmt: skip
        found = self._rows(task)
        report.without_old, report.num_rollouts, report.num_tokens = (
            found.without_old,
            len(found.rows),
            found.num_tokens,
        )
        report.is_lower_bound = any(not old.is_exact for old in found.old)
        if not found.rows:
            return self.refuse(report, "empty")
        batches = make_batches(found.rows, self.settings.micro_batch_tokens, self.pad_id)
        weights = {name: tensor.clone() for name, tensor in trainable_weights(self.model).items()}
        state = copy.deepcopy(self.optimizer_step.state_dict())
        skipped = self.optimizer_step.skipped_steps
        self.optimizer_step.learning_rate_scale = task.learning_rate / self.settings.learning_rate
        metrics = self._apply(batches, found, task.number)
        self._describe(report, metrics)
        if self.optimizer_step.skipped_steps > skipped:
            return self.refuse(report, "nonfinite")
        kl = self._mean_kl(batches, found)
        report.kl_control["mean_kl"] = kl
        if math.isfinite(kl) and task.error > 0:
            self.kl_coef = self._next_coef(kl, report.kl_control["before"])
        if not kl <= self.settings.kl_limit:
            # a step may be finite and still leave weights that give no finite number any more
            load_trainable_weights(self.model, weights)
            self.optimizer_step.load_state_dict(state)
            self.optimizer_step.num_steps += 1
            return self.refuse(report, "kl" if math.isfinite(kl) else "nonfinite")
        self.taken += 1
        self.refused_in_row = 0
        return report

    def refuse(self, report: UpdateReport, why: str) -> UpdateReport:
        """Count a refused update."""
        report.refused = why
        self.refused[why] += 1
        if why in ("kl", "nonfinite"):
            self.refused_in_row += 1
        return report

    def served_weights(self) -> dict[str, torch.Tensor]:
        """A copy of what may be served: the average; before the first update the weights themselves."""
        with self.optimizer_step.ema.swapped_in():
            return trainable_weights(self.model, copy=True)

    def restart_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go back to these weights, with a new optimizer, average and coefficient."""
        load_trainable_weights(self.model, weights)
        self.optimizer_step = self._optimizer_step()
        self.kl_coef = self.settings.kl_coef
        self.refused_in_row = 0

    def metrics(self) -> dict[str, float]:
        """Counts of updates and the coefficient."""
        tried = self.taken + self.refused["kl"] + self.refused["nonfinite"]
        return {
            "online/updates_taken": float(self.taken),
            "online/update_success_rate": self.taken / tried if tried else 1.0,
            "online/kl_coef": self.kl_coef,
            **{f"online/refused/{why}": float(count) for why, count in self.refused.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """State besides the model's weights."""
        return {
            "optimizer_step": self.optimizer_step.state_dict(),
            "kl_coef": self.kl_coef,
            "taken": self.taken,
            "refused": dict(self.refused),
            "refused_in_row": self.refused_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the model's weights are loaded before."""
        self.optimizer_step.load_state_dict(state["optimizer_step"])
        self.kl_coef, self.taken = float(state["kl_coef"]), int(state["taken"])
        self.refused = {why: int(count) for why, count in state["refused"].items()}
        self.refused_in_row = int(state["refused_in_row"])

    # Passes over the model

    def _rows(self, task: UpdateTask) -> _UpdateRows:
        rows: list[TrainRow] = []
        advantages: list[float] = []
        versions, recorded = [], []
        for item in task.items:
            experience = item.experience
            for index, rollout in enumerate(experience.rollouts):
                if item.rewards.is_known_R[index]:
                    rows.append(train_row(rollout))
                    advantages.append(item.weight * float(item.advantages_R[index]))
                    versions.append(experience.policy_version)
                    recorded.append(experience.recorded[index])
        if any(row.context_starts for row in rows):
            check_contexts(self.model)
        old = old_distributions(
            self.model, self.optimizer_step, self.snapshots, rows, versions, recorded, pad_id=self.pad_id
        )
        kept = [
            (row, advantage, one) for row, advantage, one in zip(rows, advantages, old, strict=True) if one is not None
        ]
        return _UpdateRows([k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept], len(rows) - len(kept))

    def _apply(self, batches: Sequence[TrainBatch], found: _UpdateRows, number: int) -> dict[str, float]:
        def loss(batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            return self._loss(batch.to(self.device), found)

        if not self.settings.dropout:
            return self.optimizer_step.apply(batches, loss)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # masks follow from the update, so a resumed worker draws the same
            torch.manual_seed(number)
            return self.optimizer_step.apply(batches, loss)

    def _loss(self, batch: TrainBatch, found: _UpdateRows) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss of a micro-batch over the denominator of the whole update."""
        count, mask_BS = float(found.num_tokens), batch.loss_mask_BS
        new_NV = vocabulary_logprobs(self.model, batch)
        targets_N = batch.input_ids_BS[mask_BS]
        logprobs_BS = new_NV.new_zeros(mask_BS.shape).masked_scatter(
            mask_BS, new_NV.gather(1, targets_N[:, None])[:, 0]
        )
        advantages_B = new_NV.new_tensor([found.advantages[row] for row in batch.rows])
        advantages_BS = advantages_B[:, None].expand(mask_BS.shape)
        assert batch.sampler_logprobs_BS is not None
        rl, metrics = clipped_policy_loss(
            logprobs_BS, batch.sampler_logprobs_BS.to(logprobs_BS), advantages_BS, mask_BS,
            num_loss_tokens=count, clip_eps=self.settings.clip_eps,
        )  # fmt: skip
        kl = self._kl_sum(batch, found, new_NV) / count
        parts = {"rl": rl.detach(), "kl": kl.detach(), "clip_fraction": metrics["clip_fraction"]}
        return rl + self.kl_coef * kl, parts

    def _kl_sum(self, batch: TrainBatch, found: _UpdateRows, new_NV: torch.Tensor) -> torch.Tensor:
        """Sum of KL(old || new) over the micro-batch's loss tokens."""
        counts = batch.loss_mask_BS.sum(1).tolist()
        parts = [
            forward_kl(found.old[row], part_NV).sum()
            for row, part_NV in zip(batch.rows, new_NV.split(counts), strict=True)
        ]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def _mean_kl(self, batches: Sequence[TrainBatch], found: _UpdateRows) -> float:
        """Mean KL(old || policy) per loss token, under the weights as they are; NaN where these give none."""

        def of_batch(batch: TrainBatch) -> float:
            batch = batch.to(self.device)
            return float(self._kl_sum(batch, found, vocabulary_logprobs(self.model, batch)))

        with evaluating(self.model), self.optimizer_step.autocast():
            try:
                return math.fsum(MemoryFit("KL after the update").compute(batches, of_batch)) / found.num_tokens
            except NonFiniteTensor:
                return math.nan

    def _describe(self, report: UpdateReport, metrics: Mapping[str, float]) -> None:
        norm = metrics["train/grad_norm"]
        before = metrics.get("kl", math.nan)
        report.losses = {
            "rl": metrics.get("rl", math.nan), "kl": self.kl_coef * before, "total": metrics["train/loss"]
        }  # fmt: skip
        report.gradients = {"norm": norm, "clipped": min(norm, self.settings.max_grad_norm)}
        report.kl_control = {"coefficient": self.kl_coef, "target_kl": self.settings.kl_target, "before": before}

    def _next_coef(self, kl: float, before: float) -> float:
        """The coefficient after a step that moved the KL of its tokens from `before` to `kl`.

        The KL adds up over updates while the coefficient only changes its slope, so steering by its level alone swings
        about the band. It is steered by the level that the KL would have after a few more steps like this one.
        """
        settings = self.settings
        ahead = max(0.0, kl + settings.kl_lookahead * (kl - before))
        return banded_kl_coef(
            self.kl_coef, ahead, target=settings.kl_target, tolerance=settings.kl_tolerance,
            increase_factor=settings.kl_factor, decrease_factor=settings.kl_factor,
            minimum=settings.kl_coef_min, maximum=settings.kl_coef_max,
        )  # fmt: skip
