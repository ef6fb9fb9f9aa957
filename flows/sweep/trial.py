"""Trial of a sweep, in this process: a pipeline run that shares finished stages and ends with its evaluation."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.runtime.run_summary import build_result_rows, collect_parent_metrics, format_headline
from flows.sweep.plan import EVALUATION_METRICS
from flows.sweep.search import RUNG_SHARES
from rl_core.errors import SettingsError, Stopped
from tasks.config import PipelineSettings, build_settings
from tasks.pipeline.dag import run_dag, wrap_stage_call
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.run_options import RunOptions, TrialLocation
from tasks.pipeline.stage_result import resolve_journal_folder
from tasks.stage_registry import list_training_stages
from tasks.tracking import read_metrics

logger = logging.getLogger(__name__)

SKIPPED_STAGES = (
    "suites",
    "analyze",
    "export",
    "promote",
    "gguf",
)  # only the winner's run has them
_TRAINING_METRICS = {
    "success": ("eval/success_rate", "train/success_rate"),
    "reward": ("eval/reward_mean", "reward/mean"),
}
_RECENT_SHARE = 5  # a rung averages the newest 1 / _RECENT_SHARE of the values


class TrialPruned(Exception):
    """The search stopped the trial at a rung."""


@dataclass(frozen=True)
class TrialJob:
    """Trial as it is passed to the process that runs it."""

    home: str
    name: str  # of its run
    settings: Mapping[str, Any]
    metric: str
    rungs: int | None  # number reached before; None = it is not pruned
    parent_folder: str
    tags: Mapping[str, str]
    models: Mapping[str, str]  # evaluated on fresh episodes; {} = a trial
    skip: tuple[str, ...] = SKIPPED_STAGES

    def build_run_options(
        self, on_metrics: Callable[[str, Mapping[str, float], int], None] | None = None
    ) -> RunOptions:
        """Build the options of its pipeline run."""
        location = TrialLocation(
            home=Path(self.home),
            name=self.name,
            parent_folder=Path(self.parent_folder),
            on_metrics=on_metrics,
        )
        return RunOptions(
            on_drift="beside",
            tags=dict(self.tags),
            evaluated_models=dict(self.models),
            trial=location,
        )


class _RungReporter:
    """Reporter of a stage's metric at shares of its training; the search may stop the training there."""

    def __init__(
        self,
        job: TrialJob,
        stage: str,
        stop: threading.Event,
        decide: Callable[[float], bool],
        reached: int,
    ) -> None:
        self._names = _TRAINING_METRICS.get(job.metric, (job.metric,))
        self._stage, self._stop, self._decide, self._next_rung = stage, stop, decide, reached
        self._values: dict[str, list[float]] = {}
        self.is_pruned = False

    def on_metrics(self, stage: str, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a stage."""
        if stage == self._stage:
            for name in self._names:
                if name in metrics:
                    self._values.setdefault(name, []).append(metrics[name])

    def on_progress(self, label: str, done: int, total: int, message: str) -> None:
        """Report at a rung, and stop the training if the search decides so."""
        if label != self._stage or self._next_rung >= len(RUNG_SHARES):
            return
        if not total or done / total < RUNG_SHARES[self._next_rung]:
            return
        values = next((self._values[name] for name in self._names if name in self._values), None)
        if values is None:
            return
        recent = values[-max(1, len(values) // _RECENT_SHARE) :]
        self._next_rung += 1
        if not self._decide(sum(recent) / len(recent)):
            self.is_pruned = True
            self._stop.set()


def run_trial(
    job: TrialJob,
    stop: threading.Event,
    decide: Callable[[float], bool],
    on_progress: Callable[[str, int, int, str], None],
) -> dict[str, Any]:
    """Run the job's pipeline up to its evaluation; return fields of `TrialOutcome`.

    Args:
        stop: set by a signal; training saves and stops.
        decide: called with the metric at a rung; False = stop the trial.
    Raises: TrialPruned; Stopped; errors of the stages.
    """
    settings = build_settings(job.settings)
    stage = _find_last_training_stage(settings)
    reporter = None if job.rungs is None else _RungReporter(job, stage, stop, decide, job.rungs)
    start = time.monotonic()
    cpu_start = time.process_time()

    def report_progress(label: str, done: int, total: int, message: str = "") -> None:
        on_progress(label, done, total, message)
        if reporter is not None:
            reporter.on_progress(label, done, total, message)

    options = job.build_run_options(reporter.on_metrics if reporter is not None else None)
    try:
        with PipelineRun(settings, options, on_progress=report_progress, stop=stop) as run:
            run_dag(run, job.models, wrap_stage_call, skip=job.skip)
            value, metrics = _measure_metric(run, job.metric)
            rows = build_result_rows(run)
            run.parent.log_metrics({**collect_parent_metrics(run), "sweep/value": value}, 0)
            run.parent.set_tag("result", format_headline(rows))
    except Stopped as error:
        if reporter is not None and reporter.is_pruned:
            raise TrialPruned from error
        raise
    trained = [result for name, result in run.results.items() if name in list_training_stages()]
    return {
        "status": "finished",
        "value": value,
        "metrics": metrics,
        "stages": {
            name: {
                "folder": result.folder,
                "key": result.key,
                "cached": result.cached,
                "seconds": result.seconds,
            }
            for name, result in run.results.items()
        },
        "policy": trained[-1].stage if trained else "",
        "model": str(trained[-1].model) if trained else "",
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(time.process_time() - cpu_start, 3),
        "peak_bytes": measure_peak_bytes(),
        "run_id": run.parent.run_id or "",
    }


def evaluate_on_fresh_episodes(job: TrialJob, stop: threading.Event) -> dict[str, Any]:
    """Play the job's held-out episodes with its models; return the folder of the evaluation.

    Raises: as `run_trial`; DataError if the environment has no fresh episodes left.
    """
    with PipelineRun(build_settings(job.settings), job.build_run_options(), stop=stop) as run:
        run_dag(run, job.models, wrap_stage_call, skip=job.skip)
        return {"folder": run.results["evaluate"].folder}


def measure_peak_bytes() -> int:
    """Return the peak memory of this process and its children."""
    kilobytes = (
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return 1024 * sum(kilobytes)


def _find_last_training_stage(settings: PipelineSettings) -> str:
    return next(
        name
        for name in reversed(list_training_stages())
        if getattr(settings.stages, name) is not None
    )


def _measure_metric(run: PipelineRun, metric: str) -> tuple[float, dict[str, float]]:
    """Return the sweep's metric of a finished trial, and further metrics of its stages."""
    trained = [name for name in reversed(list(run.results)) if name in list_training_stages()]
    numbers = run.results[trained[0]].summary.get("metrics") or {}
    metrics = {
        name: float(value) for name, value in numbers.items() if isinstance(value, int | float)
    }
    if "evaluate" in run.results:
        row = next(iter(run.results["evaluate"].summary["models"].values()))
        metrics |= {
            name: float(row[name])
            for name in ("success", "success_low", "success_high", "reward")
            if row[name] is not None
        }
    if metric in EVALUATION_METRICS:
        if metric not in metrics:
            raise SettingsError(
                "--metric success: success is unknown, as the environment has no verifier; use --metric reward"
            )
        return metrics[metric], metrics
    for name in trained:
        logged = [
            row[metric] for _, row in read_metrics(_locate_journal(run, name)) if metric in row
        ]
        if logged:
            return logged[-1], metrics
    logged_names = {
        name
        for stage in trained
        for _, row in read_metrics(_locate_journal(run, stage))
        for name in row
    }
    raise SettingsError(
        f"--metric {metric}: no stage of the trial logs it; it logs {', '.join(sorted(logged_names))}"
    )


def _locate_journal(run: PipelineRun, stage: str) -> Path:
    return resolve_journal_folder(run.results[stage].path)
