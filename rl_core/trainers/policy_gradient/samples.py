"""Training samples of an iteration, group by group, and the replay buffer of those of past iterations.

A sample keeps its sampling temperature. Log-probs of the policy, the reference and the sampler are all taken there,
also when the sample is replayed in another curriculum stage: the gradient is that of the policy that acted, and
importance weights measure the change of the weights, not of the temperature.

Suffixes: T completion tokens.

Dynamic sampling: groups whose rollouts earn the same reward carry no signal, and are replaced by new episodes.

Source: DAPO, arXiv:2503.14476, section 3.2; here a bounded number of rounds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rl_core.rollouts.batching import TrainRow, build_train_row
from rl_core.settings import ReplaySettings
from rl_core.types import Rollout, RolloutGroup, StopReason


@dataclass(slots=True)
class TrainingSample:
    """One rollout as training uses it."""

    row: TrainRow
    reward: float
    is_truncated: bool  # True = cut off rather than over: a critic's value stands for the rest
    advantage: float | None = (
        None  # from comparing rewards; None = not known yet, or estimated from values
    )
    is_replayed: bool = False
    is_masked: bool = False  # no reward could be computed: it carries no loss


SampleGroup = list[TrainingSample]  # [G] the samples of one prompt


def build_sample_groups(
    groups: Sequence[RolloutGroup], *, bootstrap_limits: bool = False, mask_truncated: bool = False
) -> list[SampleGroup]:
    """One sample per rollout, in the groups of the rollouts.

    Args:
        bootstrap_limits: a rollout that ran into a limit of the sampler (tokens, turns, context) counts as truncated,
            as one truncated by its environment always does. False = such a limit is part of the task, and ends it.
        mask_truncated: the tokens of a rollout that was cut by the token limit or the context carry no loss; its
            reward counts in its group all the same.
    """

    def sample(rollout: Rollout) -> TrainingSample:
        by_environment = rollout.trajectory.stop_reason == StopReason.ENVIRONMENT
        is_truncated = by_environment or (bootstrap_limits and rollout.is_truncated)
        row = build_train_row(rollout)
        if count_nonfinite_tokens(rollout):
            row = _mask_nonfinite_tokens(row)
        if mask_truncated and is_cut_by_token_limit(rollout):
            row = dataclasses.replace(row, loss_mask=[False] * len(row.loss_mask))
        return TrainingSample(row, rollout.reward, is_truncated, is_masked=rollout.is_masked)

    return [[sample(rollout) for rollout in group.rollouts] for group in groups]


def compute_masking_metrics(
    groups: Sequence[RolloutGroup], *, mask_truncated: bool
) -> dict[str, float]:
    """Rollouts and tokens that carry no loss, for what they are; the latter only where there are some."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = (
        {"train/masked_truncated": float(sum(map(is_cut_by_token_limit, rollouts)))}
        if mask_truncated
        else {}
    )
    if broken := sum(map(count_nonfinite_tokens, rollouts)):
        metrics["train/nonfinite_sampler_tokens"] = float(broken)
    return metrics


def count_nonfinite_tokens(rollout: Rollout) -> int:
    """Sampled tokens whose log-probability the sampler gave as NaN or infinite."""
    if math.isfinite(sum(rollout.sampler_logprobs)):
        return 0
    pairs = zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    return sum(is_sampled and not math.isfinite(logprob) for logprob, is_sampled in pairs)


def _mask_nonfinite_tokens(row: TrainRow) -> TrainRow:
    """The row without loss where the sampler's log-prob is not finite: its ratio to the policy is not known there."""
    logprobs = row.sampler_logprobs or ()
    is_finite = [math.isfinite(logprob) for logprob in logprobs]
    return dataclasses.replace(
        row,
        loss_mask=[
            counts and finite for counts, finite in zip(row.loss_mask, is_finite, strict=True)
        ],
        sampler_logprobs=[
            value if finite else 0.0 for value, finite in zip(logprobs, is_finite, strict=True)
        ],
    )


def is_cut_by_token_limit(rollout: Rollout) -> bool:
    """True = the token limit or the context ended it in the middle."""
    return rollout.trajectory.stop_reason == StopReason.MAX_TOKENS


