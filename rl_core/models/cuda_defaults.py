"""Settings of torch for this process that every model on a GPU shares, made once, with a line that says so.

- Float32 products run in TF32: a float32 exponent, 10 bits of mantissa, several times as fast. Sums stay in float32.
- Attention without a mask takes the flash kernels: cuDNN's build a plan for every new shape of a batch.
- Memory grows in segments that can be extended, so that batches of other lengths leave no holes.

Set POSTTRAIN_FLOAT32=exact to compute float32 products in float32, POSTTRAIN_ATTENTION=cudnn to allow cuDNN's kernels,
and torch's PYTORCH_ALLOC_CONF for another allocator.
"""

from __future__ import annotations

import functools
import logging
import os

import torch

logger = logging.getLogger(__name__)


@functools.cache
def configure_cuda() -> None:
    """Make the settings, before the first tensor is on the GPU where possible."""
    lines = []
    if os.environ.get("POSTTRAIN_FLOAT32") == "exact":
        lines.append("float32 products are exact (POSTTRAIN_FLOAT32)")
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        lines.append("float32 products run in TF32 (POSTTRAIN_FLOAT32=exact: in float32)")
    if os.environ.get("POSTTRAIN_ATTENTION") != "cudnn":
        torch.backends.cuda.enable_cudnn_sdp(False)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        _use_expandable_segments()
    lines.append(
        "with model.dtype: bfloat16, training and rollouts are faster and take half the memory"
    )
    logger.info("GPU: %s", "; ".join(lines))


def _use_expandable_segments() -> None:
    try:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    except (AttributeError, RuntimeError) as error:  # another platform, or another allocator
        logger.debug("no expandable segments: %s", error)


def uses_tf32(device: torch.device) -> bool:
    """Return whether float32 products on this device round their inputs to TF32."""
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
