"""Gate after weight updates: the sampler's log-probs on fixed prompts have to be those of the trainer's forward pass.

The probe (`rollout_workers.sampler_probe`) draws its tokens from counters of its own, so it moves no random generator,
and whether it runs follows from the iteration's number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rl_core.curriculum.snapshots import StageSnapshots
from rl_core.errors import SamplerMismatch
from rl_core.inference.sampling import RolloutBackend
from rl_core.models.export_records import read_vocabulary_size
from rl_core.rollout_workers.sampler_probe import (
    NUM_SEQUENCES,
    SamplerProbe,
    measure_trainer_difference,
    sample_probe,
)
from rl_core.settings import PolicySettings, SamplingSettings
from rl_core.settings.rollouts import select_rounding_bound
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MAX_ROLLBACKS = 3  # in a row, without a comparison that passes between them; more, and the run ends


class NumericsGate:
    """Comparison of trainer and sampler, and the weights of the last one that passed where it may roll back."""

    def __init__(
        self,
        policy: PreTrainedModel,
        backend: RolloutBackend,
        settings: PolicySettings,
        optimizer_step: OptimizerStep,
        snapshots: StageSnapshots,
    ) -> None:
        """Note the parts; `snapshots` are this gate's own."""
        self.policy = policy
        self.backend = backend
        self.settings = settings.numerics
        self.optimizer_step = optimizer_step
        self.rollbacks = 0  # since the beginning
        self._consecutive_failures = 0  # in a row
        self._snapshots = snapshots
        self._snapshot_number = 0  # number of the newest snapshot
        self.bound = self._compute_bound(settings)

    def _compute_bound(self, settings: PolicySettings) -> float | None:
        """Largest difference that rounding explains, nats; None = other samplers are allowed."""
        if settings.numerics.bound is not None:
            return settings.numerics.bound
        if settings.corrects_sampler or settings.sampler_kl_max is not None:
            return None
        return select_rounding_bound(self.optimizer_step.computes_in_float32)

    def is_due(self, iteration: int) -> bool:
        """True = the update of this iteration is to be checked."""
        return (
            self.bound is not None
            and self.settings.every > 0
            and iteration % self.settings.every == 0
        )

    def prepare_iteration(self, learned_state: Callable[[], Mapping[str, Any]]) -> None:
        """Called before every iteration: the weights of the beginning are the first to go back to."""
        if self.settings.action == "rollback" and self._snapshot_number == 0 and self.is_due(0):
            self._store_snapshot(learned_state)

    def check_sampler(
        self,
        sampling: SamplingSettings,
        learned_state: Callable[[], Mapping[str, Any]],
        restore: Callable[[Any], None],
    ) -> dict[str, float]:
        """Compare, at the temperature of these settings; metrics.

        Args:
            learned: state of the trainer that a rollback restores beside weights and optimizers. restore: loads it.
        Raises: SamplerMismatch with the figure, beyond the bound.
        """
        assert self.bound is not None
        difference = self.measure_difference(sampling)
        if difference <= self.bound:
            self._consecutive_failures = 0
            if self.settings.action == "rollback":
                self._store_snapshot(learned_state)
        elif self.settings.action == "refuse":
            raise SamplerMismatch(
                self._describe_mismatch(difference) + "; nothing of this iteration is saved"
            )
        else:
            self._roll_back_weights(difference, sampling, restore)
        metrics = {"policy/numerics_difference": difference}
        if self.settings.action == "rollback":
            metrics["policy/numerics_rollbacks"] = float(self.rollbacks)
        return metrics

    def measure_difference(self, sampling: SamplingSettings) -> float:
        """Largest difference of a token's log-prob between sampler and trainer, nats, over all processes."""
        probe = SamplerProbe.from_sampling(read_vocabulary_size(self.policy), sampling)
        process_group = self.optimizer_step.process_group

        def compare() -> float:
            self.backend.refresh_weights()
            answers = sample_probe(self.backend, probe)
            with self.optimizer_step.enable_autocast():
                return measure_trainer_difference(self.policy, answers, probe)

        with span("numerics"):
            return max(
                process_group.all_gather(
                    self.optimizer_step.sharded.run_independently_with_full_weights(compare)
                )
            )

    def _store_snapshot(self, learned_state: Callable[[], Mapping[str, Any]]) -> None:
        self._snapshot_number += 1
        self._snapshots.update_snapshots(
            self._snapshot_number, {self._snapshot_number}, learned_state
        )

    def _roll_back_weights(
        self, difference: float, sampling: SamplingSettings, restore: Callable[[Any], None]
    ) -> None:
        """Go back to the snapshot. Raises: SamplerMismatch where the sampler does not follow, or again and again."""
        assert self.bound is not None
        self._consecutive_failures += 1
        self.rollbacks += 1
        if self._consecutive_failures > MAX_ROLLBACKS:
            raise SamplerMismatch(
                f"{self._describe_mismatch(difference)}; {MAX_ROLLBACKS} rollbacks before it did not help"
            )
        restore(self._snapshots.restore_stage(self._snapshot_number))
        if not (after := self.measure_difference(sampling)) <= self.bound:
            raise SamplerMismatch(
                f"{self._describe_mismatch(difference)}; after the rollback it is {after:.3g}: the sampler does not follow"
            )

    def _describe_mismatch(self, difference: float) -> str:
        return (
            f"numerics: after a weight update rollout engine and trainer differ by up to {difference:.3g} nats on a "
            f"token of {NUM_SEQUENCES} fixed prompts (numerics.bound {self.bound:g}): the engine does not sample from the "
            "weights, adapter and temperature that are trained. Mend the sampler and resume; a sampler that differs on "
            "purpose needs importance: token, or a larger numerics.bound"
        )

    def state_dict(self) -> dict[str, Any]:
        """Counters and snapshot; {} where it never goes back."""
        if self.settings.action != "rollback":
            return {}
        return {
            "rollbacks": self.rollbacks,
            "failed": self._consecutive_failures,
            "kept": self._snapshot_number,
            "snapshots": self._snapshots.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. {} = of a run without rollbacks: the present weights are the first to go back to."""
        if self.settings.action != "rollback" or not state:
            return
        self.rollbacks, self._consecutive_failures, self._snapshot_number = (
            int(state[name]) for name in ("rollbacks", "failed", "kept")
        )
        self._snapshots.load_state_dict(state["snapshots"])
