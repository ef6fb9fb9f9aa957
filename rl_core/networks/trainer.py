"""Trainer of an actor-critic: rollouts of a vectorised environment, PPO's update, validation on held-out seeds.

Suffixes: T steps of an iteration, N environments, A actions or numbers of an action.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_core.errors import SettingsError
from rl_core.networks.actor_critic import ActionSpace, ActorCritic, NetworkShape
from rl_core.networks.fused_loss import NetworkArrays
from rl_core.networks.network_update import NetworkUpdate, compute_policy_logprobs
from rl_core.networks.step_buffer import RewardStatistics, StepBuffer
from rl_core.networks.vector_environment import (
    NEXT_STEP,
    TEST_SEEDS,
    TRAINING_SEEDS,
    VALIDATION_SEEDS,
    EnvironmentFactory,
    VectorEnvironment,
    compute_clipped_share,
    make_vector_environment,
)
from rl_core.settings import NetworkSettings, build_settings
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep

MAX_PARALLEL_ENVIRONMENTS = 32  # limit of environments of an evaluation
NUM_RECENT_EPISODES = 100  # episodes averaged in train/episode_return
Z95 = 1.959964  # quantile of the normal distribution for a 95% interval


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """Returns and lengths of episodes, in the order of their seeds."""

    seeds: list[int]
    returns: list[float]  # undiscounted and unscaled
    lengths: list[int]
    truncated: list[bool]

    def compute_metrics(self) -> dict[str, float]:
        """Compute the mean return with its normal 95% interval, extremes, length, and share of truncated episodes."""
        returns = np.array(self.returns)
        spread = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
        half = Z95 * spread / math.sqrt(len(returns))
        mean = float(returns.mean())
        return {
            "eval/episode_return": mean,
            "eval/episode_return_low": mean - half,
            "eval/episode_return_high": mean + half,
            "eval/episode_return_min": float(returns.min()),
            "eval/episode_return_max": float(returns.max()),
            "eval/episode_length": float(np.mean(self.lengths)),
            "eval/truncated_rate": float(np.mean(self.truncated)),
            "eval/episodes": float(len(returns)),
        }

    def to_json(self) -> list[dict[str, float | bool]]:
        """Convert to one JSON object per episode."""
        rows = zip(self.seeds, self.returns, self.lengths, self.truncated, strict=True)
        return [
            {"seed": seed, "return": value, "length": length, "truncated": truncated}
            for seed, value, length, truncated in rows
        ]


def draw_action_noise(rng: np.random.Generator, count: int, actions: ActionSpace) -> np.ndarray:
    """Draw the noise that samples `count` actions (`PolicyNetwork.act`), float32 [count, A]."""
    shape = (count, actions.size)
    noise = rng.gumbel(size=shape) if actions.is_discrete else rng.standard_normal(shape)
    return noise.astype(np.float32)


class ActionNoise:
    """Noise of the sampled actions of a training, optionally correlated from step to step.

    An iteration's independent draws x come from the trainer's generator at once. With a correlation c, the noise of
    continuous actions is e = c e' + sqrt(1 - c^2) x, e' that of the episode's previous step: standard normal at every
    step, so log-probabilities stay those of the policy. Exploration then moves instead of trembling. Source:
    Hollenstein et al. 2024, arXiv:2312.11091 (correlated noise in on-policy learning).
    """

    def __init__(
        self, rng: np.random.Generator, size: int, actions: ActionSpace, correlation: float
    ) -> None:
        """Raises: SettingsError for a correlation with discrete actions."""
        if correlation and actions.is_discrete:
            raise SettingsError("noise_correlation: needs continuous actions; leave it 0")
        self._rng, self._actions, self._correlation = rng, actions, correlation
        self._previous_NA = np.zeros((size, actions.size), np.float32)
        self._has_previous_N = np.zeros(size, bool)

    def draw_steps(self, steps: int) -> np.ndarray:
        """Draw independent noise of so many steps of all environments, float32 [T, N, A]."""
        size = len(self._previous_NA)
        noise = draw_action_noise(self._rng, steps * size, self._actions)
        return noise.reshape(steps, size, -1)

    def correlate(self, independent_NA: np.ndarray) -> np.ndarray:
        """Return the next step's noise from its independent draws."""
        if not self._correlation:
            return independent_NA
        share = math.sqrt(1 - self._correlation**2)
        moved_NA = self._correlation * self._previous_NA + np.float32(share) * independent_NA
        noise_NA = np.where(self._has_previous_N[:, None], moved_NA, independent_NA)
        self._previous_NA, self._has_previous_N[:] = noise_NA.astype(np.float32), True
        return self._previous_NA

    def end_episodes(self, ended_N: np.ndarray) -> None:
        """Start with independent noise where an episode ended."""
        self._has_previous_N &= ~ended_N

    def state_dict(self) -> dict[str, Any]:
        """Return the noise of the newest step."""
        return {
            "previous": self._previous_NA.copy(),
            "has_previous": self._has_previous_N.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self._previous_NA = np.array(state["previous"])
        self._has_previous_N = np.array(state["has_previous"])


def play_episodes(
    model: ActorCritic,
    factory: EnvironmentFactory,
    seeds: Sequence[int],
    *,
    greedy: bool,
    noise_seed: int,
    name: str,
) -> PlayedEpisodes:
    """Play one episode from each seed to its end.

    Args:
        greedy: True = the likeliest action (the mean of continuous ones); False = sampled actions.
        noise_seed: of sampled actions.
    Raises: SettingsError, EnvironmentFault.
    """
    num_environments = min(MAX_PARALLEL_ENVIRONMENTS, len(seeds))
    pending = list(range(len(seeds)))[::-1]  # indices of seeds
    started: list[int] = []  # indices of the seeds of new episodes; -1 = a surplus episode

    def draw_next_seed() -> int:
        index = pending.pop() if pending else -1
        started.append(index)
        return seeds[max(index, 0)]

    vector = make_vector_environment(factory, num_environments)
    environment = VectorEnvironment(vector, name, draw_next_seed)
    rng = np.random.default_rng(noise_seed)
    returns, lengths, truncated = [0.0] * len(seeds), [0] * len(seeds), [False] * len(seeds)
    num_missing = len(seeds)
    try:
        environment.reset()
        current, started[:] = list(started), []  # current: by environment
        while num_missing:
            noise_NA = None
            if not greedy:
                noise = draw_action_noise(rng, num_environments, environment.actions)
                noise_NA = torch.from_numpy(noise)
            actions = model.act(torch.from_numpy(environment.observations_ND), noise_NA).numpy()
            step = environment.step(actions)
            ended = np.flatnonzero(step.terminated_N | step.truncated_N)
            ended_returns, ended_lengths = environment.pop_ended_episodes(step)
            for i, value, length in zip(ended, ended_returns, ended_lengths, strict=True):
                index = current[i]
                if index >= 0:
                    returns[index], lengths[index] = value, length
                    truncated[index] = bool(step.truncated_N[i])
                    num_missing -= 1
                current[i] = started.pop(0)
    finally:
        environment.close()
    return PlayedEpisodes(list(seeds), returns, lengths, truncated)


class NetworkTrainer:
    """PPO of an actor-critic on a vectorised environment; a `rl_core.training.callbacks.Trainer`.

    The statistics of normalised observations are updated with an iteration's steps after its update, so that all
    log-probs of an iteration are of the same inputs.
    """

    def __init__(
        self,
        environment_factory: EnvironmentFactory | None,
        settings: NetworkSettings | Mapping[str, Any],
        seed: int,
        *,
        name: str,
        vector: Any = None,
    ) -> None:
        """Build environment, networks and optimizer.

        Args:
            environment_factory: makes one environment; for training unless `vector` is passed, and for validation.
            name: of the environment, for messages.
            vector: a gymnasium `VectorEnv` to train in, with any autoreset mode; None = one from `environment_factory`.
        Raises: SettingsError if the environment cannot be made, or does not match the settings.
        """
        settings = build_settings(settings, NetworkSettings)
        self.settings, self.seed, self.name = settings, seed, name
        self.environment_factory = environment_factory
        self._rng = np.random.default_rng([seed, 0])
        if vector is None:
            if environment_factory is None:
                raise SettingsError("environment: needs a function that makes one, or a VectorEnv")
            vector = make_vector_environment(
                environment_factory, settings.num_environments, settings.vectorization
            )
        self.environment = VectorEnvironment(vector, name, self._draw_seed)
        if self.environment.size != settings.num_environments:
            raise SettingsError(
                f"num_environments: {settings.num_environments}, but the VectorEnv has {self.environment.size}"
            )
        if self.environment.mode == NEXT_STEP and settings.rollout_steps < 2:
            raise SettingsError(
                "rollout_steps: a VectorEnv that resets at the next step needs at least 2"
            )
        self.model = ActorCritic(self._build_network_shape(), seed).eval()
        self.optimizer_step = OptimizerStep(
            self.model,
            settings,
            settings.iterations * settings.updates_per_iteration,
            max_nonfinite=settings.max_nonfinite,
        )
        self._buffers = [self._create_buffer()]  # of the current iteration first
        # (return, length) of the newest episodes.
        self._recent: deque[tuple[float, int]] = deque(maxlen=NUM_RECENT_EPISODES)
        self._reward_statistics: RewardStatistics | None = None
        if settings.normalise_rewards:
            self._reward_statistics = RewardStatistics(self.environment.size, settings.gamma)
        self._noise = ActionNoise(
            self._rng, self.environment.size, self.environment.actions, settings.noise_correlation
        )
        self.environment_steps = 0  # real ones, of all environments
        self.episodes = 0
        self._has_started = False

    def _build_network_shape(self) -> NetworkShape:
        settings = self.settings
        return NetworkShape(
            self.environment.observation_size,
            self.environment.actions,
            settings.hidden,
            settings.activation,
            settings.initial_log_std,
            settings.normalise_observations,
        )

    def _create_buffer(self) -> StepBuffer:
        environment = self.environment
        return StepBuffer(
            self.settings.rollout_steps,
            environment.size,
            environment.observation_size,
            environment.actions,
        )

    def _draw_seed(self) -> int:
        return int(self._rng.integers(TRAINING_SEEDS.start, TRAINING_SEEDS.stop))

    def step(self) -> dict[str, float]:
        """Run one iteration, rollout and update, and return its metrics."""
        if not self._has_started:
            self.environment.reset()
            self._has_started = True
        start_time = time.perf_counter()
        buffer = self._rotate_buffers()
        with span("rollout"):
            metrics = self._collect_rollouts(buffer)
        with span("update"):
            if self.settings.advantages == "vtrace":
                buffer.behaviour_logprobs_M = compute_policy_logprobs(
                    self.model,
                    buffer.read_real_steps("observations"),
                    buffer.read_real_steps("actions"),
                )
            if self._reward_statistics is not None:
                self._reward_statistics.update(buffer)
            update = NetworkUpdate(
                self.model,
                self.optimizer_step,
                self.settings,
                self._buffers,
                self._reward_statistics,
            )
            metrics |= update.run_update(self._rng)
            if self.model.statistics is not None:
                self.model.statistics.update(buffer.read_real_steps("observations"))
        if not self.environment.actions.is_discrete:
            metrics["policy/action_std"] = float(self.model.policy.log_std_A.detach().exp().mean())
        seconds = time.perf_counter() - start_time
        metrics["perf/environment_steps_per_second"] = buffer.num_steps / seconds
        return metrics

    def _rotate_buffers(self) -> StepBuffer:
        """Return an empty buffer at the front; buffers beyond `replay` are reused or dropped."""
        if len(self._buffers) > self.settings.replay and self._buffers[0].num_filled:
            self._buffers.insert(0, self._buffers.pop())
        elif self._buffers[0].num_filled:
            self._buffers.insert(0, self._create_buffer())
        self._buffers[0].clear_steps()
        return self._buffers[0]

    def _collect_rollouts(self, buffer: StepBuffer) -> dict[str, float]:
        """Fill the buffer with sampled actions. Raises: EnvironmentFault."""
        environment, action_space = self.environment, self.environment.actions
        steps, _ = buffer.shape
        noise_TNA = self._noise.draw_steps(steps)
        arrays = NetworkArrays(self.model)
        num_episodes = 0
        for independent_NA in noise_TNA:
            observations_ND = environment.observations_ND
            noise_NA = self._noise.correlate(independent_NA)
            inputs_ND = self.model.normalised(torch.from_numpy(observations_ND))
            actions = arrays.draw_actions(inputs_ND, noise_NA)
            step = environment.step(actions)
            buffer.add_step(observations_ND, actions, step)
            self._noise.end_episodes(step.terminated_N | step.truncated_N)
            ended = list(zip(*environment.pop_ended_episodes(step), strict=True))
            self._recent.extend(ended)
            num_episodes += len(ended)
        self.environment_steps += buffer.num_steps
        self.episodes += num_episodes
        metrics = {
            "train/environment_steps": float(self.environment_steps),
            "train/episodes": float(self.episodes),
            "train/step_reward": float(buffer.read_real_steps("rewards").mean()),
        }
        if self._recent:
            returns, lengths = zip(*self._recent, strict=True)
            metrics["train/episode_return"] = np.mean(returns)
            metrics["train/episode_length"] = np.mean(lengths)
        if not action_space.is_discrete:
            metrics["train/clipped_action_rate"] = compute_clipped_share(
                buffer.read_real_steps("actions").numpy(), action_space
            )
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the same validation episodes each time; {} if only a VectorEnv was passed."""
        if self.environment_factory is None:
            return {}
        return self.evaluate_on_seeds(VALIDATION_SEEDS).compute_metrics()

    def evaluate_on_test_seeds(self) -> PlayedEpisodes:
        """Play held-out episodes that share no seed with training or validation."""
        return self.evaluate_on_seeds(TEST_SEEDS)

    def evaluate_on_seeds(self, seeds: Sequence[int]) -> PlayedEpisodes:
        """Play `eval_episodes` episodes from seeds drawn among these, the same ones at every call. Raises:
        SettingsError.
        """
        if self.environment_factory is None:
            raise SettingsError(
                "environment: a VectorEnv has no held-out episodes; pass a function that makes an environment"
            )
        rng = np.random.default_rng([self.seed, 1])
        indices = rng.integers(0, len(seeds), size=self.settings.eval_episodes)
        return play_episodes(
            self.model,
            self.environment_factory,
            [seeds[int(index)] for index in indices],
            greedy=self.settings.eval_greedy,
            noise_seed=self.seed,
            name=self.name,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return current episodes, generator, counts, and the buffers to replay."""
        replayed = self._buffers[: self.settings.replay] if self._buffers[0].num_filled else []
        state: dict[str, Any] = {
            "environment": self.environment.state_dict() if self._has_started else None,
            "rng": self._rng.bit_generator.state,
            "recent": [[value, length] for value, length in self._recent],
            "environment_steps": self.environment_steps,
            "episodes": self.episodes,
            "buffers": [buffer.state_dict() for buffer in replayed],
        }
        if self._reward_statistics is not None:
            state["reward_statistics"] = self._reward_statistics.state_dict()
        if self.settings.noise_correlation:
            state["noise"] = self._noise.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`. Raises: CheckpointError if the environment is not deterministic."""
        self._has_started = state["environment"] is not None
        if self._has_started:
            self.environment.load_state_dict(state["environment"])
        self._rng.bit_generator.state = state["rng"]
        recent = ((value, length) for value, length in state["recent"])
        self._recent = deque(recent, maxlen=NUM_RECENT_EPISODES)
        self.environment_steps, self.episodes = state["environment_steps"], state["episodes"]
        if self._reward_statistics is not None:
            self._reward_statistics.load_state_dict(state["reward_statistics"])
            if not self.environment.can_restore:
                self._reward_statistics.reset_sums()
        if self.settings.noise_correlation:
            self._noise.load_state_dict(state["noise"])
        self._buffers = []
        for buffer_state in state["buffers"]:
            self._buffers.append(self._create_buffer())
            self._buffers[-1].load_state_dict(buffer_state)
        self._buffers = self._buffers or [self._create_buffer()]
