"""Episodes of an actor-critic on chosen seeds.

Suffixes: N environments, A actions or numbers of an action.

Trainer of an actor-critic: rollouts of a vectorised environment, PPO's update, validation on held-out seeds.

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
from rl_core.networks.network_update import NetworkUpdate, StepBuffer, compute_policy_logprobs
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
from rl_core.settings import NetworkSettings
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep

MAX_PARALLEL_ENVIRONMENTS = 32  # environments of an evaluation at most
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """Returns and lengths of episodes, in the order of their seeds."""

    seeds: list[int]
    returns: list[float]  # undiscounted, of the environment's own rewards
    lengths: list[int]
    truncated: list[bool]

    def compute_metrics(self) -> dict[str, float]:
        """Mean return with its normal 95% interval, extremes, length, share of truncated episodes."""
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
        """One object an episode."""
        rows = zip(self.seeds, self.returns, self.lengths, self.truncated, strict=True)
        return [
            dict(zip(("seed", "return", "length", "truncated"), row, strict=True)) for row in rows
        ]


def draw_action_noise(rng: np.random.Generator, count: int, actions: ActionSpace) -> np.ndarray:
    """Noise by which `count` actions are drawn (`PolicyNetwork.act`), float32 [count, A]."""
    shape = (count, actions.size)
    drawn = rng.gumbel(size=shape) if actions.is_discrete else rng.standard_normal(shape)
    return drawn.astype(np.float32)


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
        greedy: the likeliest action (the mean of continuous ones); False: sampled actions.
        noise_seed: of sampled actions.
    Raises: SettingsError, EnvironmentFault.
    """
    waiting = list(range(len(seeds)))[::-1]
    count = min(MAX_PARALLEL_ENVIRONMENTS, len(seeds))
    playing: list[int | None] = [
        None
    ] * count  # index of the seed of each environment's episode; None = of no interest
    started: list[int] = []

    def next_seed() -> int:
        started.append(waiting.pop() if waiting else -1)
        return seeds[started[-1]] if started[-1] >= 0 else seeds[0]

    environment = VectorEnvironment(make_vector_environment(factory, count), name, next_seed)
    rng = np.random.default_rng(noise_seed)
    returns, lengths, truncated = [0.0] * len(seeds), [0] * len(seeds), [False] * len(seeds)
    missing = len(seeds)
    try:
        environment.reset()
        playing, started[:] = list(started), []
        while missing:
            noise_NA = (
                None
                if greedy
                else torch.from_numpy(draw_action_noise(rng, count, environment.actions))
            )
            actions = model.act(torch.from_numpy(environment.observations_ND), noise_NA).numpy()
            step = environment.step(actions)
            ended = np.flatnonzero(step.terminated_N | step.truncated_N)
            for place, value, length in zip(
                ended, *environment.pop_ended_episodes(step), strict=True
            ):
                index = playing[place]
                if index is not None and index >= 0:
                    returns[index], lengths[index], truncated[index] = (
                        value,
                        length,
                        bool(step.truncated_N[place]),
                    )
                    missing -= 1
                playing[place] = started.pop(0)
    finally:
        environment.close()
    return PlayedEpisodes(list(seeds), returns, lengths, truncated)


NUM_RECENT_EPISODES = 100  # episodes behind train/episode_return


