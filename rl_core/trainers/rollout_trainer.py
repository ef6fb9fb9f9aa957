"""Base class of trainers that learn from their rollouts: playing episodes, records, throughput, entropy schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.data.batches import resolve_padding_id
from rl_core.distributed import ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor, StoreFailedEpisode
from rl_core.inference.sampling import RolloutBackend, compute_sequence_seed
from rl_core.losses.supervised import entropy_coef_at
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest, Renderer
from rl_core.settings import PolicySettings, SamplingSettings, ThoughtsSettings
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from rl_core.rollout_workers.async_worker import RolloutTask
    from rl_core.rollout_workers.async_worker_group import AsyncWorkerGroup, ScheduleReplay
    from rl_core.rollout_workers.server_backend import ServerBackend
    from rl_core.rollout_workers.worker_group import WorkerGroup


_TASK_SEED_DOMAIN = 2**31  # separates the random numbers of rollout tasks from those of iterations
RolloutRecorder = Callable[[int, Sequence[Rollout]], None]  # takes an iteration and its rollouts


class RolloutTrainer(ABC):
    """Common part of trainers that play episodes with the policy that they train.

    Episodes and sampling of an iteration follow from `seed` and the iteration's number, so no generator is saved.
    Subclasses set `optimizer_step`.
    """

    settings: PolicySettings | ThoughtsSettings
    optimizer_step: OptimizerStep  # of the policy's optimizer

    def __init__(
        self,
        renderer: Renderer,
        environment: Environment,
        seed: int,
        backend: RolloutBackend,
        *,
        levels: Iterable[str],
        pad_id: int | None,
        record: RolloutRecorder | None,
        process_group: ProcessGroup,
        max_failed_share: float,
    ) -> None:
        """Store the parts and check the levels.

        Raises: SettingsError for a level that the environment does not have; DataError for a renderer without padding
            token if pad_id is None.
        """
        self.renderer = renderer
        self.environment = environment
        self.seed = seed
        self.backend = backend
        self.record = record
        self.process_group = process_group
        self.pad_id = resolve_padding_id(renderer, pad_id)
        self.levels = list(levels)
        for level in self.levels:
            environment.check_level(level)
        self.iteration = 0
        self.rollouts_played = 0  # of all iterations: the entropy coefficient depends on it
        self.failures = EpisodeFailureMonitor(max_failed_share)  # of the environment
        self.failures.watch_environments(environment)
        self.worker_group: WorkerGroup | None = None  # workers that play instead of this process
        # The backend, if its tokens come from an inference server.
        self.server: ServerBackend | None = None
        # Rollouts that are played during updates.
        self.stream: AsyncWorkerGroup | ScheduleReplay | None = None

    def set_failure_recorder(self, recorder: StoreFailedEpisode) -> None:
        """Store failed episodes for inspection."""
        self.failures.store_episode = recorder

    @abstractmethod
    def step(self) -> dict[str, float]:
        """Run one iteration: play, score, update."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of the current weights on held-out episodes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state besides weights and the policy's optimizer."""

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus: max(floor, start decay^rollouts played)."""
        settings = self.settings
        return entropy_coef_at(
            self.rollouts_played,
            start=settings.entropy_coef,
            decay=settings.entropy_decay,
            floor=settings.entropy_floor,
        )

    def _build_generator(self) -> np.random.Generator:
        """Build the random generator of the iteration."""
        return np.random.default_rng([self.seed, self.iteration])

    def _play_groups(
        self,
        requests: Sequence[EpisodeRequest],
        *,
        group_size: int,
        sampling: SamplingSettings,
        purpose: Sequence[str | int],
    ) -> list[RolloutGroup]:
        """Play one group per request with the current weights; every process plays a share and gets all groups.

        Failed episodes are left out, as are groups in which every episode failed.

        Args:
            purpose: determines the random numbers of the sampling, together with the trainer's seed.
        """
        self.failures.iteration = self.iteration
        seed = compute_sequence_seed(self.seed, *purpose)
        if self.worker_group is not None:
            groups = self.worker_group.collect_rollouts(
                requests,
                group_size=group_size,
                sampling=sampling,
                seed=seed,
                policy_version=self.optimizer_step.num_steps,
                failures=self.failures,
            )
            return [group for group in groups if group.rollouts]
        self.backend.refresh_weights()

        def play() -> list[RolloutGroup]:
            return collect_rollouts(
                self.environment,
                self.backend,
                self.renderer,
                requests,
                group_size=group_size,
                sampling=sampling,
                seed=seed,
                policy_version=self.optimizer_step.num_steps,
                process_group=self.process_group,
                failures=self.failures,
            )

        groups = self.optimizer_step.sharded.run_independently_with_full_weights(play)
        return [group for group in groups if group.rollouts]

    def _take_stream_groups(
        self,
        count: int,
        settings: PolicySettings,
        draw: Callable[[np.random.Generator], EpisodeRequest],
    ) -> list[RolloutGroup]:
        """Take the next groups of the stream that have a rollout; `draw` draws episodes ahead of them."""
        assert self.stream is not None

        def draw_task(number: int) -> RolloutTask:
            from rl_core.rollout_workers.async_worker import RolloutTask

            request = draw(np.random.default_rng([self.seed, _TASK_SEED_DOMAIN, number]))
            seed = compute_sequence_seed(self.seed, "rollouts", "ticket", number)
            return RolloutTask(
                number, request, settings.group_size, settings.sampling.temperature, seed
            )

        self.failures.iteration = self.iteration
        groups = self.stream.take_groups(
            self.iteration,
            count,
            groups_per_iteration=settings.prompts_per_iteration,
            draw_task=draw_task,
            sampling=settings.sampling,
            failures=self.failures,
            policy_version=self.optimizer_step.num_steps,
        )
        return [group for group in groups if group.rollouts]

    def _collect_failure_metrics(self) -> dict[str, float]:
        """Return the share of failed episodes since the last call, and their number since the start."""
        failed, played = self.failures.take_counts()
        return {
            "train/failed_rate": failed / max(1, played),
            "train/failed_episodes": float(self.failures.total),
        }

    def _record_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        if self.record is not None and self.process_group.is_rank_zero:
            self.record(self.iteration, rollouts)

    @staticmethod
    def _compute_throughput(
        rollouts: Iterable[Rollout], seconds: float, rollout_seconds: float
    ) -> dict[str, float]:
        """Compute sampled tokens per second of the whole iteration and of its rollout phase."""
        num_tokens = sum(rollout.trajectory.num_action_tokens for rollout in rollouts)
        return {
            "perf/rollout_seconds": rollout_seconds,
            "perf/tokens_per_second": num_tokens / max(seconds, 1e-9),
            "perf/rollout_tokens_per_second": num_tokens / max(rollout_seconds, 1e-9),
        }
