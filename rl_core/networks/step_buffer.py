"""Fixed-size buffer of the steps of one iteration, and their advantages by GAE or V-trace.

Suffixes: T steps of an iteration, N environments, M = real steps of the buffer, D numbers of an observation, E parts of
episodes within the buffer, L steps of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.errors import DataError
from rl_core.losses.advantages import gae, vtrace
from rl_core.networks.actor_critic import ActionSpace
from rl_core.networks.vector_environment import VectorStep

__all__ = ["EpisodeParts", "StepBuffer"]

Values = Callable[[torch.Tensor], torch.Tensor]  # observations [B, D] to values [B]


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """Places of the real steps in a table with one row for each part of an episode, in the order of time."""

    rows_M: torch.Tensor  # int64
    columns_M: torch.Tensor  # int64
    mask_EL: torch.Tensor  # bool, True = a real step
    last_E: torch.Tensor  # int64, index among the M steps of each part's last one

    def table(self, values_M: torch.Tensor) -> torch.Tensor:
        """[M] to [E, L], 0 beyond a part's end."""
        table_EL = values_M.new_zeros(self.mask_EL.shape)
        table_EL[self.rows_M, self.columns_M] = values_M
        return table_EL

    def flat(self, table_EL: torch.Tensor) -> torch.Tensor:
        """[E, L] to [M]."""
        return table_EL[self.rows_M, self.columns_M]


class StepBuffer:
    """The steps of T x N actions: allocated once, filled step by step, read flat.

    Steps in which an environment only reset itself are in it, and left out of everything that is read.
    """

    def __init__(self, steps: int, environments: int, observation_size: int, actions: ActionSpace) -> None:
        shape = (steps, environments)
        self.shape = shape
        self.filled = 0
        self.observations = np.zeros((*shape, observation_size), np.float32)
        self.after = np.zeros((*shape, observation_size), np.float32)  # observations that the actions led to
        self.actions = (
            np.zeros(shape, np.int64) if actions.is_discrete else np.zeros((*shape, actions.size), np.float32)
        )
        self.rewards = np.zeros(shape, np.float32)
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self.is_action = np.zeros(shape, bool)
        self.behaviour_logprobs_M = torch.zeros(0)  # of the policy that acted, nats; set once the buffer is full

    def add(self, observations_ND: np.ndarray, actions: np.ndarray, step: VectorStep) -> None:
        """Add one step of all environments. Raises: DataError where the buffer is full."""
        if self.filled == self.shape[0]:
            raise DataError(f"the buffer holds {self.shape[0]} steps already; read it, then `clear`")
        place = self.filled
        self.observations[place], self.actions[place] = observations_ND, actions
        self.after[place], self.rewards[place] = step.after_ND, step.rewards_N
        self.terminated[place], self.truncated[place] = step.terminated_N, step.truncated_N
        self.is_action[place] = step.is_action_N
        self.filled += 1

    def clear(self) -> None:
        """Empty the buffer; its memory is used again."""
        self.filled = 0

    @property
    def num_steps(self) -> int:
        """M, the real steps."""
        return int(self.is_action.sum())

    def flat(self, name: str) -> torch.Tensor:
        """A field's real steps, [M] or [M, ...], environment after environment; a copy."""
        values, mask = getattr(self, name).swapaxes(0, 1), self.is_action.swapaxes(0, 1)
        return torch.from_numpy(values[mask])

    def parts(self) -> EpisodeParts:
        """The real steps cut behind every end of an episode, and at the end of the buffer."""
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
        return EpisodeParts(*(torch.from_numpy(part) for part in (rows_M, columns_M, mask_EL, borders[1:] - 1)))

    def estimate(
        self,
        values: Values,
        *,
        gamma: float,
        trace_lambda: float,
        reward_scale: float = 1.0,
        ratios_M: torch.Tensor | None = None,
        rho_cap: float = 1.0,
        c_cap: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Advantages, targets of the value network and present values of the real steps; float [M] each.

        A part of an episode that ends in a truncation, or with the buffer, goes on with the value of the observation
        that its last action led to; one that terminated is worth 0 from there.

        Args:
            ratios_M: probability of each action under the present policy over that of the policy that acted: V-trace.
                None = the steps are the present policy's own: GAE.
        """
        parts = self.parts()
        values_M = values(self.flat("observations"))
        alive_E = ~self.flat("terminated")[parts.last_E]
        bootstrap_E = values(self.flat("after")[parts.last_E]) * alive_E
        rewards_EL, values_EL = parts.table(self.flat("rewards") * reward_scale), parts.table(values_M)
        if ratios_M is None:
            found = gae(
                rewards_EL, values_EL, parts.mask_EL, gamma=gamma, gae_lambda=trace_lambda, bootstrap_B=bootstrap_E
            )
        else:
            found = vtrace(
                rewards_EL, values_EL, parts.table(ratios_M), parts.mask_EL, gamma=gamma, trace_lambda=trace_lambda,
                rho_cap=rho_cap, c_cap=c_cap, bootstrap_B=bootstrap_E,
            )  # fmt: skip
        return parts.flat(found[0]), parts.flat(found[1]), values_M

    def state_dict(self) -> dict[str, Any]:
        """All fields, of a full buffer that is replayed."""
        names = ("observations", "after", "actions", "rewards", "terminated", "truncated", "is_action")
        return {name: getattr(self, name) for name in names} | {"behaviour_logprobs": self.behaviour_logprobs_M}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        for name, value in state.items():
            if name != "behaviour_logprobs":
                getattr(self, name)[:] = value
        self.behaviour_logprobs_M = state["behaviour_logprobs"]
        self.filled = self.shape[0]
