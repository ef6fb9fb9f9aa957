"""Spaces of Gymnasium environments as vectors: sizes, and conversion of observations and actions.

Suffixes: N environments, D numbers of an observation, A numbers of an action.

Gymnasium's vectorised environments, one interface for their three autoreset modes.

Environments that are made here reset by hand (`AutoresetMode.DISABLED`): every episode has a seed of its own, so their
state is the seeds and the actions since, which a resume plays again. A `VectorEnv` that a user hands in keeps its mode.

Suffixes: N environments, D numbers of an observation, A numbers of an action.

Gymnasium environments by id, class or function, made in vectors that reset by hand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.environments.environment import HELDOUT_START
from rl_core.environments.optional_packages import import_optional_package
from rl_core.errors import CheckpointError, EnvironmentFault, SettingsError
from rl_core.networks.actor_critic import ActionSpace
from rl_core.settings import NetworkSettings
from rl_core.user_code import import_object


def _find_space_kind(space: Any) -> str:
    """Class name of a space; spaces are recognised by it, so that gymnasium need not be imported."""
    return next(
        (base.__name__ for base in type(space).__mro__ if base.__name__ in ("Box", "Discrete")), ""
    )


def convert_action_space(space: Any) -> ActionSpace:
    """The space as a network acts in it. Raises: SettingsError for another than Discrete, or Box of numbers."""
    if _find_space_kind(space) == "Discrete":
        return ActionSpace("discrete", int(space.n), start=int(space.start))
    if (
        _find_space_kind(space) == "Box"
        and np.issubdtype(space.dtype, np.floating)
        and math.prod(space.shape) > 0
    ):
        low, high = (
            tuple(np.asarray(bound, np.float64).flatten().tolist())
            for bound in (space.low, space.high)
        )
        return ActionSpace("continuous", len(low), low=low, high=high, shape=tuple(space.shape))
    raise SettingsError(
        f"environment: actions are {space}; a network acts in Discrete, or in Box of real numbers"
    )


def count_observation_values(space: Any) -> int:
    """Numbers of an observation: of a Box all of them, of a Discrete one for each value.

    Raises: SettingsError for another space.
    """
    if _find_space_kind(space) == "Discrete":
        return int(space.n)
    if _find_space_kind(space) == "Box" and math.prod(space.shape) > 0:
        return math.prod(space.shape)
    raise SettingsError(
        f"environment: observations are {space}; a network reads Box or Discrete (wrap others, as by "
        "gymnasium.wrappers.FlattenObservation, in a class of yours: environment_class)"
    )


def flatten_observations(observations: Any, space: Any) -> np.ndarray:
    """Observations of several environments as float32 [N, D]; a Discrete one is 1 at its value and 0 elsewhere."""
    values = np.asarray(observations)
    if _find_space_kind(space) == "Discrete":
        return np.eye(int(space.n), dtype=np.float32)[values.astype(np.int64) - int(space.start)]
    return values.reshape(len(values), -1).astype(np.float32)


def convert_actions(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """Actions as the environments take them: counted from the space's start, or clipped to its bounds and shaped.

    Args:
        actions: int64 [N] counted from 0, or float [N, A].
    """
    if space.is_discrete:
        return actions + space.start
    clipped_NA = np.clip(actions, space.low, space.high).astype(np.float32)
    return clipped_NA.reshape(len(actions), *space.shape)


def compute_clipped_share(actions: np.ndarray, space: ActionSpace) -> float:
    """Share of the numbers [..., A] that lie outside the bounds of a continuous space; 0 for a discrete one."""
    if space.is_discrete:
        return 0.0
    return float(((actions < np.array(space.low)) | (actions > np.array(space.high))).mean())


logger = logging.getLogger(__name__)

NEXT_STEP, SAME_STEP, DISABLED = (
    "NextStep",
    "SameStep",
    "Disabled",
)  # values of gymnasium's AutoresetMode


@dataclass(frozen=True, slots=True)
class VectorStep:
    """One step of all environments."""

    observations_ND: np.ndarray  # float32, to act on next
    rewards_N: np.ndarray  # float32
    terminated_N: np.ndarray  # bool, an end after which nothing comes: its value is 0
    truncated_N: np.ndarray  # bool, an episode that was cut: what would have come has a value
    after_ND: np.ndarray  # float32, the observation that the action led to, before any reset
    is_action_N: (
        np.ndarray
    )  # bool, False = the environment only reset itself, whatever the action (NEXT_STEP)


class VectorEnvironment:
    """Episodes of a vectorised environment, their returns, and a state from which they go on."""

    def __init__(self, inner: Any, name: str, next_seed: Callable[[], int]) -> None:
        """`inner`: a gymnasium `VectorEnv`. `next_seed`: gives the seed of the next episode.

        Raises: SettingsError for spaces that a network cannot read or act in.
        """
        self.inner = inner
        self.name = name
        self.size: int = inner.num_envs
        self.actions = convert_action_space(inner.single_action_space)
        self.observation_size = count_observation_values(inner.single_observation_space)
        mode = inner.metadata.get("autoreset_mode", NEXT_STEP)
        self.mode: str = getattr(mode, "value", mode)
        self._next_seed = next_seed
        self._ended_N = np.zeros(self.size, bool)  # NEXT_STEP: resets at the next step
        self._seeds = [0] * self.size  # of the present episodes
        self._played: list[list[np.ndarray]] = [
            [] for _ in range(self.size)
        ]  # actions of the present episodes
        self.observations_ND = np.zeros((self.size, self.observation_size), np.float32)
        self.returns_N = np.zeros(self.size)  # of the present episodes so far
        self.lengths_N = np.zeros(self.size, np.int64)

    @property
    def can_restore(self) -> bool:
        """True = `load_state_dict` brings back the very episodes that were being played."""
        return self.mode == DISABLED

    def reset(self) -> None:
        """Begin a new episode in every environment."""
        self._start_episodes(
            np.ones(self.size, bool), [self._next_seed() for _ in range(self.size)]
        )
        self._ended_N[:] = False

    def step(self, actions: np.ndarray) -> VectorStep:
        """Act in every environment; ended episodes are followed by new ones.

        Args:
            actions: int64 [N] counted from 0, or float [N, A]; clipped to the bounds of the space.
        Raises: EnvironmentFault where the environment raises or answers with a number that is not finite.
        """
        taken = convert_actions(actions, self.actions)
        is_action_N = ~self._ended_N
        with self._convert_faults("step"):
            found, rewards_N, terminated_N, truncated_N, infos = self.inner.step(taken)
            observations_ND = self._read_observations(found)
        rewards_N = np.asarray(rewards_N, np.float32)
        if not np.isfinite(rewards_N).all():
            raise EnvironmentFault(
                f"{self._describe_position()}: reward {rewards_N.tolist()} is not finite"
            )
        terminated_N, truncated_N = np.asarray(terminated_N, bool), np.asarray(truncated_N, bool)
        ended_N = terminated_N | truncated_N
        after_ND = self._read_final_observations(observations_ND, ended_N, infos)
        self.returns_N += rewards_N * is_action_N
        self.lengths_N += is_action_N
        self.observations_ND = observations_ND
        if self.mode == DISABLED:
            self._record_actions(taken)
            if ended_N.any():
                seeds = [
                    self._next_seed() if ended else self._seeds[i]
                    for i, ended in enumerate(ended_N)
                ]
                self._start_episodes(ended_N, seeds)
        elif self.mode == NEXT_STEP:
            self._ended_N = ended_N
        return VectorStep(
            self.observations_ND,
            rewards_N,
            terminated_N,
            truncated_N & ~terminated_N,
            after_ND,
            is_action_N,
        )

    def pop_ended_episodes(self, step: VectorStep) -> tuple[list[float], list[int]]:
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

    def _read_final_observations(
        self, observations_ND: np.ndarray, ended_N: np.ndarray, infos: Mapping[str, Any]
    ) -> np.ndarray:
        """Observations that the actions led to: SAME_STEP hands those of ended episodes over in `infos`."""
        if self.mode != SAME_STEP or not ended_N.any():
            return observations_ND
        if "final_obs" not in infos:
            raise EnvironmentFault(
                f"{self._describe_position()}: an episode ended, and infos hold no 'final_obs' of it"
            )
        after_ND = observations_ND.copy()
        places = np.flatnonzero(ended_N)
        last = np.stack([np.asarray(infos["final_obs"][place]) for place in places])
        after_ND[places] = flatten_observations(last, self.inner.single_observation_space)
        return after_ND

    def _start_episodes(self, mask_N: np.ndarray, seeds: list[int]) -> None:
        """New episodes where the mask is True; in a mode that resets by itself, in all environments."""
        with self._convert_faults("reset"):
            if self.mode == DISABLED:
                found, _ = self.inner.reset(seed=list(seeds), options={"reset_mask": mask_N.copy()})
            else:  # once; vectors that are one program (`vector_entry_point`) take a single seed
                found, _ = self.inner.reset(seed=seeds[0])
            self.observations_ND = self._read_observations(found)
        for place in np.flatnonzero(mask_N):
            self._seeds[place] = seeds[place]
            self._played[place] = []

    def _record_actions(self, taken: np.ndarray) -> None:
        for place, action in enumerate(taken):
            self._played[place].append(action)

    def _read_observations(self, found: Any) -> np.ndarray:
        observations_ND = flatten_observations(found, self.inner.single_observation_space)
        if not np.isfinite(observations_ND).all():
            raise EnvironmentFault(f"{self._describe_position()}: an observation is not finite")
        return observations_ND

    def _describe_position(self) -> str:
        seeds = (
            f" (seeds of the episodes: {self._seeds}, steps: {self.lengths_N.tolist()})"
            if self.can_restore
            else ""
        )
        return f"environment '{self.name}'{seeds}"

    @contextmanager
    def _convert_faults(self, call: str) -> Iterator[None]:
        """Errors of the environment's code as an EnvironmentFault that says where it happened."""
        try:
            yield
        except EnvironmentFault:
            raise
        except Exception as error:  # whatever a user's environment raises
            raise EnvironmentFault(
                f"{self._describe_position()} raised {type(error).__name__} in {call}: {error}. Nothing of this iteration is "
                "learned from; mend the environment and start the same command again"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Seeds and actions of the present episodes, and their observations, by which a resume checks itself."""
        played = (
            [np.stack(actions) if actions else None for actions in self._played]
            if self.can_restore
            else []
        )
        return {
            "seeds": list(self._seeds),
            "played": played,
            "observations": self.observations_ND.copy(),
            "returns": self.returns_N.copy(),
            "lengths": self.lengths_N.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Play the present episodes again up to where they were; new ones where the mode cannot (a warning says so).

        Raises: CheckpointError where the same seeds and actions lead elsewhere.
        """
        if len(state["seeds"]) != self.size:
            raise CheckpointError(
                f"environments: {len(state['seeds'])} in the checkpoint, {self.size} now"
            )
        if not self.can_restore:
            logger.warning(
                "environment '%s' resets itself (%s), so its episodes cannot be played again: resumed with new ones",
                self.name,
                self.mode,
            )
            self.returns_N, self.lengths_N = np.zeros(self.size), np.zeros(self.size, np.int64)
            self.reset()
            return
        self._replay_episodes(
            [int(seed) for seed in state["seeds"]],
            [[] if one is None else list(one) for one in state["played"]],
        )
        if not np.array_equal(self.observations_ND, state["observations"]):
            raise CheckpointError(
                f"environment '{self.name}' is not deterministic: the same seeds and actions led to other observations "
                "than those of the checkpoint, so it cannot be resumed; begin anew with --fresh"
            )
        self.returns_N, self.lengths_N = np.array(state["returns"]), np.array(state["lengths"])

    def _replay_episodes(self, seeds: list[int], played: list[list[np.ndarray]]) -> None:
        """Play all episodes so that they arrive at the same step; before its turn each plays something that is lost."""
        lengths = [len(actions) for actions in played]
        longest = max(lengths)
        idle = next((actions[0] for actions in played if actions), None)
        ended_N = np.ones(self.size, bool)
        for time in range(longest + 1):
            starts_N = np.array([time == longest - length for length in lengths])
            if (due_N := ended_N | starts_N).any():
                self._start_episodes(due_N, seeds)
            if time == longest:
                break
            assert idle is not None
            actions = [
                played[i][time - longest + lengths[i]] if time >= longest - lengths[i] else idle
                for i in range(self.size)
            ]
            with self._convert_faults("step"):
                found, _, terminated_N, truncated_N, _ = self.inner.step(np.stack(actions))
                self.observations_ND = self._read_observations(found)
            ended_N = np.asarray(terminated_N, bool) | np.asarray(truncated_N, bool)
        self._seeds, self._played = seeds, [list(actions) for actions in played]


EnvironmentFactory = Callable[[], Any]  # a gymnasium.Env, a new one at each call

# Seeds of episodes: those that are reported share none with training or with the choice of the best weights.
TRAINING_SEEDS = range(HELDOUT_START)
VALIDATION_SEEDS = range(HELDOUT_START, HELDOUT_START + HELDOUT_START // 2)
TEST_SEEDS = range(HELDOUT_START + HELDOUT_START // 2, 2 * HELDOUT_START)


def import_gymnasium() -> Any:
    """The package. Raises: SettingsError with the command that installs it."""
    return import_optional_package("gymnasium", "gymnasium", "environment: a network's environment")


def build_environment_factory(settings: NetworkSettings) -> EnvironmentFactory:
    """Function that makes one environment as the settings name it.

    Raises: SettingsError without the package, for an unknown id, or a class that is none.
    """
    gymnasium = import_gymnasium()
    options = dict(settings.environment_options)
    if settings.environment_class is None:
        return lambda: gymnasium.make(settings.environment, **options)
    found = import_object(settings.environment_class, "environment_class")
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        raise SettingsError(
            f"environment_class: '{settings.environment_class}' is not a subclass of gymnasium.Env"
        )
    return lambda: found(**options)


def make_vector_environment(
    factory: EnvironmentFactory, count: int, vectorization: str = "sync"
) -> Any:
    """A gymnasium `VectorEnv` of `count` environments that are reset by hand. Raises: SettingsError."""
    gymnasium = import_gymnasium()
    kind = (
        gymnasium.vector.AsyncVectorEnv
        if vectorization == "async"
        else gymnasium.vector.SyncVectorEnv
    )
    try:
        # its observations are read into arrays of our own before the next step
        return kind(
            [factory] * count, copy=False, autoreset_mode=gymnasium.vector.AutoresetMode(DISABLED)
        )
    except Exception as error:
        raise SettingsError(_describe_creation_error(error)) from error


def read_environment_name(settings: NetworkSettings) -> str:
    """The environment as the settings name it, for people."""
    return (
        settings.environment if settings.environment_class is None else settings.environment_class
    )


def check_environment(settings: NetworkSettings) -> None:
    """Make one environment and look at its spaces. Raises: SettingsError naming the setting."""
    read_spaces(settings)


def read_spaces(settings: NetworkSettings) -> tuple[int, ActionSpace]:
    """Numbers of an observation, and the actions, of one environment. Raises: SettingsError naming the setting."""
    maker = build_environment_factory(settings)
    try:
        environment = maker()
    except Exception as error:
        raise SettingsError(_describe_creation_error(error)) from error
    try:
        actions = convert_action_space(environment.action_space)
        return count_observation_values(environment.observation_space), actions
    finally:
        environment.close()


def _describe_creation_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"environment: cannot be made ({type(error).__name__}: {lines[0][:300]})"
