"""Parsers of the commands in `posttrain.cli.evaluate_commands`. Standard library only.

Commands that evaluate, compare and promote models, and that look at runs and keep them in order.

Each imports what it needs at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup as loading
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
    about = "evaluate a model on the held-out episodes of a configuration"
    parser = add_command_parser(commands, "evaluate", about, examples)
    parser.add_argument(
        "model", metavar="MODEL", help="model folder, hub name or models:/NAME@ALIAS"
    )
    add_config_argument(parser, option=True, required=True)
    add_quiet_option(parser)


def _add_analyze_parser(commands: Any) -> None:
    examples = [
        "analyze outputs/demo/stages/evaluate/KEY --out report",
        "analyze sft.jsonl policy.jsonl --config demo",
        "analyze path/to/sft path/to/policy models:/demo@champion --config demo",
    ]
    about = (
        "analyse trajectory files, or models on the same episodes: tables, figures, an HTML report"
    )
    parser = add_command_parser(commands, "analyze", about, examples)
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


def _add_promote_parser(commands: Any) -> None:
    examples = [
        "promote --config demo --note 'loops on hard questions'    (back to the champion before)",
        "promote --version 3 --config demo",
    ]
    about = "move the alias champion manually: back to the previous champion, or to any version"
    parser = add_command_parser(commands, "promote", about, examples)
    parser.add_argument(
        "--version",
        type=parse_positive_integer,
        metavar="N",
        help="version of the registered model",
    )
    add_note_option(parser)
    add_config_argument(parser, option=True, required=True)


def _add_approve_parser(commands: Any) -> None:
    examples = [
        "approve",
        "approve 'demo · 2026-11-21 14:00:00' --yes --note 'looked at the regressions'",
        "approve demo --no --note 'worse on hard questions'",
    ]
    about = "approve or reject a pending promotion; without RUN, list pending ones"
    parser = add_command_parser(commands, "approve", about, examples)
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


def _add_replay_parser(commands: Any) -> None:
    examples = [
        "replay    (lists the failed episodes that are kept)",
        "replay policy/12/easy/345/0",
        "replay evaluate/policy/hard/17/0 --config demo",
    ]
    about = "play a recorded episode again, failed or not, and say where the result differs from the recording"
    parser = add_command_parser(commands, "replay", about, examples)
    parser.add_argument(
        "episode",
        metavar="EPISODE",
        nargs="?",
        help="STAGE/ITERATION/LEVEL/SEED/SAMPLE, or evaluate/MODEL/LEVEL/SEED/SAMPLE",
    )
    add_json_option(parser, "without EPISODE: the list for programs")
    add_config_and_output_options(parser)


def _add_sync_parser(commands: Any) -> None:
    examples = ["sync", "sync --config gsm8k", "sync --output /data/outputs"]
    about = "deliver to the tracking store what runs recorded while it was away, or before it lost its database"
    parser = add_command_parser(commands, "sync", about, examples)
    add_config_and_output_options(parser)


def _add_gc_parser(commands: Any) -> None:
    examples = ["gc --keep 5", "gc --keep 5 --pipeline demo --yes"]
    about = "remove data needed by no alias, champion lineage or open run; a dry run unless --yes is given"
    parser = add_command_parser(commands, "gc", about, examples)
    parser.add_argument(
        "--keep",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="newest runs to keep per pipeline (default: 5)",
    )
    parser.add_argument(
        "--pipeline",
        metavar="NAME",
        action="append",
        default=[],
        help="only this pipeline; may be repeated",
    )
    parser.add_argument("--yes", action="store_true", help="actually remove")
    add_json_option(parser)
    add_config_and_output_options(parser)


PARSERS: dict[str, Callable[[Any], None]] = {
    "evaluate": _add_evaluate_parser,
    "analyze": _add_analyze_parser,
    "promote": _add_promote_parser,
    "approve": _add_approve_parser,
    "replay": _add_replay_parser,
    "sync": _add_sync_parser,
    "gc": _add_gc_parser,
}


def _print_wrapped(text: str) -> None:
    """Print what may hold texts of models, environments and people: in a terminal within its width, harmless to it."""
    from flows.runtime.progress import wrap_to_terminal

    print(wrap_to_terminal(escape_control_characters(text)))


def _resolve_tracking_store(
    arguments: argparse.Namespace, settings: PipelineSettings | None
) -> tuple[Path, str | None]:
    """Output folder and address of the tracking store: of the configuration, or of `--output`."""
    output = loading.connect_mlflow(settings.output if settings else arguments.output)
    return output, settings.tracking.uri if settings else None


def run_evaluate_command(arguments: argparse.Namespace) -> int:
    """Evaluate one model on a configuration's held-out episodes."""
    settings = loading.load_pipeline_settings(arguments)
    loading.refuse_unknown_models(settings, arguments.model)
    loading.configure_prefect(settings)
    with loading.print_banner_and_start_prefect(
        settings, quiet=arguments.quiet, fresh=True, stages=["evaluate"]
    ):
        from flows.single_stage import evaluate_model
        from posttrain.cli.model_references import format_model_name

    name = format_model_name(arguments.model)
    result = evaluate_model(settings, arguments.model, name=name, quiet=arguments.quiet)
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def run_analyze_command(arguments: argparse.Namespace) -> int:
    """Analyse trajectory files, or models after evaluating them on the same episodes."""
    settings = loading.load_optional_settings(arguments, import_code=True)
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
        loading.connect_mlflow(settings.output)
    from posttrain.cli.model_diff import analyze_trajectory_files as analyze_paths

    report = analyze_paths([Path(path) for path in arguments.paths], settings, Path(arguments.out))
    print(f"report: {report}")
    return 0


