"""Peak memory of a run."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn

__all__ = ["peak_memory_gb"]


def peak_memory_gb(model: nn.Module) -> float:
    """Largest memory since the process began, in 10^9 bytes.

    Of a model on a GPU: what torch had allocated there. Of a model on a CPU: the resident memory of the whole process,
    libraries and data included.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # macOS counts bytes, Linux KiB
