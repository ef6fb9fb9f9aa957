"""Guarded updates: policy loss and KL to the old policy, with a hard KL limit, gradient clipping and averaged weights.

An update task holds experiences with rewards, advantages, learning rate and the distribution that they were sampled
from: exact if the snapshot exists, otherwise the recorded part of it.

B rows of a micro-batch, S complete sequence, R rollouts of an experience, N loss tokens of a rollout or micro-batch,
K recorded tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.errors import DataError, NonFiniteTensor
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.losses.advantages import GroupMethod, group_advantages
from rl_core.losses.kl import banded_kl_coef, exact_forward_kl, truncated_forward_kl
from rl_core.losses.policy import clipped_policy_loss
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.forward_modes import has_dropout, seed_dropout_masks, use_training_mode
from rl_core.models.logprobs import check_contexts, compute_vocabulary_logprobs
from rl_core.models.trainable_weights import (
    collect_trainable_weights,
    load_trainable_weights,
    swap_weights,
)
from rl_core.online.experience import Experience, RecordedTopK
from rl_core.online.experience_buffer import BufferedExperience
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.labels import Label
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import TrainRow, build_batches, build_train_row
from rl_core.settings import OnlineUpdateSettings
from rl_core.training.guarded_step import run_guarded_step
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Optimizer steps of a service that never ends; its schedule is constant after the warm-up.
_UNLIMITED_STEPS = 2**31


def compute_adaptive_learning_rate(
    error: float, *, base: float, reference: float, low: float, high: float
) -> float:
    """Return base error / reference, bounded to [low, high].

    Args:
        error: root mean square of reward minus baseline over the update's rollouts; at least 0.
        base: learning rate at `reference`.
        low, high: bounds.
    Raises: DataError for an invalid error, or bounds out of order.
    """
    if not 0 <= error < math.inf or not 0 < low <= high or reference <= 0 or base <= 0:
        raise DataError(
            f"learning rate: error {error}, reference {reference}, base {base}, bounds {low} to {high}"
        )
    return min(max(base * error / reference, low), high)


def compute_request_advantages(
    rewards_R: NDArray[np.float64],
    is_known_R: NDArray[np.bool_],
    baseline: float,
    method: GroupMethod,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return advantages and errors (reward minus baseline) of one request's rollouts; 0 for unknown rewards.

    Two or more known rollouts are compared with each other (`group_advantages`), a single one with the running mean of
    its environment and level.
    """
    advantages_R, errors_R = np.zeros(len(rewards_R)), np.zeros(len(rewards_R))
    known = np.flatnonzero(is_known_R)
    if len(known) > 1:
        values = rewards_R[known]
        advantages = group_advantages(torch.from_numpy(values)[None], method=method)[0]
        advantages_R[known] = advantages.numpy()
        errors_R[known] = values - values.mean()
    elif len(known) == 1:
        advantages_R[known] = errors_R[known] = rewards_R[known] - baseline
    return advantages_R, errors_R


