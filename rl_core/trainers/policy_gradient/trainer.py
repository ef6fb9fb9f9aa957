"""Policy optimisation from rewards: PPO, GRPO and its kin, REINFORCE; the algorithm is a setting.

One iteration: draw episodes from the curriculum, play each of them group_size times, score the rollouts, give credit,
and update the policy on what it sampled (see `policy_update`).

Suffixes: P prompts, G rollouts per prompt.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rl_core.curriculum.manager import CurriculumManager
from rl_core.data.batches import DataOrder, padding_id
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.errors import SettingsError
from rl_core.inference.sampling import RolloutBackend, sequence_seed
from rl_core.losses.kl import adaptive_kl_coef, banded_kl_coef
from rl_core.losses.supervised import entropy_coef_at
from rl_core.models.turn_states import TurnStates, turn_states
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.collect import EpisodeRequest, Renderer, collect
from rl_core.rollouts.rollout_metrics import rollout_metrics
from rl_core.settings import PolicySettings, RollbackSettings
from rl_core.timing import span
from rl_core.trainers.policy_gradient.advantages import punish_length
from rl_core.trainers.policy_gradient.replay_buffer import ReplayBuffer, Sample, samples_of
from rl_core.trainers.policy_gradient.rollout_buffer import make_actor_critic
from rl_core.trainers.policy_gradient.stage_snapshots import StageSnapshots
from rl_core.trainers.policy_gradient.update import PolicyUpdate
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import Rollout, RolloutGroup

__all__ = ["PolicyGradientTrainer"]

ENUMERABLE = 2**20  # splits up to this many seeds are gone through in epochs; larger ones are drawn from
SAME_REWARD = 1e-6  # groups whose rewards differ by less have nothing to compare
BAND = 0.2  # half-width of the banded controller's band, as a share of kl_target


class PolicyGradientTrainer:
    """A `Trainer` (see `trainers.loop`) that learns from the rewards of its own rollouts.

    Its own state is small: levels, seeds and sampling follow from the seed and the iteration's number. Where the
    curriculum may be rolled back, it also holds how the stages were entered, each as large as model and optimizer.
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
        record: Callable[[int, Sequence[Rollout]], None] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Build everything; nothing is drawn or played yet.

        Args:
            reference_model: what the KL term refers to, frozen; needed when kl_coef > 0.
            backend: samples from `model`'s own weights (a benchmark may hand in one that lags behind).
            pad_id: None = the renderer's.
            evaluator: plays validation episodes and gives `eval/...` metrics; None = `evaluate` gives none.
            record: is given every iteration's number and scored rollouts.
            process_group: the processes that train this model. Each plays a share of the episodes; rank 0
                scores them all.
        Raises: SettingsError for a level that the environment has not got, or a KL term without a reference; DataError
            for a renderer without padding token where pad_id is None.
        """
        if settings.kl_coef > 0 and reference_model is None:
            raise SettingsError(f"kl_coef: {settings.kl_coef} needs a reference model")
        self.policy = model
        self.renderer = renderer
        self.environment = environment
        self.settings = settings
        self.seed = seed
        self.rewards = rewards
        self.backend = backend
        self.evaluator = evaluator
        self.record = record
        self.iteration = 0
        self.rollouts_played = 0
        self.kl_coef = settings.kl_coef
        self.groups: list[RolloutGroup] = []  # what the last iteration learnt from, for whoever wants to look at it
        self.curriculum = CurriculumManager(
            settings.curriculum, environment.levels, early_stop=settings.early_stop, rollback=settings.rollback
        )
        self.levels = sorted({level for stage in self.curriculum.stages for level in stage.levels})
        for level in self.levels:
            environment.check_level(level)
        self._stage_settings = [settings.within(stage) for stage in self.curriculum.stages]
        self._orders: dict[str, DataOrder] = {}  # of the levels whose seeds are few
        self._replay = ReplayBuffer(settings.replay) if settings.replay is not None else None
        if reference_model is not None:
            reference_model.requires_grad_(False).eval()
        pad = padding_id(renderer, pad_id)
        self.process_group = process_group
        self.actor_critic = make_actor_critic(model, reference_model, settings, pad, process_group)
        optimizer_steps = [
            optimizer_step
            for optimizer_step in (self.actor_critic.optimizer_step, self.actor_critic.critic_optimizer_step)
            if optimizer_step is not None
        ]
        self._snapshots = StageSnapshots(self.model, optimizer_steps)

    @property
    def model(self) -> nn.Module:
        """The policy, with its value function where the algorithm has one: what a checkpoint holds."""
        return self.actor_critic.critic if self.actor_critic.critic is not None else self.policy

    @property
    def optimizer_step(self) -> OptimizerStep:
        """Owner of the policy's optimizer."""
        return self.actor_critic.optimizer_step

    @property
    def stage_settings(self) -> PolicySettings:
        """The settings with what the present curriculum stage overrides."""
        return self._stage_settings[self.curriculum.index]

    @property
    def finished(self) -> str | None:
        """Why no further iteration is wanted; None = go on."""
        return self.curriculum.finished

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus now: it falls with every rollout, down to its floor."""
        start, decay, floor = self.settings.entropy_coef, self.settings.entropy_decay, self.settings.entropy_floor
        return entropy_coef_at(self.rollouts_played, start=start, decay=decay, floor=floor) if start else 0.0

    def step(self) -> dict[str, float]:
        """One iteration: play, score, give credit, update, move the curriculum on, or back."""
        started = time.perf_counter()
        self._snapshots.keep(self.curriculum.index, self.curriculum.restorable, self._changed_by_learning)
        rng = np.random.default_rng([self.seed, self.iteration])  # nothing to save: the iteration says it all
        played, self.groups, metrics = self._play_and_score(rng)
        metrics |= rollout_metrics(played)
        rollouts = [rollout for group in played for rollout in group.rollouts]
        if self.record is not None and self.process_group.is_rank_zero:
            self.record(self.iteration, rollouts)
        updating = time.perf_counter()
        self.rollouts_played += len(rollouts)
        metrics |= self._update(rng)
        stopped = time.perf_counter()
        sampled = sum(rollout.trajectory.num_action_tokens for rollout in rollouts)
        playing = metrics["perf/rollout_seconds"]
        metrics |= {
            "perf/reward_seconds": updating - started - playing,
            "perf/update_seconds": stopped - updating,
            "perf/tokens_per_second": sampled / max(stopped - started, 1e-9),
            "perf/rollout_tokens_per_second": sampled / max(playing, 1e-9),
        }
        self.iteration += 1
        metrics = self.process_group.on_rank_zero(
            functools.partial(dict, metrics)
        )  # the curriculum decides alike everywhere
        left = self.curriculum.index
        target = self.curriculum.observe(metrics, known=[f"train/success_rate_by_level/{lv}" for lv in self.levels])
        if target is not None:
            self._go_back(target, self.curriculum.watch.settings[left])
        return metrics | self.curriculum.metrics()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluator on the present weights."""
        if self.evaluator is None:
            return {}
        self.backend.refresh()
        return dict(self.optimizer_step.sharded.with_full_weights_independent(self.evaluator))

    def state_dict(self) -> dict[str, Any]:
        """Everything besides weights and the policy's optimizer."""
        critic = self.actor_critic.critic_optimizer_step
        return {
            "iteration": self.iteration,
            "rollouts_played": self.rollouts_played,
            "kl_coef": self.kl_coef,
            "curriculum": self.curriculum.state_dict(),
            "rewards": self.rewards.state_dict(),
            "orders": {level: order.state_dict() for level, order in self._orders.items()},
            "replay": self._replay.state_dict() if self._replay is not None else None,
            "critic_optimizer_step": critic.state_dict() if critic is not None else None,
            "entries": self._snapshots.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.iteration = int(state["iteration"])
        self.rollouts_played = int(state["rollouts_played"])
        self.kl_coef = float(state["kl_coef"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.rewards.load_state_dict(state["rewards"])
        self._orders = {}
        for level, order in state["orders"].items():
            self._order(level, int(order["num_rows"])).load_state_dict(order)
        if self._replay is not None:
            self._replay.load_state_dict(state["replay"])
        if self.actor_critic.critic_optimizer_step is not None:
            self.actor_critic.critic_optimizer_step.load_state_dict(state["critic_optimizer_step"])
        self._snapshots.load_state_dict(state["entries"])

    # Going back

    def _changed_by_learning(self) -> dict[str, Any]:
        """What goes back with weights and optimizers."""
        replay = self._replay.state_dict() if self._replay is not None else None
        return {"kl_coef": self.kl_coef, "rewards": self.rewards.state_dict(), "replay": replay}

    def _go_back(self, target: int, rollback: RollbackSettings | None) -> None:
        """Everything that learning changed, as it was when the stage `target` was entered."""
        factor = rollback.learning_rate_factor if rollback is not None else 1.0
        extra = self._snapshots.restore(target, learning_rate_factor=factor)
        self.kl_coef = float(extra["kl_coef"])
        self.rewards.load_state_dict(extra["rewards"])
        if self._replay is not None:
            self._replay.load_state_dict(extra["replay"])

    # Playing

    def _play_and_score(
        self, rng: np.random.Generator
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], dict[str, float]]:
        """All groups that were played, those to learn from, and the rewards' metrics.

        With dynamic sampling, groups whose rewards are all equal are left out and played again with new episodes, a
        bounded number of times; what is measured (success, rewards) is measured on all that was played.
        """
        wanted, tries = self.stage_settings.prompts_per_iteration, self.stage_settings.sampling_tries
        played: list[RolloutGroup] = []
        kept: list[RolloutGroup] = []
        scored: list[dict[str, float]] = []
        seconds = 0.0
        self.rewards.set_weights(self.curriculum.stage.rewards)
        for attempt in range(1 + tries):
            started = time.perf_counter()
            groups = self._play(rng, wanted - len(kept), attempt)
            seconds += time.perf_counter() - started
            groups, rewarded = self._score(groups)
            scored.append(rewarded)
            played += groups
            kept += [g for g in groups if not tries or max(g.rewards) - min(g.rewards) > SAME_REWARD]
            if len(kept) == wanted:
                break
        names = dict.fromkeys(name for part in scored for name in part)
        metrics = {name: statistics.fmean(part[name] for part in scored if name in part) for name in names}
        totals = [rollout.reward for group in played for rollout in group.rollouts if not rollout.is_masked]
        metrics |= {"reward/mean": statistics.fmean(totals), "reward/std": statistics.pstdev(totals)}
        metrics |= self.process_group.on_rank_zero(lambda: self.rewards.observe(played, self.curriculum.stage.name))
        if tries:
            metrics["train/dropped_group_rate"] = 1 - len(kept) / len(played)
        return played, kept, metrics | {"perf/rollout_seconds": seconds}

    def _play(self, rng: np.random.Generator, count: int, attempt: int) -> list[RolloutGroup]:
        requests = []
        for _ in range(count):
            level = self.curriculum.draw_level(rng)
            requests.append(EpisodeRequest(level=level, seed=self._draw_seed(level, rng)))
        self.backend.refresh()
        parts = ("rollouts", self.iteration, attempt) if attempt else ("rollouts", self.iteration)
        play = functools.partial(
            collect,
            self.environment,
            self.backend,
            self.renderer,
            requests,
            group_size=self.stage_settings.group_size,
            sampling=self.stage_settings.sampling,
            seed=sequence_seed(self.seed, *parts),
            policy_version=self.optimizer_step.num_steps,
            process_group=self.process_group,
        )
        return self.optimizer_step.sharded.with_full_weights_independent(play)

    def _score(self, groups: list[RolloutGroup]) -> tuple[list[RolloutGroup], dict[str, float]]:
        """The groups with their rewards, and metrics; several processes get what the first one made of them."""
        states = self._states(groups) if self.rewards.needs_states else []

        def score() -> tuple[list[RolloutGroup], dict[str, float]]:
            return groups, self.rewards.score(groups, embed=lambda _: states) | punish_length(groups, self.settings)

        return self.process_group.on_rank_zero(score)

    def _states(self, groups: Sequence[RolloutGroup]) -> list[TurnStates]:
        """The policy's states at the turns of all rollouts, in order, as it is before this iteration's update."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        embed = functools.partial(
            turn_states, self.policy, pad_id=self.actor_critic.pad_id, max_tokens=self.settings.micro_batch_tokens
        )
        with span("states"), self.optimizer_step.autocast():
            return self.optimizer_step.sharded.all_gather_rows(
                rollouts, [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts], embed
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
            seed = sequence_seed(self.seed, "order", level) % 2**63
            self._orders[level] = DataOrder(num_rows, batch_size=1, seed=seed)
        return self._orders[level]

    # Learning

    def _update(self, rng: np.random.Generator) -> dict[str, float]:
        """Learn from the groups at hand, and from replayed ones."""
        settings = self.stage_settings
        critic = settings.value_function
        fresh = samples_of(self.groups, bootstrap_limits=critic is not None and critic.bootstrap_limits)
        samples = fresh + (self._replay.draw(rng, len(self.groups)) if self._replay is not None else [])
        metrics = {"policy/entropy_coef": self.entropy_coef, "policy/kl_coef": self.kl_coef}
        if not samples:  # every group was dropped
            self.optimizer_step.num_steps += settings.epochs * settings.minibatches
            return metrics | {"train/empty_updates": float(settings.epochs * settings.minibatches)}
        update = PolicyUpdate(
            self.actor_critic,
            settings,
            samples,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            critic_only=critic is not None and self.iteration < critic.warmup_iterations,
        )
        metrics |= update.run(rng) | self._advantage_metrics(update)
        if self._replay is not None:
            metrics["train/replayed_rollouts"] = float(len(samples) - len(fresh))
            size = settings.group_size
            self._replay.add([fresh[start : start + size] for start in range(0, len(fresh), size)])
        self._write_advantages(fresh)
        self._control_kl(metrics)
        return metrics

    def _write_advantages(self, fresh: list[Sample]) -> None:
        """Into the groups, where rollouts were compared."""
        size = self.stage_settings.group_size
        for index, group in enumerate(self.groups):
            advantages = [sample.advantage for sample in fresh[index * size : (index + 1) * size]]
            group.advantages = [a for a in advantages if a is not None] or None

    def _advantage_metrics(self, update: PolicyUpdate) -> dict[str, float]:
        """Over rollouts where they were compared (before whitening), over loss tokens where values were estimated."""
        buffer, threshold = update.buffer, self.settings.filter_threshold
        compared = [sample.advantage for sample in buffer.samples if sample.advantage is not None]
        if compared:
            advantages = torch.tensor(compared, dtype=torch.float64)
            filtered = float((advantages.abs() < threshold).double().mean())
        else:
            advantages = buffer.advantages_RS[buffer.mask_RS].double()
            tokens = sum(sum(sample.row.loss_mask) for sample in buffer.samples)
            filtered = 1 - advantages.numel() / tokens
        if not advantages.numel():
            return {"train/filtering_rate": filtered}
        return {
            "train/advantages_mean": float(advantages.mean()),
            "train/advantages_std": float(advantages.std(correction=0)),
            "train/zero_advantage_rate": float((advantages == 0).double().mean()),
            "train/filtering_rate": filtered,
        }

    def _control_kl(self, metrics: Mapping[str, float]) -> None:
        """Move kl_coef towards where the KL to the reference is kl_target."""
        settings, kl = self.stage_settings, metrics.get("policy/ref_kl")
        if settings.kl_controller == "fixed" or kl is None:
            return
        if settings.kl_controller == "banded":
            self.kl_coef = banded_kl_coef(
                self.kl_coef, kl, target=settings.kl_target, tolerance=BAND * settings.kl_target
            )
            return
        played = settings.prompts_per_iteration * settings.group_size
        self.kl_coef = adaptive_kl_coef(
            self.kl_coef, kl, target=settings.kl_target, horizon=settings.kl_horizon, num_samples=played
        )
