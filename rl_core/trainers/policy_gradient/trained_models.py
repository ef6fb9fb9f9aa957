"""Trainable models of a policy-gradient trainer: policy and critic with their optimizers, reference and teacher."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import SettingsError
from rl_core.inference.teacher import Teacher
from rl_core.models.critic import PolicyWithCritic, SeparateCritic, ValueHead, hidden_size
from rl_core.models.logprobs import check_router
from rl_core.models.lora import is_lora
from rl_core.settings import PolicySettings
from rl_core.trainers.policy_gradient.own_parts import OwnParts, own_parts
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ActorCriticModels", "check_models", "make_actor_critic"]


@dataclass
class ActorCriticModels:
    """The trainable models (policy, critic), their optimizers, and the frozen reference."""

    policy: PreTrainedModel
    optimizer_step: OptimizerStep  # of the policy, value head included
    pad_id: int
    reference: PreTrainedModel | None = None  # of the KL term, frozen; the policy itself = without its adapters
    critic: PolicyWithCritic | None = None  # None = an algorithm without values
    critic_optimizer_step: OptimizerStep | None = None  # of a separate critic
    teacher: Teacher | None = None  # of a distillation: advantages come from it in place of rewards
    own: OwnParts = field(default_factory=OwnParts)  # loss and advantage estimator of the user's

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        return next(self.policy.parameters()).device


def check_models(
    settings: PolicySettings, model: PreTrainedModel, reference: PreTrainedModel | None, teacher: Teacher | None
) -> None:
    """Refuse models that the settings cannot be trained with.

    Raises: SettingsError for a KL term without a reference, a reference that cannot be one, a router's loss for a
        model without one, or a distillation without a teacher.
    """
    if settings.is_taught != (teacher is not None):
        raise SettingsError("teacher: a distillation needs one, and nothing else takes one")
    if settings.kl_coef > 0 and reference is None:
        raise SettingsError(f"kl_coef: {settings.kl_coef} needs a reference model")
    if reference is model and not is_lora(model):
        raise SettingsError("kl_coef: a model without adapters cannot be its own reference; hand in a copy")
    check_router(model, settings.router_aux_loss_coef)


def make_actor_critic(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    settings: PolicySettings,
    pad_id: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    teacher: Teacher | None = None,
    own: OwnParts | None = None,
) -> ActorCriticModels:
    """Policy, critic and optimizers that the algorithm needs; the reference is frozen.

    Args:
        reference: `model` itself, where it has adapters: the model without them, and no second copy.
        own: None = the loss and the advantage estimator that the settings name.
    """
    if reference is not None and reference is not model:
        reference.requires_grad_(False).eval()
    own = own_parts(settings) if own is None else own
    optimizer_step_of = functools.partial(
        OptimizerStep,
        total_steps=settings.iterations * settings.epochs * settings.minibatches,
        max_nonfinite=settings.max_nonfinite,
        process_group=process_group,
    )
    chosen = settings.value_function
    if chosen is None:
        return ActorCriticModels(model, optimizer_step_of(model, settings), pad_id, reference, teacher=teacher, own=own)
    if chosen.kind == "shared":
        head = ValueHead(hidden_size(model)).to(next(model.parameters()).device)
        joined = PolicyWithCritic(model, head)
        return ActorCriticModels(model, optimizer_step_of(joined, settings), pad_id, reference, joined, own=own)
    critic = SeparateCritic(model)
    of_critic = dataclasses.replace(settings, learning_rate=chosen.learning_rate or settings.learning_rate)
    return ActorCriticModels(
        model,
        optimizer_step_of(model, settings),
        pad_id,
        reference,
        PolicyWithCritic(model, critic),
        optimizer_step_of(critic, of_critic),
        own=own,
    )
