"""Turns of a rollout for credit by turn: their tokens, states and rewards, and the advantages of their tokens.

Suffixes: G rollouts of a group, N turns of one rollout, T completion tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import GroupMethod
from rl_core.losses.turn_advantages import turn_advantages
from rl_core.settings import TurnCreditSettings
from rl_core.types import Rollout, Turn


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One turn of a rollout, in the order in which the turns were taken."""

    tokens: range  # of its action, as indices of the completion; empty if it carries no loss
    state: Hashable  # equal for turns that were taken in the same state
    reward: float  # its part of the rollout's reward


@dataclass(slots=True)
class TurnComparison:
    """Counts over the compared turns of an iteration, for its metrics."""

    set_sizes: list[int] = field(default_factory=list)
    step_advantages: list[float] = field(default_factory=list)

    def compute_metrics(self) -> dict[str, float]:
        """Return share of turns with a counterpart, size of the sets, deviation of the step advantages; {} = none."""
        if not self.set_sizes:
            return {}
        num_turns = sum(self.set_sizes)
        return {
            "train/compared_turn_rate": sum(s for s in self.set_sizes if s > 1) / num_turns,
            "train/turn_set_size": num_turns / len(self.set_sizes),
            "train/step_advantages_std": statistics.pstdev(self.step_advantages),
        }


def build_sample_turns(rollout: Rollout, task_weight: float) -> list[SampleTurn]:
    """Build the turns of a scored rollout.

    A turn earns the environment's reward of its step, times the weight of `task`. What else the rollout earned (other
    components, penalties, a reward at the end) belongs to the last turn. The state is the one that the environment
    named (`Step.state`), else the text of the observation, else the tokens of the prompt: of the first turn, and of
    one that begins another conversation.

    Raises: DataError if the tokens are not those of the turns.
    """
    turns = rollout.trajectory.turns
    try:
        tokens = rollout.list_turn_tokens()
    except DataError as error:
        raise DataError(f"turn_credit: {error}") from error
    order = _order_turns(turns)
    rewards = [task_weight * turns[index].reward for index in order]
    if rewards:
        rewards[-1] = rollout.reward - math.fsum(rewards[:-1])
    return [
        SampleTurn(tokens[index], _find_state(rollout, index, tokens[index].start), reward)
        for index, reward in zip(order, rewards, strict=True)
    ]


def _order_turns(turns: Sequence[Turn]) -> list[int]:
    """Return the turns' indices in the order in which they were taken: an agent's conversations may alternate."""
    calls = [turn.info.get("call") for turn in turns if "conversation" in turn.info]
    numbers = [call for call in calls if isinstance(call, int)]
    if sorted(numbers) != list(range(1, len(turns) + 1)):
        return list(range(len(turns)))
    return [numbers.index(number) for number in range(1, len(turns) + 1)]


def _find_state(rollout: Rollout, index: int, start: int) -> Hashable:
    """Return the key of the state in which a turn was taken; `start`: index of its first token."""
    previous = rollout.trajectory.turns[index - 1] if index else None
    if previous is not None and previous.state is not None:
        return "state", previous.state
    if previous is not None and previous.observation is not None:
        return "observation", previous.observation
    if previous is None:
        return "prompt", *rollout.prompt_ids
    begin = max((at for at in rollout.context_starts if at <= start), default=0)
    return "prompt", *rollout.completion_ids[begin:start]


def estimate_token_advantages(
    episode_advantages_G: torch.Tensor,
    turns: Sequence[Sequence[SampleTurn]],
    lengths: Sequence[int],
    settings: TurnCreditSettings,
    method: GroupMethod,
    penalties: Sequence[torch.Tensor] | None,
    comparison: TurnComparison,
) -> list[list[float]]:
    """Estimate the advantage of each completion token of the rollouts of one group.

    Args:
        episode_advantages_G: float64 [G].
        turns: of each rollout.
        lengths: completion tokens of each rollout.
        penalties: float64 [T] of each rollout, subtracted from the reward of the turn of each token; None = none.
        comparison: takes the counts.
    Returns: [T] of each rollout, 0 at tokens of no turn.
    """
    rewards = []
    for number, row in enumerate(turns):
        rewards_N = torch.tensor([turn.reward for turn in row], dtype=torch.float64)
        for index, turn in enumerate(row if penalties is not None else ()):
            assert penalties is not None
            rewards_N[index] -= penalties[number][turn.tokens.start : turn.tokens.stop].sum()
        rewards.append(rewards_N)
    keys = [[_build_key(turn, n, settings) for n, turn in enumerate(row)] for row in turns]
    result = turn_advantages(
        episode_advantages_G,
        rewards,
        keys,
        gamma=settings.gamma,
        episode_weight=settings.episode_weight,
        step_weight=settings.step_weight,
        method=method,
    )
    comparison.set_sizes += result.set_sizes
    flat_keys = [key for row in keys for key in row]
    comparison.step_advantages += [
        value
        for value, key in zip(result.step_advantages_K.tolist(), flat_keys, strict=True)
        if key is not None
    ]
    token_advantages = [[0.0] * length for length in lengths]
    for values, row, advantages_N in zip(token_advantages, turns, result.advantages, strict=True):
        for turn, advantage in zip(row, advantages_N.tolist(), strict=True):
            values[turn.tokens.start : turn.tokens.stop] = [advantage] * len(turn.tokens)
    return token_advantages


def _build_key(turn: SampleTurn, number: int, settings: TurnCreditSettings) -> Hashable:
    """Return the key of the turns that a turn is compared with; None = it carries no loss."""
    if not len(turn.tokens):
        return None
    if settings.compare == "states":
        return turn.state
    return "turn", number if settings.compare == "turns" else 0
