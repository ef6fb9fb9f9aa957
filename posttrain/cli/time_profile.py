"""`posttrain profile`: time profile of a training stage's iterations."""

from __future__ import annotations

import dataclasses
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_core.storage.folders import remove_folder
from rl_core.timing import ENCLOSING_SPANS
from tasks.config import PipelineSettings
from tasks.tracking.journal import read_metrics

_PHASE_LABELS = {
    "rollout": "rollouts: decoding",
    "environment": "rollouts: environment and tools",
    "weight_sync": "rollouts: weights to the workers",
    "reward": "rewards",
    "states": "rewards: the policy's states",
    "reference": "update: reference log-probs",
    "teacher": "update: teacher log-probs",
    "measure": "update: old log-probs and values",
    "optimizer": "update: optimizer steps",
    "numerics": "update: comparison with the sampler",
    "update": "update: the rest",
    "eval": "validation",
    "checkpoint": "checkpoints",
    "tracking": "metrics to journal and history",
}
_OUTSIDE_STEP = ("eval", "checkpoint", "tracking")  # not within perf/step_seconds
_MEDIAN_FORMATS = {
    "perf/tokens_per_second": ("tokens/s", "{:,.0f}"),
    "perf/rollout_tokens_per_second": ("sampled tokens/s while rolling out", "{:,.0f}"),
    "perf/update_tflops": ("TFLOP/s of the optimizer steps", "{:.3g}"),
    "perf/mfu": ("of the GPU's bfloat16 peak (MFU)", "{:.1%}"),
    "perf/memory_gb": ("GB at most", "{:.2f}"),
}


@dataclasses.dataclass(frozen=True)
class ProfilePhase:
    """One row of the profile."""

    label: str
    seconds: float  # mean per iteration
    share: float  # of the total


def compute_phase_times(records: Sequence[tuple[int, Mapping[str, float]]]) -> list[ProfilePhase]:
    """Disjoint parts of the iteration time, longest first; the first iteration is warm-up.

    Args:
        records: (step, metrics) from the journal; an iteration has perf/step_seconds, a validation perf/eval_seconds.
            Checkpoint and tracking times reported by an iteration were spent just before it.
    Returns: [] with fewer than two iterations.
    """
    iterations = [
        index for index, (_, metrics) in enumerate(records) if "perf/step_seconds" in metrics
    ]
    if len(iterations) < 2:
        return []
    measured = [metrics for _, metrics in records[iterations[0] + 1 :]]
    spent: dict[str, float] = {}
    for metrics in measured:
        for name in {*_PHASE_LABELS, "step"}:
            spent[name] = spent.get(name, 0.0) + metrics.get(f"perf/{name}_seconds", 0.0)
    total = spent.pop("step") + sum(spent[name] for name in _OUTSIDE_STEP)
    own = dict(spent)
    for inner, outer in ENCLOSING_SPANS.items():
        if spent[outer]:  # a stage without the outer span has the inner one on its own
            own[outer] -= spent[inner]
    own["other"] = total - sum(own.values())
    labels = _PHASE_LABELS | {"other": "the rest: batches, statistics"}
    parts = [
        ProfilePhase(labels[name], seconds / (len(iterations) - 1), seconds / total)
        for name, seconds in own.items()
    ]
    return sorted((part for part in parts if part.share >= 0.0005), key=lambda part: -part.seconds)


def shorten_stage(settings: PipelineSettings, name: str, iterations: int) -> PipelineSettings:
    """Pipeline settings with `iterations` iterations of a stage, in its first curriculum stage, without early stopping.

    Its models are registered under a separate name, so that the real one gets no new version.
    """
    stage = getattr(settings.stages, name)
    lengths = [name for name in ("max_steps", "iterations") if hasattr(stage, name)]
    changes: dict[str, Any] = dict.fromkeys(lengths[:1], iterations)
    for field, value in (("patience", None), ("early_stop", None), ("require_genuine", False)):
        if hasattr(stage, field):
            changes[field] = value
    if getattr(stage, "curriculum", None):
        first = dataclasses.replace(
            stage.curriculum[0],
            exit_conditions=type(stage.curriculum[0].exit_conditions)(),
            max_iterations=None,
        )
        changes["curriculum"] = type(stage.curriculum)([first])
    if hasattr(stage, "warmup_steps"):
        changes["warmup_steps"] = min(stage.warmup_steps, iterations - 1)
    stages = settings.stages.replace_stages({name: dataclasses.replace(stage, **changes)})
    registered = f"{settings.tracking.registered_model or settings.name}-profile"
    tracking = dataclasses.replace(settings.tracking, registered_model=registered)
    return dataclasses.replace(settings, stages=stages, tracking=tracking)


def profile_stage(
    settings: PipelineSettings, name: str, iterations: int, *, quiet: bool = False
) -> list[tuple[int, dict[str, float]]]:
    """Run a few iterations of a training stage; earlier stages come from finished runs, or run first.

    The model of these iterations goes again: it would be the newest of its stage for `diff`, `replay` and the readers.
    Returns: (step, metrics) from its journal.
    """
    from flows.single_stage import run_stage

    found = run_stage(shorten_stage(settings, name, iterations), name, quiet=quiet).results[name]
    records = read_metrics(Path(found.folder))
    if not found.cached:
        remove_folder(found.folder)
    return records


def build_profile_record(
    name: str, records: Sequence[tuple[int, Mapping[str, float]]]
) -> dict[str, Any]:
    """Profile for programs: parts with seconds an iteration and their shares, and medians of what was counted."""
    return {
        "stage": name,
        "iterations": len(_list_measured_iterations(records)),
        "parts": [dataclasses.asdict(part) for part in compute_phase_times(records)],
        "medians": _compute_medians(records),
    }


def _list_measured_iterations(
    records: Sequence[tuple[int, Mapping[str, float]]],
) -> list[Mapping[str, float]]:
    """Metrics of the iterations after the first."""
    return [metrics for _, metrics in records if "perf/step_seconds" in metrics][1:]


def _compute_medians(records: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    counted = {
        name: [one[name] for one in _list_measured_iterations(records) if name in one]
        for name in _MEDIAN_FORMATS
    }
    return {name: statistics.median(values) for name, values in counted.items() if values}


def format_profile_table(
    name: str, records: Sequence[tuple[int, Mapping[str, float]]], width: int | None = None
) -> str:
    """Profile as text."""
    parts = compute_phase_times(records)
    if not parts:
        return f"{name}: fewer than two iterations were recorded, so there is nothing to compare"
    title = f"{name.replace('_', ' ')}: {len(_list_measured_iterations(records))} iterations after the first"
    table = Table(pad_edge=False, title=title)
    table.add_column("part")
    table.add_column("seconds an iteration", justify="right")
    table.add_column("share", justify="right")
    for part in parts:
        table.add_row(part.label, f"{part.seconds:.4f}", f"{part.share:.1%}")
    table.add_section()
    table.add_row("all", f"{sum(part.seconds for part in parts):.4f}", "")
    out = io.StringIO()
    Console(file=out, width=width or 100, no_color=True).print(table)
    lines = [out.getvalue().rstrip()]
    for metric, median in _compute_medians(records).items():
        label, form = _MEDIAN_FORMATS[metric]
        lines.append(f"{form.format(median)} {label} (median)")
    return "\n".join(lines)
