"""Command `posttrain check profile`: time profile of a training stage's iterations."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import UNLIMITED_COLUMNS, detect_terminal_columns
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_config_argument,
    add_data_options,
    add_quiet_option,
    parse_stage_name,
)
from rl_core.errors import SettingsError
from rl_core.storage.folders import remove_folder
from rl_core.timing import ENCLOSING_SPANS
from tasks import stage_registry

if TYPE_CHECKING:
    from tasks.config import PipelineSettings


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

EXAMPLES = (
    "check profile demo",
    "check profile demo --stage sft --iterations 20",
    "check profile demo --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--stage", metavar="NAME", type=parse_stage_name, help="default: the last training stage"
    )
    parser.add_argument(
        "--iterations",
        "-n",
        metavar="N",
        type=_parse_profile_iterations,
        default=8,
        help="how many (default: 8)",
    )
    add_data_options(parser)
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the time profile of a stage."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    name = _resolve_profiled_stage(arguments.stage, settings)
    run_setup.refuse_unknown_base_model(settings)
    run_setup.configure_prefect(settings)
    quiet = arguments.quiet or arguments.json or arguments.csv
    active = settings.stages.active
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=quiet, stages=active[: active.index(name) + 1], fresh=True
    ):
        importlib.import_module("flows.single_stage")  # which profile_stage calls

    records = profile_stage(settings, name, arguments.iterations, quiet=quiet)
    from posttrain.cli.tables import print_requested_data

    record = build_profile_record(name, records)
    if not print_requested_data(arguments, record, record["parts"]):
        print(format_profile_table(name, records))
    return 0


def _parse_profile_iterations(text: str) -> int:
    """Parse the number of iterations to profile; the first one is warm-up."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer of at least 2: the first iteration is warm-up"
        )
    return int(text)


def _resolve_profiled_stage(name: str | None, settings: PipelineSettings) -> str:
    """Return the named training stage, by default the last one. Raises: SettingsError if there is none."""
    available = [
        stage for stage in stage_registry.list_training_stages() if stage in settings.stages.active
    ]
    if not available:
        raise SettingsError("there is no training stage to profile")
    if name is not None and name not in available:
        raise SettingsError(
            f"the configuration has no stage '{name}' to profile, only {', '.join(available)}"
        )
    return name or available[-1]


@dataclasses.dataclass(frozen=True)
class ProfilePhase:
    """Row of the profile."""

    label: str
    seconds: float  # mean per iteration
    share: float  # of the total


def compute_phase_times(records: Sequence[tuple[int, Mapping[str, float]]]) -> list[ProfilePhase]:
    """Split the iteration time into disjoint parts, longest first. The first iteration is warm-up.

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
    seconds_by_phase: dict[str, float] = {}
    for metrics in measured:
        for name in {*_PHASE_LABELS, "step"}:
            seconds_by_phase[name] = seconds_by_phase.get(name, 0.0) + metrics.get(
                f"perf/{name}_seconds", 0.0
            )
    total = seconds_by_phase.pop("step") + sum(seconds_by_phase[name] for name in _OUTSIDE_STEP)
    exclusive = dict(seconds_by_phase)  # without nested phases
    for inner, outer in ENCLOSING_SPANS.items():
        if seconds_by_phase[outer]:  # without the outer span the inner one is not nested
            exclusive[outer] -= seconds_by_phase[inner]
    exclusive["other"] = total - sum(exclusive.values())
    labels = _PHASE_LABELS | {"other": "the rest: batches, statistics"}
    parts = [
        ProfilePhase(labels[name], seconds / (len(iterations) - 1), seconds / total)
        for name, seconds in exclusive.items()
    ]
    return sorted((part for part in parts if part.share >= 0.0005), key=lambda part: -part.seconds)


def shorten_stage(settings: PipelineSettings, name: str, iterations: int) -> PipelineSettings:
    """Shorten a stage to `iterations` iterations of its first curriculum stage, without early stopping.

    Its models are registered under a separate name, so that the real model gets no new version.
    """
    stage = getattr(settings.stages, name)
    length_fields = [field for field in ("max_steps", "iterations") if hasattr(stage, field)]
    changes: dict[str, Any] = dict.fromkeys(length_fields[:1], iterations)
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

    The model of these iterations is removed: otherwise `compare --models`, `replay` and the readers would take it for
    the newest.
    Returns: (step, metrics) from its journal.
    """
    from flows.single_stage import run_stage
    from tasks.tracking.journal import read_metrics

    shortened = shorten_stage(settings, name, iterations)
    result = run_stage(shortened, name, quiet=quiet).results[name]
    records = read_metrics(Path(result.folder))
    if not result.cached:
        remove_folder(result.folder)
    return records


def build_profile_record(
    name: str, records: Sequence[tuple[int, Mapping[str, float]]]
) -> dict[str, Any]:
    """Return the profile as a record: parts with seconds per iteration and shares, and medians of the counters."""
    return {
        "stage": name,
        "iterations": len(_list_measured_iterations(records)),
        "parts": [dataclasses.asdict(part) for part in compute_phase_times(records)],
        "medians": _compute_medians(records),
    }


def _list_measured_iterations(
    records: Sequence[tuple[int, Mapping[str, float]]],
) -> list[Mapping[str, float]]:
    """Return the metrics of the iterations after the first."""
    return [metrics for _, metrics in records if "perf/step_seconds" in metrics][1:]


def _compute_medians(records: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    iterations = _list_measured_iterations(records)
    medians = {}
    for name in _MEDIAN_FORMATS:
        values = [metrics[name] for metrics in iterations if name in metrics]
        if values:
            medians[name] = statistics.median(values)
    return medians


def format_profile_table(
    name: str, records: Sequence[tuple[int, Mapping[str, float]]], width: int | None = None
) -> str:
    """Format the profile as a table."""
    from rich.console import Console
    from rich.table import Table

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
    columns = width or detect_terminal_columns() or UNLIMITED_COLUMNS
    text = io.StringIO()
    Console(file=text, width=columns, no_color=True).print(table)
    lines = [text.getvalue().rstrip()]
    for metric, median in _compute_medians(records).items():
        label, number_format = _MEDIAN_FORMATS[metric]
        lines.append(f"{number_format.format(median)} {label} (median)")
    return "\n".join(lines)
