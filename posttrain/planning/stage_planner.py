"""Plan of one stage that trains or runs a language model: memory by part, work and time. No weights are loaded."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from posttrain.planning.target import (
    PlanLengths,
    PlanTarget,
    count_training_rows,
    find_data_file,
    list_rollout_notes,
    list_target_notes,
)
from rl_core.capabilities import check_training_forward
from rl_core.cpu.prefix_tree import MIN_SHARED_SHARE
from rl_core.models.forward_modes import enable_autocast
from rl_core.resources.activations import (
    Activations,
    MicroBatch,
    estimate_packed_activations,
    estimate_transformers_activations,
)
from rl_core.resources.model_shape import (
    ModelShape,
    build_model_without_weights,
    measure_model_shape,
)
from rl_core.resources.stage_memory import (
    PERSISTENT_PARTS,
    MemoryPhase,
    Placement,
    SlotSizes,
    StageMemory,
    estimate_frozen_bytes,
    estimate_gathered_weights,
    estimate_rollout_parts,
    estimate_training_state,
    estimate_update_phases,
    needs_reference_copy,
)
from rl_core.resources.stage_time import (
    StageTime,
    StageWork,
    estimate_decoding_work,
    estimate_scoring_work,
    estimate_training_work,
)
from rl_core.settings import (
    LoopSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    PreferenceSettings,
    RewardModelSettings,
    SFTSettings,
)
from rl_core.trainers.supervised_trainer import compute_training_length
from tasks import stage_registry
from tasks.config import PipelineSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Holes of the heap with adapters on a machine without calibration; measured ones are 0.6 to 0.8 of the activations.
_ADAPTER_HEAP_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Resources of one stage; memory is that of each of its processes."""

    name: str
    parameters: int
    trainable_parameters: int
    processes: int
    memory: StageMemory
    work: StageWork | None  # None = the number of rows is unknown
    time: StageTime | None
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class PlannedModel:
    """Model of the settings on the meta device, as a policy and as a trunk with a scalar head."""

    settings: ModelSettings
    context: int
    module: PreTrainedModel = field(init=False)
    policy: ModelShape = field(init=False)
    trunk: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        self.module = build_model_without_weights(self.settings)
        self.policy = measure_model_shape(self.module, self.context)
        self.trunk = measure_model_shape(self.module, self.context, trunk_only=True)


