"""System metrics: CPU, memory, disk and GPUs."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil

log = logging.getLogger(__name__)

MEBIBYTE = 2**20


def sample_system_metrics(process: psutil.Process, folder: Path) -> dict[str, float]:
    """Take one reading. Percentages refer to the time since the previous reading with the same process object."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(str(folder))
    metrics = {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/process_cpu_percentage": process.cpu_percent(),  # 100 = one core
        "system/process_memory_megabytes": process.memory_info().rss / MEBIBYTE,
        "system/system_memory_usage_megabytes": memory.used / MEBIBYTE,
        "system/system_memory_usage_percentage": memory.percent,
        "system/disk_usage_percentage": disk.percent,
        "system/disk_available_megabytes": disk.free / MEBIBYTE,
    }
    torch = _find_loaded_torch()
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            metrics.update(
                _measure_gpu_memory(torch, index) | _measure_gpu_utilization(torch, index)
            )
    return metrics


def _find_loaded_torch() -> ModuleType | None:
    """Return torch if a stage has loaded it.

    A fully cached run needs no GPU and should not spend seconds on the import.
    """
    torch = sys.modules.get("torch")
    # Another thread may be importing it.
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return None
    return torch


def _measure_gpu_memory(torch: ModuleType, index: int) -> dict[str, float]:
    """Measure the memory of a GPU. Without a CUDA context, which a reading must not create, ask the driver."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info(index)
        return {
            f"system/gpu_{index}_memory_usage_megabytes": (total - free) / MEBIBYTE,
            f"system/gpu_{index}_memory_usage_percentage": 100 * (total - free) / total,
            f"system/gpu_{index}_memory_reserved_megabytes": torch.cuda.memory_reserved(index)
            / MEBIBYTE,
        }
    try:
        used = torch.cuda.device_memory_used(index)
        return {f"system/gpu_{index}_memory_usage_megabytes": used / MEBIBYTE}
    except Exception:  # see `_measure_gpu_utilization`
        return {}


def _measure_gpu_utilization(torch: ModuleType, index: int) -> dict[str, float]:
    try:
        return {
            f"system/gpu_{index}_utilization_percentage": float(torch.cuda.utilization(index)),
            f"system/gpu_{index}_power_usage_watts": torch.cuda.power_draw(index) / 1000,
        }
    # No NVML bindings, no permission, or a partitioned GPU: NVML's errors share no base class.
    except Exception:
        return {}


class SystemMonitor:
    """Thread that passes a reading to `record(metrics, sample number)` every `seconds`."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        record: Callable[[dict[str, float], int], None],
        first: int = 0,
    ) -> None:
        """Start the thread. `first`: number of the first reading, so that a resumed run continues counting."""
        self._folder, self._seconds, self._record, self._number = folder, seconds, record, first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="system-metrics", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        process = psutil.Process()
        process.cpu_percent()
        psutil.cpu_percent()
        while not self._stop.wait(self._seconds):
            try:
                self._record(sample_system_metrics(process, self._folder), self._number)
                self._number += 1
            except Exception as error:  # readings must never end a run
                log.warning("system metrics stopped: %s", error)
                return

    def close(self) -> None:
        """Stop; return once no reading is in progress."""
        self._stop.set()
        self._thread.join(5)
