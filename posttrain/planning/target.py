"""Memory of a process of this project on this machine, measured once for the versions that are installed and kept.

Device that a plan is for, and the lengths that a configuration leaves open.

Number of rows that a stage trains on, from its settings or its data file.

Notes of a plan: what its figures leave out, or count otherwise than a reader would expect.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.data.files import list_data_files
from rl_core.errors import PosttrainError
from rl_core.machine_memory import measure_machine_memory
from rl_core.resources.model_shape import count_experts
from rl_core.resources.stage_memory import Placement
from rl_core.resources.stage_time import (
    GpuFigures,
    StageTime,
    StageWork,
    estimate_gpu_time,
    estimate_machine_time,
    parse_gpu_count,
)
from rl_core.settings import LoraSettings, ModelSettings, PolicySettings, SamplingSettings
from rl_core.settings.planning import MachineSettings
from rl_core.storage.atomic_files import make_folder, resolve_cache_folder, write_text_unsynced
from tasks.config import PipelineSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)

_KEYED_PACKAGES = ("posttrain", "torch", "transformers")
_MIN_PROCESS_BYTES = 2**20  # bytes; less is no process, but a damaged file


def measure_process_bytes_once() -> int:
    """Peak memory of a process that trains a tiny model. Measuring it takes a process of about 10 processor seconds.

    Raises: BackendError where that process fails.
    """
    import torch

    place = _locate_cached_bytes(torch.get_num_threads())
    kept = _read_cached_bytes(place)
    if kept is not None:
        return kept
    from rl_core.resources.machine_calibration import (
        measure_process_bytes,  # imports trainers and engine
    )

    measured = measure_process_bytes()
    if place is not None:
        try:
            make_folder(place.parent)
            write_text_unsynced(place, f"{measured}\n")
        except (OSError, PosttrainError) as error:
            log.debug("the memory of a process is not kept: %s", error)
    return measured


def _locate_cached_bytes(threads: int) -> Path | None:
    """File of what was measured with these packages; None where this user has no cache."""
    native = os.environ.get("POSTTRAIN_NATIVE", "")
    try:
        packages = "-".join(f"{name}-{version(name)}" for name in _KEYED_PACKAGES)
        return (
            resolve_cache_folder("plan")
            / f"process-{platform.python_version()}-{packages}-{threads}{native and '-' + native}"
        )
    except (PosttrainError, PackageNotFoundError):  # the second: run from a folder, not installed
        return None


def _read_cached_bytes(path: Path | None) -> int | None:
    """Bytes that the file holds; None = nothing of use."""
    try:
        found = int(path.read_text()) if path is not None else 0
    except (OSError, ValueError):
        return None
    return found if found >= _MIN_PROCESS_BYTES else None


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0}  # bytes of a weight, scales aside


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """Device that stages will run on."""

    name: str
    device: str  # cpu or cuda
    memory_bytes: int  # of the machine, or of one GPU
    runtime_bytes: int  # of a process without a model; 0 on a GPU
    machine: MachineSettings | None = None
    gpu: GpuFigures | None = None
    gpus: int = 1

    def build_placement(self, model: ModelSettings, processes: int) -> Placement:
        """Placement of a model of these settings in so many processes."""
        lora: LoraSettings | None = model.lora
        rounded = _QUANTIZED_BYTES.get(lora.quantize) if lora is not None else None
        packed = self.machine.packed_weight_bytes if self.machine is not None else 4.0
        return Placement(
            self.device, _DTYPE_BYTES[model.dtype], processes, self.runtime_bytes, packed, rounded
        )

    def estimate_time(self, work: StageWork, hidden: int, processes: int) -> StageTime | None:
        """Seconds of this work; None where no speeds are known."""
        if self.gpu is not None:
            return estimate_gpu_time(work, self.gpu, processes)
        return None if self.machine is None else estimate_machine_time(work, hidden, self.machine)


def parse_gpu_target(text: str) -> PlanTarget:
    """GPUs by number and kind, as `8xH200`. Raises: SettingsError."""
    count, gpu = parse_gpu_count(text)
    return PlanTarget(f"{count} x {gpu.name}", "cuda", gpu.memory_bytes, 0, gpu=gpu, gpus=count)


def build_machine_target(machine: MachineSettings | None) -> PlanTarget:
    """A calibrated machine; None = this one, without speeds; a process of its own measures memory, once.

    Raises: BackendError where that process fails.
    """
    if machine is None:
        return PlanTarget(
            "this machine", "cpu", measure_machine_memory(), measure_process_bytes_once()
        )
    runtime = machine.library_bytes + machine.pipeline_bytes
    name = f"{machine.name}, {machine.threads} threads"
    return PlanTarget(name, "cpu", machine.memory_bytes, runtime, machine=machine)


@dataclass(frozen=True, slots=True)
class PlanLengths:
    """Mean tokens; None = the longest that the settings allow, so that times are upper bounds."""

    row: int | None = None  # of a demonstration, or of one side of a pair
    prompt: int | None = None
    completion: int | None = None  # of a rollout
    rows: int | None = None  # of the data file that a stage learns from

    def resolve_row_length(self, context: int) -> int:
        """Tokens of a row."""
        return min(self.row or context, context)

    def resolve_rollout_lengths(self, sampling: SamplingSettings, context: int) -> tuple[int, int]:
        """Tokens of a prompt and of what follows it."""
        longest = min(sampling.max_completion_tokens, context - 1)
        prompt = min(self.prompt or context - longest, context - 1)
        return prompt, min(self.completion or longest, longest, context - prompt)


def count_training_rows(name: str, settings: PipelineSettings, lengths: PlanLengths) -> int | None:
    """Rows that a stage on data trains on, held-out ones left out; None = not known."""
    data, block = settings.stages.prepare_data, getattr(settings.stages, name)
    path = find_data_file(settings, "demonstrations" if name == "sft" else "preferences")
    if lengths.rows is not None:
        found: int | None = lengths.rows
    elif path is not None:
        found = count_known_rows(path)
    elif name == "sft":
        found = data.num_demonstrations if data is not None else None
    else:
        found = block.num_pairs
    if found is None:
        return None
    if data is not None and data.max_rows is not None:
        found = min(found, data.max_rows)
    share = 1.0 if data is None else 1.0 - data.heldout_fraction
    return max(1, round(found * share))


def find_data_file(settings: PipelineSettings, name: str) -> str | None:
    """The file or folder that `prepare_data` reads these rows from, if it does."""
    data = settings.stages.prepare_data
    found: str | None = getattr(data, name) if data is not None else None
    return found


def count_known_rows(path: str | None) -> int | None:
    """Rows of JSON Lines files; None for other kinds of files, or none at all."""
    if path is None:
        return None
    files = list_data_files(Path(path))
    if not files or any(file.suffix != ".jsonl" for file in files):
        return None
    count = 0
    for file in files:
        with file.open("rb") as lines:
            count += sum(1 for line in lines if line.strip())
    return count


def list_target_notes(target: PlanTarget, processes: int, model: PreTrainedModel) -> list[str]:
    """Of a stage in so many processes with this model."""
    found = []
    if target.gpus > processes:
        found.append(f"launch uses {processes} of {target.gpus} GPUs: set launch.processes")
    elif target.device == "cuda" and target.gpus < processes:
        found.append(
            f"launch needs {processes} GPUs, one a process, and there are {target.gpus}; the time is theirs"
        )
    if (experts := count_experts(model)) is not None:
        count, met = experts
        found.append(
            f"a token meets {met} of {count} experts, but all count in operations and time, as in perf/mfu"
        )
    return found


def list_rollout_notes(block: PolicySettings, lengths: PlanLengths) -> list[str]:
    """Of a stage that plays rollouts."""
    found = []
    if not lengths.completion:
        found.append(
            "rollouts count at max_completion_tokens: --completion-tokens gives their mean"
        )
    if (workers := block.rollouts.workers) != "in_process":
        found.append(
            f"rollouts count in this process, one after the other with updates, but are played beside it (workers: "
            f"{workers}); --simulate tells who waits for whom"
        )
    found.append("environment steps and reward functions are not in the time")
    return found