class StagePlanner:
    """Planner of one stage."""

    def __init__(
        self,
        name: str,
        settings: PipelineSettings,
        target: PlanTarget,
        lengths: PlanLengths,
        model: PlannedModel,
    ) -> None:
        self.name, self.settings, self.model = name, settings, model
        self.target = target
        self.lengths, length_notes = lengths.choose_for_stage(name, settings)
        self.block = getattr(settings.stages, name)
        launch = self.block.launch if isinstance(self.block, LoopSettings) else None
        self.processes = 1 if launch is None else launch.processes * launch.nodes
        self.placement: Placement = target.build_placement(model.settings, self.processes)
        self.notes: list[str] = length_notes
        self.runtime = {"runtime": self.placement.runtime} if self.placement.runtime else {}
        self.notes += list_target_notes(target, self.processes, model.module)

    def plan_supervised(
        self, block: SFTSettings | PreferenceSettings | RewardModelSettings
    ) -> StagePlan:
        """Plan SFT on rows, and preference optimisation or a reward model on pairs, both sides in one micro-batch.

        KTO also reads a mismatched completion for each row, without gradient, that counts towards the limit of a
        micro-batch.
        """
        is_sft = isinstance(block, SFTSettings)
        is_kto = isinstance(block, PreferenceSettings) and block.loss == "kto"
        shape = self.model.trunk if isinstance(block, RewardModelSettings) else self.model.policy
        sides = 1 if is_sft or is_kto or self._is_single_sided(block) else 2
        row_tokens = self.lengths.resolve_row_length(shape.context)
        prompt = min(self.lengths.prompt or 0, row_tokens - 1)
        if self.lengths.row is None:
            self.notes.append(
                f"rows count at {row_tokens:,} tokens, the longest that fit: --row-tokens gives their mean"
            )
        step_rows = -(-block.batch_size // self.processes)
        # A reward model reads only the last state.
        loss_tokens = 1 if isinstance(block, RewardModelSettings) else row_tokens - prompt
        batch = self._fit_micro_batch(
            block,
            step_rows,
            row_tokens,
            loss_tokens,
            sides=sides,
            extra_rows=int(is_kto),
            group=sides,
            prompt=prompt,
        )
        phases = self._plan_update_phases(shape, block, batch, dict(self.runtime))
        makes_pairs = not is_sft and find_data_file(self.settings, "preferences") is None
        if makes_pairs:
            rollouts = self._plan_rollout_phase(self.model.policy, block, dict(self.runtime))
            phases = [rollouts, *phases]
            self.notes.append("the rollouts that pairs are made from are not in the time")
        rows = count_training_rows(self.name, self.settings, self.lengths)
        work = None
        if rows is None:
            self.notes.append("rows of the data are not known: give --rows")
        else:
            updates, _ = compute_training_length(block, -(-rows // block.batch_size))
            count = updates * min(block.batch_size, rows) * sides
            work = estimate_training_work(
                shape,
                block,
                rows=count,
                length=row_tokens,
                loss_length=loss_tokens,
                updates=updates,
                micro_batches=batch.count,
                **self._compute_packed_savings(shape, block, batch),
            )
            if is_kto:
                work += estimate_scoring_work(
                    shape, rows=count, length=row_tokens, loss_length=loss_tokens
                )
            if isinstance(block, PreferenceSettings) and block.needs_reference:
                work += estimate_scoring_work(
                    shape, rows=rows * 2, length=row_tokens, loss_length=row_tokens - prompt
                )
        return self._build_plan(shape, phases, work)

    @staticmethod
    def _is_single_sided(block: SFTSettings | PreferenceSettings | RewardModelSettings) -> bool:
        return isinstance(block, RewardModelSettings) and block.loss != "bradley_terry"

    def plan_policy(self, block: PolicySettings) -> StagePlan:
        """Plan rollouts, passes without gradient, and epochs x minibatches of updates."""
        shape, critic = self.model.policy, block.value_function
        prompt, new_tokens = self.lengths.resolve_rollout_lengths(block.sampling, shape.context)
        count = block.prompts_per_iteration * block.group_size
        step_rows = -(-count // (block.minibatches * self.processes))
        batch = self._fit_micro_batch(
            block, step_rows, prompt + new_tokens, new_tokens, group=block.group_size, prompt=prompt
        )
        frozen = self._estimate_frozen_models(block)
        resident = {**self.runtime, **frozen}
        has_separate_critic = critic is not None and critic.kind == "separate"
        critic_bytes = {}
        if has_separate_critic:
            critic_state = estimate_training_state(self.model.trunk, block, self.placement)
            critic_bytes["critic"] = sum(critic_state.values())
        rollouts = self._plan_rollout_phase(shape, block, {**resident, **critic_bytes})
        policy_state = estimate_training_state(shape, block, self.placement)
        rollouts = MemoryPhase(
            rollouts.name,
            {**rollouts.parts, **policy_state, **estimate_gathered_weights(shape, self.placement)},
        )
        persistent = {
            name: size for name, size in rollouts.parts.items() if name in PERSISTENT_PARTS
        }
        phases = [
            rollouts,
            *self._plan_update_phases(
                shape, block, batch, {**resident, **critic_bytes, **persistent}
            ),
        ]
        if has_separate_critic:
            policy_bytes = {"policy": sum(policy_state.values())}
            critic_phases = self._plan_update_phases(
                self.model.trunk, block, batch, {**resident, **policy_bytes, **persistent}
            )
            phases += [
                MemoryPhase(f"critic's {phase.name}", phase.parts) for phase in critic_phases
            ]
        work = self._estimate_iteration_work(block, prompt, new_tokens, batch).scale_by(
            block.iterations
        )
        if block.eval_every:
            num_episodes = block.iterations // block.eval_every * block.eval_episodes
            work += self._estimate_rollout_work(
                block, num_episodes, num_episodes, prompt, new_tokens
            )
        self.notes += list_rollout_notes(block, self.lengths)
        return self._build_plan(shape, phases, work)

    def _estimate_iteration_work(
        self, block: PolicySettings, prompt: int, new_tokens: int, batch: MicroBatch
    ) -> StageWork:
        """Estimate the rollouts, scoring passes and updates of one iteration."""
        shape, trunk = self.model.policy, self.model.trunk
        count, length = block.prompts_per_iteration * block.group_size, prompt + new_tokens
        work = self._estimate_rollout_work(
            block, count, block.prompts_per_iteration, prompt, new_tokens
        )
        updates = block.epochs * block.minibatches
        sizes = {
            "length": float(length),
            "loss_length": float(new_tokens),
            **self._compute_packed_savings(shape, block, batch),
        }
        work += estimate_training_work(
            shape,
            block,
            rows=count * block.epochs,
            updates=updates,
            micro_batches=batch.count,
            **sizes,
        )
        if block.kl_coef > 0:
            dequantized_bytes = 0.0
            # Each pass of a micro-batch writes and reads the dequantized weights.
            if block.reference_precision != "full":
                dequantized_bytes = 9.0 * shape.linear / max(1.0, batch.padded / length)
            work += estimate_scoring_work(
                shape, rows=count, dequantized_bytes=dequantized_bytes, **sizes
            )
        needs_old = updates > 1 or block.kl_max is not None
        if needs_old and (block.minibatches > 1 or block.kl_max is not None or self.processes > 1):
            work += estimate_scoring_work(shape, rows=count, **sizes)
        if self._uses_reward_model(block):
            work += estimate_scoring_work(trunk, rows=count, **sizes)
        critic = block.value_function
        if critic is not None:
            critic_shape = trunk if critic.kind == "separate" else shape
            work += estimate_scoring_work(critic_shape, rows=count, **sizes)
            if critic.kind == "separate":
                work += estimate_training_work(
                    trunk,
                    block,
                    rows=count * block.epochs,
                    updates=updates,
                    micro_batches=batch.count,
                    **sizes,
                )
        return work

    def _estimate_rollout_work(
        self, block: Any, sequences: float, prompts: float, prompt: int, new_tokens: int
    ) -> StageWork:
        return estimate_decoding_work(
            self.model.policy,
            sequences=sequences,
            prompts=prompts,
            prompt_length=prompt,
            new_tokens=new_tokens,
            slots=block.sampling.slots * self.processes,
            item=self.placement.item,
            processes=self.processes,
        )

    def _uses_reward_model(self, block: PolicySettings) -> bool:
        """Return whether a reward of the stage, or of an environment of a mixture, is that of a reward model."""
        return block.uses_reward_model or (
            self.name == "policy" and self.settings.uses_reward_model
        )

    def _estimate_frozen_models(self, block: PolicySettings) -> dict[str, int]:
        """Estimate the models that only score: the KL reference and the reward model."""
        sizes = {}
        if needs_reference_copy(block, self.model.policy):
            precision = block.reference_precision
            sizes["reference model"] = estimate_frozen_bytes(
                self.model.policy, self.placement.item, precision
            )
        if self._uses_reward_model(block):
            sizes["reward model"] = estimate_frozen_bytes(self.model.trunk, self.placement.item)
        if block.is_taught:
            self.notes.append("the teacher's memory and passes are not counted")
        return sizes

    def plan_evaluation(self, block: Any) -> StagePlan:
        """Plan the held-out episodes of every model of the run, one model after another."""
        shape = self.model.policy
        prompt, new_tokens = self.lengths.resolve_rollout_lengths(block.sampling, shape.context)
        episodes = self._count_evaluated_models() * block.episodes
        work = self._estimate_rollout_work(
            block, episodes * block.samples, episodes, prompt, new_tokens
        )
        if block.greedy:
            work += self._estimate_rollout_work(block, episodes, episodes, prompt, new_tokens)
        phase = self._plan_rollout_phase(
            shape, block, {**self.runtime, "weights": self.placement.item * shape.parameters}
        )
        return self._build_plan(shape, [phase], work, trainable=0)

    def _count_evaluated_models(self) -> int:
        """Count the models that the evaluation plays."""
        trained = [
            getattr(self.settings.stages, name) for name in stage_registry.list_policy_stages()
        ]
        is_started = self.settings.model.path is not None  # the start model is played as well
        return max(1, is_started + sum(block is not None for block in trained))

    def _plan_rollout_phase(
        self, shape: ModelShape, block: Any, resident_parts: Mapping[str, int]
    ) -> MemoryPhase:
        """Plan the rollouts of a stage's `sampling`; add the model's weights unless they are resident."""
        prompt, _ = self.lengths.resolve_rollout_lengths(block.sampling, shape.context)
        length = min(shape.context, prompt + block.sampling.max_completion_tokens)
        count = getattr(block, "episodes", 0) * getattr(block, "samples", 1)
        if isinstance(block, PolicySettings):
            count = -(-block.prompts_per_iteration * block.group_size // self.processes)
        slots = min(block.sampling.slots, count or block.sampling.slots)
        group = getattr(block, "group_size", 1)
        sizes = SlotSizes(slots, length, -(-slots // group) * prompt)
        parts = dict(resident_parts)
        if "weights" not in parts:
            parts["weights"] = self.placement.item * shape.parameters
        parts |= estimate_rollout_parts(shape, sizes, self.placement)
        return MemoryPhase("rollouts", parts)

    def _fit_micro_batch(
        self,
        block: OptimizerSettings,
        rows: int,
        length: int,
        loss_length: int,
        *,
        sides: int = 1,
        extra_rows: int = 0,
        group: int = 1,
        prompt: int = 0,
    ) -> MicroBatch:
        """Return the largest micro-batch of a step of `rows` examples with `sides` rows of `length` tokens each.

        Rows of one group share the states of their prompt, if the model shares prefixes; they are then counted once.
        Args:
            extra_rows: further rows of an example that count towards the limit, but not in the pass with gradient.
        """
        drops_out = block.dropout and self.model.policy.drops_out
        is_shared = not drops_out and group > 1 and self._uses_packed_forward(block)

        def count_tokens(examples: int) -> int:
            padded = examples * sides * length
            group_rows = min(group, examples * sides)
            shared = prompt * (examples * sides - -(-examples * sides // group_rows))
            return padded - shared if is_shared and shared > MIN_SHARED_SHARE * padded else padded

        if drops_out and not isinstance(block, SFTSettings):
            capacity = 1  # each example has its own masks
        else:
            extra = extra_rows * length
            capacity = bisect.bisect_right(
                range(1, rows + 1),
                block.micro_batch_tokens,
                key=lambda examples: count_tokens(examples) + examples * extra,
            )
        examples = max(1, min(rows, capacity))
        return MicroBatch(
            count_tokens(examples),
            examples * sides * length,
            examples * sides * loss_length,
            max(1, math.ceil(rows / examples)),
        )

    def _plan_update_phases(
        self,
        shape: ModelShape,
        block: OptimizerSettings,
        batch: MicroBatch,
        resident_parts: Mapping[str, int],
    ) -> list[MemoryPhase]:
        activations = self._estimate_activations(shape, block, batch)
        evaluates = isinstance(block, LoopSettings) and block.eval_every > 0
        return estimate_update_phases(
            shape,
            block,
            self.placement,
            activations,
            batch.count,
            resident_parts,
            evaluates=evaluates,
        )

    def _uses_packed_forward(self, block: OptimizerSettings) -> bool:
        """Return whether passes go through `rl_core.cpu.run_packed_forward`."""
        if self.target.device != "cpu":
            return False
        with enable_autocast(block.autocast, torch.device("cpu")):
            return check_training_forward(self.model.module, "cpu").allowed

    def _computes_in_bfloat16(self) -> bool:
        """Return whether the stage on a CPU multiplies in bfloat16: by autocast, or by weights of that type."""
        if self.target.device != "cpu":
            return False
        autocast = getattr(self.block, "autocast", "none")
        return autocast == "bfloat16" or self.model.settings.dtype == "bfloat16"

    def _compute_packed_savings(
        self, shape: ModelShape, block: OptimizerSettings, batch: MicroBatch
    ) -> dict[str, float]:
        """Return the work saved by the packed forward: shared prefixes, and the last MLP at tokens without loss."""
        if not self._uses_packed_forward(block):
            return {}
        return {
            "computed": batch.tokens / batch.padded,
            "skipped": 3.0 * shape.hidden * shape.inner,
        }

    def _estimate_activations(
        self, shape: ModelShape, block: OptimizerSettings, batch: MicroBatch
    ) -> Activations:
        machine = self.target.machine
        if self._uses_packed_forward(block):
            recomputed = block.activation_checkpointing
            packed = estimate_packed_activations(shape, batch, checkpointing=recomputed)
            has_adapters = bool(shape.ranks)
            if machine is None:
                return packed.with_heap_holes(_ADAPTER_HEAP_SHARE) if has_adapters else packed
            if recomputed:
                return packed.with_heap_holes(machine.heap_share_recomputed)
            return packed.with_heap_holes(
                machine.heap_share_adapters if has_adapters else machine.heap_share
            )
        activations = estimate_transformers_activations(
            self.model.module,
            shape,
            batch,
            device=self.target.device,
            autocast=block.autocast == "bfloat16",
            checkpointing=block.activation_checkpointing,
        )
        if machine is None or not block.activation_checkpointing:
            return activations.with_heap_holes(0.0)
        return activations.with_heap_holes(machine.heap_share_recomputed)

    def _build_plan(
        self,
        shape: ModelShape,
        phases: list[MemoryPhase],
        work: StageWork | None,
        *,
        trainable: int | None = None,
    ) -> StagePlan:
        time = None
        if work is not None:
            in_bfloat16 = self._computes_in_bfloat16()
            time = self.target.estimate_time(
                work, shape.hidden, self.processes, in_bfloat16=in_bfloat16
            )
            machine = self.target.machine
            if in_bfloat16 and machine is not None and not machine.training_bfloat16:
                self.notes.append(
                    "the time is that of float32: the calibration has no speeds in bfloat16, because the processor is "
                    "slower in it, or because it is older than they (posttrain check machine --calibrate)"
                )
        return StagePlan(
            self.name,
            shape.parameters,
            shape.trainable if trainable is None else trainable,
            self.processes,
            StageMemory(tuple(phases)),
            work,
            time,
            tuple(dict.fromkeys(self.notes)),
        )
