"""Training samples of an iteration, group by group, and the replay buffer of those of past iterations.

A sample keeps its sampling temperature. Log-probs of the policy, the reference and the sampler are all taken there,
also when the sample is replayed in another curriculum stage: the gradient is that of the policy that acted, and
importance weights measure the change of the weights, not of the temperature.

Suffixes: T completion tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.rollouts.batching import TrainRow, train_row
from rl_core.settings import ReplaySettings
from rl_core.types import Rollout, RolloutGroup, StopReason

__all__ = ["ReplayBuffer", "Sample", "SampleGroup", "is_cut", "masked_metrics", "num_nonfinite", "sample_groups"]


@dataclass(slots=True)
class Sample:
    """One rollout as training uses it."""

    row: TrainRow
    reward: float
    is_truncated: bool  # True = cut off rather than over: a critic's value stands for the rest
    advantage: float | None = None  # from comparing rewards; None = not known yet, or estimated from values
    is_replayed: bool = False
    is_masked: bool = False  # no reward could be computed: it carries no loss


SampleGroup = list[Sample]  # [G] the samples of one prompt


def sample_groups(
    groups: Sequence[RolloutGroup], *, bootstrap_limits: bool = False, mask_truncated: bool = False
) -> list[SampleGroup]:
    """One sample per rollout, in the groups of the rollouts.

    Args:
        bootstrap_limits: a rollout that ran into a limit of the sampler (tokens, turns, context) counts as truncated,
            as one truncated by its environment always does. False = such a limit is part of the task, and ends it.
        mask_truncated: the tokens of a rollout that was cut by the token limit or the context carry no loss; its
            reward counts in its group all the same.
    """

    def sample(rollout: Rollout) -> Sample:
        by_environment = rollout.trajectory.stop_reason == StopReason.ENVIRONMENT
        is_truncated = by_environment or (bootstrap_limits and rollout.is_truncated)
        row = train_row(rollout)
        if num_nonfinite(rollout):
            row = _finite(row)
        if mask_truncated and is_cut(rollout):
            row = dataclasses.replace(row, loss_mask=[False] * len(row.loss_mask))
        return Sample(row, rollout.reward, is_truncated, is_masked=rollout.is_masked)

    return [[sample(rollout) for rollout in group.rollouts] for group in groups]


def masked_metrics(groups: Sequence[RolloutGroup], *, mask_truncated: bool) -> dict[str, float]:
    """Rollouts and tokens that carry no loss, for what they are; the latter only where there are some."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {"train/masked_truncated": float(sum(map(is_cut, rollouts)))} if mask_truncated else {}
    if broken := sum(map(num_nonfinite, rollouts)):
        metrics["train/nonfinite_sampler_tokens"] = float(broken)
    return metrics


def num_nonfinite(rollout: Rollout) -> int:
    """Sampled tokens whose log-probability the sampler gave as NaN or infinite."""
    if math.isfinite(sum(rollout.sampler_logprobs)):
        return 0
    pairs = zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    return sum(is_sampled and not math.isfinite(logprob) for logprob, is_sampled in pairs)


def _finite(row: TrainRow) -> TrainRow:
    """The row without loss where the sampler's log-prob is not finite: its ratio to the policy is not known there."""
    logprobs = row.sampler_logprobs or ()
    is_finite = [math.isfinite(logprob) for logprob in logprobs]
    return dataclasses.replace(
        row,
        loss_mask=[counts and finite for counts, finite in zip(row.loss_mask, is_finite, strict=True)],
        sampler_logprobs=[value if finite else 0.0 for value, finite in zip(logprobs, is_finite, strict=True)],
    )


def is_cut(rollout: Rollout) -> bool:
    """True = the token limit or the context ended it in the middle."""
    return rollout.trajectory.stop_reason == StopReason.MAX_TOKENS


class ReplayBuffer:
    """Groups of the last iterations, drawn uniformly. A group keeps the advantages it was given when it was fresh."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings
        self._past: deque[list[SampleGroup]] = deque(maxlen=settings.iterations)  # iterations of groups

    def draw(self, rng: np.random.Generator, num_fresh: int) -> list[SampleGroup]:
        """round(share * num_fresh) past groups without replacement; fewer while the buffer holds fewer."""
        groups = [group for iteration in self._past for group in iteration]
        count = min(len(groups), round(self.settings.share * num_fresh))
        picked = sorted(rng.choice(len(groups), size=count, replace=False).tolist()) if count else []
        return [groups[index] for index in picked]

    def add(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Store an iteration's groups, and drop the oldest iteration when the buffer is full."""
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
            "prompt_ids": _concatenate([row.prompt_ids for row in rows], torch.int64),
            "completion_ids": _concatenate([row.completion_ids for row in rows], torch.int64),
            "loss_mask": _concatenate([row.loss_mask for row in rows], torch.bool),
            "logprobs": _concatenate([row.sampler_logprobs or () for row in rows], torch.float64),
            "temperatures": [float(row.temperature) for row in rows],
            "context_starts": [list(row.context_starts) for row in rows],
            "rewards": [float(sample.reward) for sample in samples],
            "is_truncated": [bool(sample.is_truncated) for sample in samples],
            "is_masked": [bool(sample.is_masked) for sample in samples],
            "advantages": [None if sample.advantage is None else float(sample.advantage) for sample in samples],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        prompts = _split(state["prompt_ids"], state["prompt_lengths"])
        completions, masks, logprobs = (
            _split(state[name], state["lengths"]) for name in ("completion_ids", "loss_mask", "logprobs")
        )
        # checkpoints from before temperatures were stored hold log-probs at temperature 1
        temperatures = state.get("temperatures", [1.0] * len(state["rewards"]))
        starts = map(tuple, state["context_starts"])
        samples = iter(
            Sample(
                TrainRow(prompt, completion, mask, sampler_logprobs, temperature, contexts),
                reward, is_truncated, advantage, is_replayed=True, is_masked=is_masked,
            )
            for prompt, completion, mask, sampler_logprobs, temperature, contexts, reward, is_truncated, is_masked,
            advantage
            in zip(
                prompts, completions, masks, logprobs, temperatures, starts,
                state["rewards"], state["is_truncated"], state["is_masked"], state["advantages"], strict=True,
            )
        )  # fmt: skip
        self._past.clear()
        for sizes in state["group_sizes"]:
            self._past.append([[next(samples) for _ in range(size)] for size in sizes])


def _concatenate(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _split(flat: torch.Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [part.tolist() for part in torch.split(flat, list(lengths))]
