"""Measured speed and memory of a machine: what `posttrain doctor --calibrate` writes for `posttrain plan --machine`."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["MachineSettings", "MeasuredSpeed", "ProductSpeed"]


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
    pipeline_bytes: int = setting(ge=0, doc="resident memory that Prefect, MLflow and the pipeline add to that")
    heap_share: float = setting(
        0.0, ge=0, doc="memory that the heap takes beyond live activations, as a share of them: holes between tensors"
    )
    heap_share_recomputed: float = setting(0.0, ge=0, doc="the same of transformers' own pass with checkpointing")
    heap_share_adapters: float = setting(0.0, ge=0, doc="the same with adapters, whose products come between others")
    packed_weight_bytes: float = setting(4.0, gt=0, doc="of a weight's copy for rollouts, in bytes")
    training: tuple[MeasuredSpeed, ...] = setting(doc="optimizer steps, by the operations of forward and backward")
    scoring: tuple[MeasuredSpeed, ...] = setting(doc="forward passes without gradient")
    decoding: tuple[MeasuredSpeed, ...] = setting(doc="decoding steps of 64 sequences, without their fixed cost")
    decode_step_seconds: float = setting(ge=0, doc="fixed cost of a decoding step")
    decode_row_seconds: float = setting(ge=0, doc="added to it by each sequence")
    copy_bytes_per_second: float = setting(gt=0, doc="copying from memory to memory; bytes read and written both count")
    read_bytes_per_second: float = setting(gt=0, doc="reading from memory")
    products: tuple[ProductSpeed, ...] = setting((), doc="matrix products alone, for comparison")

    def check(self) -> None:
        """Every speed was measured for at least one width, in ascending order."""
        for name in ("training", "scoring", "decoding"):
            widths = [point.hidden_size for point in getattr(self, name)]
            if not widths or widths != sorted(set(widths)):
                raise SettingsError(f"{name}: needs one speed or more, in ascending order of hidden_size")