class RunningRewardBaseline:
    """Running mean of rewards by environment and level, with bias correction: m_t / (1 - decay^t)."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._sums: dict[str, tuple[float, int]] = {}

    def read_mean(self, environment_level: tuple[str, str]) -> float:
        """Return the mean; 0 before the first reward."""
        total, count = self._sums.get("/".join(environment_level), (0.0, 0))
        return total / (1 - self.decay**count) if count else 0.0

    def add_reward(self, environment_level: tuple[str, str], reward: float) -> None:
        """Add one reward."""
        key = "/".join(environment_level)
        total, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = (self.decay * total + (1 - self.decay) * reward, count + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts by environment and level."""
        return {key: [total, count] for key, (total, count) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`."""
        self._sums = {key: (float(total), int(count)) for key, (total, count) in state.items()}


@dataclass(frozen=True, slots=True)
class ScoredExperience:
    """Experience of an update with its rewards."""

    buffered: BufferedExperience
    experience: Experience  # to learn from: the recorded one, or one with fresh rollouts
    label: Label  # used in this update; it may be replaced later
    weight: float  # importance weight of its draw
    rewards: RewardTable
    advantages_R: NDArray[np.float64]
    errors_R: NDArray[np.float64]

    @property
    def error(self) -> float:
        """Root mean square error of its known rollouts; its next priority."""
        known = self.errors_R[self.rewards.is_known_R]
        return float(np.sqrt(np.square(known).mean())) if len(known) else 0.0


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """All inputs of one update."""

    number: int  # of the update, from 1
    items: tuple[ScoredExperience, ...]
    learning_rate: float
    kl_coef: float

    @property
    def error(self) -> float:
        """Root mean square error over all known rollouts."""
        return compute_rms_error(self.items)


def compute_rms_error(items: Sequence[ScoredExperience]) -> float:
    """Return the root mean square of reward minus baseline over all known rollouts; 0 without one."""
    errors = [item.errors_R[item.rewards.is_known_R] for item in items]
    flat = np.concatenate(errors) if errors else np.zeros(0)
    return float(np.sqrt(np.square(flat).mean())) if len(flat) else 0.0


@dataclass(frozen=True, slots=True)
class OldPolicyDistribution:
    """Old distribution at one rollout's loss tokens, in one of two forms."""

    logprobs_NV: torch.Tensor | None = None  # exact
    top_ids_NK: torch.Tensor | None = None  # recorded
    top_logprobs_NK: torch.Tensor | None = None
    rest_N: torch.Tensor | None = None

    @property
    def is_exact(self) -> bool:
        """False if a divergence from it is only a lower bound."""
        return self.logprobs_NV is not None


def compute_forward_kl(old: OldPolicyDistribution, new_logprobs_NV: torch.Tensor) -> torch.Tensor:
    """Compute KL(old || new) [N] at each loss token with gradient to the new policy.

    It is a lower bound unless `old.is_exact`.
    """
    if old.logprobs_NV is not None:
        return exact_forward_kl(old.logprobs_NV.to(new_logprobs_NV), new_logprobs_NV)
    assert old.top_ids_NK is not None and old.top_logprobs_NK is not None and old.rest_N is not None
    device = new_logprobs_NV.device
    new_NK = new_logprobs_NV.gather(1, old.top_ids_NK.to(device))
    return truncated_forward_kl(old.top_logprobs_NK.to(device), old.rest_N.to(device), new_NK)


def build_recorded_distribution(
    top: RecordedTopK, loss_mask: Sequence[bool]
) -> OldPolicyDistribution:
    """Build the distribution at the loss tokens from the recorded tokens."""
    mask_T = np.asarray(loss_mask, dtype=bool)
    return OldPolicyDistribution(
        top_ids_NK=torch.from_numpy(top.ids_TK[mask_T].astype(np.int64)),
        top_logprobs_NK=torch.from_numpy(top.logprobs_TK[mask_T].astype(np.float32)),
        rest_N=torch.from_numpy(top.rest_T[mask_T].astype(np.float32)),
    )


def compute_old_distributions(
    model: PreTrainedModel,
    optimizer_step: OptimizerStep,
    snapshots: WeightSnapshots,
    rows: Sequence[TrainRow],
    versions: Sequence[int],
    recorded: Sequence[RecordedTopK | None],
    *,
    pad_id: int,
    mask_seeds: Sequence[int] | None = None,
) -> list[OldPolicyDistribution | None]:
    """Return the old distribution of each row: from its version's snapshot, else as recorded, else None.

    Args:
        rows, versions, recorded: one per rollout.
        mask_seeds: seeds of the rows' dropout masks, for the distributions from snapshots; None = no dropout.
    """
    distributions: list[OldPolicyDistribution | None] = [None] * len(rows)
    for version in sorted(set(versions)):
        members = [index for index, other in enumerate(versions) if other == version]
        weights = snapshots.load_weights_if_valid(version)
        if weights is None:
            for index in members:
                top = recorded[index]
                if top is not None:
                    distributions[index] = build_recorded_distribution(top, rows[index].loss_mask)
            continue
        with swap_weights(model, weights):
            _fill_exact_distributions(
                model, optimizer_step, rows, members, pad_id, mask_seeds, distributions
            )
    return distributions


@torch.no_grad()
def _fill_exact_distributions(
    model: PreTrainedModel,
    optimizer_step: OptimizerStep,
    rows: Sequence[TrainRow],
    members: Sequence[int],
    pad_id: int,
    mask_seeds: Sequence[int] | None,
    distributions: list[OldPolicyDistribution | None],
) -> None:
    device = next(model.parameters()).device
    member_rows = [rows[index] for index in members]
    max_tokens = optimizer_step.settings.micro_batch_tokens if mask_seeds is None else 1
    batches = build_batches(member_rows, max_tokens, pad_id)

    def fill(batch: TrainBatch) -> None:
        seed = None if mask_seeds is None else mask_seeds[members[batch.rows[0]]]
        with _use_dropout_masks(model, seed):
            logprobs_NV = compute_vocabulary_logprobs(model, batch.to(device))
        counts = batch.loss_mask_BS.sum(1).tolist()
        for row, row_NV in zip(batch.rows, logprobs_NV.split(counts), strict=True):
            distributions[members[row]] = OldPolicyDistribution(logprobs_NV=row_NV.clone())

    with optimizer_step.enable_autocast():
        MemoryFit("old distributions").compute_batches(batches, fill)


@contextmanager
def _use_dropout_masks(model: PreTrainedModel, seed: int | None) -> Iterator[None]:
    """Run passes over a row in training mode under the masks of `seed`; None = in eval mode, without dropout."""
    if seed is None:
        with use_eval_mode(model):
            yield
        return
    device = next(model.parameters()).device
    with use_training_mode(model, dropout=True), seed_dropout_masks(device, seed):
        yield


@dataclass(slots=True)
class UpdateReport:
    """Outcome of one update."""

    number: int
    refused: str = ""  # empty, null, kl, nonfinite or paused; "" = applied
    learning_rate: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)  # rl, kl (with its coefficient), total
    gradients: dict[str, float] = field(default_factory=dict)  # norm, clipped
    # coefficient, mean_kl, before; target_kl where the coefficient is adaptive
    kl_control: dict[str, float] = field(default_factory=dict)
    is_lower_bound: bool = False  # the KL is partly that of recorded tokens
    num_tokens: int = 0  # loss tokens
    num_rollouts: int = 0
    without_old: int = 0  # rollouts left out, because their old distribution is unknown
    error: float = 0.0
    requests: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain values as written to update_contribution.jsonl; non-finite values become strings."""
        row = {name: getattr(self, name) for name in self.__slots__}
        for name in ("losses", "gradients", "kl_control"):
            row[name] = {
                key: value if math.isfinite(value) else str(value)
                for key, value in row[name].items()
            }
        return row


@dataclass(slots=True)
class _UpdateRows:
    """Rollouts of an update as training rows."""

    rows: list[TrainRow]
    advantages: list[float]  # times the importance weight of the draw
    old_distributions: list[OldPolicyDistribution]
    # With dropout, the seed of each row's masks; None where the old distribution was recorded without dropout.
    mask_seeds: list[int | None] | None
    without_old: int

    @property
    def num_tokens(self) -> int:
        return sum(sum(row.loss_mask) for row in self.rows)


class GuardedLearner:
    """Policy, optimizer and three guardrails.

    L = clipped policy loss against the sampler's log-probs + coefficient KL(old || policy), both means over the loss
    tokens. A step whose mean KL(old || policy) exceeds the limit, or that is not finite, leaves weights, moments and
    average unchanged. The coefficient is adjusted by the KL measured after the step, refused or not. An update
    without an advantage other than 0 is null: it takes no step, as nothing but the KL would drive it.

    With dropout, a row has the same masks in the old policy's pass, in the step and in the measurement after it, so
    that ratio and KL reflect the weights only; the ratio is then to the old policy under these masks. A row whose old
    distribution was only recorded, by the sampler and so without dropout, is trained without it. Masks depend on the
    update and the row alone, so a resumed worker draws the same; each row is its own micro-batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: OnlineUpdateSettings,
        snapshots: WeightSnapshots,
        *,
        pad_id: int,
    ) -> None:
        self.model = model
        self.settings = settings
        self.snapshots = snapshots
        self.pad_id = pad_id
        self.kl_coef = settings.kl_coef
        self.num_taken = 0
        self.refused = dict.fromkeys(("empty", "null", "kl", "nonfinite", "paused"), 0)
        self.refused_in_row = 0
        self.optimizer_step = self._build_optimizer_step()
        self.device = next(model.parameters()).device

    def _build_optimizer_step(self) -> OptimizerStep:
        return OptimizerStep(
            self.model, self.settings, _UNLIMITED_STEPS, max_nonfinite=_UNLIMITED_STEPS
        )

    def apply_update(self, task: UpdateTask) -> UpdateReport:
        """Apply the update, or refuse it."""
        report = UpdateReport(
            task.number,
            learning_rate=task.learning_rate,
            error=task.error,
            requests=[item.buffered.experience.request_id for item in task.items],
        )
        update = self._build_rows(task)
        report.without_old = update.without_old
        report.num_rollouts, report.num_tokens = len(update.rows), update.num_tokens
        report.is_lower_bound = any(not old.is_exact for old in update.old_distributions)
        if not update.rows:
            return self.refuse_update(report, "empty")
        if not any(update.advantages):  # a step would follow only KL and momentum
            return self.refuse_update(report, "null")
        # With dropout each row is its own micro-batch: no second row fits into one token.
        max_tokens = self.settings.micro_batch_tokens if update.mask_seeds is None else 1
        batches = build_batches(update.rows, max_tokens, self.pad_id)
        num_skipped = self.optimizer_step.skipped_steps

        def run_step() -> dict[str, float]:
            scale = task.learning_rate / self.settings.learning_rate
            self.optimizer_step.learning_rate_scale = scale
            return self._apply_batches(batches, update)

        def measure_kls() -> list[float]:
            if self.optimizer_step.skipped_steps > num_skipped:
                return []
            return [self._measure_mean_kl(batches, update)]

        result = run_guarded_step(
            self.optimizer_step, run_step, measure_kls, [self.settings.kl_max]
        )
        self._fill_report(report, result.metrics)
        if not result.kls:
            return self.refuse_update(report, "nonfinite")
        (kl,) = result.kls
        report.kl_control["mean_kl"] = kl
        if math.isfinite(kl) and self.settings.kl_control == "adaptive":
            self.kl_coef = self._compute_next_kl_coef(kl, report.kl_control["before"])
        if result.is_refused:
            # A finite step can still lead to weights whose outputs are not finite.
            return self.refuse_update(report, "kl" if math.isfinite(kl) else "nonfinite")
        self.num_taken += 1
        self.refused_in_row = 0
        return report

    def refuse_update(self, report: UpdateReport, reason: str) -> UpdateReport:
        """Mark an update as refused and count it."""
        report.refused = reason
        self.refused[reason] += 1
        if reason in ("kl", "nonfinite"):
            self.refused_in_row += 1
        return report

    def copy_served_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights to serve: the average, or before the first update the weights themselves."""
        with self.optimizer_step.ema.use_averages():
            return collect_trainable_weights(self.model, copy=True)

    def restart_from_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restart from these weights with a new optimizer, average and coefficient."""
        load_trainable_weights(self.model, weights)
        self.optimizer_step = self._build_optimizer_step()
        self.kl_coef = self.settings.kl_coef
        self.refused_in_row = 0

    def collect_metrics(self) -> dict[str, float]:
        """Return the coefficient and counts of updates."""
        num_attempted = self.num_taken + self.refused["kl"] + self.refused["nonfinite"]
        return {
            "online/updates_taken": float(self.num_taken),
            "online/update_success_rate": self.num_taken / num_attempted if num_attempted else 1.0,
            "online/kl_coef": self.kl_coef,
            **{f"online/refused/{reason}": float(count) for reason, count in self.refused.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the model's weights."""
        return {
            "optimizer_step": self.optimizer_step.state_dict(),
            "kl_coef": self.kl_coef,
            "taken": self.num_taken,
            "refused": dict(self.refused),
            "refused_in_row": self.refused_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`. Load the model's weights first."""
        self.optimizer_step.load_state_dict(state["optimizer_step"])
        self.num_taken = int(state["taken"])
        if self.settings.kl_control == "adaptive":  # else it is the settings'
            self.kl_coef = float(state["kl_coef"])
        counts = {reason: int(count) for reason, count in state["refused"].items()}
        self.refused = {**dict.fromkeys(self.refused, 0), **counts}  # earlier releases: no null
        self.refused_in_row = int(state["refused_in_row"])

    def _build_rows(self, task: UpdateTask) -> _UpdateRows:
        rows: list[TrainRow] = []
        advantages: list[float] = []
        versions, recorded = [], []
        for item in task.items:
            experience = item.experience
            for index, rollout in enumerate(experience.rollouts):
                if item.rewards.is_known_R[index]:
                    rows.append(build_train_row(rollout))
                    advantages.append(item.weight * float(item.advantages_R[index]))
                    versions.append(experience.policy_version)
                    recorded.append(experience.recorded[index])
        if any(row.context_starts for row in rows):
            check_contexts(self.model)
        seeds = None
        if self.settings.dropout and has_dropout(self.model):
            seeds = [compute_sequence_seed("online", task.number, row) for row in range(len(rows))]
        old = compute_old_distributions(
            self.model,
            self.optimizer_step,
            self.snapshots,
            rows,
            versions,
            recorded,
            pad_id=self.pad_id,
            mask_seeds=seeds,
        )
        update = _UpdateRows([], [], [], None if seeds is None else [], without_old=0)
        for index, distribution in enumerate(old):
            if distribution is None:
                update.without_old += 1
                continue
            update.rows.append(rows[index])
            update.advantages.append(advantages[index])
            update.old_distributions.append(distribution)
            if seeds is not None and update.mask_seeds is not None:
                update.mask_seeds.append(seeds[index] if distribution.is_exact else None)
        return update

    def _apply_batches(
        self, batches: Sequence[TrainBatch], update: _UpdateRows
    ) -> dict[str, float]:
        def compute_loss(batch: TrainBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            return self._compute_loss(batch.to(self.device), update)

        return self.optimizer_step.run_step(batches, compute_loss)

    def _compute_loss(
        self, batch: TrainBatch, update: _UpdateRows
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Compute the loss of a micro-batch with the denominator of the complete update."""
        num_tokens, mask_BS = float(update.num_tokens), batch.loss_mask_BS
        targets_N = batch.input_ids_BS[mask_BS]
        assert batch.sampler_logprobs_BS is not None
        old_logprobs_BS = batch.sampler_logprobs_BS
        if update.mask_seeds is None:  # in the mode of the optimizer step
            new_NV = compute_vocabulary_logprobs(self.model, batch)
        else:
            (row,) = batch.rows
            with _use_dropout_masks(self.model, update.mask_seeds[row]):
                new_NV = compute_vocabulary_logprobs(self.model, batch)
            old_NV = update.old_distributions[row].logprobs_NV
            if old_NV is not None:  # the sampler's are those without dropout
                old_N = old_NV.gather(1, targets_N[:, None])[:, 0]
                old_logprobs_BS = old_NV.new_zeros(mask_BS.shape).masked_scatter(mask_BS, old_N)
        logprobs_N = new_NV.gather(1, targets_N[:, None])[:, 0]
        logprobs_BS = new_NV.new_zeros(mask_BS.shape).masked_scatter(mask_BS, logprobs_N)
        advantages_B = new_NV.new_tensor([update.advantages[row] for row in batch.rows])
        advantages_BS = advantages_B[:, None].expand(mask_BS.shape)
        rl, metrics = clipped_policy_loss(
            logprobs_BS,
            old_logprobs_BS.to(logprobs_BS),
            advantages_BS,
            mask_BS,
            num_loss_tokens=num_tokens,
            clip_eps=self.settings.clip_eps,
        )
        kl = self._sum_kl(batch, update, new_NV) / num_tokens
        parts = {"rl": rl.detach(), "kl": kl.detach(), "clip_fraction": metrics["clip_fraction"]}
        return rl + self.kl_coef * kl, parts

    def _sum_kl(self, batch: TrainBatch, update: _UpdateRows, new_NV: torch.Tensor) -> torch.Tensor:
        """Return the sum of KL(old || new) over the micro-batch's loss tokens."""
        counts = batch.loss_mask_BS.sum(1).tolist()
        sums = [
            compute_forward_kl(update.old_distributions[row], row_NV).sum()
            for row, row_NV in zip(batch.rows, new_NV.split(counts), strict=True)
        ]
        return torch.stack(sums).sum()

    @torch.no_grad()
    def _measure_mean_kl(self, batches: Sequence[TrainBatch], update: _UpdateRows) -> float:
        """Measure the mean KL(old || policy) per loss token under the current weights; NaN if it is not finite."""

        def sum_kl(batch: TrainBatch) -> float:
            batch = batch.to(self.device)
            seed = None if update.mask_seeds is None else update.mask_seeds[batch.rows[0]]
            with _use_dropout_masks(self.model, seed):
                new_NV = compute_vocabulary_logprobs(self.model, batch)
            return float(self._sum_kl(batch, update, new_NV))

        with self.optimizer_step.enable_autocast():
            try:
                sums = MemoryFit("KL after the update").compute_batches(batches, sum_kl)
                return math.fsum(sums) / update.num_tokens
            except NonFiniteTensor:
                return math.nan

    def _fill_report(self, report: UpdateReport, metrics: Mapping[str, float]) -> None:
        norm = metrics["train/grad_norm"]
        before = metrics.get("kl", math.nan)
        report.losses = {
            "rl": metrics.get("rl", math.nan),
            "kl": self.kl_coef * before,
            "total": metrics["train/loss"],
        }
        report.gradients = {"norm": norm, "clipped": min(norm, self.settings.max_grad_norm)}
        report.kl_control = {"coefficient": self.kl_coef, "before": before}
        if self.settings.kl_control == "adaptive":  # a fixed coefficient has no target
            report.kl_control["target_kl"] = self.settings.update_kl_target

    def _compute_next_kl_coef(self, kl: float, before: float) -> float:
        """Return the adapted coefficient after a step that changed the KL of its tokens from `before` to `kl`.

        The KL accumulates over updates while the coefficient only changes its slope, so controlling by its level alone
        oscillates around the band. It is controlled by the level that the KL would reach after a few more steps like
        this one.
        """
        settings, band = self.settings, self.settings.kl_band
        predicted_kl = max(0.0, kl + settings.kl_lookahead * (kl - before))
        return banded_kl_coef(
            self.kl_coef,
            predicted_kl,
            target=settings.update_kl_target,
            tolerance=band.width * settings.update_kl_target,
            increase_factor=band.increase,
            decrease_factor=band.decrease,
            minimum=band.minimum,
            maximum=band.maximum,
        )