class ReplayBuffer:
    """Groups of the last iterations, drawn uniformly. A group keeps the advantages it was given when it was fresh."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings
        self._past_iterations: deque[list[SampleGroup]] = deque(
            maxlen=settings.iterations
        )  # iterations of groups

    def draw_groups(self, rng: np.random.Generator, num_fresh: int) -> list[SampleGroup]:
        """round(share * num_fresh) past groups without replacement; fewer while the buffer holds fewer."""
        groups = [group for iteration in self._past_iterations for group in iteration]
        count = min(len(groups), round(self.settings.share * num_fresh))
        picked = (
            sorted(rng.choice(len(groups), size=count, replace=False).tolist()) if count else []
        )
        return [groups[index] for index in picked]

    def add_groups(self, groups: Sequence[Sequence[TrainingSample]]) -> None:
        """Store an iteration's groups, and drop the oldest iteration when the buffer is full."""
        kept = [
            [dataclasses.replace(sample, is_replayed=True) for sample in group] for group in groups
        ]
        self._past_iterations.append(kept)

    def state_dict(self) -> dict[str, Any]:
        """All samples, their tokens in flat tensors."""
        samples = [
            sample for iteration in self._past_iterations for group in iteration for sample in group
        ]
        rows = [sample.row for sample in samples]
        return {
            "group_sizes": [
                [len(group) for group in iteration] for iteration in self._past_iterations
            ],
            "prompt_lengths": [len(row.prompt_ids) for row in rows],
            "lengths": [len(row.completion_ids) for row in rows],
            "prompt_ids": _flatten_lists([row.prompt_ids for row in rows], torch.int64),
            "completion_ids": _flatten_lists([row.completion_ids for row in rows], torch.int64),
            "loss_mask": _flatten_lists([row.loss_mask for row in rows], torch.bool),
            "logprobs": _flatten_lists([row.sampler_logprobs or () for row in rows], torch.float64),
            "temperatures": [float(row.temperature) for row in rows],
            "context_starts": [list(row.context_starts) for row in rows],
            "rewards": [float(sample.reward) for sample in samples],
            "is_truncated": [bool(sample.is_truncated) for sample in samples],
            "is_masked": [bool(sample.is_masked) for sample in samples],
            "advantages": [
                None if sample.advantage is None else float(sample.advantage) for sample in samples
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        prompts = _split_by_lengths(state["prompt_ids"], state["prompt_lengths"])
        completions, masks, logprobs = (
            _split_by_lengths(state[name], state["lengths"])
            for name in ("completion_ids", "loss_mask", "logprobs")
        )
        # checkpoints from before temperatures were stored hold log-probs at temperature 1
        temperatures = state.get("temperatures", [1.0] * len(state["rewards"]))
        starts = map(tuple, state["context_starts"])
        samples = iter(
            TrainingSample(
                TrainRow(prompt, completion, mask, sampler_logprobs, temperature, contexts),
                reward,
                is_truncated,
                advantage,
                is_replayed=True,
                is_masked=is_masked,
            )
            for prompt, completion, mask, sampler_logprobs, temperature, contexts, reward, is_truncated, is_masked, advantage in zip(
                prompts,
                completions,
                masks,
                logprobs,
                temperatures,
                starts,
                state["rewards"],
                state["is_truncated"],
                state["is_masked"],
                state["advantages"],
                strict=True,
            )
        )
        self._past_iterations.clear()
        for sizes in state["group_sizes"]:
            self._past_iterations.append([[next(samples) for _ in range(size)] for size in sizes])


def _flatten_lists(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _split_by_lengths(flat: torch.Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [part.tolist() for part in torch.split(flat, list(lengths))]


MIN_REWARD_SPREAD = 1e-6  # groups whose rewards differ by less carry no signal

ScoredGroups = tuple[
    list[RolloutGroup], dict[str, float]
]  # groups with their rewards, and the rewards' metrics


@dataclass(slots=True)
class SampledGroups:
    """Groups of one iteration."""

    all_groups: list[RolloutGroup] = field(
        default_factory=list
    )  # all of them: success and reward are measured here
    selected_groups: list[RolloutGroup] = field(default_factory=list)  # those to train on
    round_metrics: list[dict[str, float]] = field(
        default_factory=list
    )  # the rewards' metrics, round by round
    rollout_seconds: float = 0.0  # spent on playing

    def compute_metrics(self) -> dict[str, float]:
        """Mean of the rewards' metrics over the rounds that have them, and the reward over all that counts."""
        names = dict.fromkeys(name for part in self.round_metrics for name in part)
        metrics = {
            name: statistics.fmean(part[name] for part in self.round_metrics if name in part)
            for name in names
        }
        totals = [
            rollout.reward
            for group in self.all_groups
            for rollout in group.rollouts
            if not rollout.is_masked
        ]
        return metrics | {
            "reward/mean": statistics.fmean(totals),
            "reward/std": statistics.pstdev(totals),
        }

    @property
    def dropped_rate(self) -> float:
        """Share of the groups that were played and not kept."""
        return 1 - len(self.selected_groups) / len(self.all_groups)


def sample_groups_with_signal(
    play: Callable[[int, int], list[RolloutGroup]],
    score: Callable[[list[RolloutGroup]], ScoredGroups],
    *,
    num_groups: int,
    num_retries: int,
) -> SampledGroups:
    """Play groups until `wanted` are kept, in 1 + `tries` rounds at most.

    Args:
        play: given the number of groups and of the round, from 0; may give fewer, where episodes fail.
        tries: further rounds; 0 = every group is kept, also one without a difference in reward.
    """
    found = SampledGroups()
    for attempt in range(1 + num_retries):
        started = time.perf_counter()
        groups = play(num_groups - len(found.selected_groups), attempt)
        found.rollout_seconds += time.perf_counter() - started
        if not groups:
            continue
        groups, metrics = score(groups)
        found.round_metrics.append(metrics)
        found.all_groups += groups
        found.selected_groups += [
            g
            for g in groups
            if not num_retries or max(g.rewards) - min(g.rewards) > MIN_REWARD_SPREAD
        ]
        if len(found.selected_groups) == num_groups:
            break
    return found
