"""A slot of the global concurrency limit `gpu`, held while a stage computes on GPUs beside other runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.concurrency.sync import concurrency

from tasks.stage_registry import entry

__all__ = ["gpu_slot"]

VARIABLE = "POSTTRAIN_GPU_LIMIT"  # name of the limit; set by `posttrain up`, whose server has it
LEASE_SECONDS = 60.0  # after which the slot of a run that was killed is free again


@contextmanager
def gpu_slot(stage: str) -> Iterator[None]:
    """Wait for a slot and hold it; nothing without GPUs, without `posttrain up`, or for a stage that needs none.

    Args:
        stage: its name.
    """
    limit = os.environ.get(VARIABLE, "")
    if not limit or not entry(stage).uses_gpu or not _has_gpus():
        yield
        return
    # Not strict: a limit that somebody deleted, or a server that is down for a while, must not end a stage.
    with concurrency(limit, lease_duration=LEASE_SECONDS, strict=False):
        yield


def _has_gpus() -> bool:
    import torch  # seconds, which a run without the limit need not spend here

    return torch.cuda.is_available()
