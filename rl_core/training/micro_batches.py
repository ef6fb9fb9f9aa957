"""Micro-batches: splitting those that do not fit into memory, and combining their metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from rl_core.errors import DataError

__all__ = ["combine_metrics", "cut", "halve", "padded_tokens"]

Batch = TypeVar("Batch")


def combine_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of micro-batches as one: names ending in _max or _min combine so, all others add up.

    Losses normalise their metrics by the global denominator, which is why sums are right (tensors are read only here,
    so that an accelerator is waited for once a step).
    """
    columns: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            columns.setdefault(name, []).append(float(value))
    return {
        name: max(values) if name.endswith("_max") else min(values) if name.endswith("_min") else math.fsum(values)
        for name, values in columns.items()
    }


def halve(batch: Batch) -> tuple[Batch, Batch] | None:
    """A batch dataclass as its first and second half of rows; None when it has a single row.

    Every tensor and list field must have one entry a row (first axis); None and scalars go to both halves.
    """
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        raise DataError(f"a micro-batch must be a dataclass with one row per entry, not {type(batch).__name__}")
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    rows = next((len(value) for value in values.values() if isinstance(value, torch.Tensor) and value.ndim), 0)
    if rows < 2:
        return None

    def part(bounds: slice) -> Batch:
        cut = {
            name: value[bounds]
            for name, value in values.items()
            if (isinstance(value, torch.Tensor) and value.ndim) or isinstance(value, list)
        }
        return dataclasses.replace(batch, **cut)

    return part(slice(0, rows // 2)), part(slice(rows // 2, rows))


def cut(micro_batches: list[Batch], max_tokens: int | None) -> list[Batch]:
    """Those above `max_tokens` padded tokens halved, again and again, down to single rows; None = as they are."""
    if max_tokens is None:
        return micro_batches
    parts: list[Batch] = []
    for batch in micro_batches:
        halves = halve(batch) if padded_tokens(batch) > max_tokens else None
        parts.extend(cut(list(halves), max_tokens) if halves else [batch])
    return parts


def padded_tokens(batch: object) -> int:
    """Entries of the batch's largest tensor: its padded tokens."""
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    tensors = (getattr(batch, field.name) for field in fields)
    return max((tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)), default=0)
