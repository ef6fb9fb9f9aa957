"""Results of an analysis as plain data, the source of the report, analysis.json and analysis.csv."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.analysis.comparison import Comparison
from rl_core.analysis.episode_index import EpisodeRef
from rl_core.analysis.probe_results import ModelProbe, Probes
from rl_core.analysis.statistics import Rate
from rl_core.analysis.summary import Summary
from rl_core.storage.single_files import replacing, write_text_atomic
from rl_core.types import Trajectory

__all__ = ["Analysis", "Case", "ModelResult", "metrics_of", "write_csv", "write_json"]


@dataclass
class ModelResult:
    """One model: summary of its trajectories, and its success rates."""

    name: str
    summary: Summary
    total: Rate
    by_level: dict[str, Rate]
    by_kind: dict[str, Rate]
    pass_at_k: dict[int, float]
    episodes: int
    probe: ModelProbe | None = None  # None = model not available

    def metrics(self) -> dict[str, float]:
        """Scalars over all trajectories, and those of the probe."""
        return self.summary.metrics() | (self.probe.metrics() if self.probe else {})


@dataclass
class Case:
    """One episode under every model."""

    episode: EpisodeRef
    trajectories: list[Trajectory]  # in the order of the models
    turning_points: list[
        int | None
    ]  # turning point of each against the first model; None = none (always for the first itself)
    image: bytes | None = None  # PNG

    @property
    def first_turning_point(self) -> int | None:
        """Earliest turning point of any other model."""
        found = [turn for turn in self.turning_points if turn is not None]
        return min(found) if found else None


@dataclass
class Analysis:
    """All results of an analysis."""

    models: list[ModelResult]
    comparisons: list[Comparison]
    cases: list[Case] = field(default_factory=list)
    probes: Probes = field(default_factory=Probes)
    notes: list[str] = field(default_factory=list)


def metrics_of(analysis: Analysis, prefix: str = "analysis") -> dict[str, float]:
    """Scalars for tracking, named `analysis/MODEL/...` and `analysis/SECOND_minus_FIRST/...`."""
    metrics: dict[str, float] = {}
    for model in analysis.models:
        place = f"{prefix}/{_slug(model.name)}"
        metrics |= {
            f"{place}/success_rate": model.total.rate,
            f"{place}/success_rate_low": model.total.low,
            f"{place}/success_rate_high": model.total.high,
            f"{place}/episodes": float(model.episodes),
        }
        metrics |= {f"{place}/{name}": value for name, value in model.metrics().items()}
        metrics |= {f"{place}/pass_at_{k}": value for k, value in model.pass_at_k.items()}
        metrics |= {f"{place}/success_rate_by_level/{_slug(name)}": rate.rate for name, rate in model.by_level.items()}
        metrics |= {f"{place}/success_rate_by_kind/{_slug(name)}": rate.rate for name, rate in model.by_kind.items()}
    for pair in analysis.comparisons:
        place = f"{prefix}/{_slug(pair.second)}_minus_{_slug(pair.first)}"
        metrics |= {
            f"{place}/success": pair.total.success.difference,
            f"{place}/success_low": pair.total.success.low,
            f"{place}/success_high": pair.total.success.high,
            f"{place}/reward": pair.reward.difference,
            f"{place}/p_value": pair.p_value,
            f"{place}/episodes": float(pair.total.episodes),
            f"{place}/wins": float(pair.total.wins),
            f"{place}/losses": float(pair.total.losses),
        }
    if analysis.probes.reward_model is not None:
        found = analysis.probes.reward_model.metrics()
        metrics |= {f"{prefix}/reward_model/{name}": value for name, value in found.items()}
    return metrics


def summary_rows(analysis: Analysis) -> list[dict[str, Any]]:
    """One row per model, for tables."""
    return [
        {
            "model": model.name,
            "episodes": model.episodes,
            "samples": model.total.n,
            "success_rate": model.total.rate,
            "low": model.total.low,
            "high": model.total.high,
            **model.metrics(),
            **{f"pass_at_{k}": value for k, value in model.pass_at_k.items()},
        }
        for model in analysis.models
    ]


def write_json(path: Path, analysis: Analysis) -> Path:
    """Write analysis.json: everything but the trajectories of the cases, which are in the report."""
    row = {
        "models": [
            {
                "name": model.name,
                "episodes": model.episodes,
                "success": model.total._asdict(),
                "by_level": {name: rate._asdict() for name, rate in model.by_level.items()},
                "by_kind": {name: rate._asdict() for name, rate in model.by_kind.items()},
                "pass_at_k": {str(k): value for k, value in model.pass_at_k.items()},
                **model.summary.to_json(),
                "probe": model.probe.to_json() if model.probe else None,
            }
            for model in analysis.models
        ],
        "comparisons": [comparison.to_json() for comparison in analysis.comparisons],
        "reward_model": analysis.probes.reward_model.to_json() if analysis.probes.reward_model else None,
        "cases": [
            {
                "environment": case.episode.environment,
                "level": case.episode.level,
                "kind": case.episode.kind,
                "seed": case.episode.seed,
                "success": list(case.episode.success),
                "turning_points": case.turning_points,
            }
            for case in analysis.cases
        ],
        "notes": analysis.notes,
    }
    write_text_atomic(path, json.dumps(row, indent=1, allow_nan=False) + "\n")
    return path


def write_csv(path: Path, analysis: Analysis) -> Path:
    """Write analysis.csv, one value per row; group: all, level, kind, tool, or `minus MODEL` for paired differences."""
    with replacing(path, errors="replace") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "group", "name", "metric", "value", "low", "high", "n"])
        for model in analysis.models:
            groups = (("all", {"all": model.total}), ("level", model.by_level), ("kind", model.by_kind))
            for group, rates in groups:
                for name, rate in rates.items():
                    writer.writerow([_cell(model.name), group, _cell(name), "success_rate", *rate])
            for metric, value in model.metrics().items():
                writer.writerow([_cell(model.name), "all", "all", metric, value, "", "", model.summary.trajectories])
            for k, value in model.pass_at_k.items():
                writer.writerow([_cell(model.name), "all", "all", f"pass_at_{k}", value, "", "", model.episodes])
            for (_, level), tools in model.summary.tools.items():
                for metric, counts in (("calls", tools.calls), ("misuse", tools.errors)):
                    for tool, count in counts.items():
                        place = [_cell(model.name), "tool", _cell(f"{level}: {tool}")]
                        writer.writerow([*place, metric, count, "", "", tools.trajectories])
        for pair in analysis.comparisons:
            place = [_cell(pair.second), f"minus {pair.first}"]
            for row in (pair.total, *pair.by_level, *pair.by_kind):
                writer.writerow([*place, _cell(row.name), "success_difference", *row.success, row.episodes])
            writer.writerow([*place, "all", "reward_difference", *pair.reward, pair.total.episodes])
        if (found := analysis.probes.reward_model) is not None:
            for metric, value in found.metrics().items():
                writer.writerow(["reward_model", "all", "all", metric, value, "", "", len(found.scores)])
    return path


def _cell(text: str) -> str:
    """Text protected against formula injection in spreadsheets, as tool names are model output."""
    return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _slug(name: str) -> str:
    """Name converted to a valid part of a metric name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_") or "unnamed"
