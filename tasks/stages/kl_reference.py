"""The reference model of a KL term."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rl_core.settings.common import Precision
from tasks.pipeline.stage import StageContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.api.policy import Policy


def load_kl_reference(
    context: StageContext, policy: Policy, precision: Precision = "full"
) -> PreTrainedModel:
    """Load the model that a KL term refers to. A policy with new adapters is its own reference, without them.

    A policy that continues an adapter started from it, so its reference is a copy with that adapter merged.

    Args:
        precision: of the weights, if the reference is a copy.
    """
    from rl_core.models.adapter_folder import is_adapter_folder
    from rl_core.models.lora import is_lora
    from rl_core.references.pool import get_frozen_models

    if is_lora(policy.model) and not is_adapter_folder(context.inputs["model"]):
        return policy.model
    frozen = dataclasses.replace(context.pipeline.model, lora=None)
    return get_frozen_models().load_model(context.inputs["model"], frozen, precision=precision)
