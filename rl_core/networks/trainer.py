"""Trainer of an actor-critic: rollouts of a vectorised environment, PPO's update, validation on held-out seeds.

Suffixes: T steps of an iteration, N environments, A actions or numbers of an action.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.errors import SettingsError
from rl_core.networks.actor_critic import ActorCritic, NetworkShape
from rl_core.networks.making import TEST_SEEDS, TRAINING_SEEDS, VALIDATION_SEEDS, EnvironmentMaker, make_vector
from rl_core.networks.network_evaluation import PlayedEpisodes, action_noise, play_episodes
from rl_core.networks.network_update import NetworkUpdate, policy_logprobs
from rl_core.networks.spaces import clipped_share
from rl_core.networks.step_buffer import StepBuffer
from rl_core.networks.vector_environment import NEXT_STEP, VectorEnvironment
from rl_core.settings import NetworkSettings
from rl_core.timing import span
from rl_core.training.optimizer_step import OptimizerStep

__all__ = ["NetworkTrainer"]

RECENT = 100  # episodes behind train/episode_return


class NetworkTrainer:
    """PPO of an actor-critic on a vectorised environment; a `rl_core.training.trainer_protocol.Trainer`.

    The statistics of normalised observations take an iteration's steps in after its update, so that all log-probs of
    an iteration are of the same inputs.
    """

    def __init__(
        self,
        maker: EnvironmentMaker | None,
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
        self.maker = maker
        self._rng = np.random.default_rng([seed, 0])
        if vector is None:
            if maker is None:
                raise SettingsError("environment: needs a function that makes one, or a VectorEnv")
            vector = make_vector(maker, settings.num_environments, settings.vectorization)
        self.environment = VectorEnvironment(vector, name, self._next_seed)
        if self.environment.size != settings.num_environments:
            raise SettingsError(
                f"num_environments: {settings.num_environments}, but the VectorEnv has {self.environment.size}"
            )
        if self.environment.mode == NEXT_STEP and settings.rollout_steps < 2:
            raise SettingsError("rollout_steps: a VectorEnv that resets at the next step needs at least 2")
        self.model = ActorCritic(self._shape(), seed).eval()
        self.optimizer_step = OptimizerStep(
            self.model, settings, settings.iterations * settings.updates_per_iteration,
            max_nonfinite=settings.max_nonfinite,
        )  # fmt: skip
        self._buffers = [self._new_buffer()]  # of the present iteration first
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)  # (return, length) of the newest episodes
        self.environment_steps = 0  # real ones, of all environments
        self.episodes = 0
        self._has_begun = False

    def _shape(self) -> NetworkShape:
        settings = self.settings
        return NetworkShape(
            self.environment.observation_size, self.environment.actions, settings.hidden, settings.activation,
            settings.initial_log_std, settings.normalise_observations,
        )  # fmt: skip

    def _new_buffer(self) -> StepBuffer:
        environment = self.environment
        return StepBuffer(
            self.settings.rollout_steps, environment.size, environment.observation_size, environment.actions
        )

    def _next_seed(self) -> int:
        return int(self._rng.integers(TRAINING_SEEDS.start, TRAINING_SEEDS.stop))

    def step(self) -> dict[str, float]:
        """Rollout and update; metrics."""
        if not self._has_begun:
            self.environment.reset()
            self._has_begun = True
        started = time.perf_counter()
        buffer = self._turn_buffers()
        with span("rollout"):
            metrics = self._collect(buffer)
        with span("update"):
            if self.settings.advantages == "vtrace":
                buffer.behaviour_logprobs_M = policy_logprobs(
                    self.model, buffer.flat("observations"), buffer.flat("actions")
                )
            metrics |= NetworkUpdate(self.model, self.optimizer_step, self.settings, self._buffers).run(self._rng)
            if self.model.statistics is not None:
                self.model.statistics.update(buffer.flat("observations"))
        if not self.environment.actions.is_discrete:
            metrics["policy/action_std"] = float(self.model.policy.log_std_A.detach().exp().mean())
        metrics["perf/environment_steps_per_second"] = buffer.num_steps / (time.perf_counter() - started)
        return metrics

    def _turn_buffers(self) -> StepBuffer:
        """An empty buffer at the front; those beyond `replay` are used again or left out."""
        if len(self._buffers) > self.settings.replay and self._buffers[0].filled:
            self._buffers.insert(0, self._buffers.pop())
        elif self._buffers[0].filled:
            self._buffers.insert(0, self._new_buffer())
        self._buffers[0].clear()
        return self._buffers[0]

    def _collect(self, buffer: StepBuffer) -> dict[str, float]:
        """Fill the buffer by sampled actions. Raises: EnvironmentFault."""
        environment, actions_space = self.environment, self.environment.actions
        steps, size = buffer.shape
        noise_TNA = torch.from_numpy(action_noise(self._rng, steps * size, actions_space)).view(steps, size, -1)
        episodes = 0
        for noise_NA in noise_TNA:
            observations_ND = environment.observations_ND
            actions = self.model.act(torch.from_numpy(observations_ND), noise_NA).numpy()
            step = environment.step(actions)
            buffer.add(observations_ND, actions, step)
            ended = list(zip(*environment.take_ended(step), strict=True))
            self._recent.extend(ended)
            episodes += len(ended)
        self.environment_steps += buffer.num_steps
        self.episodes += episodes
        metrics = {
            "train/environment_steps": float(self.environment_steps),
            "train/episodes": float(self.episodes),
            "train/step_reward": float(buffer.flat("rewards").mean()),
        }
        if self._recent:
            returns, lengths = zip(*self._recent, strict=True)
            metrics["train/episode_return"], metrics["train/episode_length"] = np.mean(returns), np.mean(lengths)
        if not actions_space.is_discrete:
            metrics["train/clipped_action_rate"] = clipped_share(buffer.flat("actions").numpy(), actions_space)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Validation episodes, the same ones each time; {} where a VectorEnv alone was handed in."""
        return {} if self.maker is None else self.play(VALIDATION_SEEDS).metrics()

    def test(self) -> PlayedEpisodes:
        """Held-out episodes that share no seed with training or validation."""
        return self.play(TEST_SEEDS)

    def play(self, among: Sequence[int]) -> PlayedEpisodes:
        """`eval_episodes` episodes from seeds drawn among these, the same ones at every call. Raises: SettingsError."""
        if self.maker is None:
            raise SettingsError(
                "environment: a VectorEnv alone has no held-out episodes; hand in a function that makes one"
            )
        drawn = np.random.default_rng([self.seed, 1]).integers(0, len(among), size=self.settings.eval_episodes)
        return play_episodes(
            self.model, self.maker, [among[int(index)] for index in drawn],
            greedy=self.settings.eval_greedy, noise_seed=self.seed, name=self.name,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Episodes being played, generator, counts, and the buffers that are learned from again."""
        kept = self._buffers[: self.settings.replay] if self._buffers[0].filled else []
        return {
            "environment": self.environment.state_dict() if self._has_begun else None,
            "rng": self._rng.bit_generator.state,
            "recent": [[value, length] for value, length in self._recent],
            "environment_steps": self.environment_steps,
            "episodes": self.episodes,
            "buffers": [buffer.state_dict() for buffer in kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. Raises: CheckpointError where the environment is not deterministic."""
        self._has_begun = state["environment"] is not None
        if self._has_begun:
            self.environment.load_state_dict(state["environment"])
        self._rng.bit_generator.state = state["rng"]
        self._recent = deque(((value, length) for value, length in state["recent"]), maxlen=RECENT)
        self.environment_steps, self.episodes = state["environment_steps"], state["episodes"]
        self._buffers = []
        for saved in state["buffers"]:
            self._buffers.append(self._new_buffer())
            self._buffers[-1].load_state_dict(saved)
        self._buffers = self._buffers or [self._new_buffer()]
