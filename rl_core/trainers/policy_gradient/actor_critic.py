"""Models of a policy-gradient trainer: policy and critic with their optimizers, reference and teacher."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rl_core.capabilities import refuse_image_training
from rl_core.distributed import SINGLE_PROCESS, ProcessGroup
from rl_core.errors import SettingsError
from rl_core.models.heads import PolicyWithCritic, SeparateCritic, ValueHead, read_hidden_size
from rl_core.models.logprobs import check_router
from rl_core.models.lora import is_lora
from rl_core.settings import PolicySettings
from rl_core.trainers.policy_gradient.advantages import RoleBaselines, build_role_baselines
from rl_core.trainers.policy_gradient.cross_vocabulary import AnyTeacher, check_teacher
from rl_core.trainers.policy_gradient.custom_functions import CustomFunctions, load_custom_functions
from rl_core.training.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class ActorCriticModels:
    """The trainable models (policy, critic), their optimizers, and the frozen reference."""

    policy: PreTrainedModel
    optimizer_step: OptimizerStep  # of the policy, value head included
    pad_id: int
    # Frozen reference of the KL term. If it is the policy itself: the policy without its adapters.
    reference: PreTrainedModel | None = None
    critic: PolicyWithCritic | None = None  # None = an algorithm without values
    critic_optimizer_step: OptimizerStep | None = None  # of a separate critic
    # of a distillation: advantages come from it, not from rewards
    teacher: AnyTeacher | None = None
    custom_functions: CustomFunctions = field(default_factory=CustomFunctions)
    role_baselines: RoleBaselines | None = None  # None = the algorithm's comparison of rewards

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        return next(self.policy.parameters()).device


def check_models(
    settings: PolicySettings,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    teacher: AnyTeacher | None,
) -> None:
    """Refuse models that cannot be trained with these settings.

    Raises: SettingsError for a KL term without a reference, an unusable reference, a router's loss for a model without
        a router, or a distillation without a teacher; for a model that reads images, what is not done with them.
    """
    check_teacher(settings, teacher)
    if settings.kl_coef > 0 and reference is None:
        raise SettingsError(f"kl_coef: {settings.kl_coef} needs a reference model")
    if reference is model and not is_lora(model):
        raise SettingsError(
            "kl_coef: a model without adapters cannot be its own reference; pass a copy"
        )
    check_router(model, settings.router_aux_loss_coef)
    refuse_image_training(model, settings)


def build_actor_critic(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    settings: PolicySettings,
    pad_id: int,
    process_group: ProcessGroup = SINGLE_PROCESS,
    teacher: AnyTeacher | None = None,
    custom_functions: CustomFunctions | None = None,
) -> ActorCriticModels:
    """Build the policy, critic and optimizers that the algorithm needs; freeze the reference.

    Args:
        reference: may be `model` itself if it has adapters; the reference is then the model without them, not a copy.
        custom_functions: None = those that the settings name.
    """
    if reference is not None and reference is not model:
        reference.requires_grad_(False).eval()
    if custom_functions is None:
        custom_functions = load_custom_functions(settings)
    build_step = functools.partial(
        OptimizerStep,
        total_steps=settings.iterations * settings.epochs * settings.minibatches,
        max_nonfinite=settings.max_nonfinite,
        process_group=process_group,
    )
    critic_settings = settings.value_function
    if critic_settings is None:
        return ActorCriticModels(
            model,
            build_step(model, settings),
            pad_id,
            reference,
            teacher=teacher,
            custom_functions=custom_functions,
            role_baselines=build_role_baselines(settings),
        )
    if critic_settings.kind == "shared":
        head = ValueHead(read_hidden_size(model)).to(next(model.parameters()).device)
        policy_with_head = PolicyWithCritic(model, head)
        return ActorCriticModels(
            model,
            build_step(policy_with_head, settings),
            pad_id,
            reference,
            policy_with_head,
            custom_functions=custom_functions,
        )
    critic = SeparateCritic(model)
    learning_rate = critic_settings.learning_rate or settings.learning_rate
    return ActorCriticModels(
        model,
        build_step(model, settings),
        pad_id,
        reference,
        PolicyWithCritic(model, critic),
        build_step(critic, dataclasses.replace(settings, learning_rate=learning_rate)),
        custom_functions=custom_functions,
    )
