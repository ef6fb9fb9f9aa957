"""Settings of `posttrain check plan`: measured speed and memory of a machine, and durations for simulated runs.

`posttrain check machine --calibrate` writes the former for `posttrain check plan --machine`; the latter describe a
training run on workers for `posttrain check plan --simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

if TYPE_CHECKING:
    import numpy as np


SPEED_NAMES = ("training", "scoring", "decoding")  # of a machine, each also in bfloat16


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed(Settings):
    """Measured speed of a model of one width."""

    hidden_size: int = setting(ge=1, doc="width of the model that was measured")
    median: float = setting(gt=0, doc="operations a second: the median of the repeats")
    slowest: float = setting(gt=0, doc="the slowest repeat")
    fastest: float = setting(gt=0, doc="the fastest repeat")

    def check(self) -> None:
        """Check that the median lies between the extremes."""
        if not self.slowest <= self.median <= self.fastest:
            raise SettingsError(f"median: {self.median:g} is not between slowest and fastest")


@dataclass(frozen=True, kw_only=True)
class ProductSpeed(Settings):
    """Measured speed of one matrix product, [rows, size] by [size, size] in float32."""

    rows: int = setting(ge=1, doc="rows of the left matrix")
    size: int = setting(ge=1, doc="rows and columns of the right matrix")
    median: float = setting(gt=0, doc="operations a second")


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Settings):
    """One machine without a GPU, at the number of threads that was measured."""

    name: str = setting(doc="processor")
    threads: int = setting(ge=1, doc="CPU threads of torch during the measurement")
    memory_bytes: int = setting(ge=1, doc="main memory, or the container's limit")
    library_bytes: int = setting(
        ge=1, doc="peak resident memory of a process that trained and sampled from a tiny model"
    )
    pipeline_bytes: int = setting(
        ge=0, doc="resident memory that Prefect, MLflow and the pipeline add to that"
    )
    heap_share: float = setting(
        0.0,
        ge=0,
        doc="memory of the heap beyond live activations, as a share of them (fragmentation)",
    )
    heap_share_recomputed: float = setting(
        0.0, ge=0, doc="the same for transformers' forward pass with checkpointing"
    )
    heap_share_adapters: float = setting(
        0.0, ge=0, doc="the same with adapters, whose products fragment the heap"
    )
    packed_weight_bytes: float = setting(4.0, gt=0, doc="bytes per weight of the copy for rollouts")
    training: tuple[MeasuredSpeed, ...] = setting(
        doc="optimizer steps, counting the operations of forward and backward"
    )
    scoring: tuple[MeasuredSpeed, ...] = setting(doc="forward passes without gradient")
    decoding: tuple[MeasuredSpeed, ...] = setting(
        doc="decoding steps of 64 sequences, without their fixed cost"
    )
    training_bfloat16: tuple[MeasuredSpeed, ...] = setting(
        (), doc="as training, with autocast: bfloat16; empty on a processor without such products"
    )
    scoring_bfloat16: tuple[MeasuredSpeed, ...] = setting((), doc="as scoring, with autocast")
    decoding_bfloat16: tuple[MeasuredSpeed, ...] = setting((), doc="as decoding, with autocast")
    decode_step_seconds: float = setting(ge=0, doc="fixed cost of a decoding step")
    decode_row_seconds: float = setting(ge=0, doc="additional cost per sequence")
    copy_bytes_per_second: float = setting(
        gt=0, doc="copying from memory to memory; counts bytes read and written"
    )
    read_bytes_per_second: float = setting(gt=0, doc="reading from memory")
    products: tuple[ProductSpeed, ...] = setting((), doc="matrix products alone, for comparison")

    def check(self) -> None:
        """Check that every speed was measured for at least one width, in ascending order."""
        in_bfloat16 = [f"{name}_bfloat16" for name in SPEED_NAMES]
        measured = [name for name in in_bfloat16 if getattr(self, name)]
        if measured and len(measured) < len(in_bfloat16):
            missing = next(name for name in in_bfloat16 if name not in measured)
            raise SettingsError(f"{missing}: is missing beside {measured[0]}; calibrate again")
        for name in (*SPEED_NAMES, *measured):
            widths = [point.hidden_size for point in getattr(self, name)]
            if not widths or widths != sorted(set(widths)):
                raise SettingsError(
                    f"{name}: needs at least one speed, in ascending order of hidden_size"
                )


@dataclass(frozen=True, kw_only=True)
class LogNormalSpread(Settings):
    """A log-normal quantity: many small values, few very large ones."""

    mean: float = setting(0.0, ge=0, doc="mean, before clipping to `most`")
    sigma: float = setting(
        0.0, ge=0, le=4, doc="standard deviation of the logarithm; 0 = always the mean"
    )
    most: float | None = setting(None, gt=0, doc="upper limit: larger values are clipped to it")

    def draw_values(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draw independent values, float64 of this shape."""
        values = self.mean * generator.lognormal(-(self.sigma**2) / 2, self.sigma, shape)
        return values if self.most is None else values.clip(max=self.most)


@dataclass(frozen=True, kw_only=True)
class ClusterRates(Settings):
    """Durations of one worker, one trainer and weight transfers between them, and sizes of a rollout."""

    step_seconds: float = setting(0.008, ge=0, doc="fixed time of one worker's decoding step")
    row_seconds: float = setting(7e-5, ge=0, doc="additional time per decoded sequence")
    turn_seconds: float = setting(
        0.0, ge=0, doc="processing a prompt or an observation of one sequence"
    )
    join_seconds: float = setting(
        0.0,
        ge=0,
        doc="additional time whenever sequences start or continue, independent of their number",
    )
    update_seconds: float = setting(0.0, ge=0, doc="fixed time of an update and its rewards")
    token_seconds: float = setting(
        1.2e-4, ge=0, doc="additional time per sampled token, on one training GPU"
    )
    publish_seconds: float = setting(0.0, ge=0, doc="pause of the trainer for a weight update")
    verify_seconds: float = setting(
        0.0,
        ge=0,
        doc="additional pause: the trainer's answers to the probe, while workers load",
    )
    call_seconds: float = setting(
        0.0, ge=0, doc="passing a task to a worker and returning its result (max_staleness 0)"
    )
    group_seconds: float = setting(0.0, ge=0, doc="additional time per group")
    load_seconds: float = setting(1.0, ge=0, doc="pause of a worker for a weight update")
    switch_seconds: float = setting(
        0.0, ge=0, doc="switching a GPU between rollouts and updates, if it does both"
    )
    turns: int = setting(1, ge=1, doc="actions of an episode")
    tokens: LogNormalSpread = setting(
        LogNormalSpread(mean=4000, sigma=0.9, most=32768), doc="sampled tokens of an action"
    )
    tools: LogNormalSpread = setting(
        LogNormalSpread(), doc="seconds of a tool call between two actions"
    )

    def check(self) -> None:
        """Check that rollouts take time, and that tools are used only with several turns."""
        if not self.step_seconds + self.row_seconds or not self.tokens.mean:
            raise SettingsError(
                "tokens: rollouts have to take some time: step_seconds or row_seconds, and tokens.mean"
            )
        if self.tools.mean and self.turns == 1:
            raise SettingsError(
                "tools: an episode of one action uses no tool; set turns, or leave tools out"
            )
