"""Command `posttrain promote`: move the alias `champion`, or decide on pending promotions."""

from __future__ import annotations

import argparse
import shlex

from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_config_argument,
    add_json_option,
    add_note_option,
    has_explicit_output,
    parse_positive_integer,
)
from rl_core.errors import SettingsError
from tasks.command_hints import format_output_option

EXAMPLES = (
    "promote demo --note 'loops on hard questions'    (back to the previous champion)",
    "promote demo --version 3",
    "promote --pending    (promotions that wait for a decision; with RUN: its evidence)",
    "promote --approve demo-7f3a --note 'looked at the regressions'",
    "promote --reject demo-7f3a --note 'worse on hard questions'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser, optional=True, was_option=True)
    parser.add_argument(
        "--version",
        type=parse_positive_integer,
        metavar="N",
        help="version of the registered model (default: the previous champion)",
    )
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument(
        "--approve", metavar="RUN", help="promote the pending version of this run"
    )
    decision.add_argument("--reject", metavar="RUN", help="reject it")
    decision.add_argument(
        "--pending",
        metavar="RUN",
        nargs="?",
        const="",
        help="list the promotions that wait for a decision, or show the evidence of one",
    )
    add_note_option(parser)
    parser.add_argument("--by", default="", help="reviewer (default: this user and machine)")
    add_json_option(parser, "with --pending: for programs")


def run_command(arguments: argparse.Namespace) -> int:
    """Move the alias `champion`, decide on a pending promotion, or list the pending ones."""
    named = (arguments.approve, arguments.reject, arguments.pending)
    run = next((name for name in named if name is not None), None)
    is_decision = run is not None
    _refuse_unused_options(arguments, is_decision)
    if run is not None:
        return _decide_or_list(arguments, run)
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    run_setup.connect_mlflow(settings.output)
    from tasks.lifecycle.promotion import promote_version

    run_setup.print_wrapped(promote_version(settings, arguments.version, arguments.note))
    return 0


def _refuse_unused_options(arguments: argparse.Namespace, is_decision: bool) -> None:
    """Refuse a command that does not say what to promote, and options that would change nothing."""
    if "" in (arguments.approve, arguments.reject):
        raise SettingsError(
            "--approve and --reject: the name of the run is empty; `posttrain promote --pending` lists the runs"
        )
    if is_decision and arguments.version is not None:
        raise SettingsError("--version: a decision is about the version of its run; leave it out")
    if arguments.json and arguments.pending != "":
        raise SettingsError("--json lists pending promotions: posttrain promote --pending --json")
    if not is_decision and arguments.config is None:
        raise SettingsError(
            "name the configuration whose champion moves (posttrain promote CONFIG), or a decision: --approve RUN, "
            "--reject RUN, --pending"
        )


def _decide_or_list(arguments: argparse.Namespace, run: str) -> int:
    from posttrain.cli import approvals
    from posttrain.cli.tables import print_json
    from tasks.tracking.run_ids import resolve_run_name

    settings = run_setup.load_optional_settings(arguments)
    output, uri = run_setup.resolve_tracking_store(arguments, settings)
    if arguments.json:
        print_json(approvals.list_pending_approvals(output, uri))
        return 0
    store_options = format_output_option(output)
    if settings is not None and not has_explicit_output(arguments):
        store_options = f" {shlex.quote(arguments.config)}"
    approve = None if arguments.pending is not None else arguments.approve is not None
    run_setup.print_wrapped(
        approvals.decide_approval(
            output,
            uri,
            resolve_run_name(output, run) if run else None,
            approve=approve,
            by=arguments.by,
            note=arguments.note,
            store_options=store_options,
        )
    )
    return 0
