"""Commands that inspect runs: `runs`, `why`, `compare`, `diff`, `profile`, `verify-resume`.

Handlers import what they need when they are called, so that `posttrain --help` starts quickly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    STAGE_HELP,
    add_command_parser,
    add_config_and_output_options,
    add_config_argument,
    add_json_option,
    add_quiet_option,
    parse_duration,
    parse_positive_integer,
    parse_stage_name,
)
from rl_core.errors import SettingsError
from tasks import stage_registry

if TYPE_CHECKING:
    from tasks.config import PipelineSettings


def _add_runs_parser(commands: Any) -> None:
    examples = [
        "runs",
        "runs --limit 5",
        "runs --format csv",
        "runs --where status=finished --where 'success_rate/policy>=0.5'",
    ]
    parser = add_command_parser(
        commands, "runs", "list runs, newest first, with status and result", examples
    )
    add_config_and_output_options(parser)
    parser.add_argument(
        "--limit",
        type=parse_positive_integer,
        default=20,
        metavar="N",
        help="how many (default: 20)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "csv", "json"),
        default="table",
        help="csv and json hold settings, metrics, tags",
    )
    _add_json_format_option(parser)
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs for which KEY OPERATOR VALUE holds, as in 'stages.policy.learning_rate<1e-3'; KEY: a setting, "
        "a metric, a tag, run, status, result; may be repeated",
    )
    parser.add_argument(
        "--no-settings", action="store_true", help="leave out the column of settings that differ"
    )


def run_runs_command(arguments: argparse.Namespace) -> int:
    """List runs with status and result."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.tables import format_runs_table
    from tasks.lifecycle.crashed_runs import find_crashed_runs
    from tasks.tracking import list_run_records, list_runs

    output, uri = run_setup.resolve_tracking_store(arguments, settings)

    def describe_crashed() -> dict[str, str]:
        return {
            run.mlflow_run_id: run.description
            for run in find_crashed_runs(output.resolve())
            if run.mlflow_run_id and not run.is_remote
        }

    if arguments.format != "table":
        records = list_run_records(
            output,
            uri=uri,
            limit=arguments.limit,
            where=arguments.where,
            find_crashed=describe_crashed,
        )
        print(_format_run_records(records, arguments.format), end="")
        return 0
    rows = list_runs(
        output,
        uri=uri,
        limit=arguments.limit,
        where=arguments.where,
        settings=not arguments.no_settings,
        find_crashed=describe_crashed,
    )
    empty_message = (
        "no run fits"
        if arguments.where
        else f"no runs in {output.absolute()}; start one: posttrain run demo"
    )
    print(format_runs_table(rows) if rows else empty_message)
    return 0


def _format_run_records(records: Sequence[dict[str, Any]], file_format: str) -> str:
    """Format records as JSON, or as CSV with a column for each metric and tag (metrics.NAME, tags.NAME)."""
    if file_format == "json":
        return json.dumps(records, indent=1) + "\n"
    import pandas as pd

    text: str = pd.json_normalize(list(records)).to_csv(index=False)
    return text if records else ""


def _add_why_parser(commands: Any) -> None:
    examples = ["why demo", "why policy demo", "why sft demo --set stages.sft.epochs=2"]
    summary = "explain why stages ran or were skipped, and what changed since"
    parser = add_command_parser(commands, "why", summary, examples)
    parser.add_argument(
        "name",
        metavar="STAGE",
        type=parse_stage_name,
        nargs="?",
        help=f"one stage, with earlier runs of it; {STAGE_HELP}",
    )
    add_config_argument(parser)
    add_json_option(parser)


def run_why_command(arguments: argparse.Namespace) -> int:
    """Explain why stages ran or were skipped."""
    config = arguments.config
    if (
        arguments.name is None
        and config in stage_registry.list_stage_names()
        and not Path(config).exists()
    ):
        raise SettingsError(
            f"{config} is a stage; name the configuration, too, as in `posttrain why {config} demo`"
        )
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    if settings.stages.custom:
        # The code of custom stages declares their settings and their position.
        settings = run_setup.load_pipeline_settings(arguments)
    from flows.runtime.progress import wrap_to_terminal
    from posttrain.cli.stage_explanations import explain_pipeline, explain_stage

    explanation = (
        explain_stage(settings, arguments.name) if arguments.name else explain_pipeline(settings)
    )
    if arguments.json:
        print(json.dumps(explanation.to_record(), indent=1))
    else:
        print(wrap_to_terminal(explanation.format_text()))
    return 0


def _add_compare_parser(commands: Any) -> None:
    examples = [
        "compare 'demo · 2026-11-21 14:00:00' 'demo · 2026-11-21 15:00:00'",
        "compare demo other_demo --out comparison",
        "compare RUN_ID RUN_ID RUN_ID --format json",
    ]
    summary = "compare runs: settings that differ, stages, curves, results on the same episodes, where they diverge"
    parser = add_command_parser(commands, "compare", summary, examples)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="name or id of a run, or a pipeline (its newest run)"
    )
    add_config_and_output_options(parser)
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )
    _add_json_format_option(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", help="also write compare.json and curves.png into FOLDER"
    )


