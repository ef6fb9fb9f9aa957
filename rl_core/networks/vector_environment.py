"""Gymnasium environments in vectors: making them, conversion of their spaces, one interface for three autoreset modes.

Environments made here reset on request (`AutoresetMode.DISABLED`): every episode has its own seed, so their state is
the seeds and the actions since, which a resume replays. A `VectorEnv` passed by the user keeps its mode.

Suffixes: N environments, D numbers of an observation, A numbers of an action.
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
from rl_core.types import REWARD_LIMIT
from rl_core.user_code.checks import USER_CODE_ERRORS
from rl_core.user_code.load import import_subclass

logger = logging.getLogger(__name__)

EnvironmentFactory = Callable[[], Any]  # makes a new gymnasium.Env at each call

# Values of gymnasium's AutoresetMode.
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"

# Seeds of episodes: reported ones share none with training or with the selection of the best weights.
TRAINING_SEEDS = range(HELDOUT_START)
VALIDATION_SEEDS = range(HELDOUT_START, HELDOUT_START + HELDOUT_START // 2)
TEST_SEEDS = range(HELDOUT_START + HELDOUT_START // 2, 2 * HELDOUT_START)


def _find_space_kind(space: Any) -> str:
    """Return Box or Discrete by class name, so that gymnasium need not be imported; "" for another space."""
    names = [base.__name__ for base in type(space).__mro__]
    return next((name for name in names if name in ("Box", "Discrete")), "")


def convert_action_space(space: Any) -> ActionSpace:
    """Convert an action space for a network. Raises: SettingsError unless it is Discrete, or Box of numbers."""
    if _find_space_kind(space) == "Discrete":
        return ActionSpace("discrete", int(space.n), start=int(space.start))
    is_real_box = _find_space_kind(space) == "Box" and np.issubdtype(space.dtype, np.floating)
    if is_real_box and math.prod(space.shape) > 0:
        low = tuple(np.asarray(space.low, np.float64).flatten().tolist())
        high = tuple(np.asarray(space.high, np.float64).flatten().tolist())
        return ActionSpace("continuous", len(low), low=low, high=high, shape=tuple(space.shape))
    raise SettingsError(
        f"environment: actions are {space}; a network acts in Discrete, or in Box of real numbers"
    )


def count_observation_values(space: Any) -> int:
    """Count the numbers of an observation: all of a Box, one per value of a Discrete.

    Raises: SettingsError for another space.
    """
    if _find_space_kind(space) == "Discrete":
        return int(space.n)
    if _find_space_kind(space) == "Box" and math.prod(space.shape) > 0:
        return math.prod(space.shape)
    raise SettingsError(
        f"environment: observations are {space}; a network reads Box or Discrete (wrap others, for example with "
        "gymnasium.wrappers.FlattenObservation, in a class of yours: environment_class)"
    )


def flatten_observations(observations: Any, space: Any) -> np.ndarray:
    """Convert observations of several environments to float32 [N, D]; a Discrete one is one-hot."""
    values = np.asarray(observations)
    if _find_space_kind(space) == "Discrete":
        return np.eye(int(space.n), dtype=np.float32)[values.astype(np.int64) - int(space.start)]
    return values.reshape(len(values), -1).astype(np.float32)


def convert_actions(actions: np.ndarray, space: ActionSpace) -> np.ndarray:
    """Convert actions for the environments: counted from the space's start, or clipped to its bounds and shaped.

    Args:
        actions: int64 [N] counted from 0, or float [N, A].
    """
    if space.is_discrete:
        return actions + space.start
    clipped_NA = np.clip(actions, space.low, space.high).astype(np.float32)
    return clipped_NA.reshape(len(actions), *space.shape)


def compute_clipped_share(actions: np.ndarray, space: ActionSpace) -> float:
    """Compute the share of the numbers [..., A] outside the bounds of a continuous space; 0 for a discrete one."""
    if space.is_discrete:
        return 0.0
    is_outside = (actions < np.array(space.low)) | (actions > np.array(space.high))
    return float(is_outside.mean())


@dataclass(frozen=True, slots=True)
class VectorStep:
    """One step of all environments."""

    observations_ND: np.ndarray  # float32, to act on next
    rewards_N: np.ndarray  # float32
    terminated_N: np.ndarray  # bool, True = a terminal state, after which the value is 0
    truncated_N: np.ndarray  # bool, True = the episode was cut off, so its last state has a value
    after_ND: np.ndarray  # float32, the observation that the action led to, before any reset
    is_action_N: (
        np.ndarray
    )  # bool, False = the environment ignored the action and reset (NEXT_STEP)


class VectorEnvironment:
    """Episodes of a vectorised environment, their returns, and a state from which they can be continued."""

    def __init__(self, inner: Any, name: str, next_seed: Callable[[], int]) -> None:
        """Read the spaces of `inner`, a gymnasium `VectorEnv`. `next_seed`: returns the seed of the next episode.

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
        # Of the current episodes: seeds and actions so far, observations, returns and lengths.
        self._seeds = [0] * self.size
        self._played: list[list[np.ndarray]] = [[] for _ in range(self.size)]
        self.observations_ND = np.zeros((self.size, self.observation_size), np.float32)
        self.returns_N = np.zeros(self.size)
        self.lengths_N = np.zeros(self.size, np.int64)

    @property
    def can_restore(self) -> bool:
        """True if `load_state_dict` restores exactly the episodes that were being played."""
        return self.mode == DISABLED

    def reset(self) -> None:
        """Start a new episode in every environment."""
        seeds = [self._next_seed() for _ in range(self.size)]
        self._start_episodes(np.ones(self.size, bool), seeds)
        self._ended_N[:] = False

    def step(self, actions: np.ndarray) -> VectorStep:
        """Act in every environment; ended episodes are followed by new ones.

        Args:
            actions: int64 [N] counted from 0, or float [N, A]; clipped to the bounds of the space.
        Raises: EnvironmentFault if the environment raises or returns a number that is not finite.
        """
        inner_actions = convert_actions(actions, self.actions)
        is_action_N = ~self._ended_N
        with self._convert_faults("step"):
            raw, rewards_N, terminated_N, truncated_N, infos = self.inner.step(inner_actions)
            observations_ND = self._read_observations(raw)
        rewards_N = np.asarray(rewards_N, np.float32)
        if not (np.abs(rewards_N) <= REWARD_LIMIT).all():
            raise EnvironmentFault(
                f"{self._describe_position()}: reward {rewards_N.tolist()} is not finite, or beyond +-{REWARD_LIMIT:g}"
            )
        terminated_N, truncated_N = np.asarray(terminated_N, bool), np.asarray(truncated_N, bool)
        ended_N = terminated_N | truncated_N
        after_ND = self._read_final_observations(observations_ND, ended_N, infos)
        self.returns_N += rewards_N * is_action_N
        self.lengths_N += is_action_N
        self.observations_ND = observations_ND
        if self.mode == DISABLED:
            for actions_so_far, action in zip(self._played, inner_actions, strict=True):
                actions_so_far.append(action)
            if ended_N.any():
                seeds = [
                    self._next_seed() if ended else seed
                    for seed, ended in zip(self._seeds, ended_N, strict=True)
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
        """Return the returns and lengths of the episodes that ended in this step, and reset their counts."""
        ended_N = step.terminated_N | step.truncated_N
        if not ended_N.any():
            return [], []
        returns, lengths = self.returns_N[ended_N].tolist(), self.lengths_N[ended_N].tolist()
        self.returns_N[ended_N] = 0.0
        self.lengths_N[ended_N] = 0
        return returns, lengths

    def close(self) -> None:
        """Close the environments."""
        self.inner.close()

    def _read_final_observations(
        self, observations_ND: np.ndarray, ended_N: np.ndarray, infos: Mapping[str, Any]
    ) -> np.ndarray:
        """Read the observations that the actions led to; in SAME_STEP those of ended episodes are in `infos`."""
        if self.mode != SAME_STEP or not ended_N.any():
            return observations_ND
        if "final_obs" not in infos:
            raise EnvironmentFault(
                f"{self._describe_position()}: an episode ended, but infos contain no 'final_obs' of it"
            )
        after_ND = observations_ND.copy()
        ended = np.flatnonzero(ended_N)
        final = np.stack([np.asarray(infos["final_obs"][index]) for index in ended])
        after_ND[ended] = flatten_observations(final, self.inner.single_observation_space)
        return after_ND

    def _start_episodes(self, mask_N: np.ndarray, seeds: list[int]) -> None:
        """Start new episodes where the mask is True; in a mode that resets by itself, in all environments."""
        with self._convert_faults("reset"):
            if self.mode == DISABLED:
                options = {"reset_mask": mask_N.copy()}
                raw, _ = self.inner.reset(seed=list(seeds), options=options)
            else:  # only once; vectors that are one program (`vector_entry_point`) take a single seed
                raw, _ = self.inner.reset(seed=seeds[0])
            self.observations_ND = self._read_observations(raw)
        for index in np.flatnonzero(mask_N):
            self._seeds[index] = seeds[index]
            self._played[index] = []

    def _read_observations(self, raw: Any) -> np.ndarray:
        observations_ND = flatten_observations(raw, self.inner.single_observation_space)
        if not np.isfinite(observations_ND).all():
            raise EnvironmentFault(f"{self._describe_position()}: an observation is not finite")
        return observations_ND

    def _describe_position(self) -> str:
        if not self.can_restore:
            return f"environment '{self.name}'"
        steps = self.lengths_N.tolist()
        return f"environment '{self.name}' (seeds of the episodes: {self._seeds}, steps: {steps})"

    @contextmanager
    def _convert_faults(self, call: str) -> Iterator[None]:
        """Convert errors of the environment's code to an EnvironmentFault that says where they occurred."""
        try:
            yield
        except EnvironmentFault:
            raise
        except USER_CODE_ERRORS as error:  # a user's environment may raise anything
            raise EnvironmentFault(
                f"{self._describe_position()} raised {type(error).__name__} in {call}: {error}. This iteration is "
                "discarded; fix the environment and run the same command again"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Return seeds and actions of the current episodes, and their observations, which a resume compares."""
        played = []
        if self.can_restore:
            played = [np.stack(actions) if actions else None for actions in self._played]
        return {
            "seeds": list(self._seeds),
            "played": played,
            "observations": self.observations_ND.copy(),
            "returns": self.returns_N.copy(),
            "lengths": self.lengths_N.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replay the current episodes up to where they were; start new ones, with a warning, if the mode cannot replay.

        Raises: CheckpointError if the same seeds and actions lead elsewhere.
        """
        if len(state["seeds"]) != self.size:
            raise CheckpointError(
                f"environments: {len(state['seeds'])} in the checkpoint, {self.size} now"
            )
        if not self.can_restore:
            logger.warning(
                "environment '%s' resets itself (%s), so its episodes cannot be replayed: resumed with new ones",
                self.name,
                self.mode,
            )
            self.returns_N, self.lengths_N = np.zeros(self.size), np.zeros(self.size, np.int64)
            self.reset()
            return
        self._replay_episodes(
            [int(seed) for seed in state["seeds"]],
            [[] if actions is None else list(actions) for actions in state["played"]],
        )
        if not np.array_equal(self.observations_ND, state["observations"]):
            raise CheckpointError(
                f"environment '{self.name}' is not deterministic: the same seeds and actions led to other observations "
                "than those of the checkpoint, so it cannot be resumed; start over with --fresh"
            )
        self.returns_N, self.lengths_N = np.array(state["returns"]), np.array(state["lengths"])

    def _replay_episodes(self, seeds: list[int], played: list[list[np.ndarray]]) -> None:
        """Replay all episodes so that they end at the same step; shorter ones play discarded steps first."""
        lengths = [len(actions) for actions in played]
        longest = max(lengths)
        idle = next((actions[0] for actions in played if actions), None)
        ended_N = np.ones(self.size, bool)
        for time in range(longest + 1):
            starts_N = np.array([time == longest - length for length in lengths])
            due_N = ended_N | starts_N
            if due_N.any():
                self._start_episodes(due_N, seeds)
            if time == longest:
                break
            assert idle is not None
            actions = []
            for episode_actions in played:
                index = time - longest + len(episode_actions)
                actions.append(episode_actions[index] if index >= 0 else idle)
            with self._convert_faults("step"):
                raw, _, terminated_N, truncated_N, _ = self.inner.step(np.stack(actions))
                self.observations_ND = self._read_observations(raw)
            ended_N = np.asarray(terminated_N, bool) | np.asarray(truncated_N, bool)
        self._seeds, self._played = seeds, [list(actions) for actions in played]


def import_gymnasium() -> Any:
    """Import the package. Raises: SettingsError with the command that installs it."""
    return import_optional_package("gymnasium", "gymnasium", "environment: a network's environment")


def build_environment_factory(settings: NetworkSettings) -> EnvironmentFactory:
    """Build a function that makes one environment as set in the settings.

    Raises: SettingsError without the package, for an unknown id, or for a class that is not an environment.
    """
    gymnasium = import_gymnasium()
    options = dict(settings.environment_options)
    if settings.environment_class is None:
        return lambda: gymnasium.make(settings.environment, **options)
    environment_class = import_subclass(
        settings.environment_class, "environment_class", gymnasium.Env, "gymnasium.Env"
    )
    return lambda: environment_class(**options)


def make_vector_environment(
    factory: EnvironmentFactory, count: int, vectorization: str = "sync"
) -> Any:
    """Make a gymnasium `VectorEnv` of `count` environments that reset on request. Raises: SettingsError."""
    gymnasium = import_gymnasium()
    vector_class = gymnasium.vector.SyncVectorEnv
    if vectorization == "async":
        vector_class = gymnasium.vector.AsyncVectorEnv
    mode = gymnasium.vector.AutoresetMode(DISABLED)
    try:
        # No copies, because observations are converted to new arrays before the next step.
        return vector_class([factory] * count, copy=False, autoreset_mode=mode)
    except USER_CODE_ERRORS as error:
        raise SettingsError(_describe_creation_error(error)) from error


def read_environment_name(settings: NetworkSettings) -> str:
    """Return the environment's name in the settings, for messages."""
    if settings.environment_class is not None:
        return settings.environment_class
    return settings.environment


def check_environment(settings: NetworkSettings) -> None:
    """Make one environment and check its spaces. Raises: SettingsError naming the setting."""
    read_spaces(settings)


def read_spaces(settings: NetworkSettings) -> tuple[int, ActionSpace]:
    """Return the numbers of an observation, and the actions, of one environment. Raises: SettingsError naming the
    setting.
    """
    factory = build_environment_factory(settings)
    try:
        environment = factory()
    except USER_CODE_ERRORS as error:
        raise SettingsError(_describe_creation_error(error)) from error
    try:
        actions = convert_action_space(environment.action_space)
        return count_observation_values(environment.observation_space), actions
    finally:
        environment.close()


def _describe_creation_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"environment: cannot be made ({type(error).__name__}: {lines[0][:300]})"
