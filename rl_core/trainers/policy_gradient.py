"""Policy optimisation from rewards: GRPO, Dr.GRPO and RLOO.

One iteration: draw episodes from the curriculum, play each of them group_size times, score the rollouts, compare them
within their group, and update the policy on what it sampled.

Suffixes: P prompts, G rollouts per prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rl_core.curriculum.manager import CurriculumManager
from rl_core.data.batches import DataOrder
from rl_core.environments.base import Environment
from rl_core.errors import SettingsError
from rl_core.losses.advantages import group_advantages
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.batching import TrainRow, rows_of
from rl_core.rollouts.collect import EpisodeRequest, Renderer, collect
from rl_core.rollouts.sampling import RolloutBackend, session_seed
from rl_core.settings import PolicySettings
from rl_core.trainers.policy_update import PolicyUpdate
from rl_core.trainers.rollout_metrics import rollout_metrics
from rl_core.trainers.update import Updater
from rl_core.types import RolloutGroup

__all__ = ["PolicyGradientTrainer"]

ENUMERABLE = 2**20  # splits up to this many seeds are gone through in epochs; larger ones are drawn from


class PolicyGradientTrainer:
    """A `Trainer` (see `trainers.loop`) that learns from the rewards of its own rollouts.

    Its own state is small: levels, seeds and sampling follow from the seed and the iteration's number.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reference_model: PreTrainedModel | None,
        renderer: Renderer,
        environment: Environment,
        settings: PolicySettings,
        seed: int,
        rewards: RewardOrchestrator,
        backend: RolloutBackend,
        *,
        pad_id: int | None = None,
        evaluator: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Build everything; nothing is drawn or played yet.

        Args:
            reference_model: what the KL term refers to, frozen; needed when kl_coef > 0.
            backend: samples from `model`'s own weights.
            pad_id: None = the renderer's.
            evaluator: plays held-out episodes and gives `eval/...` metrics; None = `evaluate` gives none.
        Raises: SettingsError for a level that the environment has not got, or a KL term without a reference.
        """
        if settings.kl_coef > 0 and reference_model is None:
            raise SettingsError(f"kl_coef: {settings.kl_coef} needs a reference model")
        self.model = model
        self.reference_model = reference_model
        self.renderer = renderer
        self.environment = environment
        self.settings = settings
        self.seed = seed
        self.rewards = rewards
        self.backend = backend
        self.evaluator = evaluator
        self.pad_id: int = pad_id if pad_id is not None else getattr(renderer, "pad_id", 0)
        self.iteration = 0
        self.groups: list[RolloutGroup] = []  # of the last iteration, for whoever wants to look at them
        self.curriculum = CurriculumManager(settings.curriculum, environment.levels, early_stop=settings.early_stop)
        self.levels = sorted({level for stage in self.curriculum.stages for level in stage.levels})
        for level in self.levels:
            environment.check_level(level)
        self._orders: dict[str, DataOrder] = {}  # of the levels whose seeds are few
        total_steps = settings.iterations * settings.epochs * settings.minibatches
        self.updater = Updater(model, settings, total_steps, max_nonfinite=settings.max_nonfinite)
        if reference_model is not None:
            reference_model.requires_grad_(False).eval()

    @property
    def finished(self) -> str | None:
        """Why no further iteration is wanted; None = go on."""
        return self.curriculum.finished

    def step(self) -> dict[str, float]:
        """One iteration: play, score, compare, update, move the curriculum on."""
        started = time.perf_counter()
        rng = np.random.default_rng([self.seed, self.iteration])  # nothing to save: the iteration says it all
        self.groups = self._play(rng)
        played = time.perf_counter()
        metrics = self.rewards.score(self.groups)
        advantages_PG = self._assign_advantages()
        metrics |= rollout_metrics(self.groups)
        metrics |= self._advantage_metrics(advantages_PG)
        updating = time.perf_counter()
        update = PolicyUpdate(
            self.model, self.reference_model, self.updater, self.settings, self._rows(), pad_id=self.pad_id
        )
        metrics |= update.run(rng)
        stopped = time.perf_counter()
        sampled = sum(r.trajectory.num_action_tokens for group in self.groups for r in group.rollouts)
        metrics |= {
            "perf/rollout_seconds": played - started,
            "perf/reward_seconds": updating - played,
            "perf/update_seconds": stopped - updating,
            "perf/tokens_per_second": sampled / max(stopped - started, 1e-9),
            "perf/rollout_tokens_per_second": sampled / max(played - started, 1e-9),
        }
        self.iteration += 1
        self.curriculum.observe(metrics, known=[f"train/success_rate_by_level/{level}" for level in self.levels])
        return metrics | self.curriculum.metrics()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluator on the present weights."""
        self.backend.refresh()
        return dict(self.evaluator()) if self.evaluator is not None else {}

    def state_dict(self) -> dict[str, Any]:
        """Everything besides weights and optimizer: what was drawn, where the curriculum stands, reward scales."""
        return {
            "iteration": self.iteration,
            "curriculum": self.curriculum.state_dict(),
            "rewards": self.rewards.state_dict(),
            "orders": {level: order.state_dict() for level, order in self._orders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.iteration = int(state["iteration"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.rewards.load_state_dict(state["rewards"])
        self._orders = {}
        for level, order in state["orders"].items():
            self._order(level, int(order["num_rows"])).load_state_dict(order)

    # Playing

    def _play(self, rng: np.random.Generator) -> list[RolloutGroup]:
        requests = []
        for _ in range(self.settings.prompts_per_iteration):
            level = self.curriculum.draw_level(rng)
            requests.append(EpisodeRequest(level=level, seed=self._draw_seed(level, rng)))
        self.backend.refresh()
        return collect(
            self.environment,
            self.backend,
            self.renderer,
            requests,
            group_size=self.settings.group_size,
            sampling=self.settings.sampling,
            seed=session_seed(self.seed, "rollouts", self.iteration),
            policy_version=self.updater.step,
        )

    def _draw_seed(self, level: str, rng: np.random.Generator) -> int:
        """A training seed: each one once before any comes again where they are few, at random where they are many."""
        seeds = self.environment.seeds_of("train", level)
        if not len(seeds):
            raise SettingsError(f"environment '{self.environment.name}' has no training episodes of level '{level}'")
        if len(seeds) > ENUMERABLE:
            return int(seeds[int(rng.integers(len(seeds)))])
        return int(seeds[self._order(level, len(seeds)).next()[0]])

    def _order(self, level: str, num_rows: int) -> DataOrder:
        if level not in self._orders:
            # 63 bits: a level's order is its own, whatever other levels there are
            seed = session_seed(self.seed, "order", level) % 2**63
            self._orders[level] = DataOrder(num_rows, batch_size=1, seed=seed)
        return self._orders[level]

    def _assign_advantages(self) -> torch.Tensor:
        """Advantages [P, G] of the groups, also written into them."""
        rewards_PG = torch.tensor([group.rewards for group in self.groups], dtype=torch.float64)
        advantages_PG = group_advantages(rewards_PG, method=self.settings.algorithm)
        for group, advantages in zip(self.groups, advantages_PG.tolist(), strict=True):
            group.advantages = advantages
        return advantages_PG

    def _rows(self) -> list[TrainRow]:
        """What to learn from, without the samples that the filter leaves out."""
        threshold = self.settings.filter_threshold
        kept = [a for group in self.groups for a in group.advantages or []]
        return [row for row, advantage in zip(rows_of(self.groups), kept, strict=True) if abs(advantage) >= threshold]

    def _advantage_metrics(self, advantages_PG: torch.Tensor) -> dict[str, float]:
        size = advantages_PG.numel()
        return {
            "train/advantages_mean": float(advantages_PG.mean()),
            "train/advantages_std": float(advantages_PG.std(correction=0)),
            "train/zero_advantage_rate": float((advantages_PG == 0).sum()) / size,
            "train/filtering_rate": float((advantages_PG.abs() < self.settings.filter_threshold).sum()) / size,
        }
