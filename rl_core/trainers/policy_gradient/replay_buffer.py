"""What an iteration learns from, and a buffer of what past iterations learned from.

A sample keeps the temperature that it was sampled at, and the policy's, the reference's and the sampler's log-probs of
it are all taken there, in whichever curriculum stage it is learned from again: its gradient is that of the policy which
acted, and importance weights measure how far the weights have moved, not that the temperature has.

Suffixes: T completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.rollouts.batching import TrainRow, rows_of
from rl_core.settings import ReplaySettings
from rl_core.types import Rollout, RolloutGroup, StopReason

__all__ = ["ReplayBuffer", "Sample", "samples_of"]


@dataclass(slots=True)
class Sample:
    """One rollout as training sees it."""

    row: TrainRow  # its `old_logprobs` are the sampler's
    reward: float
    is_truncated: bool  # cut off rather than over: what would have come is estimated by the critic
    advantage: float | None = None  # from comparing rewards; None = not known yet, or estimated from values
    is_replayed: bool = False
    is_masked: bool = False  # no reward could be computed: it carries no loss


def samples_of(groups: Sequence[RolloutGroup], *, bootstrap_limits: bool = False) -> list[Sample]:
    """One sample for each rollout, in order.

    Args:
        bootstrap_limits: a rollout that ran into a limit of the sampler (tokens, turns, context) counts as cut off, as
            one that its environment truncated always does. False = such a limit is part of the task, and ends it.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def is_cut_off(rollout: Rollout) -> bool:
        by_environment = rollout.trajectory.stop_reason == StopReason.ENVIRONMENT
        return by_environment or (bootstrap_limits and rollout.is_truncated)

    return [
        Sample(row, rollout.reward, is_cut_off(rollout), is_masked=rollout.is_masked)
        for row, rollout in zip(rows_of(groups), rollouts, strict=True)
    ]


class ReplayBuffer:
    """Groups of the last iterations, drawn again without preference. A group keeps the advantages it was given."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings
        self._past: deque[list[list[Sample]]] = deque(maxlen=settings.iterations)  # iterations of groups

    def draw(self, rng: np.random.Generator, num_fresh: int) -> list[Sample]:
        """Samples of round(share * num_fresh) past groups, none twice; fewer while the buffer holds fewer."""
        groups = [group for iteration in self._past for group in iteration]
        count = min(len(groups), round(self.settings.share * num_fresh))
        picked = sorted(rng.choice(len(groups), size=count, replace=False).tolist()) if count else []
        return [sample for index in picked for sample in groups[index]]

    def add(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Keep an iteration's groups; the oldest iteration goes."""
        kept = [[dataclasses.replace(sample, is_replayed=True) for sample in group] for group in groups]
        self._past.append(kept)

    def state_dict(self) -> dict[str, Any]:
        """All samples, their tokens in flat tensors."""
        samples = [sample for iteration in self._past for group in iteration for sample in group]
        rows = [sample.row for sample in samples]
        return {
            "group_sizes": [[len(group) for group in iteration] for iteration in self._past],
            "prompt_lengths": [len(row.prompt_ids) for row in rows],
            "lengths": [len(row.completion_ids) for row in rows],
            "prompt_ids": _flat([row.prompt_ids for row in rows], torch.int64),
            "completion_ids": _flat([row.completion_ids for row in rows], torch.int64),
            "loss_mask": _flat([row.loss_mask for row in rows], torch.bool),
            "logprobs": _flat([row.sampler_logprobs or () for row in rows], torch.float64),
            "temperatures": [float(row.temperature) for row in rows],
            "rewards": [float(sample.reward) for sample in samples],
            "is_truncated": [bool(sample.is_truncated) for sample in samples],
            "is_masked": [bool(sample.is_masked) for sample in samples],
            "advantages": [None if sample.advantage is None else float(sample.advantage) for sample in samples],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        prompts = _cut(state["prompt_ids"], state["prompt_lengths"])
        completions, masks, logprobs = (
            _cut(state[name], state["lengths"]) for name in ("completion_ids", "loss_mask", "logprobs")
        )
        # a checkpoint of before temperatures were kept holds log-probs at temperature 1
        temperatures = state.get("temperatures", [1.0] * len(state["rewards"]))
        samples = iter(
            Sample(
                TrainRow(p, c, m, None, lp, temperature=drawn_at), reward, truncated, advantage, is_replayed=True,
                is_masked=masked,
            )
            for p, c, m, lp, drawn_at, reward, truncated, advantage, masked in zip(
                prompts, completions, masks, logprobs, temperatures,
                state["rewards"], state["is_truncated"], state["advantages"], state["is_masked"], strict=True,
            )
        )  # fmt: skip
        self._past.clear()
        for sizes in state["group_sizes"]:
            self._past.append([[next(samples) for _ in range(size)] for size in sizes])


def _flat(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _cut(flat: torch.Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [part.tolist() for part in torch.split(flat, list(lengths))]
