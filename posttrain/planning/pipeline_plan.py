"""Plans of all stages of a pipeline: thoughts, networks, analysis and export besides training and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.planning.stage_planner import PlannedModel, StagePlan, StagePlanner
from posttrain.planning.target import PlanLengths, PlanTarget
from rl_core.errors import SettingsError
from rl_core.models.gguf_export import GGUF_BITS
from rl_core.resources.activations import MicroBatch
from rl_core.resources.stage_memory import (
    PERSISTENT_PARTS,
    MemoryPhase,
    StageMemory,
    estimate_forward_parts,
    estimate_frozen_bytes,
    estimate_training_state,
)
from rl_core.resources.stage_time import StageWork, estimate_scoring_work, estimate_training_work
from rl_core.settings import (
    AnalysisSettings,
    DistillationSettings,
    EvaluationSettings,
    ExportSettings,
    GgufSettings,
    NetworkSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
    ThoughtsSettings,
)
from tasks import stage_registry
from tasks.config import PipelineSettings
from tasks.config.machine_checks import read_context_length

_PROBE_TOKENS = 4096  # `rl_core.probe.MAX_TOKENS`
_FIXED_RECORD_TOKENS = 8 * 16 + 16  # of the trainer's record and the evaluation's sequences
_TRAINING_OPERATIONS = 6  # per parameter and observation
_ROLLOUT_OPERATIONS = 2  # per parameter and observation


class AllStagesPlanner(StagePlanner):
    """Planner of one stage of any plannable kind."""

    def plan_thoughts(self, block: ThoughtsSettings) -> StagePlan:
        """Plan episodes of one rollout each.

        Answers are scored with and without the thought; the update trains on both.
        """
        shape = self.model.policy
        prompt, new_tokens = self.lengths.resolve_rollout_lengths(block.sampling, shape.context)
        count, length = block.episodes_per_iteration, prompt + new_tokens
        rows = 2 * count  # with the thought, and without it
        batch = self._fit_micro_batch(block, -(-rows // self.processes), length, new_tokens)
        resident = dict(self.runtime)
        if block.kl_coef and not shape.ranks:
            resident["reference model"] = estimate_frozen_bytes(shape, self.placement.item)
        rollouts = self._plan_rollout_phase(shape, block, resident)
        rollouts = MemoryPhase(
            rollouts.name,
            {**rollouts.parts, **estimate_training_state(shape, block, self.placement)},
        )
        persistent = {
            name: size for name, size in rollouts.parts.items() if name in PERSISTENT_PARTS
        }
        phases = [
            rollouts,
            *self._plan_update_phases(shape, block, batch, {**resident, **persistent}),
        ]
        sizes = {
            "length": float(length),
            "loss_length": float(new_tokens),
            **self._compute_packed_savings(shape, block, batch),
        }
        # Each answer twice, and the states of the baseline.
        scoring = estimate_scoring_work(shape, rows=rows + count, **sizes)
        work = self._estimate_rollout_work(block, count, count, prompt, new_tokens) + scoring
        work += estimate_training_work(
            shape, block, rows=rows, updates=1, micro_batches=batch.count, **sizes
        )
        if block.kl_coef:
            work += estimate_scoring_work(shape, rows=rows, **sizes)
        work = work.scale_by(block.iterations)
        validations = 1 + (block.iterations // block.eval_every if block.eval_every else 0)
        # The test for genuine thoughts scores each answer four times: thought, none, shuffled, filler.
        for episodes, passes in (
            (block.validation_episodes * validations, 2),
            (block.check_episodes, 4),
        ):
            work += self._estimate_rollout_work(block, episodes, episodes, prompt, new_tokens)
            work += estimate_scoring_work(
                shape, rows=passes * episodes, length=float(length), loss_length=float(new_tokens)
            )
        if not self.lengths.completion:
            self.notes.append(
                "rollouts count at max_completion_tokens: --completion-tokens gives their mean"
            )
        self.notes.append(
            "an episode counts as one question; environment steps are not in the time"
        )
        return self._build_plan(shape, phases, work)

    def plan_analysis(self, block: AnalysisSettings) -> StagePlan:
        """Plan the passes of every evaluated model with the first one loaded as well, and those of the reward model."""
        shape = self.model.policy
        models = self._count_evaluated_models()
        length = self.lengths.resolve_row_length(shape.context)
        evaluation = self.settings.stages.evaluate
        if evaluation is not None:
            lengths = self.lengths.resolve_rollout_lengths(evaluation.sampling, shape.context)
            length = min(shape.context, sum(lengths))
        tokens = max(length, _PROBE_TOKENS // length * length)
        weight_bytes = min(2, models) * self.placement.item * shape.parameters
        passes = estimate_forward_parts(shape, MicroBatch(tokens, tokens, tokens), self.placement)
        phase = MemoryPhase("models' passes", {**self.runtime, "weights": weight_bytes, **passes})
        episodes = block.probe_episodes
        # Entropy and KL need this model and the first; the coherence of turns needs the first model's states.
        work = estimate_scoring_work(
            shape,
            rows=models * 3 * episodes + models * block.probe_demonstrations,
            length=float(length),
            loss_length=float(length),
        )
        if self.settings.stages.reward_model is not None:
            work += estimate_scoring_work(
                self.model.trunk,
                rows=models * block.probe_scores,
                length=float(length),
                loss_length=1.0,
            )
        self.notes.append("counting, drawing and the trajectories in memory are not in the plan")
        return self._build_plan(shape, [phase], work, trainable=0)

    def plan_export(self, block: ExportSettings) -> StagePlan:
        """Plan the fresh process that loads one exported model after another, in addition to this process."""
        shape = self.model.policy
        trained = self._count_evaluated_models()
        batch = MicroBatch(_FIXED_RECORD_TOKENS, _FIXED_RECORD_TOKENS, _FIXED_RECORD_TOKENS)
        passes = estimate_forward_parts(shape, batch, self.placement)
        runtime = {"runtime": 2 * self.placement.runtime} if self.placement.runtime else {}
        phase = MemoryPhase(
            "fresh process",
            {**runtime, "weights": self.placement.item * shape.parameters, **passes},
        )
        work = estimate_scoring_work(
            shape, rows=float(trained * 2 * 16), length=16.0, loss_length=16.0
        )
        self.notes.append(
            "the start of a fresh process, 20 s or more on a slow core, is not in the time"
        )
        return self._build_plan(shape, [phase], work, trainable=0)

    def plan_gguf(self, block: GgufSettings) -> StagePlan:
        """Plan the model and the file's copy of it, both in float32 on the CPU, and the passes that compare them."""
        shape = self.model.policy
        size = GGUF_BITS[block.type] / 8 * shape.parameters
        self.notes.append(f"the file takes {size / 1e9:,.2f} GB in the output folder")
        if self.target.device != "cpu":
            self.notes.append("runs on the CPU")
            phase = MemoryPhase("read back", {"weights": 0})
        else:
            weights = 2 * 4 * shape.parameters
            phase = MemoryPhase("read back", {**self.runtime, "weights": weights})
        work = estimate_scoring_work(shape, rows=4.0, length=32.0, loss_length=32.0)
        return self._build_plan(shape, [phase], work, trainable=0)

    def plan_network(self, block: NetworkSettings) -> StagePlan:
        """Plan policy and value networks; their sizes follow from the spaces of the environment.

        Raises: SettingsError if the environment cannot be created.
        """
        from rl_core.networks.actor_critic import ActorCritic, NetworkShape
        from rl_core.networks.vector_environment import read_spaces

        observation, actions = read_spaces(block)
        network = ActorCritic(NetworkShape(observation, actions, block.hidden, block.activation))
        parameters = sum(parameter.numel() for parameter in network.parameters())
        steps = block.num_environments * block.rollout_steps
        # Six more values: reward, end, log-prob, value, advantage, return.
        row_bytes = 4 * (observation + actions.size + 6)
        batch_rows = min(block.micro_batch_tokens, -(-steps // block.minibatches))
        activation_bytes = (
            4 * 2 * (observation + sum(block.hidden)) * batch_rows
        )  # of both networks
        parts = {
            **self.runtime,
            "weights": 4 * parameters,
            "gradients": 4 * parameters,
            "optimizer moments": 8 * parameters,
            "best model": 4 * parameters,
            "steps": row_bytes * steps * (1 + block.replay),
            "activations": activation_bytes,
        }
        iterations = max(1, block.environment_steps // steps)
        trained_rows = iterations * steps * block.epochs * (1 + block.replay)
        work = StageWork(
            trained_tokens=float(trained_rows),
            scored_tokens=float(iterations * steps),
            updates=float(iterations * block.epochs * block.minibatches),
            training_flops=float(_TRAINING_OPERATIONS * parameters * trained_rows),
            scoring_flops=float(_ROLLOUT_OPERATIONS * parameters * iterations * steps),
        )
        self.notes.append(
            "tokens are observations; environments and their time, which is most of it, are not planned"
        )
        memory = StageMemory(
            (MemoryPhase("update", {name: size for name, size in parts.items() if size}),)
        )
        return StagePlan(
            self.name, parameters, parameters, 1, memory, work, None, tuple(self.notes)
        )


_PlanFunction = Callable[[AllStagesPlanner, Any], StagePlan]
_PLAN_FUNCTIONS: Mapping[type, _PlanFunction] = {
    SFTSettings: AllStagesPlanner.plan_supervised,
    PreferenceSettings: AllStagesPlanner.plan_supervised,
    RewardModelSettings: AllStagesPlanner.plan_supervised,
    PolicySettings: AllStagesPlanner.plan_policy,
    DistillationSettings: lambda stage, block: stage.plan_policy(block.policy()),
    ThoughtsSettings: AllStagesPlanner.plan_thoughts,
    NetworkSettings: AllStagesPlanner.plan_network,
    EvaluationSettings: AllStagesPlanner.plan_evaluation,
    AnalysisSettings: AllStagesPlanner.plan_analysis,
    ExportSettings: AllStagesPlanner.plan_export,
    GgufSettings: AllStagesPlanner.plan_gguf,
}


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Plans of the stages in order, and the names of the unplanned stages."""

    stages: tuple[StagePlan, ...]
    unplanned_stages: tuple[str, ...]


def plan_pipeline(
    settings: PipelineSettings, target: PlanTarget, lengths: PlanLengths
) -> PipelinePlan:
    """Plan all active stages except those that compute little (data, promotion) and custom stages.

    Raises: ModelError if the model's config cannot be read.
    """
    models: dict[bool, PlannedModel] = {}
    plans, unplanned = [], []
    for name in stage_registry.list_stage_names():
        block = getattr(settings.stages, name)
        if block is None:
            continue
        if type(block) not in _PLAN_FUNCTIONS:
            unplanned.append(name)
            continue
        try:
            plans.append(plan_stage(name, settings, target, lengths, models))
        except SettingsError as error:
            if not isinstance(block, NetworkSettings):
                raise
            # The package of its environment may be installed only on another machine.
            unplanned.append(f"{name} ({error})")
    return PipelinePlan(tuple(plans), tuple(unplanned))


def plan_stage(
    name: str,
    settings: PipelineSettings,
    target: PlanTarget,
    lengths: PlanLengths,
    models: dict[bool, PlannedModel] | None = None,
) -> StagePlan:
    """Plan one stage.

    Args:
        models: built by earlier calls for the same settings, by whether they have adapters.
    """
    block = getattr(settings.stages, name)
    # The reward model trains all weights, and an exported model has its adapters merged.
    merged = RewardModelSettings | AnalysisSettings | ExportSettings | GgufSettings
    with_adapters = not isinstance(block, merged)
    models = {} if models is None else models
    if with_adapters not in models:
        model_settings = settings.model
        if not with_adapters:
            model_settings = dataclasses.replace(settings.model, lora=None)
        context = read_context_length(settings.model) or 2**20
        models[with_adapters] = PlannedModel(model_settings, context)
    planner = AllStagesPlanner(name, settings, target, lengths, models[with_adapters])
    return _PLAN_FUNCTIONS[type(block)](planner, block)
