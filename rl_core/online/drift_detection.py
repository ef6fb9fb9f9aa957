"""Sequential change detection on the traffic, with a stated rate of false alarms and no assumed distribution.

A signal runs from 0 to 1. Its first observations, the reference, bound its usual mean m from the side that matters:
m_low for a signal that must not fall, m_high for one that must not rise. After that each observation x multiplies an
e-value of the hypothesis "the mean is still at least m_low - slack":

    R_n(l) = (R_(n-1)(l) + 1) (1 + l (m_low - slack - x_n)),    R = the mean over a grid of stakes l

(for a rising signal with 1 - x). R is a Shiryaev-Roberts e-detector: while nothing has changed, R_n - n is a
supermartingale, so an alarm at R >= c comes after c observations on average at the earliest. J signals alarm at
c = J run_length; the sum of their detectors, less the observations times J, is a supermartingale too, hence the first
of all false alarms comes after `run_length` observations on average at the earliest.

Source: Shin, Ramdas and Rinaldo 2024, E-detectors: a nonparametric framework for sequential change detection,
arXiv:2203.03532 (section 2, theorem 2.4, SR e-detectors; section 4 for bounded means); Shiryaev 1963, Roberts 1966;
Hoeffding 1963, theorem 1, for the reference.

Signals of the traffic for the alarms: KL to the champion, reward components against success.

B rows of a micro-batch, S whole sequence, R rollouts of a request, C reward components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from rl_core.errors import DataError, NonFiniteTensor
from rl_core.losses.kl import kl_k3
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.logprobs import check_contexts, completion_logprobs
from rl_core.models.trainable_weights import swap_weights
from rl_core.online.experience import Experience
from rl_core.online.labelled_rewards import RewardTable
from rl_core.online.weight_snapshots import CHAMPION_VERSION, WeightSnapshots
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import build_batches, build_train_row
from rl_core.settings import OnlineDriftSettings
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NUM_STAKES = 16
# The change of each signal that raises an alarm.
ALARM_DIRECTIONS: dict[str, Literal["falls", "rises"]] = {
    "confidence": "falls",
    "success": "falls",
    "length": "rises",
    "refusals": "rises",
    "kl": "rises",
    "champion_kl": "rises",
    "components": "rises",
}


@dataclass(frozen=True, slots=True)
class DriftAlarm:
    """A signal that has changed."""

    signal: str
    direction: str
    usual: float  # mean of the reference
    recent: float  # exponential mean over about 50 observations
    observations: int  # after the reference

    def __str__(self) -> str:
        return (
            f"{self.signal} {self.direction}: {self.recent:.4g} of late, {self.usual:.4g} in the reference "
            f"({self.observations} observations after it)"
        )


def compute_lower_mean_bound(mean: float, count: int, error: float) -> float:
    """Lower confidence bound of the mean of values in [0, 1]: the least q with count kl(mean, q) <= log(1 / error).

    kl(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    Source: Hoeffding 1963, doi:10.1080/01621459.1963.10500830, theorem 1, equation 2.1.
    """
    low, high, budget = 0.0, mean, math.log(1 / error) / count
    for _ in range(60):
        q = (low + high) / 2
        first = mean * math.log(mean / q) if mean > 0 and q > 0 else (math.inf if mean > 0 else 0.0)
        second = (1 - mean) * math.log((1 - mean) / (1 - q)) if mean < 1 else 0.0
        low, high = (low, q) if first + second <= budget else (q, high)
    return high


class DriftDetector:
    """One signal, one direction."""

    def __init__(
        self,
        direction: Literal["falls", "rises"],
        *,
        threshold: float,
        reference: int,
        slack: float,
        error: float,
    ) -> None:
        """Nothing is observed yet.

        Args:
            threshold: c, of the alarm. reference: observations that set the usual mean.
            slack: tolerated change. error: chance that the true usual mean lies beyond the bound taken for it.
        """
        self.direction = direction
        self.threshold, self.reference, self.slack, self.error = threshold, reference, slack, error
        self.count = 0  # observations, the reference included
        self.total = 0.0  # of the reference
        self.recent = 0.0
        self.log_values = np.full(_NUM_STAKES, -math.inf)  # log R(l)

    @property
    def bound(self) -> float:
        """Lower bound of the usual mean of x (x = 1 - value for a signal that must not rise), less the slack."""
        mean = min(1.0, self.total / self.reference)
        return compute_lower_mean_bound(mean, self.reference, self.error) - self.slack

    @property
    def log_value(self) -> float:
        """log R."""
        top = float(self.log_values.max())
        return (
            top if top == -math.inf else top + math.log(float(np.exp(self.log_values - top).mean()))
        )

    def observe(self, value: float) -> bool:
        """Take one observation in; True = alarm. Raises: DataError for a value outside [0, 1]."""
        if not 0 <= value <= 1:
            raise DataError(f"drift: {value} does not lie between 0 and 1")
        x = value if self.direction == "falls" else 1.0 - value
        self.count += 1
        self.recent = value if self.count == 1 else 0.98 * self.recent + 0.02 * value
        if self.count <= self.reference:
            self.total += x
            return False
        bound = self.bound
        if bound <= 0:  # the mean cannot fall below 0: nothing to detect
            return False
        # 1 + l (bound - x) > 0 for every x up to 1 where l < 1 / (1 - bound); small stakes find small changes late
        stakes = 0.99 * (np.arange(1, _NUM_STAKES + 1) / _NUM_STAKES) ** 2 / max(1.0 - bound, 0.01)
        self.log_values = np.logaddexp(self.log_values, 0.0) + np.log1p(stakes * (bound - x))
        return self.log_value >= math.log(self.threshold)

    def state_dict(self) -> dict[str, Any]:
        """Counts, sums and detector values."""
        return {
            "count": self.count,
            "total": self.total,
            "recent": self.recent,
            "log_values": self.log_values.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.count, self.total, self.recent = (
            int(state["count"]),
            float(state["total"]),
            float(state["recent"]),
        )
        self.log_values = np.asarray(state["log_values"], dtype=np.float64)


class DriftMonitor:
    """The watched signals. An alarm stays until `reset`, which takes a new reference."""

    def __init__(self, settings: OnlineDriftSettings) -> None:
        self.settings = settings
        self.alarm: DriftAlarm | None = None
        self.alarms = 0
        self.detectors: dict[str, DriftDetector] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew, with a new reference."""
        settings = self.settings
        self.alarm = None
        self.detectors = {
            name: DriftDetector(
                ALARM_DIRECTIONS[name],
                threshold=settings.run_length * len(settings.watched),
                reference=settings.reference,
                slack=settings.slack,
                error=settings.reference_error,
            )
            for name in settings.watched
        }

    def observe(self, signal: str, value: float) -> DriftAlarm | None:
        """Take one observation of a signal in; the alarm that it raises, None = none, or there is one already."""
        detector = self.detectors.get(signal)
        if (
            detector is None
            or self.alarm is not None
            or not detector.observe(min(1.0, max(0.0, value)))
        ):
            return None
        mean = detector.total / detector.reference
        self.alarms += 1
        self.alarm = DriftAlarm(
            signal,
            detector.direction,
            usual=mean if detector.direction == "falls" else 1.0 - mean,
            recent=detector.recent,
            observations=detector.count - detector.reference,
        )
        return self.alarm

    def compute_metrics(self) -> dict[str, float]:
        """Recent means, levels (log of the detector over log of the threshold: 1 = alarm), number of alarms."""
        found = {"online/drift_alarms": float(self.alarms)}
        for name, detector in self.detectors.items():
            found[f"online/drift/{name}"] = detector.recent
            level = detector.log_value / math.log(detector.threshold)
            found[f"online/drift/{name}_level"] = max(0.0, level)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Detectors, the alarm and the number of alarms."""
        alarm = self.alarm
        return {
            "alarms": self.alarms,
            "alarm": None
            if alarm is None
            else {name: getattr(alarm, name) for name in alarm.__slots__},
            "detectors": {name: detector.state_dict() for name, detector in self.detectors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.alarms = int(state["alarms"])
        self.alarm = None if state["alarm"] is None else DriftAlarm(**state["alarm"])
        for name, detector in self.detectors.items():
            detector.load_state_dict(state["detectors"][name])


TASK_COMPONENT = "task"  # the component that is success itself


@torch.no_grad()
def measure_champion_kl(
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
    rows = [
        build_train_row(r)
        for one in experiences
        if one.policy_version != CHAMPION_VERSION
        for r in one.rollouts
    ]
    if not rows or not tokens:
        return 0.0 if tokens else None
    weights = snapshots.load_weights_if_valid(CHAMPION_VERSION)
    if weights is None:
        return None
    if any(row.context_starts for row in rows):
        check_contexts(model)
    device = next(model.parameters()).device
    batches = build_batches(rows, optimizer_step.settings.micro_batch_tokens, pad_id)

    def of_batch(batch: TrainBatch) -> float:
        batch = batch.to(device)
        mask_BS = batch.loss_mask_BS
        assert batch.sampler_logprobs_BS is not None
        champion_BS = completion_logprobs(model, batch)[0]
        sampler_BS = batch.sampler_logprobs_BS.to(champion_BS)
        return float(kl_k3(sampler_BS[mask_BS], champion_BS[mask_BS]).sum())

    with swap_weights(model, weights), use_eval_mode(model), optimizer_step.enable_autocast():
        try:
            found = (
                math.fsum(MemoryFit("KL to the champion").compute_batches(batches, of_batch))
                / tokens
            )
        except NonFiniteTensor:
            return None
    return found if math.isfinite(found) else None


def measure_component_misranking(table: RewardTable) -> float | None:
    """Share of the pairs of a right and a wrong answer to one request of which the components rank the wrong higher.

    The components are all but the task's own, with their weights; a pair that they rank equal counts half. 0: they
    tell right from wrong; 0.5: nothing; 1: they reward what is wrong.
    Returns: None without such a pair, or without such a component.
    """
    others = [index for index, name in enumerate(table.components) if name != TASK_COMPONENT]
    if not others:
        return None
    sums_R = table.weighted_RC[:, others].sum(1)
    right = sums_R[table.is_known_R & table.success_R]
    wrong = sums_R[table.is_known_R & ~table.success_R]
    if not len(right) or not len(wrong):
        return None
    higher = (wrong[None, :] > right[:, None]).sum() + 0.5 * (
        wrong[None, :] == right[:, None]
    ).sum()
    return float(higher / (len(right) * len(wrong)))
