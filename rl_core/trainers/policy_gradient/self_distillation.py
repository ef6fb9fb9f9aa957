"""The policy as its own teacher: with a prompt that holds more than the policy's, it scores the policy's tokens.

The answer, another rollout's solution, the environment's feedback or a demonstration stands in the teacher's prompt;
the tokens after it are those of the rollout. Sources: SDPO, arXiv:2601.20802; OPSD, arXiv:2601.18734; SDFT,
arXiv:2601.19897.

Suffixes: R rows of the iteration, B rows of a micro-batch, S whole sequence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_core.distributed import DummyBatch
from rl_core.environments.environment import warn_once
from rl_core.errors import CheckpointError, SettingsError, suggest_name
from rl_core.models.causal_lm import use_eval_mode
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.trainable_weights import collect_trainable_weights, swap_weights
from rl_core.out_of_memory import MemoryFit
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.rollouts.episode_sequence import Renderer
from rl_core.settings import PolicySettings, SelfTeacherSettings
from rl_core.trainers.policy_gradient.samples import SampleGroup, TrainingSample
from rl_core.types import Message, Rollout, RolloutGroup, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")
_BUILTIN_NAMES = ("prompt", "target", "solution", "feedback")
SOLUTION_REWARD = 1.0  # of a rollout that is a solution, where the environment judges no success


class TaughtBuffer(Protocol):
    """The part of `rollout_buffer.RolloutBuffer` that the teacher's pass needs."""

    samples: list[TrainingSample]
    settings: PolicySettings
    actor_critic: Any  # `ActorCriticModels`
    shape: tuple[int, int]
    device: torch.device
    mask_RS: torch.Tensor
    host_mask_RS: torch.Tensor


class SelfTeacher:
    """The policy with a privileged prompt and with its current, averaged or initial weights.

    Averaged and initial weights are a copy of the trainable ones (with adapters, of the adapters), which are swapped in
    for the teacher's passes.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        renderer: Renderer,
        settings: SelfTeacherSettings,
        *,
        columns: Sequence[str] | None = None,
        context: int | None = None,
    ) -> None:
        """Copy the weights, if they are not the current ones.

        Args:
            columns: of the environment's rows; () = the episodes have none, None = unknown.
            context: the policy's longest sequence in tokens; None = unknown.
        Raises: SettingsError for a placeholder of the prompt that nothing fills.
        """
        self.policy = policy
        self.renderer = renderer
        self.settings = settings
        self.context = context
        self._check_placeholders(columns)
        self._weights: dict[str, torch.Tensor] | None = None
        if settings.weights != "current":
            self._weights = {
                name: tensor.to(self._select_dtype(tensor), copy=True)
                for name, tensor in collect_trainable_weights(policy).items()
            }

    def attach_rows(
        self, groups: Sequence[RolloutGroup], samples: Sequence[SampleGroup]
    ) -> dict[str, float]:
        """Give each sample the teacher's row; one whose prompt lacks something carries no loss.

        Args:
            samples: [P][G] of the groups' rollouts.
        Returns: {"train/taught_rate"}: the share of rollouts with a teacher's prompt.
        Raises: SettingsError for a rollout of several contexts, or without its opening messages.
        """
        num_taught = num_rollouts = 0
        for group, group_samples in zip(groups, samples, strict=True):
            for index, sample in enumerate(group_samples):
                num_rollouts += 1
                prompt_ids = self._build_prompt(group.rollouts[index], group.rollouts)
                row = sample.row
                length = len(prompt_ids or ()) + len(row.completion_ids)
                if prompt_ids is None or (self.context is not None and length > self.context):
                    sample.row = dataclasses.replace(row, loss_mask=[False] * len(row.loss_mask))
                    continue
                num_taught += 1
                sample.teacher_row = TrainRow(
                    prompt_ids, row.completion_ids, row.loss_mask, None, row.temperature
                )
        if not num_taught and num_rollouts:
            warn_once(
                "self_teacher.prompt: no rollout of an iteration had what it names (another rollout that succeeded for "
                "{solution}, an observation or `Step.info['feedback']` for {feedback}, a column), or room for it in "
                "the context; nothing is learned from them"
            )
        return {"train/taught_rate": num_taught / max(1, num_rollouts)}

    @torch.no_grad()
    def compute_row_logprobs(
        self, buffer: TaughtBuffer, plan: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Compute log-probs [R, S] of the tokens at their places in the policy's rows, 0 where there is no loss."""
        logprobs_RS = torch.zeros(buffer.shape, device=buffer.device)
        optimizer_step = buffer.actor_critic.optimizer_step

        def fill(batch: TrainBatch) -> None:
            values_BS, _ = completion_logprobs(self.policy, batch)
            for row, values_S, mask_S in zip(
                batch.rows, values_BS, batch.loss_mask_BS, strict=True
            ):
                logprobs_RS[row][buffer.mask_RS[row]] = values_S[mask_S].float()

        def run() -> None:
            memory_fit = MemoryFit("scoring of rollouts by the teacher")
            for indices in plan:
                batches = build_teacher_batches(
                    buffer,
                    indices,
                    pad_id=buffer.actor_critic.pad_id,
                    shares_prefixes=optimizer_step.can_share_prefixes(self.policy),
                )
                memory_fit.compute_batches(batches, fill)

        swapped = (
            nullcontext() if self._weights is None else swap_weights(self.policy, self._weights)
        )
        with swapped, use_eval_mode(self.policy), optimizer_step.enable_autocast():
            optimizer_step.sharded.run_independently_with_full_weights(run)
        return optimizer_step.process_group.all_reduce_sum(logprobs_RS)

    @torch.no_grad()
    def follow_policy(self) -> None:
        """Move averaged weights towards the policy's: w = decay w + (1 - decay) policy, once an iteration."""
        if self.settings.weights != "ema" or self._weights is None:
            return
        for name, tensor in collect_trainable_weights(self.policy).items():
            average = self._weights[name]
            if average.is_floating_point():
                average.lerp_(tensor.to(average.dtype), 1 - self.settings.ema_decay)
            else:
                average.copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights; {} for others, which follow from the policy or from its start."""
        if self.settings.weights != "ema" or self._weights is None:
            return {}
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`. Raises: CheckpointError for weights of another model."""
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(
                "self_teacher: the checkpoint has averaged weights of another model"
            )
        for name, tensor in state.items():
            assert self._weights is not None
            self._weights[name].copy_(tensor)

    def _select_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return at least float32 for an average: one of bfloat16 would lose small changes."""
        if self.settings.weights != "ema" or not tensor.is_floating_point():
            return tensor.dtype
        return torch.promote_types(tensor.dtype, torch.float32)

    def _build_prompt(self, rollout: Rollout, group: Sequence[Rollout]) -> list[int] | None:
        """Return the token ids of the teacher's prompt; None = the rollout lacks something that it names."""
        rollout.check_one_context("self_teacher")
        if not rollout.messages:
            raise SettingsError(
                "self_teacher: its prompt is built from an episode's opening messages, which episodes of an agent do "
                "not have; use an environment, or teacher.model"
            )
        values = _collect_values(rollout, group)
        missing = False

        def fill(match: re.Match[str]) -> str:
            nonlocal missing
            if match[1] is None:
                return match[0][0]
            value = values.get(match[1])
            missing = missing or value is None
            return str(value)

        text = _PLACEHOLDER.sub(fill, self.settings.prompt)
        if missing:
            return None
        return self.renderer.prompt_ids(_replace_last_question(rollout.messages, text))

    def _check_placeholders(self, columns: Sequence[str] | None) -> None:
        names = [match[1] for match in _PLACEHOLDER.finditer(self.settings.prompt) if match[1]]
        known = [*_BUILTIN_NAMES, *(columns or ())]
        for name in names:
            if columns is not None and name not in known:
                raise SettingsError(
                    f"self_teacher.prompt: '{{{name}}}' is none of {', '.join(known)}; {suggest_name(name, known)} "
                    "Double literal braces"
                )
        if not set(names) - {"prompt"}:
            raise SettingsError(
                "self_teacher.prompt: tells the teacher nothing that the policy does not know; name {target}, "
                "{solution}, {feedback} or a column"
            )


