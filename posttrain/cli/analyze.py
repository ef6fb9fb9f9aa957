"""Commands that judge models: `evaluate`, `analyze`, `replay`, `promote`, `approve`.

Handlers import what they need when they are called, so that `posttrain --help` starts quickly.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_command_parser,
    add_config_and_output_options,
    add_config_argument,
    add_json_option,
    add_note_option,
    add_quiet_option,
    parse_positive_integer,
)
from rl_core.errors import DataError, SettingsError
from tasks.command_hints import format_output_option

if TYPE_CHECKING:
    from tasks.config import PipelineSettings


def _add_evaluate_parser(commands: Any) -> None:
    examples = [
        "evaluate models:/demo@champion --config demo",
        "evaluate path/to/model -c demo --set stages.evaluate.episodes=100",
    ]
    summary = "evaluate a model on the held-out episodes of a configuration"
    parser = add_command_parser(commands, "evaluate", summary, examples)
    parser.add_argument(
        "model", metavar="MODEL", help="model folder, hub name or models:/NAME@ALIAS"
    )
    add_config_argument(parser, option=True, required=True)
    add_quiet_option(parser)


def run_evaluate_command(arguments: argparse.Namespace) -> int:
    """Evaluate one model on a configuration's held-out episodes."""
    settings = run_setup.load_pipeline_settings(arguments)
    run_setup.refuse_unknown_models(settings, arguments.model)
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, quiet=arguments.quiet, fresh=True, stages=["evaluate"]
    ):
        from flows.single_stage import evaluate_model
        from posttrain.cli.model_references import format_model_name

    name = format_model_name(arguments.model)
    result = evaluate_model(settings, arguments.model, name=name, quiet=arguments.quiet)
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def _add_analyze_parser(commands: Any) -> None:
    examples = [
        "analyze outputs/demo/stages/evaluate/KEY --out report",
        "analyze sft.jsonl policy.jsonl --config demo",
        "analyze path/to/sft path/to/policy models:/demo@champion --config demo",
    ]
    summary = (
        "analyse trajectory files, or models on the same episodes: tables, figures, an HTML report"
    )
    parser = add_command_parser(commands, "analyze", summary, examples)
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="trajectories.jsonl files, folders with some, or models",
    )
    add_config_argument(parser, option=True)
    add_quiet_option(parser)
    parser.add_argument(
        "--out", default="analysis", help="output folder of the report (default: analysis)"
    )


def run_analyze_command(arguments: argparse.Namespace) -> int:
    """Analyse trajectory files, or models after evaluating them on the same episodes."""
    settings = run_setup.load_optional_settings(arguments, import_code=True)
    from posttrain.cli.model_references import resolve_model_references

    models = resolve_model_references(arguments.paths) if settings else {}
    missing = [path for path in arguments.paths if not models and not Path(path).exists()]
    if missing:
        raise DataError(
            f"{missing[0]}: no such file; give trajectories.jsonl files or folders that hold some"
        )
    if not settings and (models := resolve_model_references(arguments.paths)):
        raise SettingsError(
            f"{arguments.paths[0]}: is a model; give its episodes with --config CONFIG"
        )
    if settings and models:
        return _evaluate_and_analyze_models(settings, models, Path(arguments.out), arguments.quiet)
    if settings:
        run_setup.connect_mlflow(settings.output)
    from posttrain.cli.diff import analyze_trajectory_files

    paths = [Path(path) for path in arguments.paths]
    report = analyze_trajectory_files(paths, settings, Path(arguments.out))
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


def _add_replay_parser(commands: Any) -> None:
    examples = [
        "replay    (lists the stored failed episodes)",
        "replay policy/12/easy/345/0",
        "replay evaluate/policy/hard/17/0 --config demo",
    ]
    summary = "replay a recorded episode, failed or not, and show where the result differs from the recording"
    parser = add_command_parser(commands, "replay", summary, examples)
    parser.add_argument(
        "episode",
        metavar="EPISODE",
        nargs="?",
        help="STAGE/ITERATION/LEVEL/SEED/SAMPLE, or evaluate/MODEL/LEVEL/SEED/SAMPLE",
    )
    add_json_option(parser, "without EPISODE: the list for programs")
    add_config_and_output_options(parser)


