"""Command `posttrain evaluate`: evaluate one model on held-out episodes of a configuration, or by other evaluators."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_config_argument,
    add_json_option,
    add_quiet_option,
    list_overrides,
)
from rl_core.errors import SettingsError

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

EXAMPLES = (
    "evaluate demo models:/demo@champion",
    "evaluate demo demo-7f3a    (the model of a run)",
    "evaluate demo path/to/model --set stages.evaluate.episodes=100",
    "evaluate path/to/model --suite lm-eval:gsm8k,arc_easy    (tasks of lm-eval)",
    "evaluate demo models:/demo@champion --suite inspect:evals.py@sums --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True, was_option=True)
    parser.add_argument(
        "model", metavar="MODEL", help="model folder, hub name, models:/NAME@ALIAS, or a run"
    )
    parser.add_argument(
        "--suite",
        metavar="SUITE",
        action="append",
        default=[],
        help="lm-eval:TASK,TASK or inspect:FILE.py@TASK, instead of held-out episodes; may be repeated",
    )
    parser.add_argument(
        "--include-path",
        metavar="FOLDER",
        help="lm-eval tasks of your own: YAML files and their data",
    )
    parser.add_argument(
        "--limit", metavar="ROWS", type=int, help="first rows of each task of the suites"
    )
    add_json_option(parser, "for programs: models, metrics with intervals, facts of the run")
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Evaluate one model."""
    settings = _resolve_settings(arguments)
    from posttrain.cli.model_references import format_model_name, resolve_run_model

    model = resolve_run_model(arguments.model, Path(settings.output))
    run_setup.refuse_unknown_models(settings, model)
    run_setup.configure_prefect(settings)
    quiet = arguments.quiet or arguments.json
    stages = ["suites"] if arguments.suite else ["evaluate"]
    if not arguments.suite and settings.stages.suites is not None:
        stages.append("suites")
    with run_setup.print_banner_and_start_prefect(settings, quiet=quiet, fresh=True, stages=stages):
        from flows.single_stage import evaluate_model, run_suites
        from posttrain.cli.tables import print_requested_data

    name = format_model_name(model)
    evaluate = run_suites if arguments.suite else evaluate_model
    result = evaluate(settings, model, name=name, quiet=quiet)
    record = {
        "models": {
            stage: result.results[stage].summary["models"]
            for stage in stages
            if stage in result.results
        },
        "run": result.facts.get("id", ""),
        "output": result.facts.get("output", ""),
    }
    if not print_requested_data(arguments, record):
        print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def _resolve_settings(arguments: argparse.Namespace) -> PipelineSettings:
    """Return the settings of the configuration, with the suites of the command line.

    Suites need no configuration. Raises: SettingsError without both; ConfigError.
    """
    if not arguments.suite and (arguments.include_path or arguments.limit is not None):
        raise SettingsError("--include-path and --limit belong to --suite")
    if arguments.config is None and not arguments.suite:
        raise SettingsError(
            f"name the configuration whose episodes it plays: posttrain evaluate CONFIG "
            f"{shlex.quote(arguments.model)}; or "
            "--suite lm-eval:TASK"
        )
    arguments.set = [*arguments.set, *_list_suite_overrides(arguments)]
    if arguments.config is not None:
        return run_setup.load_pipeline_settings(arguments)
    return _build_settings_without_config(arguments)


def _list_suite_overrides(arguments: argparse.Namespace) -> list[str]:
    """List the suites of the command line as settings."""
    if not arguments.suite:
        return []
    values = {
        "tasks": arguments.suite,
        "include_path": arguments.include_path,
        "limit": arguments.limit,
    }
    return [
        f"stages.suites.{name}={json.dumps(value)}"
        for name, value in values.items()
        if value is not None
    ]


def _build_settings_without_config(arguments: argparse.Namespace) -> PipelineSettings:
    """Build the settings of a pipeline that has nothing but suites, which play no episodes.

    Raises: ConfigError.
    """
    from posttrain.cli.model_references import resolve_run_model
    from tasks.config import ConfigError, build_settings
    from tasks.config.problems import KeyLocations
    from tasks.config.yaml_loader import apply_overrides

    model = resolve_run_model(arguments.model, Path(arguments.output))
    values: dict[str, Any] = {
        "name": "suites",
        "environment": {"name": "arithmetic"},
        "model": {"path": model},
        "stages": {"suites": {}},
    }
    locations = KeyLocations("--set")
    if problems := apply_overrides(values, list_overrides(arguments), locations):
        raise ConfigError(problems, locations)
    return build_settings(values)
