"""Memory of the machine, and this process's peak usage. Imports torch only for a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


# Limits of a container, for cgroups v2 and v1.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def measure_machine_memory(device: torch.device | None = None) -> int:
    """Return the bytes of main memory, or of the container's limit if that is smaller; for a GPU, of its memory."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    total = _measure_physical_memory()
    for path in map(Path, _CONTAINER_LIMITS):
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return total


def measure_free_memory(device: torch.device | None = None) -> int:
    """Return the bytes available without swapping, within the container's limit; for a GPU, including torch's cache."""
    if device is not None and device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    total = measure_machine_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return total
    used = _measure_physical_memory() - available
    return max(0, min(available, total - used))


def _measure_physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_peak_resident_bytes() -> int:
    """Return the peak resident memory of this process (VmHWM), or 0 if the system does not report it.

    ru_maxrss would not do: after `exec` it still holds the parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