def run_replay_command(arguments: argparse.Namespace) -> int:
    """Replay a recorded episode, or list the failed ones."""
    settings = run_setup.load_optional_settings(arguments, import_code=True)
    from posttrain.cli.replay import (
        format_failed_episodes,
        list_failed_episodes,
        load_newest_run_settings,
        replay_recorded_episode,
    )

    settings = settings or load_newest_run_settings(Path(arguments.output))
    if arguments.json:
        if arguments.episode is not None:
            raise SettingsError("--json lists the stored episodes; leave EPISODE out")
        print(json.dumps(list_failed_episodes(settings), indent=1))
        return 0
    if arguments.episode is None:
        run_setup.print_wrapped(format_failed_episodes(settings))
        return 0
    text, is_same = replay_recorded_episode(settings, arguments.episode, trace=arguments.debug)
    run_setup.print_wrapped(text)
    return 0 if is_same else 1


def _add_promote_parser(commands: Any) -> None:
    examples = [
        "promote --config demo --note 'loops on hard questions'    (back to the champion before)",
        "promote --version 3 --config demo",
    ]
    summary = "move the alias champion manually: back to the previous champion, or to any version"
    parser = add_command_parser(commands, "promote", summary, examples)
    parser.add_argument(
        "--version",
        type=parse_positive_integer,
        metavar="N",
        help="version of the registered model",
    )
    add_note_option(parser)
    add_config_argument(parser, option=True, required=True)


def run_promote_command(arguments: argparse.Namespace) -> int:
    """Move the alias `champion`."""
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    run_setup.connect_mlflow(settings.output)
    from tasks.lifecycle.promotion import promote_version

    run_setup.print_wrapped(promote_version(settings, arguments.version, arguments.note))
    return 0


def _add_approve_parser(commands: Any) -> None:
    examples = [
        "approve",
        "approve 'demo · 2026-11-21 14:00:00' --yes --note 'looked at the regressions'",
        "approve demo --no --note 'worse on hard questions'",
    ]
    summary = "approve or reject a pending promotion; without RUN, list pending ones"
    parser = add_command_parser(commands, "approve", summary, examples)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name or id of the run, or its pipeline (posttrain runs)",
    )
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument(
        "--yes", dest="approve", action="store_true", help="promote", default=None
    )
    decision.add_argument("--no", dest="approve", action="store_false", help="reject", default=None)
    add_note_option(parser)
    parser.add_argument("--by", default="", help="reviewer (default: this user and machine)")
    add_json_option(parser, "without RUN: pending ones, for programs")
    add_config_and_output_options(parser)


def run_approve_command(arguments: argparse.Namespace) -> int:
    """Decide on a pending promotion, or list the pending ones."""
    settings = run_setup.load_optional_settings(arguments)
    from posttrain.cli.approve import decide_approval, list_pending_approvals

    output, uri = run_setup.resolve_tracking_store(arguments, settings)
    if arguments.json:
        if arguments.run is not None:
            raise SettingsError("--json lists pending approvals; leave RUN out")
        print(json.dumps(list_pending_approvals(output, uri), indent=1))
        return 0
    store_options = format_output_option(output)
    if settings:
        store_options = f" --config {shlex.quote(arguments.config)}"
    decision = {"approve": arguments.approve, "by": arguments.by, "note": arguments.note}
    run_setup.print_wrapped(
        decide_approval(output, uri, arguments.run, **decision, store_options=store_options)
    )
    return 0


PARSERS: dict[str, Callable[[Any], None]] = {
    "evaluate": _add_evaluate_parser,
    "analyze": _add_analyze_parser,
    "replay": _add_replay_parser,
    "promote": _add_promote_parser,
    "approve": _add_approve_parser,
}
