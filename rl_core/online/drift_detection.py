"""Sequential change detection on the traffic, with a bounded rate of false alarms and no distributional assumptions.

A signal ranges from 0 to 1. Its first observations, the reference, bound its usual mean m on the side that matters:
m_low for a signal that must not fall, m_high for one that must not rise. After that each observation x multiplies an
e-value of the hypothesis "the mean is still at least m_low - slack":

    R_n(l) = (R_(n-1)(l) + 1) (1 + l (m_low - slack - x_n)),    R = the mean over a grid of stakes l

(for a rising signal with 1 - x). R is a Shiryaev-Roberts e-detector: while nothing has changed, R_n - n is a
supermartingale, so an alarm at R >= c comes after at least c observations on average. J signals alarm at
c = J run_length; the sum of their detectors, less the observations times J, is a supermartingale too, so the first
false alarm of all comes after at least `run_length` observations on average.

A change is detected if the mean passes the limit (m_low - slack, or m_high + slack). The reference is uncertain, so
that is more than the slack: with 200 observations of mean 0.8 and an error of 0.001, m_low is 0.683.

Sampling at another temperature is another distribution, not a change: each temperature has a separate reference, the
first one that is complete counts, and observations at other temperatures are left out from then on.

Also here: the signals KL to the champion, and reward components compared with success.

B rows of a micro-batch, S complete sequence, R rollouts of a request, C reward components.

Source: Shin, Ramdas and Rinaldo 2024, E-detectors: a nonparametric framework for sequential change detection,
arXiv:2203.03532 (section 2, theorem 2.4, SR e-detectors; section 4 for bounded means); Shiryaev 1963, Roberts 1966;
Hoeffding 1963, theorem 1, for the reference.
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
from rl_core.rollouts.batching import TrainRow, build_batches, build_train_row
from rl_core.settings import OnlineDriftSettings
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TASK_COMPONENT = "task"  # the reward component that is success itself
_NUM_STAKES = 16
_MAX_TEMPERATURES = 16  # with an incomplete reference of a signal; the least observed one goes
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
    """Signal that has changed."""

    signal: str
    direction: str
    usual: float  # mean of the reference
    recent: float  # exponential mean over about 50 observations
    observations: int  # after the reference

    def __str__(self) -> str:
        return (
            f"{self.signal} {self.direction}: {self.recent:.4g} recently, {self.usual:.4g} in the reference "
            f"({self.observations} observations later)"
        )


def compute_lower_mean_bound(mean: float, count: int, error: float) -> float:
    """Return a lower confidence bound of the mean of values in [0, 1].

    It is the least q with count kl(mean, q) <= log(1 / error), kl(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 -
    q)).
    Source: Hoeffding 1963, doi:10.1080/01621459.1963.10500830, theorem 1, equation 2.1.
    """
    low, high, budget = 0.0, mean, math.log(1 / error) / count
    for _ in range(60):
        q = (low + high) / 2
        first = second = 0.0
        if mean > 0:
            first = mean * math.log(mean / q) if q > 0 else math.inf
        if mean < 1:
            second = (1 - mean) * math.log((1 - mean) / (1 - q))
        low, high = (low, q) if first + second <= budget else (q, high)
    return high


class DriftDetector:
    """Detector of one signal in one direction."""

    def __init__(
        self,
        direction: Literal["falls", "rises"],
        *,
        threshold: float,
        reference: int,
        slack: float,
        error: float,
    ) -> None:
        """Prepare a detector without observations.

        Args:
            threshold: c, the alarm threshold.
            reference: number of observations that set the usual mean.
            slack: tolerated change.
            error: probability that the true usual mean lies beyond its bound.
        """
        self.direction = direction
        self.threshold, self.reference, self.slack, self.error = threshold, reference, slack, error
        self.count = 0  # observations including the reference
        self.total = 0.0  # of the reference
        self.recent = 0.0
        self.log_values = np.full(_NUM_STAKES, -math.inf)  # log R(l)

    @property
    def bound(self) -> float:
        """Lower bound of the usual mean of x (x = 1 - value for a signal that must not rise), less the slack."""
        mean = min(1.0, self.total / self.reference)
        return compute_lower_mean_bound(mean, self.reference, self.error) - self.slack

    @property
    def limit(self) -> float:
        """Mean of the signal beyond which a change is detected; outside [0, 1] there is none."""
        return self.bound if self.direction == "falls" else 1.0 - self.bound

    @property
    def is_reference_complete(self) -> bool:
        """True = further observations are compared."""
        return self.count >= self.reference

    @property
    def log_value(self) -> float:
        """log R."""
        largest = float(self.log_values.max())
        if largest == -math.inf:
            return largest
        return largest + math.log(float(np.exp(self.log_values - largest).mean()))

    def observe(self, value: float) -> bool:
        """Add one observation and return whether it raises an alarm. Raises: DataError for a value outside [0, 1]."""
        if not 0 <= value <= 1:
            raise DataError(f"drift: {value} must lie between 0 and 1")
        x = value if self.direction == "falls" else 1.0 - value
        self.count += 1
        self.recent = value if self.count == 1 else 0.98 * self.recent + 0.02 * value
        if self.count <= self.reference:
            self.total += x
            return False
        bound = self.bound
        if bound <= 0:  # the mean cannot fall below 0, so there is nothing to detect
            return False
        # 1 + l (bound - x) > 0 for every x up to 1 if l < 1 / (1 - bound). Small stakes detect small, late changes.
        stakes = 0.99 * (np.arange(1, _NUM_STAKES + 1) / _NUM_STAKES) ** 2 / max(1.0 - bound, 0.01)
        self.log_values = np.logaddexp(self.log_values, 0.0) + np.log1p(stakes * (bound - x))
        return self.log_value >= math.log(self.threshold)

    def state_dict(self) -> dict[str, Any]:
        """Return counts, sums and detector values."""
        return {
            "count": self.count,
            "total": self.total,
            "recent": self.recent,
            "log_values": self.log_values.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`."""
        self.count = int(state["count"])
        self.total, self.recent = float(state["total"]), float(state["recent"])
        self.log_values = np.asarray(state["log_values"], dtype=np.float64)


