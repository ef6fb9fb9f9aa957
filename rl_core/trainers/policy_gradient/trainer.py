"""Policy optimisation from rewards: PPO, GRPO and variants, REINFORCE; the algorithm is a setting.

One iteration draws episodes from the curriculum, plays each of them group_size times, scores the rollouts, estimates
advantages and updates the policy. The steps are in `samples`, `rollout_buffer`, `advantages`, `losses` and `update`.

Suffixes: P prompts, G rollouts per prompt, N turns, H hidden.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from rl_core.curriculum.manager import CurriculumManager, expand_curriculum
from rl_core.curriculum.snapshots import StageSnapshots
from rl_core.curriculum.watched_metrics import check_watched_tools, list_watchable_names
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.environments.environment import Environment
from rl_core.environments.failed_episodes import StoreFailedEpisode
from rl_core.environments.two_player import NUM_PLAYERS
from rl_core.inference.sampling import RolloutBackend, compute_sequence_seed
from rl_core.models.hidden_states import TurnEmbeddings, compute_turn_embeddings
from rl_core.rewards.components import OverlongPenalty
from rl_core.rewards.mixture_rewards import check_part_credit
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.collect import TrainingSeedOrders
from rl_core.rollouts.episode_sequence import EpisodeRequest, Renderer
from rl_core.rollouts.rollout_metrics import TruncationMonitor, compute_rollout_metrics
from rl_core.settings import PolicySettings, RollbackSettings, build_settings
from rl_core.timing import span
from rl_core.trainers.policy_gradient.actor_critic import build_actor_critic, check_models
from rl_core.trainers.policy_gradient.advantages import (
    LearningSignalMonitor,
    compute_advantage_metrics,
)
from rl_core.trainers.policy_gradient.cross_vocabulary import AlignedTeacher, AnyTeacher
from rl_core.trainers.policy_gradient.custom_functions import load_custom_functions
from rl_core.trainers.policy_gradient.losses import compute_next_kl_coef
from rl_core.trainers.policy_gradient.numerics_gate import NumericsGate
from rl_core.trainers.policy_gradient.samples import (
    ReplayBuffer,
    SampleGroup,
    build_sample_groups,
    compute_masking_metrics,
    sample_groups_with_signal,
    warn_about_single_turns,
)
from rl_core.trainers.policy_gradient.self_distillation import SelfTeacher
from rl_core.trainers.policy_gradient.self_play import SelfPlay
from rl_core.trainers.policy_gradient.update import PolicyUpdate
from rl_core.trainers.rollout_trainer import RolloutRecorder, RolloutTrainer
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GroupScorer:
    """Scorer of rollout groups by the policy's rewards; rank 0 scores, and every process gets the scored groups."""

    def __init__(
        self,
        rewards: RewardOrchestrator,
        policy: PreTrainedModel,
        settings: PolicySettings,
        pad_id: int,
        optimizer_step: OptimizerStep,
        process_group: ProcessGroup,
    ) -> None:
        """Store the parts; `optimizer_step` is the policy's: its precision and shards apply to the hidden states."""
        self.rewards = rewards
        self.policy = policy
        self.pad_id = pad_id
        self.max_tokens = settings.micro_batch_tokens
        self.optimizer_step = optimizer_step
        self.process_group = process_group
        self.penalties: dict[str, OverlongPenalty] = {}
        if settings.overlong_tokens:
            limit = settings.sampling.max_completion_tokens
            self.penalties["overlong"] = OverlongPenalty(limit, settings.overlong_tokens)

    def score_groups(
        self, groups: list[RolloutGroup]
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return the groups with their rewards, and the rewards' metrics."""
        states = self._compute_hidden_states(groups) if self.rewards.needs_states else []

        def score() -> tuple[list[RolloutGroup], dict[str, float]]:
            metrics = self.rewards.score(groups, embed=lambda _: states, penalties=self.penalties)
            return groups, metrics

        return self.process_group.run_on_rank_zero(score)

    def _compute_hidden_states(self, groups: Sequence[RolloutGroup]) -> list[TurnEmbeddings]:
        """Compute hidden states [N, H] of the policy at the turns of all rollouts, in order, before this update."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
        embed = functools.partial(
            compute_turn_embeddings, self.policy, pad_id=self.pad_id, max_tokens=self.max_tokens
        )
        with span("states"), self.optimizer_step.enable_autocast():
            return self.optimizer_step.sharded.gather_row_results(rollouts, lengths, embed)


class PolicyGradientTrainer(RolloutTrainer):
    """A `Trainer` (see `training.callbacks`) of a policy on the rewards of its rollouts.

    Its state is small: levels, seeds and sampling follow from the seed and the iteration's number. If the curriculum
    may be rolled back, it also holds snapshots of stage entries, each as large as model and optimizer.
    """

    settings: PolicySettings

    def __init__(
        self,
        model: PreTrainedModel,
        reference_model: PreTrainedModel | None,
        renderer: Renderer,
        environment: Environment,
        settings: PolicySettings | Mapping[str, Any],
        seed: int,
        rewards: RewardOrchestrator,
        backend: RolloutBackend,
        *,
        pad_id: int | None = None,
        evaluator: Callable[[], Mapping[str, float]] | None = None,
        record: RolloutRecorder | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
        teacher: AnyTeacher | None = None,
        custom_functions: Mapping[str, Callable[..., Any]] | None = None,
        opponents_folder: Path | None = None,
    ) -> None:
        """Build all parts; no episode is drawn or played yet.

        Args:
            reference_model: of the KL term, frozen here; needed when kl_coef > 0. Pass `model` itself if it has
                adapters: the reference is then the model without them, not a copy.
            backend: samples from `model`'s weights (a benchmark may pass one that lags behind).
            pad_id: None = the renderer's.
            evaluator: plays validation episodes and returns `eval/...` metrics; None = `evaluate` returns none.
            record: called with every iteration's number and scored rollouts.
            process_group: the processes that train this model; each plays a share of the episodes, rank 0 scores all.
            teacher: of a distillation: determines each token's advantage; rewards are only measured.
            custom_functions: the user's loss and advantage estimator, by setting name; None = those in the settings.
            opponents_folder: of the policy's past versions in self-play; None = in memory and in checkpoints.
        Raises: SettingsError for a level or watched tool that the environment lacks, self-play without two players, a
            KL term without a reference, or a router's loss for a model without a router; DataError for a renderer
            without padding token if pad_id is None.
        """
        settings = build_settings(settings, PolicySettings)
        check_models(settings, model, reference_model, teacher)
        check_part_credit(settings, environment)
        self.curriculum = CurriculumManager(
            expand_curriculum(settings.curriculum, environment),
            environment.level_weights,
            early_stop=settings.early_stop,
            rollback=settings.rollback,
        )
        levels = sorted({level for stage in self.curriculum.stages for level in stage.levels})
        super().__init__(
            renderer,
            environment,
            seed,
            backend,
            levels=levels,
            pad_id=pad_id,
            record=record,
            process_group=process_group,
            max_failed_share=settings.sampling.max_failed_share,
        )
        self.policy, self.settings = model, settings
        self.rewards, self.evaluator = rewards, evaluator
        # Metrics of the newest evaluation, for the curriculum's next observation.
        self._latest_evaluation: dict[str, float] = {}
        self._watched_names = list_watchable_names(settings, environment)
        self._tools = tuple(environment.tools.tools)
        self._visual_tools = environment.tools.list_visual_tools()
        check_watched_tools(settings, environment)
        self.kl_coef = settings.kl_coef
        self.groups: list[RolloutGroup] = []  # those of the last update, for inspection
        self._stage_settings = [settings.for_stage(stage) for stage in self.curriculum.stages]
        self._seeds = TrainingSeedOrders(environment, seed)
        self._replay = ReplayBuffer(settings.replay) if settings.replay is not None else None
        self._signal_monitor = LearningSignalMonitor()
        self._truncation_monitor = TruncationMonitor(settings.sampling)
        functions = load_custom_functions(settings, custom_functions)
        self.actor_critic = build_actor_critic(
            model, reference_model, settings, self.pad_id, process_group, teacher, functions
        )
        self.optimizer_step = self.actor_critic.optimizer_step
        self._scorer = GroupScorer(
            rewards, model, settings, self.pad_id, self.optimizer_step, process_group
        )
        self._self_play = self._build_self_play(opponents_folder)
        self._snapshots = self._build_snapshots()
        self._numerics = NumericsGate(
            model, backend, settings, self.optimizer_step, self._build_snapshots()
        )

    def _build_self_play(self, folder: Path | None) -> SelfPlay | None:
        """Build the opponents of self-play; None = an episode has one player."""
        if self.settings.self_play is None:
            return None
        return SelfPlay(
            self.policy,
            self.backend,
            self.renderer,
            self.environment,
            self.settings,
            self.seed,
            levels=self.levels,
            pad_id=self.pad_id,
            folder=folder,
        )

    def _build_snapshots(self) -> StageSnapshots:
        """Build a store for snapshots of the policy, its critic, and their optimizers."""
        return StageSnapshots(self.model, self.optimizer_steps)

    @property
    def optimizer_steps(self) -> list[OptimizerStep]:
        """The optimizers of the policy and of a separate critic."""
        critic = self.actor_critic.critic_optimizer_step
        return [self.optimizer_step, *([] if critic is None else [critic])]

    @property
    def model(self) -> nn.Module:
        """The policy, joined with its critic if the algorithm has one: the content of a checkpoint."""
        return self.actor_critic.critic if self.actor_critic.critic is not None else self.policy

    @property
    def stage_settings(self) -> PolicySettings:
        """The settings with the overrides of the current curriculum stage."""
        return self._stage_settings[self.curriculum.index]

    @property
    def finished(self) -> str | None:
        """Reason to stop training; None = continue."""
        return self.curriculum.finished

    def step(self) -> dict[str, float]:
        """Run one iteration: play, score, update, and advance or roll back the curriculum."""
        start_time = time.perf_counter()
        self._snapshots.update_snapshots(
            self.curriculum.index, self.curriculum.restorable_stages, self._collect_learned_state
        )
        self._numerics.prepare_iteration(self._collect_learned_state)
        if self._self_play is not None:
            self._self_play.prepare_iteration(self.iteration)
        rng = self._build_generator()
        played_groups, self.groups, metrics = self._play_and_score(rng)
        rollout_seconds = metrics["perf/rollout_seconds"]
        metrics |= compute_rollout_metrics(
            played_groups,
            with_success=self.environment.knows_success,
            tools=self._tools,
            visual_tools=self._visual_tools,
            environments=self._list_mixed_environments(),
        )
        if self._self_play is not None:
            metrics |= self._self_play.metrics
        rollouts = [rollout for group in played_groups for rollout in group.rollouts]
        self._record_rollouts(rollouts)
        if self.server is not None:
            self.server.put_server_to_sleep()
        update_start = time.perf_counter()
        self.rollouts_played += len(rollouts)
        metrics |= self._update_policy(rng)
        metrics |= self._check_numerics()
        if self.server is not None:
            self.server.put_server_to_sleep()  # the gate may have woken it
        if self.process_group.is_rank_zero:
            self._truncation_monitor.observe_iteration(metrics)
            self._signal_monitor.observe_iteration(
                metrics, [rollout.reward for rollout in rollouts if not rollout.is_masked]
            )
        end_time = time.perf_counter()
        metrics |= self._compute_throughput(rollouts, end_time - start_time, rollout_seconds)
        metrics["perf/reward_seconds"] = update_start - start_time - rollout_seconds
        metrics["perf/update_seconds"] = end_time - update_start
        workers = self.stream or self.worker_group or self.server
        if workers is not None:
            metrics |= workers.collect_metrics()
        self.iteration += 1
        # Every process uses the metrics of rank 0, so that the curriculum decides the same everywhere.
        metrics = self.process_group.run_on_rank_zero(functools.partial(dict, metrics))
        if "policy/update_kl" in metrics:
            self.optimizer_step.adapt_learning_rate(
                metrics["policy/update_kl"], self.settings.learning_rate_control
            )
        previous_stage = self.curriculum.index
        target_stage = self.curriculum.observe_iteration(
            metrics | self._latest_evaluation, known=self._watched_names
        )
        self._latest_evaluation = {}
        if target_stage is not None:
            rollback_settings = self.curriculum.rollback_monitor.settings[previous_stage]
            self._roll_back_stage(target_stage, rollback_settings)
        return metrics | self.curriculum.collect_metrics()

    def _list_mixed_environments(self) -> list[str]:
        """List the environments of a mixture; [] for any other environment."""
        parts = self.environment.parts
        return [part.name for part in parts] if len(parts) > 1 else []

    def evaluate(self) -> dict[str, float]:
        """Return the evaluator's metrics with the current weights."""
        if self.evaluator is None and self._self_play is None:
            return {}
        self.backend.refresh_weights()
        metrics: dict[str, float] = {}
        if self.evaluator is not None:
            sharded = self.optimizer_step.sharded
            metrics |= sharded.run_independently_with_full_weights(self.evaluator)
        if self._self_play is not None:
            metrics |= self._self_play.evaluate(self.iteration)
        self._latest_evaluation = self.process_group.run_on_rank_zero(
            functools.partial(dict, metrics)
        )
        return metrics

    def set_failure_recorder(self, recorder: StoreFailedEpisode) -> None:
        """Store failed episodes, including those on which a reward function failed."""
        super().set_failure_recorder(recorder)
        self.rewards.failures.store_episode = recorder

    def _collect_failure_metrics(self) -> dict[str, float]:
        """Add the episodes on which a reward function failed to the metrics of the base class."""
        metrics = super()._collect_failure_metrics()
        metrics["train/failed_episodes"] += self.rewards.failures.total
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides weights and the policy's optimizer."""
        critic = self.actor_critic.critic_optimizer_step
        baselines, self_play = self.actor_critic.role_baselines, self._self_play
        teacher = self._self_teacher
        return {
            "iteration": self.iteration,
            "rollouts_played": self.rollouts_played,
            "kl_coef": self.kl_coef,
            "curriculum": self.curriculum.state_dict(),
            "evaluated": dict(self._latest_evaluation),
            "failures": {
                "environment": self.failures.state_dict(),
                "rewards": self.rewards.failures.state_dict(),
            },
            "rewards": self.rewards.state_dict(),
            "orders": self._seeds.state_dict(),
            "replay": self._replay.state_dict() if self._replay is not None else None,
            "critic_optimizer_step": critic.state_dict() if critic is not None else None,
            "entries": self._snapshots.state_dict(),
            "numerics": self._numerics.state_dict(),
            **({"stream": self.stream.state_dict()} if self.stream is not None else {}),
            **({"role_baselines": dict(baselines.values)} if baselines is not None else {}),
            **({"self_teacher": teacher.state_dict()} if teacher is not None else {}),
            **(
                {"self_play": self_play.state_dict(self.iteration)} if self_play is not None else {}
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.iteration = int(state["iteration"])
        self.rollouts_played = int(state["rollouts_played"])
        self.kl_coef = float(state["kl_coef"])
        self.curriculum.load_state_dict(state["curriculum"])
        self._latest_evaluation = {
            name: float(value) for name, value in state.get("evaluated", {}).items()
        }
        self.failures.load_state_dict(state["failures"]["environment"])
        self.rewards.failures.load_state_dict(state["failures"]["rewards"])
        self.rewards.load_state_dict(state["rewards"])
        self._seeds.load_state_dict(state["orders"])
        if self._replay is not None:
            self._replay.load_state_dict(state["replay"])
        if self.actor_critic.critic_optimizer_step is not None:
            self.actor_critic.critic_optimizer_step.load_state_dict(state["critic_optimizer_step"])
        self._snapshots.load_state_dict(state["entries"])
        self._numerics.load_state_dict(state.get("numerics", {}))
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"])
        self._load_role_baselines(state)
        if self._self_teacher is not None:
            self._self_teacher.load_state_dict(state["self_teacher"])
        if self._self_play is not None:
            self._self_play.load_state_dict(state["self_play"])

    def _collect_learned_state(self) -> dict[str, Any]:
        """Return the state that a rollback restores besides weights and optimizers."""
        replay = self._replay.state_dict() if self._replay is not None else None
        state = {"kl_coef": self.kl_coef, "rewards": self.rewards.state_dict(), "replay": replay}
        baselines = self.actor_critic.role_baselines
        if baselines is not None:
            state["role_baselines"] = dict(baselines.values)
        if self._self_teacher is not None:
            state["self_teacher"] = self._self_teacher.state_dict()
        return state

    def _load_role_baselines(self, state: Mapping[str, Any]) -> None:
        """Load the running means of rewards by role, if the settings have them."""
        if self.actor_critic.role_baselines is not None:
            values = state.get("role_baselines", {})
            self.actor_critic.role_baselines.values = {
                str(role): float(value) for role, value in values.items()
            }

    def _roll_back_stage(self, target: int, rollback: RollbackSettings | None) -> None:
        """Restore everything that training changes to the snapshot taken at the entry of stage `target`."""
        factor = rollback.learning_rate_factor if rollback is not None else 1.0
        self._restore_learned_state(
            self._snapshots.restore_stage(target, learning_rate_factor=factor)
        )

    def _restore_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `_collect_learned_state` returned."""
        self.kl_coef = float(state["kl_coef"])
        self.rewards.load_state_dict(state["rewards"])
        if self._replay is not None:
            self._replay.load_state_dict(state["replay"])
        self._load_role_baselines(state)
        if self._self_teacher is not None:
            self._self_teacher.load_state_dict(state["self_teacher"])

    def _play_and_score(
        self, rng: np.random.Generator
    ) -> tuple[list[RolloutGroup], list[RolloutGroup], dict[str, float]]:
        """Return all groups that were played, those to train on, and the rewards' metrics."""
        settings = self.stage_settings
        self.rewards.set_weights(self.curriculum.stage.rewards)
        sampled = sample_groups_with_signal(
            functools.partial(self._play_round, rng),
            self._score_groups,
            num_groups=settings.prompts_per_iteration,
            num_retries=settings.sampling_tries,
            measure_spread=self._measure_component_spread if self._needs_components else None,
        )
        metrics = sampled.compute_metrics()
        metrics |= self.process_group.run_on_rank_zero(
            lambda: self.rewards.observe(sampled.all_groups, self.curriculum.stage.name)
        )
        metrics |= self._collect_failure_metrics()
        if settings.sampling_tries:
            metrics["train/dropped_group_rate"] = sampled.dropped_rate
        metrics["perf/rollout_seconds"] = sampled.rollout_seconds
        return sampled.all_groups, sampled.selected_groups, metrics

    def _play_round(self, rng: np.random.Generator, count: int, attempt: int) -> list[RolloutGroup]:
        """Play groups of `count` new episodes, or take them from the stream.

        Args:
            attempt: round of this iteration, from 0.
        """
        settings = self.stage_settings
        self.failures.is_refill = self.rewards.failures.is_refill = attempt > 0
        if self.stream is not None:
            return self._take_stream_groups(
                count, settings, lambda rng: self._draw_episodes(rng, 1)[0]
            )
        purpose: tuple[str | int, ...] = ("rollouts", self.iteration)
        if self._self_play is not None:
            self.failures.iteration = self.iteration
            groups = self._self_play.play_iteration(
                self.iteration,
                self._draw_episodes(rng, count // NUM_PLAYERS),
                group_size=settings.group_size,
                sampling=settings.sampling,
                seed=compute_sequence_seed(self.seed, *purpose),
                policy_version=self.optimizer_step.num_steps,
                failures=self.failures,
            )
            return [group for group in groups if group.rollouts]
        return self._play_groups(
            self._draw_episodes(rng, count),
            group_size=settings.group_size,
            sampling=settings.sampling,
            purpose=(*purpose, attempt) if attempt else purpose,
        )

    def _score_groups(
        self, groups: list[RolloutGroup]
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Return the groups with their rewards, and metrics."""
        self.rewards.failures.iteration = self.iteration
        return self._scorer.score_groups(groups)

    def _draw_episodes(self, rng: np.random.Generator, count: int) -> list[EpisodeRequest]:
        """Draw episodes of the current stage: levels by their weights, training seeds of each level."""
        requests = []
        for _ in range(count):
            level = self.curriculum.draw_level(rng)
            requests.append(EpisodeRequest(level=level, seed=self._seeds.draw_seed(level, rng)))
        return requests

    def _update_policy(self, rng: np.random.Generator) -> dict[str, float]:
        """Train on this iteration's groups and on replayed ones."""
        settings = self.stage_settings
        critic = settings.value_function
        fresh = build_sample_groups(
            self.groups,
            bootstrap_limits=critic is not None and critic.bootstrap_limits,
            mask_truncated=settings.mask_truncated,
            read_task_weight=(
                None if settings.turn_credit is None else self.rewards.read_task_weight
            ),
            read_components=self._read_components if self._needs_components else None,
            read_step_reward=self._read_step_reward if settings.uses_step_credit else None,
        )
        if settings.turn_credit is not None and fresh:
            warn_about_single_turns(fresh)
        taught, teacher = {}, self.actor_critic.teacher
        if isinstance(teacher, SelfTeacher | AlignedTeacher):
            taught = teacher.attach_rows(self.groups, fresh)
        replayed = self._replay.draw_groups(rng, len(fresh)) if self._replay is not None else []
        metrics = {"policy/entropy_coef": self.entropy_coef, "policy/kl_coef": self.kl_coef}
        metrics |= taught | compute_masking_metrics(
            self.groups, mask_truncated=settings.mask_truncated
        )
        if not fresh and not replayed:  # every group was dropped
            self.optimizer_step.num_steps += settings.epochs * settings.minibatches
            return metrics | {"train/empty_updates": float(settings.epochs * settings.minibatches)}
        update = PolicyUpdate(
            self.actor_critic,
            settings,
            [*fresh, *replayed],
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            critic_only=critic is not None and self.iteration < critic.warmup_iterations,
        )
        metrics |= update.run_optimizer_steps(rng)
        update.check_sampler(metrics)
        buffer = update.buffer
        metrics |= compute_advantage_metrics(
            buffer.samples,
            buffer.advantages_RS,
            buffer.mask_RS,
            filter_threshold=settings.filter_threshold,
        )
        if self._replay is not None:
            metrics["train/replayed_rollouts"] = float(sum(map(len, replayed)))
            self._replay.add_groups(fresh)
        self._copy_advantages_to_groups(fresh)
        if self._self_teacher is not None:
            self._self_teacher.follow_policy()
        if "policy/ref_kl" in metrics:
            self.kl_coef = compute_next_kl_coef(settings, self.kl_coef, metrics["policy/ref_kl"])
        return metrics

    @property
    def _self_teacher(self) -> SelfTeacher | None:
        teacher = self.actor_critic.teacher
        return teacher if isinstance(teacher, SelfTeacher) else None

    @property
    def _needs_components(self) -> bool:
        """True if advantages are estimated from the components of the reward."""
        estimator = self.actor_critic.custom_functions.advantages
        if estimator is not None:
            return estimator.takes_components
        return self.settings.algorithm == "gdpo"

    def _read_components(self, rollout: Rollout) -> dict[str, tuple[float, float]]:
        return self.rewards.read_components(rollout, self._scorer.penalties)

    def _read_step_reward(self, rollout: Rollout) -> tuple[float, float]:
        return self.rewards.read_components(rollout).get("process", (0.0, 0.0))

    def _measure_component_spread(self, group: RolloutGroup) -> float:
        """Return the largest range of a reward component in a group; groups of equal totals may differ in parts."""
        known = [rollout for rollout in group.rollouts if not rollout.is_masked]
        parts = [self._read_components(rollout) for rollout in known]
        names = {name for components in parts for name in components}
        values = ([components.get(name, (0.0, 0.0))[0] for components in parts] for name in names)
        return max((max(column) - min(column) for column in values), default=0.0)

    def _check_numerics(self) -> dict[str, float]:
        """Compare the trainer with the sampler after an update, if due."""
        if not self._numerics.is_due(self.iteration):
            return {}
        return self._numerics.check_sampler(
            self.stage_settings.sampling, self._collect_learned_state, self._restore_learned_state
        )

    def _copy_advantages_to_groups(self, fresh: Sequence[SampleGroup]) -> None:
        """Copy advantages into the groups if rollouts were compared."""
        for group, samples in zip(self.groups, fresh, strict=True):
            advantages = [sample.advantage for sample in samples if sample.advantage is not None]
            group.advantages = advantages or None