def _evaluate_and_analyze_models(
    settings: PipelineSettings, models: dict[str, str], out: Path, quiet: bool
) -> int:
    loading.refuse_unknown_models(settings, *models.values())
    loading.configure_prefect(settings)
    with loading.print_banner_and_start_prefect(
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


def run_diff_command(arguments: argparse.Namespace) -> int:
    """Compare two models on the same held-out episodes."""
    settings = loading.load_optional_settings(arguments, import_code=True)
    if settings is None:
        from posttrain.cli.episode_replay import load_newest_run_settings

        settings = load_newest_run_settings(Path(arguments.output))
    from posttrain.cli.model_diff import format_diff, resolve_diffed_models

    models = resolve_diffed_models(settings, (arguments.first, arguments.second))
    loading.refuse_unknown_models(settings, *models.values())
    loading.configure_prefect(settings)
    quiet = arguments.quiet or arguments.format == "json"
    with loading.print_banner_and_start_prefect(
        settings, quiet=quiet, fresh=True, stages=["evaluate"]
    ):
        from posttrain.cli.model_diff import evaluate_diff
    found, knows_success = evaluate_diff(settings, models, examples=arguments.episodes, quiet=quiet)
    if arguments.format == "json":
        print(json.dumps({**found.to_json(), "knows_success": knows_success}, indent=1))
    else:
        _print_wrapped(format_diff(found, knows_success=knows_success))
    return 0


def run_promote_command(arguments: argparse.Namespace) -> int:
    """Move the alias `champion`."""
    settings = loading.load_pipeline_settings(arguments, import_code=False)
    loading.connect_mlflow(settings.output)
    from tasks.lifecycle.promotion import promote_version

    _print_wrapped(promote_version(settings, arguments.version, arguments.note))
    return 0


def run_approve_command(arguments: argparse.Namespace) -> int:
    """Decide on a pending promotion, or list the pending ones."""
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.approvals import decide_approval

    output, uri = _resolve_tracking_store(arguments, settings)
    if arguments.json:
        if arguments.run is not None:
            raise SettingsError("--json lists pending approvals; leave RUN out")
        from posttrain.cli.approvals import list_pending_approvals

        print(json.dumps(list_pending_approvals(output, uri), indent=1))
        return 0
    where = (
        f" --config {shlex.quote(arguments.config)}" if settings else format_output_option(output)
    )
    answer = {"approve": arguments.approve, "by": arguments.by, "note": arguments.note}
    _print_wrapped(decide_approval(output, uri, arguments.run, **answer, store_options=where))
    return 0


def run_replay_command(arguments: argparse.Namespace) -> int:
    """Play a recorded episode again, or list the failed ones."""
    settings = loading.load_optional_settings(arguments, import_code=True)
    from posttrain.cli.episode_replay import (
        format_failed_episodes,
        list_failed_episodes,
        load_newest_run_settings,
    )
    from posttrain.cli.episode_replay import replay_recorded_episode as play_again

    settings = settings or load_newest_run_settings(Path(arguments.output))
    if arguments.json:
        if arguments.episode is not None:
            raise SettingsError("--json lists the episodes that are kept; leave EPISODE out")
        print(json.dumps(list_failed_episodes(settings), indent=1))
        return 0
    if arguments.episode is None:
        _print_wrapped(format_failed_episodes(settings))
        return 0
    text, is_same = play_again(settings, arguments.episode, trace=arguments.debug)
    _print_wrapped(text)
    return 0 if is_same else 1


def run_runs_command(arguments: argparse.Namespace) -> int:
    """List runs with status and result."""
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.runs_table import format_runs_table
    from tasks.lifecycle.crashed_runs import find_crashed_runs
    from tasks.tracking import list_run_records, list_runs

    output, uri = _resolve_tracking_store(arguments, settings)

    def gone() -> dict[str, str]:
        return {
            one.mlflow_run_id: one.description
            for one in find_crashed_runs(output.resolve())
            if one.mlflow_run_id and not one.is_remote
        }

    if arguments.format != "table":
        records = list_run_records(
            output, uri=uri, limit=arguments.limit, where=arguments.where, find_crashed=gone
        )
        print(_format_run_records(records, arguments.format), end="")
        return 0
    rows = list_runs(
        output,
        uri=uri,
        limit=arguments.limit,
        where=arguments.where,
        settings=not arguments.no_settings,
        find_crashed=gone,
    )
    none = (
        "no run fits"
        if arguments.where
        else f"no runs in {output.absolute()}; start one: posttrain run demo"
    )
    print(format_runs_table(rows) if rows else none)
    return 0


def run_compare_command(arguments: argparse.Namespace) -> int:
    """Compare runs."""
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.run_comparison import compare_tracked_runs as compare_runs
    from posttrain.cli.run_comparison import format_comparison

    output = loading.connect_mlflow(settings.output if settings else arguments.output)
    uri = settings.tracking.uri if settings else None
    out = Path(arguments.out) if arguments.out else None
    told = compare_runs(output, uri, arguments.runs, out)
    if arguments.format == "json":
        print(json.dumps(told, indent=1))
    else:
        _print_wrapped(format_comparison(told))
    return 0


def _format_run_records(records: Sequence[dict[str, Any]], form: str) -> str:
    """Records as JSON, or as CSV with a column for each metric and tag (metrics.NAME, tags.NAME)."""
    if form == "json":
        return json.dumps(records, indent=1) + "\n"
    import pandas as pd

    text: str = pd.json_normalize(list(records)).to_csv(index=False)
    return text if records else ""


def run_sync_command(arguments: argparse.Namespace) -> int:
    """Deliver what still waits for the tracking store."""
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.housekeeping import deliver_journals as deliver

    text, good = deliver(*_resolve_tracking_store(arguments, settings))
    _print_wrapped(text)
    return 0 if good else 1


def run_gc_command(arguments: argparse.Namespace) -> int:
    """List or remove unreferenced data."""
    settings = loading.load_optional_settings(arguments)
    from posttrain.cli.housekeeping import collect_garbage

    output, uri = _resolve_tracking_store(arguments, settings)
    found = collect_garbage(
        output,
        uri,
        num_kept_runs=arguments.keep,
        pipelines=arguments.pipeline,
        delete=arguments.yes,
    )
    if arguments.json:
        print(json.dumps(found.to_record(), indent=1))
    else:
        _print_wrapped(found.format_text())
    return 0
