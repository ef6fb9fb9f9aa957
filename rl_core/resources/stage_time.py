"""Work of a stage (tokens, operations, decoding steps, memory traffic), figures of GPUs, and the resulting time.

The time is an interval, from measured speeds of a machine or from a GPU's published figures.

Peaks in dense bfloat16 are those of `rl_core.training.performance_metrics.find_peak_flops`. MFU is model FLOPs
utilisation in pre-training with the cited system; post-training of small models or short sequences reaches less.
Without a published MFU only the time at the full peak is known, a lower bound.
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
from rl_core.settings.planning import SPEED_NAMES, MachineSettings, MeasuredSpeed
from rl_core.training.performance_metrics import find_peak_flops

# Values read and written per parameter: 7 in the update (minimum in tests/benchmarks), 3 in norm and clipping.
_ADAMW_VALUES = 10
_MUON_VALUES = 9  # momentum, update, norm and clipping
_HEAD_VALUES = 8  # per logit: log-softmax, its exponential and its gradient, each read and written
_MUON_STEPS = 5  # Newton-Schulz iterations of three products each


@dataclass(frozen=True, slots=True)
class StageWork:
    """Sums over a stage. Adding two gives the work of both."""

    trained_tokens: float = 0.0
    scored_tokens: float = 0.0  # in passes without gradient, with prompts of rollouts
    decoded_tokens: float = 0.0
    updates: float = 0.0  # optimizer steps
    training_flops: float = 0.0
    scoring_flops: float = 0.0
    decoding_flops: float = 0.0
    decode_steps: float = 0.0
    decode_rows: float = 0.0  # sequences decoded in a step, summed over the steps
    decode_bytes: float = 0.0  # weights, keys and values that the steps read
    traffic_bytes: float = 0.0  # of optimizer, logits and gradient sums, read and written

    @property
    def flops(self) -> float:
        """All operations."""
        return self.training_flops + self.scoring_flops + self.decoding_flops

    def __add__(self, other: StageWork) -> StageWork:
        return StageWork(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def scale_by(self, factor: float) -> StageWork:
        """Return the same work `factor` times."""
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
    """Estimate the work of forward, backward and optimizer steps.

    Args:
        rows: sequences in total, over all epochs.
        length: mean tokens of a sequence.
        loss_length: mean tokens with loss.
        updates: optimizer steps in total.
        micro_batches: of one step.
        computed: share of the tokens that is computed, if rows share prefixes.
        skipped: parameters that tokens without loss do not use (the last layer's MLP of the packed pass).
    """
    tokens, pairs = rows * length, rows * length**2
    # Of a weight that is frozen under an adapter, or trained.
    operations = 4 if shape.ranks else 6
    skipped_flops = operations * skipped * rows * (length - loss_length)
    flops = computed * (shape.training.compute_total(tokens, pairs) - skipped_flops)
    if settings.activation_checkpointing:
        flops += shape.forward.compute_total(tokens, pairs)
    muon_parameters = shape.muon if settings.optimizer == "muon" else 0
    flops += updates * _MUON_STEPS * 6 * muon_parameters * shape.hidden
    values = _ADAMW_VALUES * (shape.trainable - muon_parameters) + _MUON_VALUES * muon_parameters
    gradient_sums = 3 * shape.trainable * max(0.0, micro_batches - 1)
    logits = rows * loss_length * shape.vocabulary * _HEAD_VALUES if shape.head else 0.0
    return StageWork(
        trained_tokens=tokens,
        updates=updates,
        training_flops=flops,
        traffic_bytes=4 * (updates * (values + gradient_sums) + logits),
    )


def estimate_scoring_work(
    shape: ModelShape,
    *,
    rows: float,
    length: float,
    loss_length: float,
    dequantized_bytes: float = 0.0,
    computed: float = 1.0,
    skipped: float = 0.0,
) -> StageWork:
    """Estimate the work of passes without gradient; arguments as in `estimate_training_work`.

    Args:
        dequantized_bytes: of quantized weights, per row.
    """
    tokens = rows * length
    skipped_flops = 2 * skipped * rows * (length - loss_length)
    flops = computed * (shape.forward.compute_total(tokens, rows * length**2) - skipped_flops)
    logits = rows * loss_length * shape.vocabulary * _HEAD_VALUES / 2 if shape.head else 0.0
    return StageWork(
        scored_tokens=tokens,
        scoring_flops=flops,
        traffic_bytes=4 * logits + rows * dequantized_bytes,
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
    """Estimate prompts read once each, then steps of as many sequences as there are slots, which are refilled.

    Args:
        prompts: number of distinct prompts.
        new_tokens: mean of a sequence.
        slots: of all processes.
        item: bytes of a weight as it is read.
        processes: decode in parallel; each reads all weights in every step.
    """
    rows = max(1.0, min(float(slots), sequences))
    tokens = sequences * new_tokens
    steps = max(new_tokens, tokens / rows) if sequences else 0.0
    context = prompt_length + new_tokens / 2
    # S^2 counts all pairs, of which the causal half is computed.
    per_token = shape.forward.per_token + 2 * shape.forward.per_pair * context
    prefill = estimate_scoring_work(shape, rows=prompts, length=prompt_length, loss_length=0.0)
    weights = item * processes * (shape.parameters - (0 if shape.tied else shape.embedding))
    return prefill + StageWork(
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
    memory_bytes: int  # of the data sheet, 10^9 bytes per GB
    bytes_per_second: float  # peak memory bandwidth
    source: str
    mfu: tuple[float, float] | None = None  # lowest and highest published; None = unknown
    mfu_source: str = ""

    @property
    def flops_per_second(self) -> float:
        """Dense bfloat16 peak, in operations per second."""
        peak = find_peak_flops(self.name)
        assert peak is not None, self.name
        return peak


# The table of the former: 137 to 163 of 312 TFLOP/s for models of 1.7B to 1T parameters.
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
    """Parse number and kind of GPUs, as `8xH200`, `H100`, `4xA100-40GB`.

    Raises: SettingsError for an unknown name or another form.
    """
    match = re.fullmatch(r"(?:(\d{1,5})x)?([A-Za-z][A-Za-z0-9 _-]*)", text.strip())
    if match is None or not int(match[1] or 1):
        raise SettingsError(
            f"--gpus: {text!r} is no number and kind of GPU; write 8xH200, or H100 for one"
        )
    name = _GPU_NAMES_BY_KEY.get(re.sub(r"[ _-]", "", match[2]).lower())
    if name is None:
        hint = suggest_name(match[2], GPUS)
        known = f"known: {', '.join(sorted(GPUS))}"
        suffix = "" if hint == known else f" ({known})"
        raise SettingsError(f"--gpus: no GPU {match[2]!r} is known; {hint}{suffix}")
    return int(match[1] or 1), GPUS[name]


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time of a stage in seconds. An unknown end of the interval is None, and so is `likely` on a GPU."""

    low: float
    high: float | None
    likely: float | None = None

    @property
    def expected_seconds(self) -> float:
        """Likely time, else the lower bound; for comparisons."""
        return self.low if self.likely is None else self.likely


def interpolate_speed(
    points: Sequence[MeasuredSpeed], hidden: int, value: Callable[[MeasuredSpeed], float]
) -> float:
    """Interpolate the speed at a width: linearly in logarithms between measured widths, constant beyond them."""
    if hidden <= points[0].hidden_size:
        return value(points[0])
    for lower, upper in itertools.pairwise(points):
        if hidden <= upper.hidden_size:
            distance = math.log(upper.hidden_size / lower.hidden_size)
            share = math.log(hidden / lower.hidden_size) / distance
            return math.exp((1 - share) * math.log(value(lower)) + share * math.log(value(upper)))
    return value(points[-1])


def estimate_machine_time(
    work: StageWork, hidden: int, machine: MachineSettings, *, in_bfloat16: bool = False
) -> StageTime:
    """Estimate the time at the median speeds; the interval comes from the slowest and fastest repeat of each speed.

    Args:
        in_bfloat16: with the speeds of bfloat16 products, which the machine must have.
    """
    training, scoring, sampling = (
        getattr(machine, f"{name}_bfloat16" if in_bfloat16 else name) for name in SPEED_NAMES
    )

    def compute_seconds(value: Callable[[MeasuredSpeed], float]) -> float:
        total = work.training_flops / interpolate_speed(training, hidden, value)
        total += work.scoring_flops / interpolate_speed(scoring, hidden, value)
        products = work.decoding_flops / interpolate_speed(sampling, hidden, value)
        steps = (
            work.decode_steps * machine.decode_step_seconds
            + work.decode_rows * machine.decode_row_seconds
        )
        decoding = steps + max(products, work.decode_bytes / machine.read_bytes_per_second)
        return total + decoding + work.traffic_bytes / machine.copy_bytes_per_second

    return StageTime(
        low=compute_seconds(lambda point: point.fastest),
        high=compute_seconds(lambda point: point.slowest),
        likely=compute_seconds(lambda point: point.median),
    )


def estimate_gpu_time(work: StageWork, gpu: GpuFigures, count: int) -> StageTime:
    """Estimate the interval by the published MFU of training, divided evenly over `count` GPUs without communication.

    Decoding counts at the device's limits: every step reads the weights, keys and values once. No share of that limit
    is published for this engine, so with rollouts there is no upper end; nor is there for a GPU without an MFU.
    """
    compute_flops = work.training_flops + work.scoring_flops
    decoding = max(
        work.decode_bytes / gpu.bytes_per_second, work.decoding_flops / gpu.flops_per_second
    )
    memory = work.traffic_bytes / gpu.bytes_per_second
    lowest_mfu, highest_mfu = gpu.mfu or (None, 1.0)
    low = (compute_flops / (gpu.flops_per_second * highest_mfu) + decoding + memory) / count
    high = None
    if lowest_mfu is not None and not work.decoded_tokens:
        high = (compute_flops / (gpu.flops_per_second * lowest_mfu) + memory) / count
    return StageTime(low, high)
