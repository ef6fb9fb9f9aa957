"""Device that a plan is for, and the lengths that a configuration leaves open."""

from __future__ import annotations

from dataclasses import dataclass

from flows.planning.own_process import own_process_bytes
from rl_core.machine_memory import machine_memory
from rl_core.resources.gpus import Gpu, parse_gpus
from rl_core.resources.stage_memory import Placement
from rl_core.resources.stage_time import StageTime, time_on_gpu, time_on_machine
from rl_core.resources.stage_work import StageWork
from rl_core.settings import LoraSettings, ModelSettings, SamplingSettings
from rl_core.settings.machine import MachineSettings

__all__ = ["Lengths", "Target", "target_gpus", "target_machine"]

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_ROUNDED = {"nf4": 0.5, "int8": 1.0}  # bytes of a weight, scales aside


@dataclass(frozen=True, slots=True)
class Target:
    """Device that stages will run on."""

    name: str
    device: str  # cpu or cuda
    memory_bytes: int  # of the machine, or of one GPU
    runtime_bytes: int  # of a process without a model; 0 on a GPU
    machine: MachineSettings | None = None
    gpu: Gpu | None = None
    gpus: int = 1

    def placement(self, model: ModelSettings, processes: int) -> Placement:
        """Placement of a model of these settings in so many processes."""
        lora: LoraSettings | None = model.lora
        rounded = _ROUNDED.get(lora.quantize) if lora is not None else None
        packed = self.machine.packed_weight_bytes if self.machine is not None else 4.0
        return Placement(self.device, _ITEM[model.dtype], processes, self.runtime_bytes, packed, rounded)

    def time(self, work: StageWork, hidden: int, processes: int) -> StageTime | None:
        """Seconds of this work; None where no speeds are known."""
        if self.gpu is not None:
            return time_on_gpu(work, self.gpu, processes)
        return None if self.machine is None else time_on_machine(work, hidden, self.machine)


def target_gpus(text: str) -> Target:
    """GPUs by number and kind, as `8xH200`. Raises: SettingsError."""
    count, gpu = parse_gpus(text)
    return Target(f"{count} x {gpu.name}", "cuda", gpu.memory_bytes, 0, gpu=gpu, gpus=count)


def target_machine(machine: MachineSettings | None) -> Target:
    """A calibrated machine; None = this one, without speeds; a process of its own measures memory, once.

    Raises: BackendError where that process fails.
    """
    if machine is None:
        return Target("this machine", "cpu", machine_memory(), own_process_bytes())
    runtime = machine.library_bytes + machine.pipeline_bytes
    name = f"{machine.name}, {machine.threads} threads"
    return Target(name, "cpu", machine.memory_bytes, runtime, machine=machine)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens; None = the longest that the settings allow, so that times are upper bounds."""

    row: int | None = None  # of a demonstration, or of one side of a pair
    prompt: int | None = None
    completion: int | None = None  # of a rollout
    rows: int | None = None  # of the data file that a stage learns from

    def of_row(self, context: int) -> int:
        """Tokens of a row."""
        return min(self.row or context, context)

    def of_rollout(self, sampling: SamplingSettings, context: int) -> tuple[int, int]:
        """Tokens of a prompt and of what follows it."""
        longest = min(sampling.max_completion_tokens, context - 1)
        prompt = min(self.prompt or context - longest, context - 1)
        return prompt, min(self.completion or longest, longest, context - prompt)
