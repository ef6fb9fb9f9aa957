"""Training samples of an iteration, dynamic sampling, and the replay buffer of past iterations.

A sample keeps its sampling temperature. The log-probs of policy, reference and sampler are all computed at it, also
when the sample is replayed in another curriculum stage: the gradient is that of the policy that acted, and importance
weights measure the change of the weights, not of the temperature.

Dynamic sampling replaces groups whose rollouts all earn the same reward, which carry no signal, by new episodes.
Source: DAPO, arXiv:2503.14476, section 3.2; here with a bounded number of rounds.

Suffixes: T completion tokens.
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

from rl_core.environments.environment import warn_once
from rl_core.rollouts.batching import TrainRow, build_train_row
from rl_core.settings import ReplaySettings
from rl_core.trainers.policy_gradient.turn_credit import SampleTurn, build_sample_turns
from rl_core.types import ImagePixels, Rollout, RolloutGroup, StopReason

MIN_REWARD_SPREAD = 1e-6  # groups whose rewards differ by less carry no signal

# Groups with their rewards, and the rewards' metrics.
ScoredGroups = tuple[list[RolloutGroup], dict[str, float]]


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """Spans of a completion's tokens and of the teacher's tokens of the same text (`data.token_bytes`)."""

    student_spans: Sequence[int]  # [T] number of each token's span, ascending from 0; -1 = no loss
    teacher_spans: Sequence[int]  # [U] the same of the teacher's tokens


@dataclass(slots=True)
class TrainingSample:
    """One rollout, prepared for training."""

    row: TrainRow
    reward: float
    is_truncated: bool  # True = cut off before its end: bootstrapped from a critic's value
    advantage: float | None = None  # from comparing rewards; None = not known yet, or per token
    is_replayed: bool = False
    is_masked: bool = False  # True = no reward could be computed, so it carries no loss
    turns: Sequence[SampleTurn] = ()  # for credit by turn
    role: str = ""  # level and kind of the episode, for baselines by role
    # Reward components by name: value and weight; {} = nothing reads them.
    components: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # (index of its last completion token, score) of each step, and the weight of their reward, for credit by step
    steps: Sequence[tuple[int, float]] = ()
    step_weight: float = 0.0
    step_value: float = 0.0  # aggregate of the scores, in `reward` times the weight
    # the same completion after a self-teacher's prompt, or in the tokens of a teacher with another vocabulary
    teacher_row: TrainRow | None = None
    alignment: TokenAlignment | None = (
        None  # with the tokens of `teacher_row`; None = they are equal
    )
    # [T] with credit by turn, where `advantage` is the rollout's alone; None = all tokens have `advantage`
    token_advantages: Sequence[float] | None = None

    @property
    def outcome_reward(self) -> float:
        """The reward without the part that is earned by steps."""
        return self.reward - self.step_weight * self.step_value


SampleGroup = list[TrainingSample]  # [G] the samples of one prompt


def build_sample_groups(
    groups: Sequence[RolloutGroup],
    *,
    bootstrap_limits: bool = False,
    mask_truncated: bool = False,
    read_task_weight: Callable[[Rollout], float] | None = None,
    read_components: Callable[[Rollout], Mapping[str, tuple[float, float]]] | None = None,
    read_step_reward: Callable[[Rollout], tuple[float, float]] | None = None,
) -> list[SampleGroup]:
    """Build one sample per rollout, in the groups of the rollouts.

    Args:
        bootstrap_limits: a rollout that reached a limit of the sampler (tokens, turns, context) counts as truncated,
            as a rollout truncated by its environment always does. False = such a limit is part of the task and ends it.
        mask_truncated: the tokens of a rollout that was cut by the token limit or the context carry no loss; its reward
            still counts in its group.
        read_task_weight: weight of the environment's reward in a rollout's total, for credit by turn; None = no turns
            are needed.
        read_components: value and weight of each reward component of an unmasked rollout; None = nothing reads them.
        read_step_reward: value and weight of its process reward; None = no credit by step.
    """

    def sample(rollout: Rollout) -> TrainingSample:
        by_environment = rollout.trajectory.stop_reason == StopReason.ENVIRONMENT
        is_truncated = by_environment or (bootstrap_limits and rollout.is_truncated)
        row = build_train_row(rollout)
        if count_nonfinite_tokens(rollout):
            row = _mask_nonfinite_tokens(row)
        if mask_truncated and is_cut_by_token_limit(rollout):
            row = dataclasses.replace(row, loss_mask=[False] * len(row.loss_mask))
        turns = (
            []
            if read_task_weight is None
            else build_sample_turns(rollout, read_task_weight(rollout))
        )
        trajectory, steps = rollout.trajectory, rollout.step_scores
        step_value = step_weight = 0.0
        if read_step_reward is None or rollout.is_masked:
            steps = []
        else:
            step_value, step_weight = read_step_reward(rollout)
        return TrainingSample(
            row,
            rollout.reward,
            is_truncated,
            is_masked=rollout.is_masked,
            turns=turns,
            steps=tuple(steps),
            step_weight=step_weight,
            step_value=step_value,
            role="/".join(part for part in (trajectory.level, trajectory.kind) if part),
            components=(
                {} if read_components is None or rollout.is_masked else read_components(rollout)
            ),
        )

    return [[sample(rollout) for rollout in group.rollouts] for group in groups]


def warn_about_single_turns(groups: Sequence[SampleGroup]) -> None:
    """Warn, once in this process, if no episode of an iteration had turns to tell apart."""
    if all(len(sample.turns) < 2 for group in groups for sample in group):
        warn_once(
            "turn_credit: every episode of an iteration had a single turn, whose advantage by turn repeats the "
            "rollout's; remove turn_credit, or check that the policy's first action is not the episode's last"
        )


def compute_masking_metrics(
    groups: Sequence[RolloutGroup], *, mask_truncated: bool
) -> dict[str, float]:
    """Count rollouts and tokens that carry no loss because of what they are; the latter only if there are any."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics = {}
    if mask_truncated:
        metrics["train/masked_truncated"] = float(sum(map(is_cut_by_token_limit, rollouts)))
    num_nonfinite = sum(map(count_nonfinite_tokens, rollouts))
    if num_nonfinite:
        metrics["train/nonfinite_sampler_tokens"] = float(num_nonfinite)
    return metrics


