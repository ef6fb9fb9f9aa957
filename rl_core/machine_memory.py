"""Memory of the machine, and the most that this process had. Imports no torch on a machine without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# of a container, v2 and v1
_CONTAINER_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def measure_machine_memory(device: torch.device | None = None) -> int:
    """Bytes of main memory, or of the container's limit where that is less; of a GPU, its own."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in map(Path, _CONTAINER_LIMITS):
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return total


def measure_free_memory(device: torch.device | None = None) -> int:
    """Bytes that can be had without swapping, within the container's limit; of a GPU, also those that torch keeps."""
    if device is not None and device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    everything, whole = (
        measure_machine_memory(),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    try:
        lines = dict(
            line.split(":", 1)
            for line in Path("/proc/meminfo").read_text().splitlines()
            if ":" in line
        )
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # another system than Linux
        return everything
    return max(0, min(available, everything - (whole - available)))


def measure_peak_resident_bytes() -> int:
    """Highest resident memory of this process: VmHWM. 0 where the system does not tell it.

    Not ru_maxrss, which after `exec` still holds the parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
