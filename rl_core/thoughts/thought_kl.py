"""Reference of the KL term of thoughts: the model that training starts from, or the policy without its adapters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from rl_core.errors import SettingsError
from rl_core.models.causal_lm import evaluating
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import without_adapter
from rl_core.timing import span
from rl_core.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["needed_reference", "ref_logprobs"]


def needed_reference(reference: PreTrainedModel | None, kl_coef: float) -> PreTrainedModel | None:
    """The reference, None where no KL is taken. Raises: SettingsError where one is needed and none is there."""
    if kl_coef > 0 and reference is None:
        raise SettingsError("kl_coef: needs a reference, the model that training starts from")
    return reference if kl_coef > 0 else None


@torch.no_grad()
def ref_logprobs(model: PreTrainedModel, reference: PreTrainedModel | None, train: TrainBatch) -> torch.Tensor:
    """Log-probabilities of the tokens that carry loss under the reference, float32 [B, S], without dropout.

    They are at the temperatures of the batch, as the policy's own.
    Args:
        reference: `model` itself = that model without its adapters.
    """
    assert reference is not None
    own = without_adapter(reference) if reference is model else nullcontext()
    with span("reference"), own, evaluating(reference):
        return completion_logprobs(reference, train)[0]
