"""Gymnasium's vectorised environments, one interface for their three autoreset modes.

Environments that are made here reset by hand (`AutoresetMode.DISABLED`): every episode has a seed of its own, so their
state is the seeds and the actions since, which a resume plays again. A `VectorEnv` that a user hands in keeps its mode.

Suffixes: N environments, D numbers of an observation, A numbers of an action.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.errors import CheckpointError, EnvironmentFault
from rl_core.networks.spaces import action_space, observation_size, observations_of, to_environment

__all__ = ["VectorEnvironment", "VectorStep"]

logger = logging.getLogger(__name__)

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"  # values of gymnasium's AutoresetMode


@dataclass(frozen=True, slots=True)
class VectorStep:
    """One step of all environments."""

    observations_ND: np.ndarray  # float32, to act on next
    rewards_N: np.ndarray  # float32
    terminated_N: np.ndarray  # bool, an end after which nothing comes: its value is 0
    truncated_N: np.ndarray  # bool, an episode that was cut: what would have come has a value
    after_ND: np.ndarray  # float32, the observation that the action led to, before any reset
    is_action_N: np.ndarray  # bool, False = the environment only reset itself, whatever the action (NEXT_STEP)


class VectorEnvironment:
    """Episodes of a vectorised environment, their returns, and a state from which they go on."""

    def __init__(self, inner: Any, name: str, next_seed: Callable[[], int]) -> None:
        """`inner`: a gymnasium `VectorEnv`. `next_seed`: gives the seed of the next episode.

        Raises: SettingsError for spaces that a network cannot read or act in.
        """
        self.inner = inner
        self.name = name
        self.size: int = inner.num_envs
        self.actions = action_space(inner.single_action_space)
        self.observation_size = observation_size(inner.single_observation_space)
        mode = inner.metadata.get("autoreset_mode", NEXT_STEP)
        self.mode: str = getattr(mode, "value", mode)
        self._next_seed = next_seed
        self._ended_N = np.zeros(self.size, bool)  # NEXT_STEP: resets at the next step
        self._seeds = [0] * self.size  # of the present episodes
        self._played: list[list[np.ndarray]] = [[] for _ in range(self.size)]  # actions of the present episodes
        self.observations_ND = np.zeros((self.size, self.observation_size), np.float32)
        self.returns_N = np.zeros(self.size)  # of the present episodes so far
        self.lengths_N = np.zeros(self.size, np.int64)

    @property
    def restores(self) -> bool:
        """True = `load_state_dict` brings back the very episodes that were being played."""
        return self.mode == DISABLED

    def reset(self) -> None:
        """Begin a new episode in every environment."""
        self._begin(np.ones(self.size, bool), [self._next_seed() for _ in range(self.size)])
        self._ended_N[:] = False

    def step(self, actions: np.ndarray) -> VectorStep:
        """Act in every environment; ended episodes are followed by new ones.

        Args:
            actions: int64 [N] counted from 0, or float [N, A]; clipped to the bounds of the space.
        Raises: EnvironmentFault where the environment raises or answers with a number that is not finite.
        """
        taken = to_environment(actions, self.actions)
        is_action_N = ~self._ended_N
        with self._faults("step"):
            found, rewards_N, terminated_N, truncated_N, infos = self.inner.step(taken)
            observations_ND = self._read(found)
        rewards_N = np.asarray(rewards_N, np.float32)
        if not np.isfinite(rewards_N).all():
            raise EnvironmentFault(f"{self._where()}: reward {rewards_N.tolist()} is not finite")
        terminated_N, truncated_N = np.asarray(terminated_N, bool), np.asarray(truncated_N, bool)
        ended_N = terminated_N | truncated_N
        after_ND = self._before_reset(observations_ND, ended_N, infos)
        self.returns_N += rewards_N * is_action_N
        self.lengths_N += is_action_N
        self.observations_ND = observations_ND
        if self.mode == DISABLED:
            self._record(taken)
            if ended_N.any():
                seeds = [self._next_seed() if ended else self._seeds[i] for i, ended in enumerate(ended_N)]
                self._begin(ended_N, seeds)
        elif self.mode == NEXT_STEP:
            self._ended_N = ended_N
        return VectorStep(
            self.observations_ND, rewards_N, terminated_N, truncated_N & ~terminated_N, after_ND, is_action_N
        )

    def take_ended(self, step: VectorStep) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended in this step; their counts begin anew."""
        ended_N = step.terminated_N | step.truncated_N
        if not ended_N.any():
            return [], []
        found = self.returns_N[ended_N].tolist(), self.lengths_N[ended_N].tolist()
        self.returns_N[ended_N] = 0.0
        self.lengths_N[ended_N] = 0
        return found

    def close(self) -> None:
        """Close the environments."""
        self.inner.close()

    def _before_reset(self, observations_ND: np.ndarray, ended_N: np.ndarray, infos: Mapping[str, Any]) -> np.ndarray:
        """Observations that the actions led to: SAME_STEP hands those of ended episodes over in `infos`."""
        if self.mode != SAME_STEP or not ended_N.any():
            return observations_ND
        if "final_obs" not in infos:
            raise EnvironmentFault(f"{self._where()}: an episode ended, and infos hold no 'final_obs' of it")
        after_ND = observations_ND.copy()
        places = np.flatnonzero(ended_N)
        last = np.stack([np.asarray(infos["final_obs"][place]) for place in places])
        after_ND[places] = observations_of(last, self.inner.single_observation_space)
        return after_ND

    def _begin(self, mask_N: np.ndarray, seeds: list[int]) -> None:
        """New episodes where the mask is True; in a mode that resets by itself, in all environments."""
        with self._faults("reset"):
            if self.mode == DISABLED:
                found, _ = self.inner.reset(seed=list(seeds), options={"reset_mask": mask_N.copy()})
            else:  # once; vectors that are one program (`vector_entry_point`) take a single seed
                found, _ = self.inner.reset(seed=seeds[0])
            self.observations_ND = self._read(found)
        for place in np.flatnonzero(mask_N):
            self._seeds[place] = seeds[place]
            self._played[place] = []

    def _record(self, taken: np.ndarray) -> None:
        for place, action in enumerate(taken):
            self._played[place].append(action)

    def _read(self, found: Any) -> np.ndarray:
        observations_ND = observations_of(found, self.inner.single_observation_space)
        if not np.isfinite(observations_ND).all():
            raise EnvironmentFault(f"{self._where()}: an observation is not finite")
        return observations_ND

    def _where(self) -> str:
        seeds = f" (seeds of the episodes: {self._seeds}, steps: {self.lengths_N.tolist()})" if self.restores else ""
        return f"environment '{self.name}'{seeds}"

    @contextmanager
    def _faults(self, call: str) -> Iterator[None]:
        """Errors of the environment's code as an EnvironmentFault that says where it happened."""
        try:
            yield
        except EnvironmentFault:
            raise
        except Exception as error:  # whatever a user's environment raises
            raise EnvironmentFault(
                f"{self._where()} raised {type(error).__name__} in {call}: {error}. Nothing of this iteration is "
                "learned from; mend the environment and start the same command again"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Seeds and actions of the present episodes, and their observations, by which a resume checks itself."""
        played = [np.stack(actions) if actions else None for actions in self._played] if self.restores else []
        return {
            "seeds": list(self._seeds), "played": played, "observations": self.observations_ND.copy(),
            "returns": self.returns_N.copy(), "lengths": self.lengths_N.copy(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Play the present episodes again up to where they were; new ones where the mode cannot (a warning says so).

        Raises: CheckpointError where the same seeds and actions lead elsewhere.
        """
        if len(state["seeds"]) != self.size:
            raise CheckpointError(f"environments: {len(state['seeds'])} in the checkpoint, {self.size} now")
        if not self.restores:
            logger.warning(
                "environment '%s' resets itself (%s), so its episodes cannot be played again: resumed with new ones",
                self.name, self.mode,
            )  # fmt: skip
            self.returns_N, self.lengths_N = np.zeros(self.size), np.zeros(self.size, np.int64)
            self.reset()
            return
        self._replay(
            [int(seed) for seed in state["seeds"]], [[] if one is None else list(one) for one in state["played"]]
        )
        if not np.array_equal(self.observations_ND, state["observations"]):
            raise CheckpointError(
                f"environment '{self.name}' is not deterministic: the same seeds and actions led to other observations "
                "than those of the checkpoint, so it cannot be resumed; begin anew with --fresh"
            )
        self.returns_N, self.lengths_N = np.array(state["returns"]), np.array(state["lengths"])

    def _replay(self, seeds: list[int], played: list[list[np.ndarray]]) -> None:
        """Play all episodes so that they arrive at the same step; before its turn each plays something that is lost."""
        lengths = [len(actions) for actions in played]
        longest = max(lengths)
        idle = next((actions[0] for actions in played if actions), None)
        ended_N = np.ones(self.size, bool)
        for time in range(longest + 1):
            starts_N = np.array([time == longest - length for length in lengths])
            if (due_N := ended_N | starts_N).any():
                self._begin(due_N, seeds)
            if time == longest:
                break
            assert idle is not None
            actions = [
                played[i][time - longest + lengths[i]] if time >= longest - lengths[i] else idle
                for i in range(self.size)
            ]
            with self._faults("step"):
                found, _, terminated_N, truncated_N, _ = self.inner.step(np.stack(actions))
                self.observations_ND = self._read(found)
            ended_N = np.asarray(terminated_N, bool) | np.asarray(truncated_N, bool)
        self._seeds, self._played = seeds, [list(actions) for actions in played]
