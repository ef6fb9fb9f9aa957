"""Buffer of an iteration's steps: filled step by step, read flat, with advantages by GAE or V-trace.

Suffixes: T steps of an iteration, N environments, M real steps of the buffer (rows), D numbers of an observation,
E segments of episodes within the buffer, L steps of the longest segment. M1 is a column, [M, 1].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import gae, vtrace
from rl_core.networks.actor_critic import MAX_DEVIATIONS, VARIANCE_EPSILON, ActionSpace, ActorCritic
from rl_core.networks.vector_environment import VectorStep

ValueFunction = Callable[[torch.Tensor], torch.Tensor]  # observations [B, D] to values [B]


@dataclass(frozen=True, slots=True)
class EpisodeSegments:
    """Positions of the real steps in a table with one row per segment of an episode, in the order of time."""

    rows_M: torch.Tensor  # int64
    columns_M: torch.Tensor  # int64
    mask_EL: torch.Tensor  # bool, True = a real step
    last_E: torch.Tensor  # int64, index of each segment's last step among the M steps

    def arrange_by_segment(self, values_M: torch.Tensor) -> torch.Tensor:
        """Arrange [M] as a table [E, L], 0 after a segment's end."""
        table_EL = values_M.new_zeros(self.mask_EL.shape)
        table_EL[self.rows_M, self.columns_M] = values_M
        return table_EL

    def flatten_table(self, table_EL: torch.Tensor) -> torch.Tensor:
        """Flatten a table [E, L] to [M]."""
        return table_EL[self.rows_M, self.columns_M]


@dataclass
class NetworkBatch:
    """Rows to learn from."""

    observations_MD: torch.Tensor
    actions: torch.Tensor  # int64 [M], or float [M, A]
    old_logprobs_M1: torch.Tensor  # of the policy before the first optimizer step, nats
    advantages_M1: torch.Tensor
    targets_M1: torch.Tensor  # of the value network
    values_M1: torch.Tensor  # of the value network before the first optimizer step

    def select_rows(self, index: torch.Tensor | slice) -> NetworkBatch:
        """Select some of the rows."""
        return NetworkBatch(*(getattr(self, name)[index] for name in BATCH_FIELDS))

    def split_into_minibatches(self, count: int, rng: np.random.Generator) -> list[NetworkBatch]:
        """Split the rows in random order into `count` parts whose sizes differ by one at most; in order if count is 1.

        Raises: DataError if count is not 1 to M.
        """
        num_rows = len(self.advantages_M1)
        if not 1 <= count <= num_rows:
            raise DataError(f"count: {count} minibatches of {num_rows} rows")
        if count == 1:
            return [self]
        shuffled = self.select_rows(torch.from_numpy(rng.permutation(num_rows)))
        smallest, num_larger = divmod(num_rows, count)
        minibatches, start = [], 0
        for index in range(count):
            stop = start + smallest + (index < num_larger)
            minibatches.append(shuffled.select_rows(slice(start, stop)))
            start = stop
        return minibatches


BATCH_FIELDS = tuple(field.name for field in dataclasses.fields(NetworkBatch))


