"""Check after weight updates that the sampler's log-probs on fixed prompts match the trainer's forward pass.

The probe (`rollout_workers.sampler_probe`) draws its tokens from its own counters, so it advances no random generator,
and whether it runs depends only on the iteration's number.
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


MAX_ROLLBACKS = 3  # in a row, without a passing comparison between them; one more ends the run


class NumericsGate:
    """Comparison of trainer and sampler; with rollbacks also the last weights that passed."""

    def __init__(
        self,
        policy: PreTrainedModel,
        backend: RolloutBackend,
        settings: PolicySettings,
        optimizer_step: OptimizerStep,
        snapshots: StageSnapshots,
    ) -> None:
        """Store the parts; `snapshots` must not be shared with anything else."""
        self.policy = policy
        self.backend = backend
        self.settings = settings.numerics
        self.optimizer_step = optimizer_step
        self.rollbacks = 0  # since the start of training
        self._consecutive_failures = 0
        self._snapshots = snapshots
        self._snapshot_number = 0  # of the newest snapshot
        self.bound = self._compute_bound(settings)

    def _compute_bound(self, settings: PolicySettings) -> float | None:
        """Return the largest difference that rounding explains, in nats; None = a different sampler is allowed."""
        if settings.numerics.bound is not None:
            return settings.numerics.bound
        if settings.corrects_sampler or settings.sampler_kl_max is not None:
            return None
        return select_rounding_bound(self.optimizer_step.computes_in_float32)

    def is_due(self, iteration: int) -> bool:
        """Return whether the update of this iteration is to be checked."""
        return (
            self.bound is not None
            and self.settings.every > 0
            and iteration % self.settings.every == 0
        )

    def prepare_iteration(self, learned_state: Callable[[], Mapping[str, Any]]) -> None:
        """Store the initial weights as the first snapshot; called before every iteration."""
        if self.settings.action == "rollback" and self._snapshot_number == 0 and self.is_due(0):
            self._store_snapshot(learned_state)

    def check_sampler(
        self,
        sampling: SamplingSettings,
        learned_state: Callable[[], Mapping[str, Any]],
        restore: Callable[[Any], None],
    ) -> dict[str, float]:
        """Compare sampler and trainer at the temperature of these settings, and return metrics.

        Args:
            learned_state: returns the state of the trainer that a rollback restores besides weights and optimizers.
            restore: loads that state.
        Raises: SamplerMismatch with the difference, if it exceeds the bound.
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
        """Return the largest difference of a token's log-prob between sampler and trainer, in nats, over all
        processes.
        """
        probe = SamplerProbe.from_sampling(read_vocabulary_size(self.policy), sampling)
        process_group = self.optimizer_step.process_group

        def compare() -> float:
            self.backend.refresh_weights()
            sequences = sample_probe(self.backend, probe)
            with self.optimizer_step.enable_autocast():
                return measure_trainer_difference(self.policy, sequences, probe)

        with span("numerics"):
            difference = self.optimizer_step.sharded.run_independently_with_full_weights(compare)
            return max(process_group.all_gather(difference))

    def _store_snapshot(self, learned_state: Callable[[], Mapping[str, Any]]) -> None:
        self._snapshot_number += 1
        self._snapshots.update_snapshots(
            self._snapshot_number, {self._snapshot_number}, learned_state
        )

    def _roll_back_weights(
        self, difference: float, sampling: SamplingSettings, restore: Callable[[Any], None]
    ) -> None:
        """Restore the snapshot.

        Raises: SamplerMismatch if the sampler does not follow, or after too many rollbacks in a row.
        """
        assert self.bound is not None
        self._consecutive_failures += 1
        self.rollbacks += 1
        if self._consecutive_failures > MAX_ROLLBACKS:
            raise SamplerMismatch(
                f"{self._describe_mismatch(difference)}; {MAX_ROLLBACKS} rollbacks before it did not help"
            )
        restore(self._snapshots.restore_stage(self._snapshot_number))
        remaining = self.measure_difference(sampling)
        if not remaining <= self.bound:
            raise SamplerMismatch(
                f"{self._describe_mismatch(difference)}; after the rollback it is {remaining:.3g}: "
                "the sampler does not follow"
            )

    def _describe_mismatch(self, difference: float) -> str:
        return (
            f"numerics: after a weight update rollout engine and trainer differ by up to {difference:.3g} nats on a "
            f"token of {NUM_SEQUENCES} fixed prompts (numerics.bound {self.bound:g}): the engine does not sample "
            "from the weights, adapter and temperature that are trained. Fix the sampler and resume; a sampler that "
            "differs on purpose needs importance: token, or a larger numerics.bound"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return counters and snapshot; {} without rollbacks."""
        if self.settings.action != "rollback":
            return {}
        return {
            "rollbacks": self.rollbacks,
            "failed": self._consecutive_failures,
            "kept": self._snapshot_number,
            "snapshots": self._snapshots.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`. After {} (of a run without rollbacks), the current weights become the first snapshot."""
        if self.settings.action != "rollback" or not state:
            return
        self.rollbacks = int(state["rollbacks"])
        self._consecutive_failures = int(state["failed"])
        self._snapshot_number = int(state["kept"])
        self._snapshots.load_state_dict(state["snapshots"])
