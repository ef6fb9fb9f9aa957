"""Trajectory analysis of several models: one pass over the files, then statistics, figures and report.

Memory is constant in the number of trajectories: counters and reservoirs are bounded, episode outcomes are on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.analysis.comparison import ModelComparison, compare_models
from rl_core.analysis.custom_metrics import CustomMetric, load_custom_metrics
from rl_core.analysis.episode_index import EpisodeIndex, EpisodeReference
from rl_core.analysis.figures import draw_analysis_figures
from rl_core.analysis.glossary import METRICS
from rl_core.analysis.report import render_report
from rl_core.analysis.results import (
    AnalysisData,
    EpisodeCase,
    ModelResult,
    ProbeResults,
    build_summary_rows,
    collect_analysis_metrics,
    write_analysis_csv,
    write_analysis_json,
)
from rl_core.analysis.summary import TrajectorySummary
from rl_core.analysis.training_curves import (
    DRAWN_METRICS,
    DRAWN_PREFIXES,
    TrainingCurves,
    read_training_curves,
)
from rl_core.analysis.trajectories import (
    find_turning_point,
    read_trajectories_with_offsets,
    read_trajectory_at,
)
from rl_core.errors import DataError
from rl_core.settings import AnalysisSettings, build_settings
from rl_core.storage.atomic_files import make_folder, write_text_atomic
from rl_core.storage.faults import inject_fault

if TYPE_CHECKING:
    import pandas as pd


logger = logging.getLogger(__name__)

EpisodeImageRenderer = Callable[
    [str, int], bytes | None
]  # (level, seed) -> PNG of the episode's hidden image
MAX_MODELS = 8  # distinguishable colours


@dataclass
class AnalysisResult:
    """Output of an analysis."""

    metrics: dict[str, float]  # `analysis/...`, for tracking
    files: list[Path]  # written, report first
    summary: list[dict[str, Any]]  # one row per model
    comparisons: list[ModelComparison]
    notes: list[str]  # caveats for the reader

    @property
    def report(self) -> Path:
        """Path of the HTML page."""
        return self.files[0]

    def frame(self) -> pd.DataFrame:
        """Return the summary as a table indexed by model; `rl_core.read_analysis(out)` returns everything."""
        import pandas as pd

        return pd.DataFrame.from_records(self.summary).set_index("model")


def list_reserved_metric_names() -> set[str]:
    """Return names that a user-defined measure cannot have."""
    return {
        "success_rate",
        "episodes",
        *TrajectorySummary().compute_metrics(),
        *(name for name, _, _ in METRICS),
    }


def analyze(
    models: Mapping[str, Path],
    out: Path,
    settings: AnalysisSettings | Mapping[str, Any],
    *,
    training: Mapping[str, Path] | None = None,
    probes: ProbeResults | None = None,
    image_of: EpisodeImageRenderer | None = None,
    image_tools: Collection[str] | None = None,
    curriculum: Sequence[str] = (),
    suites: Sequence[Sequence[str]] = (),
    title: str = "Trajectory analysis",
    seed: int = 0,
) -> AnalysisResult:
    """Analyse the trajectories of one or more models; write report.html, analysis.json, analysis.csv and PNGs.

    Args:
        models: name -> trajectories.jsonl, oldest model first: differences are later minus earlier.
        out: output folder, created after all input was read, so that bad input leaves no files.
        training: name -> metrics.jsonl of a training stage, for the curves.
        probes: measurements made with the models; see `rl_core.probe`.
        curriculum: names of the stages of the policy's curriculum.
        suites: table of metrics of other evaluators, its first row the head.
        image_of: renders an episode's hidden image for the report. image_tools: tools that reveal it; None = all.
    Raises: DataError for unreadable files (file, line, reason), and for models without common episodes; SettingsError
        for a measure that cannot be imported.
    """
    if not models or len(models) > MAX_MODELS:
        raise DataError(f"analyze: found {len(models)} models, expected 1 to {MAX_MODELS}")
    settings = build_settings(settings, AnalysisSettings)
    names, paths = list(models), [Path(path) for path in models.values()]
    custom_metrics = load_custom_metrics(settings.measures, list_reserved_metric_names())
    curves = {
        name: read_training_curves(path, DRAWN_METRICS, DRAWN_PREFIXES)
        for name, path in (training or {}).items()
    }
    with EpisodeIndex() as index:
        results = [
            _summarize_model(index, number, name, path, image_tools, seed, custom_metrics)
            for number, (name, path) in enumerate(zip(names, paths, strict=True))
        ]
        comparisons = [
            compare_models(
                index, names, first, second, samples=settings.bootstrap_samples, seed=seed
            )
            for first, second in combinations(range(len(names)), 2)
        ]
        chosen = _choose_episodes(index, len(names), settings.side_by_side)
        cases = [_read_case(episode, paths, image_of) for episode in chosen]
    probes = probes or ProbeResults()
    for result in results:
        result.probe = probes.models.get(result.name)
    notes = [*_build_notes(comparisons, curves), *probes.notes]
    table = [list(row) for row in suites]
    analysis = AnalysisData(results, comparisons, cases, probes, notes, table)
    for note in analysis.notes:
        logger.warning("%s", note)
    make_folder(out)
    drawn = draw_analysis_figures(analysis, curves, out, curriculum)
    report = out / "report.html"
    write_text_atomic(report, render_report(analysis, drawn, title))
    files = [
        report,
        write_analysis_json(out / "analysis.json", analysis),
        write_analysis_csv(out / "analysis.csv", analysis),
        *(path for path, _ in drawn),
    ]
    inject_fault("analysis.written")
    return AnalysisResult(
        collect_analysis_metrics(analysis),
        files,
        build_summary_rows(analysis),
        comparisons,
        analysis.notes,
    )


def _summarize_model(
    index: EpisodeIndex,
    number: int,
    name: str,
    path: Path,
    image_tools: Collection[str] | None,
    seed: int,
    custom_metrics: Sequence[CustomMetric] = (),
) -> ModelResult:
    """Summarise one model's file and add it to the index."""
    summary = TrajectorySummary(image_tools, seed, custom_metrics)
    for offset, trajectory in read_trajectories_with_offsets(path):
        index.add_trajectory(number, trajectory, offset, summary.add_trajectory(trajectory))
    return ModelResult(
        name=name,
        summary=summary,
        total=index.compute_rates(number).get("all"),
        by_environment=index.compute_rates(number, "environment"),
        by_level=index.compute_rates(number, "level"),
        by_kind=index.compute_rates(number, "kind"),
        pass_at_k=index.compute_pass_at_ks(number),
        episodes=index.count_episodes(number),
    )


