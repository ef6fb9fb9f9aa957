"""Rows and groups of the metric reference."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Metric", "MetricGroup"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `worry` is empty where no value by itself is a bad sign."""

    name: str
    unit: str
    meaning: str
    worry: str = ""


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics under one heading."""

    title: str
    about: str
    metrics: tuple[Metric, ...]
