"""Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["MetricSample", "exposition"]

PREFIX = "posttrain_"


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric."""

    name: str
    kind: str  # gauge or counter
    about: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))


def exposition(samples: Sequence[MetricSample]) -> str:
    """All samples, those of one metric together behind its help and type (exposition format 0.0.4)."""
    lines = []
    for name in dict.fromkeys(sample.name for sample in samples):
        mine = [sample for sample in samples if sample.name == name]
        about = mine[0].about.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {mine[0].kind}"]
        for sample in mine:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
            lines.append(f"{PREFIX}{name}{{{labels}}} {_number(sample.value)}" if labels
                         else f"{PREFIX}{name} {_number(sample.value)}")  # fmt: skip
    return "\n".join(lines) + "\n"
