"""Norm and clipping of gradients: torch's, to the last bit, without what it looks up at every call.

Around networks as small as those of `rl_core.networks` the lookup costs more than the norm. Where gradients differ in
device or type, torch's own functions do the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["clip_gradients", "total_norm"]


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norm over all gradients, scalar; as `torch.nn.utils.get_total_norm`."""
    if not _are_alike(gradients):
        return torch.nn.utils.get_total_norm(gradients)
    with torch.no_grad():
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2.0)), 2.0)


def clip_gradients(parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale the gradients of the parameters, in place, by min(1, max_norm / (norm + 1e-6)).

    As `torch.nn.utils.clip_grads_with_norm_`. Args: norm: of all gradients, scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not _are_alike(gradients) or norm.device != gradients[0].device:
        torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
        return
    with torch.no_grad():
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _are_alike(gradients: Sequence[torch.Tensor]) -> bool:
    """True = plain dense tensors of one device and type, which torch handles together."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    return device.type in ("cpu", "cuda") and all(
        type(gradient) is torch.Tensor and gradient.dtype == dtype and gradient.device == device
        and gradient.layout == torch.strided
        for gradient in gradients
    )  # fmt: skip