class RewardStatistics:
    """Scale of rewards: the running deviation of their discounted sum within each environment's episode.

    The sum is s = r + gamma s', s' that of the episode's previous step. Rewards are divided by its standard deviation
    over all steps so far and clipped to +-10; their sign and zero stay. Source: Engstrom et al. 2020,
    arXiv:2005.12729, section 3 (reward scaling).
    """

    def __init__(self, environments: int, gamma: float) -> None:
        self.gamma = gamma
        self.sums_N = np.zeros(environments)
        self.count, self.mean, self.squares = 0, 0.0, 0.0  # squares: sum of squared deviations

    def update(self, buffer: StepBuffer) -> None:
        """Add the steps of a full buffer, which follow those of the buffer before."""
        sums_TN = np.zeros(buffer.shape)
        ended_TN = buffer.terminated | buffer.truncated
        for time, (rewards_N, is_action_N) in enumerate(
            zip(buffer.rewards, buffer.is_action, strict=True)
        ):
            self.sums_N = np.where(is_action_N, rewards_N + self.gamma * self.sums_N, 0.0)
            sums_TN[time] = self.sums_N
            self.sums_N = np.where(ended_TN[time], 0.0, self.sums_N)
        sums_M = sums_TN[buffer.is_action]
        num_rows, mean = len(sums_M), float(sums_M.mean())
        total, difference = self.count + num_rows, mean - self.mean
        self.squares += float(np.square(sums_M - mean).sum())
        self.squares += difference * difference * self.count * num_rows / total
        self.mean += difference * num_rows / total
        self.count = total

    def reset_sums(self) -> None:
        """Forget the episodes in play, which are not continued."""
        self.sums_N = np.zeros_like(self.sums_N)

    def normalise(self, rewards_M: torch.Tensor) -> torch.Tensor:
        """Compute r / sqrt(variance + 1e-8), clipped; unchanged before the first update."""
        if not self.count:
            return rewards_M
        deviation = math.sqrt(self.squares / self.count + VARIANCE_EPSILON)
        return (rewards_M / deviation).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and the sums of the episodes in play."""
        return {
            "sums": self.sums_N.copy(),
            "count": self.count,
            "mean": self.mean,
            "squares": self.squares,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.sums_N = np.array(state["sums"])
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class StepBuffer:
    """The steps of T x N actions: allocated once, filled step by step, read flat.

    It also stores steps in which an environment only reset itself, but excludes them from everything that is read.

        buffer = StepBuffer(128, 8, model.shape.observation_size, model.shape.actions)
        for _ in range(128):
            buffer.add(observations, actions, rewards, terminated, truncated, after)
        batch = buffer.build_batch(model, gamma=0.99, gae_lambda=0.95)
        for minibatch in batch.split_into_minibatches(4, rng):
            ...
        buffer.clear_steps()
    """

    def __init__(
        self, steps: int, environments: int, observation_size: int, actions: ActionSpace
    ) -> None:
        """Allocate the memory. Raises: DataError for sizes below 1."""
        if min(steps, environments, observation_size) < 1:
            raise DataError(
                f"sizes: {steps} steps, {environments} environments and observations of {observation_size} numbers "
                "must all be at least 1"
            )
        shape = (steps, environments)
        self.shape = shape
        self.action_space = actions
        self.num_filled = 0
        self.observations = np.zeros((*shape, observation_size), np.float32)
        self.after = np.zeros((*shape, observation_size), np.float32)  # where the actions led
        if actions.is_discrete:
            self.actions = np.zeros(shape, np.int64)
        else:
            self.actions = np.zeros((*shape, actions.size), np.float32)
        self.rewards = np.zeros(shape, np.float32)
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self.is_action = np.zeros(shape, bool)
        # Log-probs of the policy that acted, nats; set when the buffer is full.
        self.behaviour_logprobs_M = torch.zeros(0)

    def add_step(self, observations_ND: np.ndarray, actions: np.ndarray, step: VectorStep) -> None:
        """Add one step of all environments. Raises: DataError if the buffer is full."""
        if self.num_filled == self.shape[0]:
            raise DataError(
                f"the buffer already contains {self.shape[0]} steps; read it, then `clear_steps`"
            )
        index = self.num_filled
        self.observations[index], self.actions[index] = observations_ND, actions
        self.after[index], self.rewards[index] = step.after_ND, step.rewards_N
        self.terminated[index], self.truncated[index] = step.terminated_N, step.truncated_N
        self.is_action[index] = step.is_action_N
        self.num_filled += 1

    def add(
        self,
        observations_ND: Any,
        actions: Any,
        rewards_N: Any,
        terminated_N: Any,
        truncated_N: Any,
        after_ND: Any,
        is_action_N: Any = None,
    ) -> None:
        """Add one step of all environments, from arrays, tensors or lists.

        Args:
            observations_ND: float [N, D], that the actions were chosen for.
            actions: int [N], counted from 0, or float [N, A], as drawn, before clipping to bounds.
            terminated_N: bool, True = a terminal state was reached, after which the value is 0.
            truncated_N: bool, True = the episode was cut off, so the state after it has a value; with terminated_N, the
                state is terminal.
            after_ND: float [N, D], the observation that the action led to, before any reset: of a gymnasium vector in
                same-step mode, `infos["final_obs"]` where an episode ended.
            is_action_N: bool, False = the environment ignored the action and reset (next-step mode); None = all True.
        Raises: DataError if the buffer is full, on shapes, and for numbers that are not finite; nothing is added then.
        """
        size = self.shape[1]
        is_action_N = np.ones(size, bool) if is_action_N is None else is_action_N
        given: dict[str, tuple[Any, np.ndarray]] = {
            "observations": (observations_ND, self.observations),
            "actions": (actions, self.actions),
            "rewards": (rewards_N, self.rewards),
            "terminated": (terminated_N, self.terminated),
            "truncated": (truncated_N, self.truncated),
            "after": (after_ND, self.after),
            "is_action": (is_action_N, self.is_action),
        }
        arrays: dict[str, np.ndarray] = {}
        for name, (values, field) in given.items():
            array = np.asarray(values)
            if array.shape != field.shape[1:]:
                raise DataError(f"{name}: shape {array.shape}, expected {field.shape[1:]}")
            if name == "actions":
                self._check_actions(array)
            with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused
                arrays[name] = array.astype(field.dtype)
            if not np.isfinite(arrays[name]).all():
                raise DataError(f"{name}: a number is not finite")
        step = VectorStep(
            arrays["after"],
            arrays["rewards"],
            arrays["terminated"],
            arrays["truncated"] & ~arrays["terminated"],
            arrays["after"],
            arrays["is_action"],
        )
        self.add_step(arrays["observations"], arrays["actions"], step)

    def _check_actions(self, actions: np.ndarray) -> None:
        """Refuse numbers of alternatives that do not exist."""
        if not self.action_space.is_discrete:
            return
        if not np.issubdtype(actions.dtype, np.integer):
            raise DataError(f"actions: {actions.dtype}, expected integers")
        outside = actions[(actions < 0) | (actions >= self.action_space.size)]
        if len(outside):
            raise DataError(
                f"actions: {outside[0]} is not one of 0 to {self.action_space.size - 1}"
            )

    def build_batch(
        self, model: ActorCritic, *, gamma: float, gae_lambda: float, reward_scale: float = 1.0
    ) -> NetworkBatch:
        """Build rows of all real steps: advantages and value targets by GAE, log-probabilities of the model's policy.

        Call it before the model changes. Advantages are not normalised.
        Raises: DataError if the buffer is not full.
        """
        if self.num_filled < self.shape[0]:
            raise DataError(f"the buffer contains {self.num_filled} of {self.shape[0]} steps")
        advantages_M, targets_M, values_M = self.estimate_advantages(
            model.values, gamma=gamma, trace_lambda=gae_lambda, reward_scale=reward_scale
        )
        observations_MD, actions = (
            self.read_real_steps("observations"),
            self.read_real_steps("actions"),
        )
        with torch.no_grad():
            _, logprobs_M, _ = model.evaluate_actions(observations_MD, actions)
        columns = (x_M[:, None] for x_M in (logprobs_M, advantages_M, targets_M, values_M))
        return NetworkBatch(observations_MD, actions, *columns)

    def clear_steps(self) -> None:
        """Empty the buffer, keeping its memory."""
        self.num_filled = 0

    @property
    def num_steps(self) -> int:
        """M, the number of real steps."""
        return int(self.is_action.sum())

    def read_real_steps(self, name: str) -> torch.Tensor:
        """Return a copy of a field's real steps, [M] or [M, ...], environment after environment."""
        values, mask = getattr(self, name).swapaxes(0, 1), self.is_action.swapaxes(0, 1)
        return torch.from_numpy(values[mask])

    def split_into_segments(self) -> EpisodeSegments:
        """Split the real steps after every end of an episode, and at the end of the buffer."""
        mask_NT = self.is_action.swapaxes(0, 1)
        ended_NT = (self.terminated | self.truncated).swapaxes(0, 1) & mask_NT
        ended_M = ended_NT[mask_NT]
        counts_N = mask_NT.sum(1)
        stops = np.flatnonzero(ended_M) + 1
        borders = np.unique(np.concatenate([[0], stops, np.cumsum(counts_N)]))
        lengths_E = np.diff(borders)
        rows_M = np.repeat(np.arange(len(lengths_E)), lengths_E)
        columns_M = np.arange(len(ended_M)) - np.repeat(borders[:-1], lengths_E)
        mask_EL = np.arange(lengths_E.max())[None, :] < lengths_E[:, None]
        return EpisodeSegments(
            torch.from_numpy(rows_M),
            torch.from_numpy(columns_M),
            torch.from_numpy(mask_EL),
            torch.from_numpy(borders[1:] - 1),
        )

    def estimate_advantages(
        self,
        values: ValueFunction,
        *,
        gamma: float,
        trace_lambda: float,
        reward_scale: float = 1.0,
        reward_statistics: RewardStatistics | None = None,
        ratios_M: torch.Tensor | None = None,
        rho_cap: float = 1.0,
        c_cap: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Estimate advantages, targets of the value network and current values of the real steps; float [M] each.

        A segment that ends in a truncation, or with the buffer, is bootstrapped from the value of the observation that
        its last action led to; the value after a terminal state is 0.

        Args:
            reward_scale: factor of the rewards.
            reward_statistics: normalise the rewards before; None = they stay as they are.
            ratios_M: probability of each action under the current policy over that of the policy that acted: V-trace.
                None = the steps are from the current policy: GAE.
        """
        segments = self.split_into_segments()
        values_M = values(self.read_real_steps("observations"))
        alive_E = ~self.read_real_steps("terminated")[segments.last_E]
        bootstrap_E = values(self.read_real_steps("after")[segments.last_E]) * alive_E
        rewards_M = self.read_real_steps("rewards")
        if reward_statistics is not None:
            rewards_M = reward_statistics.normalise(rewards_M)
        rewards_M = rewards_M * reward_scale
        rewards_EL = segments.arrange_by_segment(rewards_M)
        values_EL = segments.arrange_by_segment(values_M)
        if ratios_M is None:
            advantages_EL, targets_EL = gae(
                rewards_EL,
                values_EL,
                segments.mask_EL,
                gamma=gamma,
                gae_lambda=trace_lambda,
                bootstrap_B=bootstrap_E,
            )
        else:
            advantages_EL, targets_EL = vtrace(
                rewards_EL,
                values_EL,
                segments.arrange_by_segment(ratios_M),
                segments.mask_EL,
                gamma=gamma,
                trace_lambda=trace_lambda,
                rho_cap=rho_cap,
                c_cap=c_cap,
                bootstrap_B=bootstrap_E,
            )
        advantages_M = segments.flatten_table(advantages_EL)
        return advantages_M, segments.flatten_table(targets_EL), values_M

    def state_dict(self) -> dict[str, Any]:
        """Return all fields of a full buffer that is replayed."""
        return {
            "observations": self.observations,
            "after": self.after,
            "actions": self.actions,
            "rewards": self.rewards,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "is_action": self.is_action,
            "behaviour_logprobs": self.behaviour_logprobs_M,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        for name, value in state.items():
            if name != "behaviour_logprobs":
                getattr(self, name)[:] = value
        self.behaviour_logprobs_M = state["behaviour_logprobs"]
        self.num_filled = self.shape[0]
