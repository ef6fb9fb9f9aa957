"""Modes of forward passes: compute precision apart from the weights' precision, and dropout.

A ratio or a KL compares two passes over the same tokens. Dropout masks that differ between the passes, or are drawn
in only one, change it although no weight has changed. Trainers that compare passes therefore train without dropout,
or give both passes the masks of the same seed.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from rl_core.cpu import build, gemm
from rl_core.models.lora import unwrap_model
from rl_core.types import AutocastPrecision

logger = logging.getLogger(__name__)

_UNUSED_HEADS = ("classifier", "summary")  # rates of heads that no trainer uses


def enable_autocast(
    precision: AutocastPrecision, device: torch.device
) -> AbstractContextManager[None]:
    """Return a context in which matrix products run in bfloat16 if requested and worth it (`resolve_autocast`);
    weights keep their dtype.

    Casts are not cached: each weight is cast once per pass anyway, and a cast cached under no_grad would cut the
    gradient of a later pass in the same context where torch does not guard against it.
    """
    if resolve_autocast(precision, device.type) == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def resolve_autocast(precision: AutocastPrecision, device_type: str) -> AutocastPrecision:
    """Return the precision that a device computes in: float32 on a processor that is slower in bfloat16.

    Without instructions for it a bfloat16 product takes many times as long as a float32 one, with slow ones (AVX-512
    BF16 of an Intel processor whose AMX is switched off) twice as long. POSTTRAIN_BFLOAT16=1 computes in bfloat16
    anyway, as to reproduce the rounding of another machine.
    """
    if precision == "none" or device_type != "cpu" or has_bfloat16_kernels():
        return precision
    _explain_float32()
    return "none"


def has_bfloat16_kernels() -> bool:
    """Return whether torch has kernels for bfloat16 and this processor multiplies it faster than float32.

    Without compiled code nothing is timed: then AVX-512 BF16 counts as faster.
    """
    if os.environ.get(gemm.BFLOAT16_VARIABLE) == "1":
        return True
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return gemm.find_bf16_kernel() is not None or (
        build.load_library() is None and _has_bfloat16_instructions()
    )


def _has_bfloat16_instructions() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def warn_about_slow_weights(model: nn.Module) -> None:
    """Log a warning if a model in half precision is about to be trained on a processor that is slow at it."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.device.type == "cpu"}
    if dtypes & {torch.bfloat16, torch.float16} and not has_bfloat16_kernels():
        logger.warning(
            "model.dtype: torch has no half-precision kernels for this processor (%s), so training takes many times "
            "as long as with dtype: float32, which needs 2 bytes more for each weight",
            torch.backends.cpu.get_cpu_capability(),
        )


@functools.cache
def _explain_float32() -> None:
    logger.warning(
        "autocast: bfloat16 is off: this processor (%s) %s, and float32 is faster; POSTTRAIN_BFLOAT16=1 computes in "
        "bfloat16 anyway",
        torch.backends.cpu.get_cpu_capability(),
        "multiplies bfloat16 slowly"
        if _has_bfloat16_instructions()
        else "has no instructions for bfloat16",
    )


def has_dropout(model: nn.Module) -> bool:
    """Return whether passes in training mode draw masks: some dropout layer or configured rate is above 0."""
    layers = any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
    config = getattr(unwrap_model(model), "config", None)
    return layers or any(not name.startswith(_UNUSED_HEADS) for name in _find_dropout_rates(config))


@contextmanager
def use_training_mode(model: nn.Module, *, dropout: bool) -> Iterator[None]:
    """Set the mode of an update and its backward pass; restore each module afterwards.

    Args:
        dropout: True = training mode, with the model's configured dropout. False = eval mode, as in sampler and
            reference. Modules that checkpoint activations do so only in training mode, so they stay in it with their
            own rates set to 0.
    """
    modules = list(model.modules())
    # looked up in __dict__, because nn.Module is slow for missing names
    checkpointing = any(module.__dict__.get("gradient_checkpointing", False) for module in modules)
    if not dropout and not checkpointing and not any(module.training for module in modules):
        yield  # nothing to change
        return
    modes = [(module, module.training) for module in modules]
    zeroed: list[tuple[Any, str, float]] = []
    model.train(dropout)
    try:
        if not dropout:
            for module, _ in modes:
                if getattr(module, "gradient_checkpointing", False):
                    module.training = True
                    zeroed += [
                        (owner, *rate)
                        for owner in (module, module.__dict__.get("config"))
                        for rate in _find_dropout_rates(owner).items()
                    ]
            for owner, name, _ in zeroed:
                setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, rate in reversed(zeroed):
            setattr(owner, name, rate)
        for module, mode in modes:
            module.training = mode


@contextmanager
def seed_dropout_masks(device: torch.device, seed: int) -> Iterator[None]:
    """Draw dropout masks that depend on `seed` and the batch's shape alone; leave the global generators unchanged.

    Activations that are recomputed in backward get the same masks, because torch stores the generator's state.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield


def _find_dropout_rates(owner: Any) -> dict[str, float]:
    """Return probabilities above 0 of a module or configuration, under names that contain 'drop'."""
    return {
        name: value
        for name, value in (vars(owner) if owner is not None else {}).items()
        if "drop" in name and isinstance(value, float) and value > 0
    }