class DriftMonitor:
    """Monitor of the watched signals. An alarm stays until `reset`, which takes a new reference."""

    def __init__(self, settings: OnlineDriftSettings) -> None:
        self.settings = settings
        self.alarm: DriftAlarm | None = None
        self.alarms = 0
        self.left_out = 0  # observations at another temperature than the reference's
        # By signal and temperature; one temperature once its reference is complete.
        self._detectors: dict[str, dict[float, DriftDetector]] = {}
        self.reset()

    @property
    def detectors(self) -> dict[str, DriftDetector]:
        """The detector of each signal, at the temperature with the most observations."""
        return {
            name: max(by_temperature.values(), key=lambda detector: detector.count)
            if by_temperature
            else self._build_detector(name)
            for name, by_temperature in self._detectors.items()
        }

    def reset(self) -> None:
        """Restart detection with a new reference."""
        self.alarm = None
        self._detectors = {name: {} for name in self.settings.watched}

    def _build_detector(self, name: str) -> DriftDetector:
        settings = self.settings
        return DriftDetector(
            ALARM_DIRECTIONS[name],
            threshold=settings.run_length * len(settings.watched),
            reference=settings.reference,
            slack=settings.slack,
            error=settings.reference_error,
        )

    def _choose_detector(self, signal: str, temperature: float) -> DriftDetector | None:
        """Return the detector of observations at this temperature; None if another one is the reference."""
        detectors = self._detectors[signal]
        if temperature in detectors:
            return detectors[temperature]
        if any(detector.is_reference_complete for detector in detectors.values()):
            return None
        if len(detectors) >= _MAX_TEMPERATURES:
            del detectors[min(detectors, key=lambda key: detectors[key].count)]
        detectors[temperature] = self._build_detector(signal)
        return detectors[temperature]

    def observe(self, signal: str, value: float, temperature: float = 1.0) -> DriftAlarm | None:
        """Add one observation of a signal; return the alarm that it raises. None if there is none, or one is active.

        Args:
            temperature: at which the observed answers were sampled.
        """
        if signal not in self._detectors or self.alarm is not None:
            return None
        detector = self._choose_detector(signal, temperature)
        if detector is None:
            self.left_out += 1
            return None
        raises_alarm = detector.observe(min(1.0, max(0.0, value)))
        if detector.is_reference_complete:
            self._detectors[signal] = {temperature: detector}
        if not raises_alarm:
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
        """Return recent means, levels (log detector / log threshold; 1 = alarm), limits and the number of alarms."""
        metrics = {
            "online/drift_alarms": float(self.alarms),
            "online/drift_left_out": float(self.left_out),
        }
        for name, detector in self.detectors.items():
            metrics[f"online/drift/{name}"] = detector.recent
            level = detector.log_value / math.log(detector.threshold)
            metrics[f"online/drift/{name}_level"] = max(0.0, level)
            if detector.is_reference_complete:
                metrics[f"online/drift/{name}_limit"] = detector.limit
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return detectors, the alarm and the number of alarms."""
        alarm = None
        if self.alarm is not None:
            alarm = {name: getattr(self.alarm, name) for name in self.alarm.__slots__}
        return {
            "alarms": self.alarms,
            "alarm": alarm,
            "left_out": self.left_out,
            "detectors": {
                name: [[temperature, detector.state_dict()] for temperature, detector in by.items()]
                for name, by in self._detectors.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; inverse of `state_dict`."""
        self.alarms = int(state["alarms"])
        self.alarm = None if state["alarm"] is None else DriftAlarm(**state["alarm"])
        self.left_out = int(state.get("left_out", 0))
        for name in self._detectors:
            saved = state["detectors"][name]
            if isinstance(saved, Mapping):  # of an earlier release, for all temperatures
                saved = [[1.0, saved]]
            self._detectors[name] = {}
            for temperature, detector_state in saved:
                detector = self._detectors[name][float(temperature)] = self._build_detector(name)
                detector.load_state_dict(detector_state)


