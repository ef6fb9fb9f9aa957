"""Target of a plan: the device, the lengths that a configuration leaves open, rows of data, and notes.

The memory of a process on this machine is measured once per set of installed versions and cached.
"""

from __future__ import annotations

import dataclasses
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

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0}  # of a weight, without scales
PAIR_STAGES = ("preference", "reward_model")
_KEYED_PACKAGES = ("posttrain", "torch", "transformers")
_MIN_PROCESS_BYTES = 2**20  # less means a damaged file


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """Device that the stages will run on."""

    name: str
    device: str  # cpu or cuda
    memory_bytes: int  # of the machine, or of one GPU
    runtime_bytes: int  # of a process without a model; 0 on a GPU
    machine: MachineSettings | None = None
    gpu: GpuFigures | None = None
    gpus: int = 1

    def build_placement(self, model: ModelSettings, processes: int) -> Placement:
        """Build the placement of a model with these settings in this many processes."""
        lora: LoraSettings | None = model.lora
        quantized_bytes = _QUANTIZED_BYTES.get(lora.quantize) if lora is not None else None
        packed_bytes = self.machine.packed_weight_bytes if self.machine is not None else 4.0
        return Placement(
            self.device,
            _DTYPE_BYTES[model.dtype],
            processes,
            self.runtime_bytes,
            packed_bytes,
            quantized_bytes,
        )

    def estimate_time(
        self, work: StageWork, hidden: int, processes: int, *, in_bfloat16: bool = False
    ) -> StageTime | None:
        """Estimate the seconds of this work; None if no speeds are known.

        Args:
            in_bfloat16: a machine's products are in bfloat16, if their speed was measured.
        """
        if self.gpu is not None:
            return estimate_gpu_time(work, self.gpu, processes)
        if self.machine is None:
            return None
        in_bfloat16 = in_bfloat16 and bool(self.machine.training_bfloat16)
        return estimate_machine_time(work, hidden, self.machine, in_bfloat16=in_bfloat16)


def parse_gpu_target(text: str) -> PlanTarget:
    """Parse GPUs by number and kind, as `8xH200`. Raises: SettingsError."""
    count, gpu = parse_gpu_count(text)
    return PlanTarget(f"{count} x {gpu.name}", "cuda", gpu.memory_bytes, 0, gpu=gpu, gpus=count)


def build_machine_target(machine: MachineSettings | None) -> PlanTarget:
    """Build the target of a calibrated machine; None = this machine, without speeds.

    Without a calibration a separate process measures memory, once. Raises: BackendError if that process fails.
    """
    if machine is None:
        return PlanTarget(
            "this machine", "cpu", measure_machine_memory(), measure_process_bytes_once()
        )
    runtime = machine.library_bytes + machine.pipeline_bytes
    name = f"{machine.name}, {machine.threads} threads"
    return PlanTarget(name, "cpu", machine.memory_bytes, runtime, machine=machine)


def measure_process_bytes_once() -> int:
    """Return the peak memory of a process that trains a tiny model, measured once.

    Measuring takes a process of about 10 processor seconds. Raises: BackendError if that process fails.
    """
    import torch

    path = _locate_cached_bytes(torch.get_num_threads())
    cached = _read_cached_bytes(path)
    if cached is not None:
        return cached
    # Imports trainers and engine.
    from rl_core.resources.machine_calibration import measure_process_bytes

    measured = measure_process_bytes()
    if path is not None:
        try:
            make_folder(path.parent)
            write_text_unsynced(path, f"{measured}\n")
        except (OSError, PosttrainError) as error:
            log.debug("the memory of a process is not cached: %s", error)
    return measured


def _locate_cached_bytes(threads: int) -> Path | None:
    """Return the file of the measurement with these packages; None if this user has no cache."""
    native = os.environ.get("POSTTRAIN_NATIVE", "")
    try:
        packages = "-".join(f"{name}-{version(name)}" for name in _KEYED_PACKAGES)
        suffix = f"-{native}" if native else ""
        name = f"process-{platform.python_version()}-{packages}-{threads}{suffix}"
        return resolve_cache_folder("plan") / name
    except (PosttrainError, PackageNotFoundError):  # not installed, if run from a folder
        return None


def _read_cached_bytes(path: Path | None) -> int | None:
    """Return the bytes in the file; None if it is missing or damaged."""
    try:
        size = int(path.read_text()) if path is not None else 0
    except (OSError, ValueError):
        return None
    return size if size >= _MIN_PROCESS_BYTES else None


