"""The precision that a model computes in, apart from that of its weights.

Dropout of training passes: switched off, or with masks that can be drawn again.

A ratio or a KL compares two passes over the same tokens. Masks that differ between the two (or are there in one only)
move it though no weight has changed, so trainers that compare either train without dropout or give both passes the
masks of the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from rl_core.models.lora import unwrap_model

AutocastPrecision = Literal["none", "bfloat16"]


def enable_autocast(
    precision: AutocastPrecision, device: torch.device
) -> AbstractContextManager[None]:
    """Context in which matrix products are taken in bfloat16, where that is asked for; weights stay as they are.

    Casts are not cached: each weight is cast once in a pass anyway, and a cast that was cached under no_grad would cut
    the gradient of a pass that follows in the same context where torch does not guard against it.
    """
    if precision == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


_OTHER_HEADS = ("classifier", "summary")  # rates of heads that no trainer uses


def has_dropout(model: nn.Module) -> bool:
    """True = passes in training mode draw masks: some dropout layer, or rate of the configuration, is above 0."""
    layers = any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
    config = getattr(unwrap_model(model), "config", None)
    return layers or any(not name.startswith(_OTHER_HEADS) for name in _find_dropout_rates(config))


@contextmanager
def use_training_mode(model: nn.Module, *, dropout: bool) -> Iterator[None]:
    """The mode of an update and its backward pass; afterwards each module is as it was before.

    Args:
        dropout: True = training mode, with the model's configured dropout. False = eval mode, in which sampler and
            reference compute as well. Modules that checkpoint their activations do so in training mode only, so they
            stay in it, their own rates set to 0.
    """
    modules = list(model.modules())
    # looked up in the instance: nn.Module answers a missing name slowly
    checkpointing = any(module.__dict__.get("gradient_checkpointing", False) for module in modules)
    if not dropout and not checkpointing and not any(module.training for module in modules):
        yield  # as it is already
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
    """Passes whose dropout masks follow from `seed` and the batch's shape; the global generators stay as they were.

    Activations that are computed again in backward get the same masks: torch keeps the generator's state of the pass.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield


def _find_dropout_rates(owner: Any) -> dict[str, float]:
    """Probabilities above 0 that a module or configuration keeps under a name with 'drop' in it."""
    return {
        name: value
        for name, value in (vars(owner) if owner is not None else {}).items()
        if "drop" in name and isinstance(value, float) and value > 0
    }