def _choose_episodes(index: EpisodeIndex, models: int, limit: int) -> list[EpisodeReference]:
    """Choose episodes for the report: half lost by the last model to the first, a quarter won, a quarter any."""
    if not limit:
        return []
    everyone = range(models)
    pools = [index.find_common_episodes(everyone, limit)]
    if models > 1:
        worse, better = (
            index.find_changed_episodes(everyone, worse=worse, limit=limit)
            for worse in (True, False)
        )
        pools = [worse[::2], worse[1::2], better, *pools]
    chosen: dict[tuple[str, str, int], EpisodeReference] = {}
    for rank in range(limit):
        for pool in pools:
            if rank < len(pool) and len(chosen) < limit:
                chosen.setdefault(
                    (pool[rank].environment, pool[rank].level, pool[rank].seed), pool[rank]
                )
    return list(chosen.values())


def _read_case(
    episode: EpisodeReference, paths: Sequence[Path], image_of: EpisodeImageRenderer | None
) -> EpisodeCase:
    trajectories = [
        read_trajectory_at(path, offset)
        for path, offset in zip(paths, episode.offsets, strict=True)
    ]
    image = None
    if image_of is not None:
        try:
            image = image_of(episode.level, episode.seed)
        except (
            Exception
        ):  # images are optional: an error in a user's renderer must not fail the analysis
            logger.warning("no image of %s/%d", episode.level, episode.seed, exc_info=True)
    turning_points = [
        None,
        *(find_turning_point(trajectories[0], other) for other in trajectories[1:]),
    ]
    return EpisodeCase(episode, trajectories, turning_points, image)


def _build_notes(
    comparisons: Sequence[ModelComparison], curves: Mapping[str, TrainingCurves]
) -> list[str]:
    notes = [
        f"'{pair.first}' and '{pair.second}' did not play the same episodes: they are compared on the "
        f"{pair.total.episodes:,} common ones ({pair.only_first:,} only '{pair.first}', {pair.only_second:,} only "
        f"'{pair.second}'); the other tables count all episodes of each model."
        for pair in comparisons
        if pair.only_first or pair.only_second
    ]
    return notes + [
        f"{run.num_skipped:,} unreadable rows of the training metrics of '{name}' were skipped."
        for name, run in curves.items()
        if run.num_skipped
    ]