def run_compare_command(arguments: argparse.Namespace) -> int:
    """Compare runs."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.run_comparison import compare_tracked_runs, format_comparison

    output, uri = run_setup.resolve_tracking_store(arguments, settings)
    report_folder = Path(arguments.out) if arguments.out else None
    comparison = compare_tracked_runs(output, uri, arguments.runs, report_folder)
    if arguments.format == "json":
        print(json.dumps(comparison, indent=1))
    else:
        run_setup.print_wrapped(format_comparison(comparison))
    return 0


def _add_diff_parser(commands: Any) -> None:
    examples = [
        "diff sft policy --config demo",
        "diff models:/demo@champion path/to/model --config demo --set stages.evaluate.episodes=1000",
        "diff sft/epochs/1 sft/epochs/3 -c demo --format json",
    ]
    summary = "compare two models on the same held-out episodes: what got better and worse, where they diverge"
    parser = add_command_parser(commands, "diff", summary, examples)
    references = (
        "model folder, hub name, models:/NAME@ALIAS, or a stage: STAGE, STAGE/KEY, .../epochs/N"
    )
    parser.add_argument("first", metavar="MODEL", help=references)
    parser.add_argument("second", metavar="MODEL", help="model that is compared with the first")
    add_config_and_output_options(parser)
    parser.add_argument(
        "--episodes",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="lost and won episodes to show, each (default: 5)",
    )
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )
    _add_json_format_option(parser)
    add_quiet_option(parser)


def run_diff_command(arguments: argparse.Namespace) -> int:
    """Compare two models on the same held-out episodes."""
    settings = run_setup.load_optional_settings(arguments, import_code=True)
    if settings is None:
        from posttrain.cli.episode_replay import load_newest_run_settings

        settings = load_newest_run_settings(Path(arguments.output))
    from posttrain.cli.model_diff import format_diff, resolve_diffed_models

    models = resolve_diffed_models(settings, (arguments.first, arguments.second))
    run_setup.refuse_unknown_models(settings, *models.values())
    run_setup.configure_prefect(settings)
    quiet = arguments.quiet or arguments.format == "json"
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=quiet, fresh=True, stages=["evaluate"]
    ):
        from posttrain.cli.model_diff import evaluate_diff

    diff, knows_success = evaluate_diff(settings, models, examples=arguments.episodes, quiet=quiet)
    if arguments.format == "json":
        print(json.dumps({**diff.to_json(), "knows_success": knows_success}, indent=1))
    else:
        run_setup.print_wrapped(format_diff(diff, knows_success=knows_success))
    return 0


def _add_profile_parser(commands: Any) -> None:
    examples = ["profile demo", "profile demo --stage sft --iterations 20", "profile demo --json"]
    summary = "profile a few iterations of a training stage by phase"
    parser = add_command_parser(commands, "profile", summary, examples)
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
    add_json_option(parser)
    add_quiet_option(parser)


def _parse_profile_iterations(text: str) -> int:
    """Parse the number of iterations to profile; the first one is warm-up."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer of at least 2: the first iteration is warm-up"
        )
    return int(text)


def run_profile_command(arguments: argparse.Namespace) -> int:
    """Print the time profile of a stage."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    name = _resolve_profiled_stage(arguments.stage, settings)
    run_setup.refuse_unknown_base_model(settings)
    run_setup.configure_prefect(settings)
    quiet = arguments.quiet or arguments.json
    active = settings.stages.active
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=quiet, stages=active[: active.index(name) + 1], fresh=True
    ):
        from posttrain.cli.time_profile import (
            build_profile_record,
            format_profile_table,
            profile_stage,
        )

    records = profile_stage(settings, name, arguments.iterations, quiet=quiet)
    if arguments.json:
        print(json.dumps(build_profile_record(name, records), indent=1))
    else:
        print(format_profile_table(name, records))
    return 0


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


def _add_verify_resume_parser(commands: Any) -> None:
    examples = [
        "verify-resume demo --set stages.policy.iterations=8 --set stages.sft.max_steps=60",
        "verify-resume my_task/config.yaml --kills 10 --seed 1",
        "verify-resume my_task/config.yaml --slices 60    (SIGTERM every 60 s, as a scheduler sends it)",
    ]
    summary = (
        "run a pipeline without interruption, and again while killing it; compare the bytes and name sources of "
        "nondeterminism; exits with 0 if they are equal, 1 if they differ, 2 if that could not be verified"
    )
    parser = add_command_parser(commands, "verify-resume", summary, examples)
    add_config_argument(parser)
    parser.add_argument(
        "--kills",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="interruptions by SIGKILL (default: 5)",
    )
    parser.add_argument(
        "--slices",
        type=parse_duration,
        metavar="SECONDS",
        help="stop by SIGTERM after every SECONDS instead",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the times and fault points of the kills (default: 0)",
    )
    parser.add_argument(
        "--minutes",
        type=parse_duration,
        default=60.0,
        metavar="M",
        help="limit for everything; half for the first run (default: 60). Only --set shortens the settings",
    )
    parser.add_argument("--keep", action="store_true", help="keep both runs even if they are equal")


def run_verify_resume_command(arguments: argparse.Namespace) -> int:
    """Compare an uninterrupted run with an interrupted one."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    run_setup.refuse_unknown_base_model(settings)
    from posttrain.verification.verify_resume import VerificationPlan, verify_resume

    plan = VerificationPlan(
        arguments.kills, arguments.slices, arguments.seed, arguments.minutes, arguments.keep
    )
    return verify_resume(arguments.config, arguments.set, settings, plan)


def _add_json_format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        dest="format",
        action="store_const",
        const="json",
        help="the same as --format json",
    )


PARSERS: dict[str, Callable[[Any], None]] = {
    "runs": _add_runs_parser,
    "why": _add_why_parser,
    "compare": _add_compare_parser,
    "diff": _add_diff_parser,
    "profile": _add_profile_parser,
    "verify-resume": _add_verify_resume_parser,
}
