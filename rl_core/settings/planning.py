"""Measured speed and memory of a machine: what `posttrain doctor --calibrate` writes for `posttrain plan --machine`.

Durations and sizes of a training run on workers, for its simulation (`posttrain plan --simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed(Settings):
    """Speed of a model of one width."""

    hidden_size: int = setting(ge=1, doc="width of the model that was measured")
    median: float = setting(gt=0, doc="operations a second: the median of the repeats")
    slowest: float = setting(gt=0, doc="the slowest repeat")
    fastest: float = setting(gt=0, doc="the fastest repeat")

    def check(self) -> None:
        """The median lies between the extremes."""
        if not self.slowest <= self.median <= self.fastest:
            raise SettingsError(f"median: {self.median:g} is not between slowest and fastest")


@dataclass(frozen=True, kw_only=True)
class ProductSpeed(Settings):
    """Speed of one matrix product, [rows, size] by [size, size] in float32."""

    rows: int = setting(ge=1, doc="rows of the left matrix")
    size: int = setting(ge=1, doc="rows and columns of the right one")
    median: float = setting(gt=0, doc="operations a second")


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Settings):
    """One machine without a GPU, with the number of threads that was measured."""

    name: str = setting(doc="processor")
    threads: int = setting(ge=1, doc="CPU threads of torch while it was measured")
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
        doc="memory that the heap takes beyond live activations, as a share of them: holes between tensors",
    )
    heap_share_recomputed: float = setting(
        0.0, ge=0, doc="the same of transformers' own pass with checkpointing"
    )
    heap_share_adapters: float = setting(
        0.0, ge=0, doc="the same with adapters, whose products come between others"
    )
    packed_weight_bytes: float = setting(4.0, gt=0, doc="of a weight's copy for rollouts, in bytes")
    training: tuple[MeasuredSpeed, ...] = setting(
        doc="optimizer steps, by the operations of forward and backward"
    )
    scoring: tuple[MeasuredSpeed, ...] = setting(doc="forward passes without gradient")
    decoding: tuple[MeasuredSpeed, ...] = setting(
        doc="decoding steps of 64 sequences, without their fixed cost"
    )
    decode_step_seconds: float = setting(ge=0, doc="fixed cost of a decoding step")
    decode_row_seconds: float = setting(ge=0, doc="added to it by each sequence")
    copy_bytes_per_second: float = setting(
        gt=0, doc="copying from memory to memory; bytes read and written both count"
    )
    read_bytes_per_second: float = setting(gt=0, doc="reading from memory")
    products: tuple[ProductSpeed, ...] = setting((), doc="matrix products alone, for comparison")

    def check(self) -> None:
        """Every speed was measured for at least one width, in ascending order."""
        for name in ("training", "scoring", "decoding"):
            widths = [point.hidden_size for point in getattr(self, name)]
            if not widths or widths != sorted(set(widths)):
                raise SettingsError(
                    f"{name}: needs one speed or more, in ascending order of hidden_size"
                )


@dataclass(frozen=True, kw_only=True)
class LogNormalSpread(Settings):
    """A log-normal quantity: many small values, few very large ones."""

    mean: float = setting(0.0, ge=0, doc="mean, before `most` cuts it")
    sigma: float = setting(
        0.0, ge=0, le=4, doc="standard deviation of the logarithm; 0 = always the mean"
    )
    most: float | None = setting(None, gt=0, doc="upper limit: larger values become this one")

    def draw_values(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent values, float64 of this shape."""
        found = self.mean * generator.lognormal(-(self.sigma**2) / 2, self.sigma, shape)
        return found if self.most is None else found.clip(max=self.most)


@dataclass(frozen=True, kw_only=True)
class ClusterRates(Settings):
    """Durations of one worker, one trainer and the weights between them, and the sizes of a rollout."""

    step_seconds: float = setting(
        0.008, ge=0, doc="a decoding step of one worker, without its rows"
    )
    row_seconds: float = setting(
        7e-5, ge=0, doc="added to that step by each sequence that is decoded"
    )
    turn_seconds: float = setting(
        0.0, ge=0, doc="reading a prompt or an observation of one sequence"
    )
    join_seconds: float = setting(
        0.0, ge=0, doc="added to that whenever sequences begin or go on, however many do so at once"
    )
    update_seconds: float = setting(0.0, ge=0, doc="an update and its rewards, without the tokens")
    token_seconds: float = setting(
        1.2e-4, ge=0, doc="added to that by each sampled token, on one training GPU"
    )
    publish_seconds: float = setting(0.0, ge=0, doc="pause of the trainer for a weight update")
    verify_seconds: float = setting(
        0.0,
        ge=0,
        doc="more of that pause: the trainer's own answers to the probe, while workers load",
    )
    call_seconds: float = setting(
        0.0, ge=0, doc="handing a task to a worker and its result back (max_staleness 0)"
    )
    group_seconds: float = setting(0.0, ge=0, doc="added to that by each group")
    load_seconds: float = setting(1.0, ge=0, doc="pause of a worker for a weight update")
    switch_seconds: float = setting(
        0.0, ge=0, doc="a GPU's change between rollouts and updates, where it does both"
    )
    turns: int = setting(1, ge=1, doc="actions of an episode")
    tokens: LogNormalSpread = setting(
        LogNormalSpread(mean=4000, sigma=0.9, most=32768), doc="sampled tokens of an action"
    )
    tools: LogNormalSpread = setting(
        LogNormalSpread(), doc="seconds of a tool call, between two actions"
    )

    def check(self) -> None:
        """Nothing takes no time at all."""
        if not self.step_seconds + self.row_seconds or not self.tokens.mean:
            raise SettingsError(
                "tokens: rollouts have to take some time: step_seconds or row_seconds, and tokens.mean"
            )
        if self.tools.mean and self.turns == 1:
            raise SettingsError(
                "tools: an episode of one action waits for no tool; set turns, or leave tools out"
            )
