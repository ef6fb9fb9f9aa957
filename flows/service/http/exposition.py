"""Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from rl_core.trackers.prometheus import prometheus_name

__all__ = ["MetricSample", "exposition"]


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric."""

    name: str
    kind: str  # gauge or counter
    about: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition(samples: Sequence[MetricSample]) -> str:
    """All samples, those of one metric together behind its help and type (exposition format 0.0.4)."""
    families: dict[str, Metric] = {}
    for sample in samples:
        family = families.setdefault(sample.name, Metric(_family(sample), sample.about, sample.kind))
        family.add_sample(prometheus_name(sample.name), dict(sample.labels), sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(list(families.values())))
    found: bytes = generate_latest(registry)
    return found.decode()


def _family(sample: MetricSample) -> str:
    """Name of the family: a counter's has no ending."""
    return prometheus_name(sample.name.removesuffix("_total") if sample.kind == "counter" else sample.name)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
