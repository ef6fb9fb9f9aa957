"""Command `posttrain run`: run a pipeline or one of its stages, or say what would run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flows.runtime.stopping import schedule_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    STAGE_HELP,
    add_allow_drift_option,
    add_config_argument,
    add_json_option,
    add_quiet_option,
    add_stop_after_option,
    parse_stage_name,
)
from posttrain.cli.parser import ExitCode
from rl_core.errors import SettingsError
from tasks import stage_registry

if TYPE_CHECKING:
    from tasks.config import PipelineSettings

EXAMPLES = (
    "run demo",
    "run demo --set stages.policy.learning_rate=1e-3 --set seed=1",
    "run demo --set stages.analyze=null --set 'stages.evaluate.levels=[easy, hard]'",
    "run gsm8k --set environment.options.path=train.jsonl",
    "run demo --only policy --model outputs/my-sft-model",
    "run demo --dry-run    (which stages are cached, and why the others would run)",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--only",
        metavar="STAGE",
        type=parse_stage_name,
        help=f"run one stage; its inputs come from cached stages, or those run first; {STAGE_HELP}",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="with --only: start from this model folder, hub name or models:/NAME@ALIAS",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run nothing: say which stages are cached, why each ran or was cached before, and what changed since; "
        "with --only one stage, with earlier runs of it",
    )
    add_json_option(parser, "with --dry-run: for programs")
    parser.add_argument(
        "--fresh", action="store_true", help="rerun cached stages: all, or that of --only"
    )
    parser.add_argument(
        "--monitor", action="store_true", help="serve the live page for as long as the run takes"
    )
    parser.add_argument(
        "--replay-schedule",
        metavar="FILE",
        help="schedule.jsonl of a run with asynchronous rollouts: train on the same tokens again, bit for bit",
    )
    add_stop_after_option(parser)
    add_allow_drift_option(parser)
    add_quiet_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the pipeline of a configuration, or one stage; or say what would run."""
    _refuse_unused_options(arguments)
    if arguments.dry_run:
        from posttrain.cli.dry_run import print_dry_run

        print_dry_run(arguments)
        return ExitCode.OK
    schedule_sigterm(arguments.stop_after)
    if arguments.replay_schedule is not None:
        arguments.set = [
            *arguments.set,
            f"stages.policy.rollouts.replay_schedule={arguments.replay_schedule}",
        ]
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    if arguments.only is not None and arguments.only not in settings.stages.active:
        missing = stage_registry.describe_unknown_stage(arguments.only, settings.stages.active)
        raise SettingsError(f"{arguments.config}: {missing}")
    run_setup.refuse_bad_rows(settings)
    if arguments.model is not None:
        run_setup.refuse_unknown_models(settings, arguments.model)
    from tasks.pipeline.stage_key import StageKeys

    if arguments.only is not None:
        settings = _shorten_pipeline(settings, arguments)
    keys = StageKeys(settings)
    if arguments.model is None:
        run_setup.refuse_unknown_base_model(settings, keys)
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, keys=keys, quiet=arguments.quiet, fresh=arguments.fresh
    ):
        from flows.post_training import run_pipeline
        from posttrain.cli.monitor_process import serve_monitor_page

    only = {} if arguments.only is None else {"only": arguments.only}
    with serve_monitor_page(Path(settings.output), arguments.monitor):
        result = run_pipeline(
            settings,
            fresh=arguments.fresh,
            quiet=arguments.quiet,
            allow_drift=arguments.allow_drift,
            changed=arguments.set,
            keys=keys,
            **only,
        )
    print(escape_control_characters(result.format_table()))
    return ExitCode.OK if result.ok else ExitCode.FAILED


def _refuse_unused_options(arguments: argparse.Namespace) -> None:
    """Refuse a stage where the configuration belongs, and options that would change nothing. Raises: SettingsError."""
    name = arguments.config
    if name in stage_registry.list_stage_names() and not run_setup.is_config_name(name):
        raise SettingsError(
            f"{name} is a stage; name the configuration, too: posttrain run CONFIG --only {name}"
        )
    if arguments.model is not None and arguments.only is None:
        raise SettingsError(
            "--model: starts one stage from a model; add --only STAGE, or name the model of the whole pipeline with "
            "--set model.path=MODEL"
        )
    if arguments.json and not arguments.dry_run:
        raise SettingsError(
            "--json: prints the answer of --dry-run; `posttrain runs --json` lists runs"
        )
    if not arguments.dry_run:
        return
    for name in ("fresh", "monitor", "replay_schedule", "stop_after", "allow_drift", "model"):
        if getattr(arguments, name):
            option = name.replace("_", "-")
            raise SettingsError(f"--{option}: --dry-run runs nothing; leave one of them out")


def _shorten_pipeline(
    settings: PipelineSettings, arguments: argparse.Namespace
) -> PipelineSettings:
    """Return the settings of the stage of `--only` and of those that it needs."""
    from tasks.config import check_changed_settings
    from tasks.pipeline.run_options import select_settings_up_to

    if arguments.model is None:
        run_setup.refuse_unknown_base_model(settings)
    return check_changed_settings(select_settings_up_to(settings, arguments.only, arguments.model))