def count_nonfinite_tokens(rollout: Rollout) -> int:
    """Count the sampled tokens whose log-probability the sampler reported as NaN or infinite."""
    if math.isfinite(sum(rollout.sampler_logprobs)):
        return 0
    pairs = zip(rollout.sampler_logprobs, rollout.loss_mask, strict=True)
    return sum(is_sampled and not math.isfinite(logprob) for logprob, is_sampled in pairs)


def _mask_nonfinite_tokens(row: TrainRow) -> TrainRow:
    """Exclude tokens with a non-finite sampler log-prob from the loss, as their ratio to the policy is unknown."""
    logprobs = row.sampler_logprobs or ()
    loss_mask = [
        counts and math.isfinite(logprob)
        for counts, logprob in zip(row.loss_mask, logprobs, strict=True)
    ]
    finite_logprobs = [logprob if math.isfinite(logprob) else 0.0 for logprob in logprobs]
    return dataclasses.replace(row, loss_mask=loss_mask, sampler_logprobs=finite_logprobs)


def is_cut_by_token_limit(rollout: Rollout) -> bool:
    """Return whether the token limit or the context cut the rollout off."""
    return rollout.trajectory.stop_reason == StopReason.MAX_TOKENS


class ReplayBuffer:
    """Groups of the last iterations, drawn uniformly. A group keeps the advantages of its iteration."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings
        self._past_iterations: deque[list[SampleGroup]] = deque(maxlen=settings.iterations)

    def draw_groups(self, rng: np.random.Generator, num_fresh: int) -> list[SampleGroup]:
        """Draw round(share * num_fresh) past groups without replacement, or all if there are fewer."""
        groups = [group for iteration in self._past_iterations for group in iteration]
        count = min(len(groups), round(self.settings.share * num_fresh))
        if not count:
            return []
        indices = sorted(rng.choice(len(groups), size=count, replace=False).tolist())
        return [groups[index] for index in indices]

    def add_groups(self, groups: Sequence[Sequence[TrainingSample]]) -> None:
        """Store an iteration's groups; drop the oldest iteration if the buffer is full."""
        replayable = [
            [
                dataclasses.replace(sample, is_replayed=True, turns=(), components={})
                for sample in group
            ]
            for group in groups
        ]
        self._past_iterations.append(replayable)

    def state_dict(self) -> dict[str, Any]:
        """Return all samples, their tokens in flat tensors."""
        samples = [
            sample for iteration in self._past_iterations for group in iteration for sample in group
        ]
        rows = [sample.row for sample in samples]
        by_token = {}
        if any(sample.token_advantages is not None for sample in samples):
            by_token = {
                "has_token_advantages": [s.token_advantages is not None for s in samples],
                "token_advantages": _flatten_lists(
                    [s.token_advantages or [0.0] * len(s.row.completion_ids) for s in samples],
                    torch.float64,
                ),
            }
        if any(sample.steps for sample in samples):
            by_token |= {
                "steps": [[[end, score] for end, score in s.steps] for s in samples],
                "step_rewards": [[s.step_value, s.step_weight] for s in samples],
            }
        return {
            **by_token,
            **_pack_images(rows),
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
        """Load a `state_dict`."""
        prompts = _split_by_lengths(state["prompt_ids"], state["prompt_lengths"])
        completions, masks, logprobs = (
            _split_by_lengths(state[name], state["lengths"])
            for name in ("completion_ids", "loss_mask", "logprobs")
        )
        # Checkpoints from before temperatures were stored hold log-probs at temperature 1.
        temperatures = state.get("temperatures", [1.0] * len(state["rewards"]))
        starts = map(tuple, state["context_starts"])
        fields = zip(prompts, completions, masks, logprobs, temperatures, starts, strict=True)
        rows = [TrainRow(*values) for values in fields]
        for row, images in zip(rows, _unpack_images(state, len(rows)), strict=True):
            row.images = images
        by_token: list[list[float] | None] = [None] * len(rows)
        if "token_advantages" in state:
            parts = _split_by_lengths(state["token_advantages"], state["lengths"])
            has_them = state["has_token_advantages"]
            by_token = [part if has else None for part, has in zip(parts, has_them, strict=True)]
        no_steps: list[list[Any]] = [[] for _ in rows]
        steps = state.get("steps", no_steps)
        step_rewards = state.get("step_rewards", [(0.0, 0.0)] * len(rows))
        samples = iter(
            TrainingSample(
                row,
                reward,
                is_truncated,
                advantage,
                is_replayed=True,
                is_masked=is_masked,
                token_advantages=token_advantages,
                steps=tuple((int(end), float(score)) for end, score in row_steps),
                step_value=float(step_value),
                step_weight=float(step_weight),
            )
            for (
                row,
                token_advantages,
                row_steps,
                (step_value, step_weight),
                reward,
                is_truncated,
                is_masked,
                advantage,
            ) in zip(
                rows,
                by_token,
                steps,
                step_rewards,
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


def _pack_images(rows: Sequence[TrainRow]) -> dict[str, Any]:
    """Return the distinct images of rows, and their numbers by row; {} without images."""
    images = {image.digest: image for row in rows for image in row.images}
    if not images:
        return {}
    numbers = {digest: number for number, digest in enumerate(images)}
    return {
        "image_pixels": [image.pixels_PD for image in images.values()],
        "image_facts": [
            [list(image.grid), image.num_tokens, image.digest, image.source]
            for image in images.values()
        ],
        "row_images": [[numbers[image.digest] for image in row.images] for row in rows],
    }


def _unpack_images(state: Mapping[str, Any], num_rows: int) -> list[tuple[ImagePixels, ...]]:
    """Return the images of each row."""
    if "row_images" not in state:
        return [()] * num_rows
    images = [
        ImagePixels(pixels_PD, (grid[0], grid[1], grid[2]), num_tokens, digest, source)
        for pixels_PD, (grid, num_tokens, digest, source) in zip(
            state["image_pixels"], state["image_facts"], strict=True
        )
    ]
    return [tuple(images[number] for number in numbers) for numbers in state["row_images"]]


def _flatten_lists(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _split_by_lengths(flat: torch.Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [part.tolist() for part in torch.split(flat, list(lengths))]


@dataclass(slots=True)
class SampledGroups:
    """Groups of one iteration."""

    # All groups that were played; success and reward are measured over them.
    all_groups: list[RolloutGroup] = field(default_factory=list)
    # The groups to train on.
    selected_groups: list[RolloutGroup] = field(default_factory=list)
    # The rewards' metrics, round by round.
    round_metrics: list[dict[str, float]] = field(default_factory=list)
    rollout_seconds: float = 0.0

    def compute_metrics(self) -> dict[str, float]:
        """Average the rewards' metrics over the rounds that have them; add the reward over all unmasked rollouts."""
        rounds = self.round_metrics
        names = dict.fromkeys(name for metrics in rounds for name in metrics)
        means = {
            name: statistics.fmean(metrics[name] for metrics in rounds if name in metrics)
            for name in names
        }
        totals = [
            rollout.reward
            for group in self.all_groups
            for rollout in group.rollouts
            if not rollout.is_masked
        ]
        if not totals:
            return means
        return means | {
            "reward/mean": statistics.fmean(totals),
            "reward/std": statistics.pstdev(totals),
        }

    @property
    def dropped_rate(self) -> float:
        """Share of the played groups that were not selected."""
        return 1 - len(self.selected_groups) / len(self.all_groups)


def measure_reward_spread(group: RolloutGroup) -> float:
    """Return the difference between the largest and the smallest reward of a group."""
    return max(group.rewards) - min(group.rewards)


def sample_groups_with_signal(
    play: Callable[[int, int], list[RolloutGroup]],
    score: Callable[[list[RolloutGroup]], ScoredGroups],
    *,
    num_groups: int,
    num_retries: int,
    measure_spread: Callable[[RolloutGroup], float] | None = None,
) -> SampledGroups:
    """Play groups until `num_groups` are selected, in at most 1 + `num_retries` rounds.

    Args:
        play: takes the number of groups and of the round, from 0; may return fewer groups if episodes fail.
        num_retries: further rounds; 0 = every group is selected, even without a difference in reward.
        measure_spread: of a group, what learning compares; None = the range of its rewards.
    """
    measure_spread = measure_spread or measure_reward_spread
    sampled = SampledGroups()
    for attempt in range(1 + num_retries):
        started = time.perf_counter()
        groups = play(num_groups - len(sampled.selected_groups), attempt)
        sampled.rollout_seconds += time.perf_counter() - started
        if not groups:
            continue
        groups, metrics = score(groups)
        sampled.round_metrics.append(metrics)
        sampled.all_groups += groups
        sampled.selected_groups += [
            group
            for group in groups
            if not num_retries or measure_spread(group) > MIN_REWARD_SPREAD
        ]
        if len(sampled.selected_groups) == num_groups:
            break
    return sampled
