"""Work of a stage: tokens, floating-point operations, decoding steps and memory traffic.

GPUs by name: memory, memory bandwidth and achieved share of the peak, each with its source.

Peaks in dense bfloat16 are `rl_core.training.performance_metrics.find_peak_flops`. MFU is model FLOPs utilisation in pre-training
with the cited system; post-training of small models or short sequences reaches less. A GPU without a published MFU has
none here: then only the time at the full peak is known, a lower bound.

Hours of a stage from its work: by measured speeds of a machine, or by a GPU's published figures, as an interval.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_core.errors import SettingsError, suggest_name
from rl_core.resources.model_shape import ModelShape
from rl_core.settings import OptimizerSettings
from rl_core.settings.planning import MachineSettings, MeasuredSpeed
from rl_core.training.performance_metrics import find_peak_flops

_ADAMW_VALUES = (
    10  # a parameter: 7 of the update (floor of tests/benchmarks), 3 of the norm and its clip
)
_MUON_VALUES = 9  # momentum, update, norm and clip
_HEAD_VALUES = 8  # a logit: log-softmax, its exponential and its gradient, each read and written
_MUON_STEPS = 5  # Newton-Schulz iterations of three products each


@dataclass(frozen=True, slots=True)
class StageWork:
    """Sums over a stage. Adding two gives the work of both."""

    trained_tokens: float = 0.0
    scored_tokens: float = 0.0  # in passes without gradient, prompts of rollouts included
    decoded_tokens: float = 0.0
    updates: float = 0.0  # optimizer steps
    training_flops: float = 0.0
    scoring_flops: float = 0.0
    decoding_flops: float = 0.0
    decode_steps: float = 0.0
    decode_rows: float = 0.0  # sum over the steps of the sequences that are decoded in them
    decode_bytes: float = 0.0  # weights, keys and values that the steps read
    traffic_bytes: float = 0.0  # of optimizer, logits and gradient sums, read and written

    @property
    def flops(self) -> float:
        """All operations."""
        return self.training_flops + self.scoring_flops + self.decoding_flops

    def __add__(self, other: StageWork) -> StageWork:
        return StageWork(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def scale_by(self, factor: float) -> StageWork:
        """The same work so many times."""
        return StageWork(*(getattr(self, name) * factor for name in self.__slots__))


def estimate_training_work(
    shape: ModelShape,
    settings: OptimizerSettings,
    *,
    rows: float,
    length: float,
    loss_length: float,
    updates: float,
    micro_batches: float,
    computed: float = 1.0,
    skipped: float = 0.0,
) -> StageWork:
    """Forward, backward and optimizer steps.

    Args:
        rows: sequences in all, every epoch counted. length, loss_length: mean tokens of one, and those with loss.
        updates: optimizer steps in all. micro_batches: of one step.
        computed: share of the tokens that is computed, where rows share prefixes.
        skipped: parameters that tokens without loss are not multiplied by (the last layer's MLP of the packed pass).
    """
    tokens, pairs = rows * length, rows * length**2
    each = (
        4 if shape.ranks else 6
    )  # operations of a weight that is frozen under an adapter, or trains
    flops = shape.training.compute_total(tokens, pairs) - each * skipped * rows * (
        length - loss_length
    )
    flops *= computed
    if settings.activation_checkpointing:
        flops += shape.forward.compute_total(tokens, pairs)
    by_muon = shape.muon if settings.optimizer == "muon" else 0
    flops += updates * _MUON_STEPS * 6 * by_muon * shape.hidden
    values = _ADAMW_VALUES * (shape.trainable - by_muon) + _MUON_VALUES * by_muon
    sums = 3 * shape.trainable * max(0.0, micro_batches - 1)
    logits = rows * loss_length * shape.vocabulary * _HEAD_VALUES if shape.head else 0.0
    return StageWork(
        trained_tokens=tokens,
        updates=updates,
        training_flops=flops,
        traffic_bytes=4 * (updates * (values + sums) + logits),
    )


def estimate_scoring_work(
    shape: ModelShape,
    *,
    rows: float,
    length: float,
    loss_length: float,
    widened: float = 0.0,
    computed: float = 1.0,
    skipped: float = 0.0,
) -> StageWork:
    """Passes without gradient, as `estimate_training_work`. `widened`: bytes of few-bit weights that a row's pass widens."""
    tokens = rows * length
    flops = computed * (
        shape.forward.compute_total(tokens, rows * length**2)
        - 2 * skipped * rows * (length - loss_length)
    )
    logits = rows * loss_length * shape.vocabulary * _HEAD_VALUES / 2 if shape.head else 0.0
    return StageWork(
        scored_tokens=tokens,
        scoring_flops=flops,
        traffic_bytes=4 * logits + rows * widened,
    )


def estimate_decoding_work(
    shape: ModelShape,
    *,
    sequences: float,
    prompts: float,
    prompt_length: float,
    new_tokens: float,
    slots: int,
    item: float,
    processes: int = 1,
) -> StageWork:
    """Prompts read once each, then steps of as many sequences as there are slots; slots are refilled as they end.

    Args:
        prompts: different ones, which are read once. new_tokens: mean of a sequence.
        slots: of all processes. item: bytes of a weight as it is read.
        processes: that decode side by side, each of which reads all weights in every step.
    """
    rows = max(1.0, min(float(slots), sequences))
    tokens = sequences * new_tokens
    steps = max(new_tokens, tokens / rows) if sequences else 0.0
    context = prompt_length + new_tokens / 2
    per_token = (
        shape.forward.per_token + 2 * shape.forward.per_pair * context
    )  # S^2 counts both, the causal half
    reading = estimate_scoring_work(shape, rows=prompts, length=prompt_length, loss_length=0.0)
    weights = item * processes * (shape.parameters - (0 if shape.tied else shape.embedding))
    return reading + StageWork(
        decoded_tokens=tokens,
        decoding_flops=tokens * per_token,
        decode_steps=steps,
        decode_rows=tokens,
        decode_bytes=steps * weights + tokens * context * shape.kv_bytes_per_token * item / 4,
    )


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Figures of one GPU."""

    name: str
    memory_bytes: int  # as the data sheet names it, 10^9 bytes to the GB
    bytes_per_second: float  # peak memory bandwidth
    source: str
    mfu: tuple[float, float] | None = (
        None  # lowest and highest that were published; None = none known
    )
    mfu_source: str = ""

    @property
    def flops_per_second(self) -> float:
        """Dense bfloat16 peak, operations a second."""
        peak = find_peak_flops(self.name)
        assert peak is not None, self.name
        return peak


# Table 1 of the former: 137 to 163 of 312 TFLOP/s for models of 1.7B to 1T parameters; table 4 of the latter.
_A100 = ((0.44, 0.52), "Narayanan et al. 2021, arXiv:2104.04473, table 1")
_H100 = ((0.38, 0.43), "Llama 3, arXiv:2407.21783, table 4")


def _build_gpu_figures(
    name: str,
    memory_gb: int,
    gb_per_second: int,
    sheet: str,
    mfu: tuple[tuple[float, float], str] | None = None,
) -> GpuFigures:
    share, source = mfu or (None, "")
    return GpuFigures(
        name, memory_gb * 10**9, gb_per_second * 1e9, f"NVIDIA {sheet} data sheet", share, source
    )


GPUS: dict[str, GpuFigures] = {
    gpu.name: gpu
    for gpu in (
        _build_gpu_figures("A100", 80, 2039, "A100 80GB SXM", _A100),
        _build_gpu_figures("A100 40GB", 40, 1555, "A100 40GB SXM", _A100),
        _build_gpu_figures("A100 PCIe", 80, 1935, "A100 80GB PCIe"),
        _build_gpu_figures("H100", 80, 3350, "H100 SXM", _H100),
        _build_gpu_figures("H100 PCIe", 80, 2000, "H100 PCIe"),
        _build_gpu_figures("H100 NVL", 94, 3900, "H100 NVL"),
        _build_gpu_figures("H200", 141, 4800, "H200 SXM"),
        _build_gpu_figures("B200", 180, 8000, "DGX B200 (an eighth of it)"),
        _build_gpu_figures("L40S", 48, 864, "L40S"),
        _build_gpu_figures("L4", 24, 300, "L4"),
        _build_gpu_figures("A10", 24, 600, "A10"),
    )
}
_GPU_NAMES_BY_KEY = {name.lower().replace(" ", ""): name for name in GPUS}


def parse_gpu_count(text: str) -> tuple[int, GpuFigures]:
    """Number and kind of `8xH200`, `H100`, `4xA100-40GB`.

    Raises: SettingsError for a name that is not known, or no such form.
    """
    found = re.fullmatch(r"(?:(\d{1,5})x)?([A-Za-z][A-Za-z0-9 _-]*)", text.strip())
    if found is None or not int(found[1] or 1):
        raise SettingsError(
            f"--gpus: {text!r} is no number and kind of GPU; write 8xH200, or H100 for one"
        )
    name = _GPU_NAMES_BY_KEY.get(re.sub(r"[ _-]", "", found[2]).lower())
    if name is None:
        near, everything = suggest_name(found[2], GPUS), f"known: {', '.join(sorted(GPUS))}"
        raise SettingsError(
            f"--gpus: no GPU {found[2]!r} is known; {near}{'' if near == everything else f' ({everything})'}"
        )
    return int(found[1] or 1), GPUS[name]


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds. An end of the interval that nothing is known about is None; so is `likely` on a GPU."""

    low: float
    high: float | None
    likely: float | None = None

    @property
    def expected_seconds(self) -> float:
        """The likely time, else the lower bound: for comparisons."""
        return self.low if self.likely is None else self.likely


def interpolate_speed(
    points: Sequence[MeasuredSpeed], hidden: int, value: Callable[[MeasuredSpeed], float]
) -> float:
    """Speed at a width: between measured widths along a straight line in logarithms, beyond them that of the last."""
    if hidden <= points[0].hidden_size:
        return value(points[0])
    for before, after in itertools.pairwise(points):
        if hidden <= after.hidden_size:
            share = math.log(hidden / before.hidden_size) / math.log(
                after.hidden_size / before.hidden_size
            )
            return math.exp((1 - share) * math.log(value(before)) + share * math.log(value(after)))
    return value(points[-1])


def estimate_machine_time(work: StageWork, hidden: int, machine: MachineSettings) -> StageTime:
    """Likely time at the median speeds; the interval is that of the slowest and fastest repeat of each speed."""

    def seconds(value: Callable[[MeasuredSpeed], float]) -> float:
        computed = work.training_flops / interpolate_speed(machine.training, hidden, value)
        computed += work.scoring_flops / interpolate_speed(machine.scoring, hidden, value)
        products = work.decoding_flops / interpolate_speed(machine.decoding, hidden, value)
        steps = (
            work.decode_steps * machine.decode_step_seconds
            + work.decode_rows * machine.decode_row_seconds
        )
        decoded = steps + max(products, work.decode_bytes / machine.read_bytes_per_second)
        return computed + decoded + work.traffic_bytes / machine.copy_bytes_per_second

    return StageTime(
        low=seconds(lambda point: point.fastest),
        high=seconds(lambda point: point.slowest),
        likely=seconds(lambda point: point.median),
    )


def estimate_gpu_time(work: StageWork, gpu: GpuFigures, count: int) -> StageTime:
    """Interval by the published MFU of training, shared out evenly over `count` GPUs without any cost of exchange.

    Decoding counts at the device's limits: every step reads the weights, keys and values once. No share of that limit
    is published for this engine, so with rollouts there is no upper end; neither is there for a GPU without an MFU.
    """
    computed = work.training_flops + work.scoring_flops
    decoded = max(
        work.decode_bytes / gpu.bytes_per_second, work.decoding_flops / gpu.flops_per_second
    )
    memory = work.traffic_bytes / gpu.bytes_per_second
    worst, best = gpu.mfu or (None, 1.0)
    low = (computed / (gpu.flops_per_second * best) + decoded + memory) / count
    high = None
    if worst is not None and not work.decoded_tokens:
        high = (computed / (gpu.flops_per_second * worst) + memory) / count
    return StageTime(low, high)
