"""Rewards of an iteration's groups, with the policy's states for components that need them.

Suffixes: N turns, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.distributed import ProcessGroup
from rl_core.models.turn_states import TurnStates, turn_states
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rewards.overlong import OverlongPenalty
from rl_core.settings import PolicySettings
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GroupScorer"]


class GroupScorer:
    """Scores groups of rollouts with the policy's rewards; rank 0 scores, and every process gets its groups."""

    def __init__(
        self,
        rewards: RewardOrchestrator,
        policy: PreTrainedModel,
        settings: PolicySettings,
        pad_id: int,
        optimizer_step: OptimizerStep,
        process_group: ProcessGroup,
    ) -> None:
        """Note the parts; `optimizer_step` is the policy's, whose precision and shards its states are computed in."""
        self.rewards = rewards
        self.policy = policy
        self.pad_id = pad_id
        self.max_tokens = settings.micro_batch_tokens
        self.optimizer_step = optimizer_step
        self.process_group = process_group
        self.penalties: dict[str, OverlongPenalty] = {}
        if settings.overlong_tokens:
            limit = settings.sampling.max_completion_tokens
            self.penalties["overlong"] = OverlongPenalty(limit, settings.overlong_tokens)

    def score(self, groups: list[RolloutGroup]) -> tuple[list[RolloutGroup], dict[str, float]]:
        """The groups with their rewards, and the rewards' metrics."""
        states = self._states(groups) if self.rewards.needs_states else []

        def score() -> tuple[list[RolloutGroup], dict[str, float]]:
            return groups, self.rewards.score(groups, embed=lambda _: states, penalties=self.penalties)

        return self.process_group.on_rank_zero(score)

    def _states(self, groups: Sequence[RolloutGroup]) -> list[TurnStates]:
        """Hidden states [N, H] of the policy at the turns of all rollouts, in order, before this iteration's update."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        embed = functools.partial(turn_states, self.policy, pad_id=self.pad_id, max_tokens=self.max_tokens)
        with span("states"), self.optimizer_step.autocast():
            return self.optimizer_step.sharded.all_gather_rows(
                rollouts, [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts], embed
            )