def build_teacher_batches(
    buffer: TaughtBuffer, indices: Sequence[int], *, pad_id: int, shares_prefixes: bool
) -> list[TrainBatch]:
    """Build this process's micro-batches of the teacher's rows that carry loss, on the policy's device."""
    optimizer_step = buffer.actor_critic.optimizer_step
    has_loss = buffer.host_mask_RS.any(1).tolist()
    indices = [index for index in indices if has_loss[index]]
    if not indices:
        return []
    rows = {index: buffer.samples[index].teacher_row for index in indices}

    def build(chosen: Sequence[int]) -> list[TrainBatch]:
        batches = build_batches(
            [row for index in chosen if (row := rows[index]) is not None],
            buffer.settings.micro_batch_tokens,
            pad_id,
            shares_prefixes=shares_prefixes,
        )
        for batch in batches:
            batch.rows = [chosen[index] for index in batch.rows]
        return batches

    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows.values() if row]
    batches = optimizer_step.process_group.build_local_batches(indices, lengths, build)
    return [b.to(buffer.device) for b in batches if not isinstance(b, DummyBatch)]


def _collect_values(rollout: Rollout, group: Sequence[Rollout]) -> dict[str, Any]:
    """Collect what fills the placeholders; a missing value is absent."""
    trajectory = rollout.trajectory
    values = {name: value for name, value in trajectory.row.items() if value not in (None, "")}
    values["prompt"] = next(
        (m["content"] for m in reversed(rollout.messages) if m["role"] == "user"), ""
    )
    if trajectory.target:
        values["target"] = trajectory.target
    feedback = trajectory.info.get("feedback")
    if feedback is None and trajectory.turns:
        seen = [turn.observation for turn in trajectory.turns if turn.observation]
        feedback = seen[-1] if seen else None
    if feedback:
        values["feedback"] = feedback
    solutions = [other for other in group if other is not rollout and _is_solution(other)]
    if solutions:
        values["solution"] = max(solutions, key=lambda other: other.reward).trajectory.completion
    return values


def _is_solution(rollout: Rollout) -> bool:
    if rollout.success is None:
        return not rollout.is_masked and rollout.reward >= SOLUTION_REWARD
    return rollout.success


def _replace_last_question(messages: Sequence[Message], text: str) -> list[Message]:
    """Replace the text of the last user message, or append one."""
    places = [index for index, message in enumerate(messages) if message["role"] == "user"]
    changed = [*messages]
    if not places:
        return [*changed, {"role": "user", "content": text}]
    question: Message = {**messages[places[-1]], "content": text}
    changed[places[-1]] = question
    return changed
