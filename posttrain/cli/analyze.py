"""Command `posttrain analyze`: analyse trajectory files, or models after evaluating them on the same episodes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_quiet_option
from rl_core.errors import DataError, SettingsError

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

EXAMPLES = (
    "analyze outputs/demo/stages/evaluate/KEY --to report",
    "analyze demo sft.jsonl policy.jsonl",
    "analyze demo path/to/sft demo-7f3a models:/demo@champion",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(
        parser,
        optional=True,
        was_option=True,
        help_text="a configuration; models need one, whose held-out episodes they play",
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="trajectories.jsonl files, folders with some, or models and runs",
    )
    add_quiet_option(parser)
    parser.add_argument("--to", metavar="FOLDER", help="folder of the report (default: analysis)")
    # Its name in the last release.
    parser.add_argument("--out", default="analysis", help=argparse.SUPPRESS)


def run_command(arguments: argparse.Namespace) -> int:
    """Analyse trajectory files, or models after evaluating them on the same episodes."""
    if arguments.config is not None and not run_setup.is_config_name(arguments.config):
        arguments.config, arguments.paths = None, [arguments.config, *arguments.paths]
    settings = run_setup.load_optional_settings(arguments, import_code=True)
    from posttrain.cli.model_references import resolve_model_references, resolve_run_model

    output, out = (
        Path(settings.output if settings else arguments.output),
        Path(arguments.to or arguments.out),
    )
    arguments.paths = [resolve_run_model(path, output) for path in arguments.paths]
    models = resolve_model_references(arguments.paths) if settings else {}
    missing = [path for path in arguments.paths if not models and not Path(path).exists()]
    if missing:
        raise DataError(
            f"{missing[0]}: no such file; give trajectories.jsonl files or folders that hold some"
        )
    if not settings and (models := resolve_model_references(arguments.paths)):
        raise SettingsError(
            f"{arguments.paths[0]}: is a model; name the configuration whose episodes it plays: posttrain analyze "
            f"CONFIG {arguments.paths[0]}"
        )
    if settings and models:
        return _evaluate_and_analyze_models(settings, models, out, arguments.quiet)
    if settings:
        run_setup.connect_mlflow(settings.output)
    paths = [Path(path) for path in arguments.paths]
    report = analyze_trajectory_files(paths, settings, out)
    print(f"report: {report}")
    return 0


def _evaluate_and_analyze_models(
    settings: PipelineSettings, models: dict[str, str], out: Path, quiet: bool
) -> int:
    run_setup.refuse_unknown_models(settings, *models.values())
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=quiet, fresh=True, stages=["evaluate", "analyze"]
    ):
        from flows.single_stage import analyze_models
        from rl_core.storage.atomic_files import copy_tree

    result = analyze_models(settings, models, quiet=quiet)
    print(escape_control_characters(result.format_table()))
    if "analyze" in result.results:
        copy_tree(result.results["analyze"].path, out)
        print(f"report: {out / 'report.html'}")
    return 0 if result.ok else 1


def analyze_trajectory_files(
    paths: Sequence[Path], settings: PipelineSettings | None, out: Path
) -> Path:
    """Analyse trajectory files (or all in a folder), oldest model first; return the report's path.

    With a config, the result is logged as a run of its experiment, and the report shows the environment's images.
    Raises: DataError if there is no trajectory file, or one cannot be read.
    """
    from rl_core.analysis import analyze as analyze_trajectories
    from rl_core.settings import AnalysisSettings
    from tasks.pipeline.run_tracking import choose_start_time
    from tasks.stages.analyze import (
        build_image_function,
        find_trajectories,
        list_image_tools,
        log_analysis,
    )
    from tasks.stages.loading import build_pipeline_environment
    from tasks.tracking import Tracking

    models = find_trajectories(paths)
    if settings is None:
        return analyze_trajectories(models, out, AnalysisSettings()).report
    environment = build_pipeline_environment(settings, None)
    result = analyze_trajectories(
        models,
        out,
        settings.stages.analyze or AnalysisSettings(),
        image_of=build_image_function(environment),
        image_tools=list_image_tools(environment),
    )
    output = Path(settings.output).resolve()
    tracking = Tracking(
        settings.tracking.uri, output, settings.tracking.experiment or settings.name
    )
    analyses = output / settings.name / "analyses"
    started = choose_start_time(analyses)
    folder = analyses / started.replace(" ", "-").replace(":", "-")
    run = tracking.start_run(
        f"analysis · {started}", folder, tags={"kind": "analysis", "models": ", ".join(models)}
    )
    log_analysis(run, result)
    run.close()
    return result.report
