"""Micro-batches: cutting those that do not fit into memory, and combining their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rl_core.memory import halve, padded_tokens

__all__ = ["combine_metrics", "cut"]

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


def cut(micro_batches: list[Batch], max_tokens: int | None) -> list[Batch]:
    """Those above `max_tokens` padded tokens halved, again and again, down to single rows; None = as they are."""
    if max_tokens is None:
        return micro_batches
    parts: list[Batch] = []
    for batch in micro_batches:
        halves = halve(batch) if padded_tokens(batch) > max_tokens else None
        parts.extend(cut(list(halves), max_tokens) if halves else [batch])
    return parts
