"""Hours of a stage from its work: by measured speeds of a machine, or by a GPU's published figures, as an interval."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_core.resources.gpus import Gpu
from rl_core.resources.stage_work import StageWork
from rl_core.settings.machine import MachineSettings, MeasuredSpeed

__all__ = ["StageTime", "speed_at", "time_on_gpu", "time_on_machine"]


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds. An end of the interval that nothing is known about is None; so is `likely` on a GPU."""

    low: float
    high: float | None
    likely: float | None = None

    @property
    def shown(self) -> float:
        """The likely time, else the lower bound: for comparisons."""
        return self.low if self.likely is None else self.likely


def speed_at(points: Sequence[MeasuredSpeed], hidden: int, value: Callable[[MeasuredSpeed], float]) -> float:
    """Speed at a width: between measured widths along a straight line in logarithms, beyond them that of the last."""
    if hidden <= points[0].hidden_size:
        return value(points[0])
    for before, after in itertools.pairwise(points):
        if hidden <= after.hidden_size:
            share = math.log(hidden / before.hidden_size) / math.log(after.hidden_size / before.hidden_size)
            return math.exp((1 - share) * math.log(value(before)) + share * math.log(value(after)))
    return value(points[-1])


def time_on_machine(work: StageWork, hidden: int, machine: MachineSettings) -> StageTime:
    """Likely time at the median speeds; the interval is that of the slowest and fastest repeat of each speed."""

    def seconds(value: Callable[[MeasuredSpeed], float]) -> float:
        computed = work.training_flops / speed_at(machine.training, hidden, value)
        computed += work.scoring_flops / speed_at(machine.scoring, hidden, value)
        products = work.decoding_flops / speed_at(machine.decoding, hidden, value)
        steps = work.decode_steps * machine.decode_step_seconds + work.decode_rows * machine.decode_row_seconds
        decoded = steps + max(products, work.decode_bytes / machine.read_bytes_per_second)
        return computed + decoded + work.traffic_bytes / machine.copy_bytes_per_second

    return StageTime(
        low=seconds(lambda point: point.fastest), high=seconds(lambda point: point.slowest),
        likely=seconds(lambda point: point.median),
    )  # fmt: skip


def time_on_gpu(work: StageWork, gpu: Gpu, count: int) -> StageTime:
    """Interval by the published MFU of training, shared out evenly over `count` GPUs without any cost of exchange.

    Decoding counts at the device's limits: every step reads the weights, keys and values once. No share of that limit
    is published for this engine, so with rollouts there is no upper end; neither is there for a GPU without an MFU.
    """
    computed = work.training_flops + work.scoring_flops
    decoded = max(work.decode_bytes / gpu.bytes_per_second, work.decoding_flops / gpu.flops_per_second)
    memory = work.traffic_bytes / gpu.bytes_per_second
    worst, best = gpu.mfu or (None, 1.0)
    low = (computed / (gpu.flops_per_second * best) + decoded + memory) / count
    high = None
    if worst is not None and not work.decoded_tokens:
        high = (computed / (gpu.flops_per_second * worst) + memory) / count
    return StageTime(low, high)