@torch.no_grad()
def measure_champion_kl(
    model: PreTrainedModel,
    optimizer_step: OptimizerStep,
    snapshots: WeightSnapshots,
    experiences: Sequence[Experience],
    *,
    pad_id: int,
) -> float | None:
    """Estimate KL(answering policy || champion) in nats per sampled token: the mean of k3 at the tokens of the answers.

    The answers are samples of the answering policy with recorded log-probabilities, so one pass of the champion is
    enough.
    Answers by the champion count as 0 and need no pass.
    Returns: None without an answer, if the champion's snapshot is missing, or if the result is not finite.
    Source: Schulman 2020, "Approximating KL divergence" (k3).
    """
    num_tokens = 0
    rows: list[TrainRow] = []
    for experience in experiences:
        num_tokens += sum(sum(rollout.loss_mask) for rollout in experience.rollouts)
        if experience.policy_version != CHAMPION_VERSION:
            rows += map(build_train_row, experience.rollouts)
    if not rows or not num_tokens:
        return 0.0 if num_tokens else None
    weights = snapshots.load_weights_if_valid(CHAMPION_VERSION)
    if weights is None:
        return None
    if any(row.context_starts for row in rows):
        check_contexts(model)
    device = next(model.parameters()).device
    batches = build_batches(
        rows,
        optimizer_step.settings.micro_batch_tokens,
        pad_id,
        shares_prefixes=optimizer_step.can_share_prefixes(model),
    )

    def sum_kl(batch: TrainBatch) -> float:
        batch = batch.to(device)
        mask_BS = batch.loss_mask_BS
        assert batch.sampler_logprobs_BS is not None
        champion_BS = completion_logprobs(model, batch)[0]
        sampler_BS = batch.sampler_logprobs_BS.to(champion_BS)
        return float(kl_k3(sampler_BS[mask_BS], champion_BS[mask_BS]).sum())

    with swap_weights(model, weights), use_eval_mode(model), optimizer_step.enable_autocast():
        try:
            sums = MemoryFit("KL to the champion").compute_batches(batches, sum_kl)
            kl = math.fsum(sums) / num_tokens
        except NonFiniteTensor:
            return None
    return kl if math.isfinite(kl) else None


def measure_component_misranking(table: RewardTable) -> float | None:
    """Return the share of (right, wrong) answer pairs of one request of which the components rank the wrong one higher.

    All components but the task's count, with their weights; a pair with equal sums counts half. 0: the components
    distinguish right from wrong; 0.5: they carry no information; 1: they reward wrong answers.
    Returns: None without such a pair or such a component.
    """
    others = [index for index, name in enumerate(table.components) if name != TASK_COMPONENT]
    if not others:
        return None
    sums_R = table.weighted_RC[:, others].sum(1)
    right = sums_R[table.is_known_R & table.success_R]
    wrong = sums_R[table.is_known_R & ~table.success_R]
    if not len(right) or not len(wrong):
        return None
    num_higher = (wrong[None, :] > right[:, None]).sum()
    num_equal = (wrong[None, :] == right[:, None]).sum()
    return float((num_higher + 0.5 * num_equal) / (len(right) * len(wrong)))
