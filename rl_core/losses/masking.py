"""Masked sums, means and whitening, and the input checks shared by all losses.

Suffixes: B rows, T tokens. A mask is True where a token counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from rl_core.errors import DataError, NonFiniteTensor
from rl_core.losses.host_reads import defer_finite_check, find_deferred_checks


def check_inputs(loss_mask: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise DataError unless every tensor has the mask's shape and is finite where the mask is True.

    Values outside the mask may be anything, NaN included: losses replace them before use. None is skipped. Within
    `host_reads.defer_checks`, values on an accelerator are checked later.
    """
    if loss_mask.dtype != torch.bool:
        raise DataError(
            f"loss_mask: dtype {loss_mask.dtype}, expected torch.bool (True = token counts)"
        )
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in present.items():
        if tensor.shape != loss_mask.shape:
            raise DataError(
                f"{name}: shape {tuple(tensor.shape)}, loss_mask has {tuple(loss_mask.shape)}"
            )
        if not tensor.is_floating_point():
            raise DataError(f"{name}: dtype {tensor.dtype}, expected a floating-point type")
    detached = {name: tensor.detach() for name, tensor in present.items()}
    if detached and find_deferred_checks(loss_mask) is None and _have_one_dtype(detached):
        # Stacked, all tensors take as many operations as one.
        stacked = torch.stack(list(detached.values()))
        if math.isfinite(float(fill_masked(stacked, loss_mask).sum(dtype=torch.float32))):
            return
    check_finite(**{name: fill_masked(tensor, loss_mask) for name, tensor in detached.items()})


def _have_one_dtype(tensors: Mapping[str, torch.Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors.values()}) == 1


def check_finite(**tensors: torch.Tensor) -> None:
    """Raise NonFiniteTensor (a DataError) naming the first tensor with NaN or infinity, and the position.

    Within `host_reads.defer_checks`, tensors on an accelerator are checked later, without the position.
    """
    if defer_finite_check({name: tensor.detach() for name, tensor in tensors.items()}):
        return
    # One reduction over all tensors needs one device synchronisation. NaN and infinity survive a sum; the loop below
    # recognises a sum that merely overflowed.
    sums = [tensor.detach().sum(dtype=torch.float32) for tensor in tensors.values()]
    if not sums or math.isfinite(float(sum(sums[1:], sums[0]))):
        return
    for name, tensor in tensors.items():
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            position = tuple(bad[0].tolist())
            raise NonFiniteTensor(
                f"{name}: {tensor[position].item()} at {position}; {len(bad)} of {tensor.numel()} are not finite"
            )


def check_count(name: str, count: float) -> float:
    """Return the global denominator as a float, which must be finite and above 0. Raises: DataError."""
    if not math.isfinite(count) or count <= 0:
        raise DataError(
            f"{name}: {count}; a loss needs at least one loss token, sequence or pair (is the mask empty?)"
        )
    return float(count)


def build_full_mask(*shape: int) -> torch.Tensor:
    """Build a mask that is True everywhere and marked as such, so that masking operations can be skipped.

    Do not write to it. A slice or copy of it is an ordinary mask.
    """
    mask = torch.ones(shape, dtype=torch.bool)
    mask.is_full = True  # type: ignore[attr-defined]
    return mask


def fill_masked(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Replace values by 0 where the mask is False; masked entries, NaN included, affect neither value nor gradient."""
    if getattr(mask_BT, "is_full", False):
        return values_BT
    return torch.where(mask_BT, values_BT, values_BT.new_zeros(()))


def masked_sum(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the scalar sum over the entries whose mask is True."""
    return fill_masked(values_BT, mask_BT).sum()


def masked_max(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the largest value under the mask, 0 for an empty mask; for metrics."""
    if not mask_BT.numel():
        return values_BT.new_zeros(())
    if getattr(mask_BT, "is_full", False):
        return values_BT.max()
    largest = values_BT.masked_fill(~mask_BT, -math.inf).max()
    return torch.where(mask_BT.any(), largest, largest.new_zeros(()))


def masked_whiten(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, *, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    """Compute (values - mean) rsqrt(var + eps) under the mask, 0 elsewhere; unbiased variance.

    Call it once per optimizer step: whitening each micro-batch separately changes the loss.

    Args:
        values_BT: float [B, T].
        shift_mean: False adds the mean back (for rewards, whose sign matters).
    Returns: float [B, T], computed in float64 if squares overflow. A single value has no variance: it becomes 0
        (unchanged with shift_mean=False).
    Raises: DataError on shapes, an empty mask, non-finite values, or squares that overflow float64.
    """
    check_inputs(mask_BT, values=values_BT)
    count = check_count("mask", int(mask_BT.sum()))
    mean = masked_sum(values_BT, mask_BT) / count
    centered_BT = fill_masked(values_BT - mean, mask_BT)
    if count > 1:
        squares = centered_BT.square().sum()
        if not bool(torch.isfinite(squares)):
            if values_BT.dtype == torch.float64:
                raise DataError("values: too large to whiten, their squares overflow float64")
            whitened_BT = masked_whiten(values_BT.double(), mask_BT, shift_mean=shift_mean, eps=eps)
            return whitened_BT.to(values_BT.dtype)
        centered_BT = centered_BT * torch.rsqrt(squares / (count - 1) + eps)
    return centered_BT if shift_mean else fill_masked(centered_BT + mean, mask_BT)
