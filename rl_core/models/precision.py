"""The precision that a model computes in, apart from that of its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

__all__ = ["Autocast", "autocast"]

Autocast = Literal["none", "bfloat16"]


def autocast(precision: Autocast, device: torch.device) -> AbstractContextManager[None]:
    """Context in which matrix products are taken in bfloat16, where that is asked for; weights stay as they are.

    Casts are not cached: each weight is cast once in a pass anyway, and a cast that was cached under no_grad would cut
    the gradient of a pass that follows in the same context where torch does not guard against it.
    """
    if precision == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
