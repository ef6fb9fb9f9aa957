"""`posttrain analyze` of trajectory files, without Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_core.analysis import analyze as analyze_trajectories
from rl_core.settings import AnalysisSettings
from tasks.config import PipelineSettings
from tasks.pipeline.pipeline_tracker import next_start
from tasks.stages.analyze import find_trajectories, image_function, image_tools, log_analysis
from tasks.stages.loading import make_environment
from tasks.tracking import Tracking

__all__ = ["analyze"]


def analyze(paths: Sequence[Path], settings: PipelineSettings | None, out: Path) -> Path:
    """Analyse trajectory files (or all in a folder), oldest model first; returns the report's path.

    With a config, the result is logged as a run of its experiment, and the report shows the environment's images.
    Raises: DataError if there is no trajectory file, or one cannot be read.
    """
    models = find_trajectories(paths)
    if settings is None:
        return analyze_trajectories(models, out, AnalysisSettings()).report
    environment = make_environment(settings, None)
    result = analyze_trajectories(
        models,
        out,
        settings.stages.analyze or AnalysisSettings(),
        image_of=image_function(environment),
        image_tools=image_tools(environment),
    )
    output = Path(settings.output).resolve()
    tracking = Tracking(settings.tracking.uri, output, settings.tracking.experiment or settings.name)
    analyses = output / settings.name / "analyses"
    started = next_start(analyses)
    folder = analyses / started.replace(" ", "-").replace(":", "-")
    run = tracking.start_run(f"analysis · {started}", folder, tags={"kind": "analysis", "models": ", ".join(models)})
    log_analysis(run, result)
    run.close()
    return result.report
