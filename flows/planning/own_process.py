"""Memory of a process of this project on this machine, measured once for the versions that are installed and kept."""

from __future__ import annotations

import logging
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_core.errors import PosttrainError
from rl_core.storage.own_files import cache_folder
from rl_core.storage.single_files import make_folder, write_text_unsynced

__all__ = ["own_process_bytes"]

log = logging.getLogger(__name__)

_PACKAGES = ("posttrain", "torch", "transformers")
_FEWEST = 2**20  # bytes; less is no process, but a damaged file


def own_process_bytes() -> int:
    """Peak memory of a process that trains a tiny model. Measuring it takes a process of about 10 processor seconds.

    Raises: BackendError where that process fails.
    """
    import torch

    place = _place(torch.get_num_threads())
    kept = _kept(place)
    if kept is not None:
        return kept
    from rl_core.resources.machine_calibration import process_bytes  # imports trainers and engine

    measured = process_bytes()
    if place is not None:
        try:
            make_folder(place.parent)
            write_text_unsynced(place, f"{measured}\n")
        except (OSError, PosttrainError) as error:
            log.debug("the memory of a process is not kept: %s", error)
    return measured


def _place(threads: int) -> Path | None:
    """File of what was measured with these packages; None where this user has no cache."""
    native = os.environ.get("POSTTRAIN_NATIVE", "")
    try:
        packages = "-".join(f"{name}-{version(name)}" for name in _PACKAGES)
        return (
            cache_folder("plan") / f"process-{platform.python_version()}-{packages}-{threads}{native and '-' + native}"
        )
    except (PosttrainError, PackageNotFoundError):  # the second: run from a folder, not installed
        return None


def _kept(place: Path | None) -> int | None:
    """Bytes that the file holds; None = nothing of use."""
    try:
        found = int(place.read_text()) if place is not None else 0
    except (OSError, ValueError):
        return None
    return found if found >= _FEWEST else None