class NetworkTrainer:
    """PPO of an actor-critic on a vectorised environment; a `rl_core.training.callbacks.Trainer`.

    The statistics of normalised observations take an iteration's steps in after its update, so that all log-probs of
    an iteration are of the same inputs.
    """

    def __init__(
        self,
        environment_factory: EnvironmentFactory | None,
        settings: NetworkSettings,
        seed: int,
        *,
        name: str,
        vector: Any = None,
    ) -> None:
        """Args:
            maker: makes one environment; for training unless `vector` is given, and for validation.
            name: of the environment, for messages.
            vector: a gymnasium `VectorEnv` to train in, whatever its autoreset mode; None = one of `maker`'s.
        Raises: SettingsError where the environment cannot be made, or does not fit the settings.
        """
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
        self._buffers = [self._create_buffer()]  # of the present iteration first
        self._recent: deque[tuple[float, int]] = deque(
            maxlen=NUM_RECENT_EPISODES
        )  # (return, length) of the newest episodes
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
        """Rollout and update; metrics."""
        if not self._has_started:
            self.environment.reset()
            self._has_started = True
        started = time.perf_counter()
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
            metrics |= NetworkUpdate(
                self.model, self.optimizer_step, self.settings, self._buffers
            ).run_update(self._rng)
            if self.model.statistics is not None:
                self.model.statistics.update(buffer.read_real_steps("observations"))
        if not self.environment.actions.is_discrete:
            metrics["policy/action_std"] = float(self.model.policy.log_std_A.detach().exp().mean())
        metrics["perf/environment_steps_per_second"] = buffer.num_steps / (
            time.perf_counter() - started
        )
        return metrics

    def _rotate_buffers(self) -> StepBuffer:
        """An empty buffer at the front; those beyond `replay` are used again or left out."""
        if len(self._buffers) > self.settings.replay and self._buffers[0].num_filled:
            self._buffers.insert(0, self._buffers.pop())
        elif self._buffers[0].num_filled:
            self._buffers.insert(0, self._create_buffer())
        self._buffers[0].clear_steps()
        return self._buffers[0]

    def _collect_rollouts(self, buffer: StepBuffer) -> dict[str, float]:
        """Fill the buffer by sampled actions. Raises: EnvironmentFault."""
        environment, actions_space = self.environment, self.environment.actions
        steps, size = buffer.shape
        noise_TNA = torch.from_numpy(
            draw_action_noise(self._rng, steps * size, actions_space)
        ).view(steps, size, -1)
        episodes = 0
        for noise_NA in noise_TNA:
            observations_ND = environment.observations_ND
            actions = self.model.act(torch.from_numpy(observations_ND), noise_NA).numpy()
            step = environment.step(actions)
            buffer.add_step(observations_ND, actions, step)
            ended = list(zip(*environment.pop_ended_episodes(step), strict=True))
            self._recent.extend(ended)
            episodes += len(ended)
        self.environment_steps += buffer.num_steps
        self.episodes += episodes
        metrics = {
            "train/environment_steps": float(self.environment_steps),
            "train/episodes": float(self.episodes),
            "train/step_reward": float(buffer.read_real_steps("rewards").mean()),
        }
        if self._recent:
            returns, lengths = zip(*self._recent, strict=True)
            metrics["train/episode_return"], metrics["train/episode_length"] = (
                np.mean(returns),
                np.mean(lengths),
            )
        if not actions_space.is_discrete:
            metrics["train/clipped_action_rate"] = compute_clipped_share(
                buffer.read_real_steps("actions").numpy(), actions_space
            )
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Validation episodes, the same ones each time; {} where a VectorEnv alone was handed in."""
        return (
            {}
            if self.environment_factory is None
            else self.evaluate_on_seeds(VALIDATION_SEEDS).compute_metrics()
        )

    def evaluate_on_test_seeds(self) -> PlayedEpisodes:
        """Held-out episodes that share no seed with training or validation."""
        return self.evaluate_on_seeds(TEST_SEEDS)

    def evaluate_on_seeds(self, seeds: Sequence[int]) -> PlayedEpisodes:
        """`eval_episodes` episodes from seeds drawn among these, the same ones at every call. Raises: SettingsError."""
        if self.environment_factory is None:
            raise SettingsError(
                "environment: a VectorEnv alone has no held-out episodes; hand in a function that makes one"
            )
        drawn = np.random.default_rng([self.seed, 1]).integers(
            0, len(seeds), size=self.settings.eval_episodes
        )
        return play_episodes(
            self.model,
            self.environment_factory,
            [seeds[int(index)] for index in drawn],
            greedy=self.settings.eval_greedy,
            noise_seed=self.seed,
            name=self.name,
        )

    def state_dict(self) -> dict[str, Any]:
        """Episodes being played, generator, counts, and the buffers that are learned from again."""
        kept = self._buffers[: self.settings.replay] if self._buffers[0].num_filled else []
        return {
            "environment": self.environment.state_dict() if self._has_started else None,
            "rng": self._rng.bit_generator.state,
            "recent": [[value, length] for value, length in self._recent],
            "environment_steps": self.environment_steps,
            "episodes": self.episodes,
            "buffers": [buffer.state_dict() for buffer in kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises: CheckpointError where the environment is not deterministic."""
        self._has_started = state["environment"] is not None
        if self._has_started:
            self.environment.load_state_dict(state["environment"])
        self._rng.bit_generator.state = state["rng"]
        self._recent = deque(
            ((value, length) for value, length in state["recent"]), maxlen=NUM_RECENT_EPISODES
        )
        self.environment_steps, self.episodes = state["environment_steps"], state["episodes"]
        self._buffers = []
        for saved in state["buffers"]:
            self._buffers.append(self._create_buffer())
            self._buffers[-1].load_state_dict(saved)
        self._buffers = self._buffers or [self._create_buffer()]