@dataclass(frozen=True, slots=True)
class PlanLengths:
    """Mean tokens; None = the longest that the settings allow, so that times are upper bounds."""

    row: int | None = None  # of a demonstration, or of one side of a pair
    prompt: int | None = None
    completion: int | None = None  # of a rollout
    rows: int | None = None  # of the data file that a stage learns from
    # of a sample of data and environment (`sampled_lengths`), used where the user gives none
    sampled_prompt: int | None = None  # the longest
    sampled_row: int | None = None  # of a demonstration
    sampled_side: int | None = None  # of a preference, with its prompt
    sampled_side_prompt: int | None = None

    def choose_for_stage(
        self, name: str, settings: PipelineSettings
    ) -> tuple[PlanLengths, list[str]]:
        """Return the lengths with the sampled ones that apply to a stage, and a note on each of those."""
        row, prompt, row_noun = None, self.sampled_prompt, ""
        if name == "sft":
            row, prompt, row_noun = self.sampled_row, None, "rows"
        elif find_data_file(settings, "preferences") is not None and name in PAIR_STAGES:
            row, prompt, row_noun = self.sampled_side, self.sampled_side_prompt, "sides of pairs"
        elif name in PAIR_STAGES and prompt is not None:  # pairs are made from rollouts
            row = prompt + getattr(settings.stages, name).sampling.max_completion_tokens
        notes = []
        if self.row is None and row is not None and row_noun:
            notes.append(f"{row_noun} count at {row:,} tokens, the mean of a sample")
        if self.prompt is None and prompt is not None:
            kind = "mean" if row_noun else "longest"
            notes.append(f"prompts count at {prompt:,} tokens, the {kind} of a sample")
        lengths = dataclasses.replace(self, row=self.row or row, prompt=self.prompt or prompt)
        return lengths, notes

    def resolve_row_length(self, context: int) -> int:
        """Return the tokens of a row."""
        return min(self.row or context, context)

    def resolve_rollout_lengths(self, sampling: SamplingSettings, context: int) -> tuple[int, int]:
        """Return the tokens of a prompt and of the completion."""
        longest = min(sampling.max_completion_tokens, context - 1)
        prompt = min(self.prompt or context - longest, context - 1)
        return prompt, min(self.completion or longest, longest, context - prompt)


def count_training_rows(name: str, settings: PipelineSettings, lengths: PlanLengths) -> int | None:
    """Count the rows that a stage on data trains on, without held-out ones; None = unknown."""
    data = settings.stages.prepare_data
    block = getattr(settings.stages, name)
    path = find_data_file(settings, "demonstrations" if name == "sft" else "preferences")
    if lengths.rows is not None:
        rows: int | None = lengths.rows
    elif path is not None:
        rows = count_known_rows(path)
    elif name == "sft":
        rows = data.num_demonstrations if data is not None else None
    else:
        rows = block.num_pairs
    if rows is None:
        return None
    if data is not None and data.max_rows is not None:
        rows = min(rows, data.max_rows)
    share = 1.0 if data is None else 1.0 - data.heldout_fraction
    return max(1, round(rows * share))


def find_data_file(settings: PipelineSettings, name: str) -> str | None:
    """Return the file or folder from which `prepare_data` reads these rows, if any."""
    data = settings.stages.prepare_data
    path: str | None = getattr(data, name) if data is not None else None
    return path


def count_known_rows(path: str | None) -> int | None:
    """Count the rows of JSON Lines files; None for other files, or none at all."""
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
    """List notes on a stage in this many processes with this model."""
    notes = []
    if target.gpus > processes:
        notes.append(f"launch uses {processes} of {target.gpus} GPUs: set launch.processes")
    elif target.device == "cuda" and target.gpus < processes:
        notes.append(
            f"launch needs {processes} GPUs, one a process, and there are {target.gpus}; the time is theirs"
        )
    experts = count_experts(model)
    if experts is not None:
        count, active = experts
        notes.append(
            f"a token uses {active} of {count} experts, but all count in operations and time, as in perf/mfu"
        )
    return notes


def list_rollout_notes(block: PolicySettings, lengths: PlanLengths) -> list[str]:
    """List notes on a stage that plays rollouts."""
    notes = []
    if not lengths.completion:
        notes.append(
            "rollouts count at max_completion_tokens: --completion-tokens gives their mean"
        )
    workers = block.rollouts.workers
    if workers != "in_process":
        notes.append(
            "rollouts count in this process, in turns with updates, but are played in other processes (workers: "
            f"{workers}); --simulate shows who waits for whom"
        )
    notes.append("environment steps and reward functions are not in the time")
    return notes
