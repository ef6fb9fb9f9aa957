"""Commands that train: `run`, `stage`, `resume`, `sweep`, `retrain`.

Handlers import what they need when they are called, so that `posttrain --help` starts quickly.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.runtime.stopping import schedule_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    STAGE_HELP,
    add_allow_drift_option,
    add_command_parser,
    add_config_and_output_options,
    add_config_argument,
    add_quiet_option,
    add_stop_after_option,
    parse_positive_integer,
    parse_positive_number,
    parse_stage_name,
)
from rl_core.errors import SettingsError
from tasks import stage_registry

if TYPE_CHECKING:
    from flows.sweep.ray_trials import TrialResources

SWEEP_METHODS = ("grid", "random", "bayes", "halving")


def _add_run_parser(commands: Any) -> None:
    parser = add_command_parser(
        commands,
        "run",
        "run a pipeline; stages finished with the same settings and data are skipped",
        [
            "run demo",
            "run demo --set stages.policy.learning_rate=1e-3 --set seed=1",
            "run demo --set stages.analyze=null --set 'stages.evaluate.levels=[easy, hard]'",
            "run gsm8k --set environment.options.path=train.jsonl",
        ],
    )
    add_config_argument(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="rerun all stages, finished ones included"
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


def run_pipeline_command(arguments: argparse.Namespace) -> int:
    """Run the pipeline of a configuration."""
    schedule_sigterm(arguments.stop_after)
    if arguments.replay_schedule is not None:
        arguments.set = [
            *arguments.set,
            f"stages.policy.rollouts.replay_schedule={arguments.replay_schedule}",
        ]
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    run_setup.refuse_bad_rows(settings)
    from tasks.pipeline.stage_key import StageKeys

    keys = StageKeys(settings)
    run_setup.refuse_unknown_base_model(settings, keys)
    run_setup.configure_prefect(settings)
    with run_setup.print_banner_and_start_prefect(
        settings, keys=keys, quiet=arguments.quiet, fresh=arguments.fresh
    ):
        from flows.post_training import run_pipeline
        from posttrain.cli.monitor_process import serve_monitor_page

    with serve_monitor_page(Path(settings.output), arguments.monitor):
        result = run_pipeline(
            settings,
            fresh=arguments.fresh,
            quiet=arguments.quiet,
            allow_drift=arguments.allow_drift,
            changed=arguments.set,
            keys=keys,
        )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def _add_stage_parser(commands: Any) -> None:
    examples = [
        "stage prepare_data demo",
        "stage policy demo --model outputs/my-sft-model",
        "stage sft demo --set stages.sft.epochs=1 --fresh",
    ]
    summary = "run one stage; its inputs come from finished stages, or those run first"
    parser = add_command_parser(commands, "stage", summary, examples)
    parser.add_argument("name", metavar="NAME", type=parse_stage_name, help=STAGE_HELP)
    add_config_argument(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="start from this model folder, hub name or models:/NAME@ALIAS",
    )
    parser.add_argument("--fresh", action="store_true", help="rerun the stage even if finished")
    add_allow_drift_option(parser)
    add_quiet_option(parser)


def run_stage_command(arguments: argparse.Namespace) -> int:
    """Run one stage."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    if arguments.name not in settings.stages.active:
        missing = stage_registry.describe_unknown_stage(arguments.name, settings.stages.active)
        raise SettingsError(f"{arguments.config}: {missing}")
    run_setup.refuse_bad_rows(settings)
    if arguments.model is None:
        run_setup.refuse_unknown_base_model(settings)
    else:
        run_setup.refuse_unknown_models(settings, arguments.model)
    run_setup.configure_prefect(settings)
    from tasks.config import check_changed_settings
    from tasks.pipeline.run_options import select_settings_up_to
    from tasks.pipeline.stage_key import StageKeys

    shortened = select_settings_up_to(settings, arguments.name, arguments.model)
    shortened = check_changed_settings(shortened)
    keys = StageKeys(shortened)
    with run_setup.print_banner_and_start_prefect(
        shortened, keys=keys, quiet=arguments.quiet, fresh=arguments.fresh
    ):
        from flows.post_training import run_pipeline

    result = run_pipeline(
        shortened,
        only=arguments.name,
        fresh=arguments.fresh,
        quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
        keys=keys,
    )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def _add_resume_parser(commands: Any) -> None:
    examples = ["resume", "resume demo", "resume 'demo · 2026-11-21 14:00:00'"]
    summary = (
        "resume a killed, stopped or failed run with its own settings, from its last checkpoint"
    )
    parser = add_command_parser(commands, "resume", summary, examples)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="name or id of the run, or its pipeline (default: the newest unfinished run)",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="restart the unfinished stage, without its checkpoint",
    )
    add_allow_drift_option(parser)
    add_config_and_output_options(parser)
    add_stop_after_option(parser)
    add_quiet_option(parser)


def run_resume_command(arguments: argparse.Namespace) -> int:
    """Resume an interrupted run."""
    schedule_sigterm(arguments.stop_after)
    config_settings = run_setup.load_optional_settings(arguments)
    output = Path(config_settings.output if config_settings else arguments.output)
    run_setup.refuse_unreadable_folder(output)
    from posttrain.cli.resumable_runs import find_resumable_run, load_recorded_settings

    record = find_resumable_run(output, arguments.run)
    settings = load_recorded_settings(record, output)
    run_setup.configure_prefect(settings)
    print(
        escape_control_characters(f"resuming '{record.name}', which is {record.status}"),
        flush=True,
    )
    from tasks.pipeline.stage_key import StageKeys

    keys = StageKeys(settings)
    with run_setup.print_banner_and_start_prefect(settings, keys=keys, quiet=arguments.quiet):
        from flows.post_training import run_pipeline

    result = run_pipeline(
        settings,
        only=record.only,
        models=record.evaluated_models,
        quiet=arguments.quiet,
        started=record.started,
        allow_drift=arguments.allow_drift,
        restart=arguments.fresh,
        keys=keys,
    )
    print(escape_control_characters(result.format_table()))
    return 0 if result.ok else 1


def _add_sweep_parser(commands: Any) -> None:
    examples = [
        "sweep demo --set stages.policy.learning_rate=1e-4,3e-4,1e-3 --seeds 3 --seed-stage policy",
        "sweep demo --set stages.policy.group_size=4,8 --set stages.policy.learning_rate=1e-4..1e-2:5:log --parallel 2",
        "sweep demo --set stages.policy.learning_rate=1e-5..1e-2:log --method halving --trials 30",
    ]
    summary = "run trials that differ in some settings and seeds, sharing all unchanged stages; choose the best"
    parser = add_command_parser(commands, "sweep", summary, examples)
    add_config_argument(parser)
    parser.add_argument(
        "--method",
        choices=SWEEP_METHODS,
        default="grid",
        help="grid: every combination (default); the others draw with Optuna",
    )
    parser.add_argument(
        "--trials",
        type=parse_positive_integer,
        default=20,
        metavar="N",
        help="configurations to draw (default: 20)",
    )
    parser.add_argument(
        "--seeds",
        type=parse_positive_integer,
        default=1,
        metavar="N",
        help="trials of each configuration (default: 1)",
    )
    parser.add_argument(
        "--seed-stage",
        type=parse_stage_name,
        metavar="NAME",
        help="vary the seed of this stage alone (default: all)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="success (default) or reward of the evaluation (default where nothing tells success), or a metric that "
        "training logs",
    )
    parser.add_argument(
        "--minimize", action="store_true", help="the smallest value of --metric is best"
    )
    parser.add_argument(
        "--parallel",
        type=parse_positive_integer,
        default=1,
        metavar="N",
        help="trials at a time (default: 1)",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run trials on the nodes of a Ray cluster: host:port of its head, auto, or local to start one here",
    )
    parser.add_argument(
        "--trial-cpus",
        type=parse_positive_integer,
        metavar="N",
        help="CPUs of a trial on Ray (default: 1)",
    )
    parser.add_argument(
        "--trial-gpus",
        type=parse_positive_number,
        metavar="N",
        help="GPUs of a trial on Ray, or a share of one (default: 1, if any)",
    )
    parser.add_argument(
        "--finalists",
        type=parse_positive_integer,
        default=3,
        metavar="N",
        help="best configurations that play fresh episodes (default: 3)",
    )
    parser.add_argument(
        "--no-gate", action="store_true", help="do not offer the winner to the promotion gate"
    )
    add_stop_after_option(parser)
    add_quiet_option(parser)


def run_sweep_command(arguments: argparse.Namespace) -> int:
    """Run trials of a configuration and choose the best."""
    schedule_sigterm(arguments.stop_after)
    from flows.sweep.plan import SweepPlan, resolve_metric
    from flows.sweep.search import parse_set_options

    overrides, dimensions = parse_set_options(arguments.set)
    if not dimensions and arguments.seeds == 1:
        raise SettingsError(
            "nothing varies: give --set KEY=A,B,C or KEY=LOW..HIGH:POINTS, or --seeds N"
        )
    plan = SweepPlan(
        config=arguments.config,
        overrides=tuple(overrides),
        dimensions=tuple(dimensions),
        method=arguments.method,
        trials=arguments.trials,
        seeds=arguments.seeds,
        seed_stage=arguments.seed_stage,
        metric=arguments.metric or "success",
        minimize=arguments.minimize,
        finalists=arguments.finalists,
        is_remote=arguments.ray is not None,
    )
    base = plan.load_base_settings()
    plan = dataclasses.replace(plan, metric=resolve_metric(arguments.metric, base))
    run_setup.refuse_bad_rows(base)
    run_setup.refuse_unknown_base_model(base)
    run_setup.configure_prefect(base)
    with run_setup.print_banner_and_start_prefect(
        base, quiet=arguments.quiet, banner=run_setup.format_sweep_banner(plan, base)
    ):
        from flows.sweep.sweep_flow import run_sweep

    result = run_sweep(
        plan,
        base,
        parallel=arguments.parallel,
        gate=not arguments.no_gate,
        quiet=arguments.quiet,
        ray=arguments.ray,
        resources=_parse_trial_resources(arguments),
    )
    print(escape_control_characters(result.text))
    if result.pipeline is not None:
        print(escape_control_characters(result.pipeline.format_table()))
    return 0 if result.ok else 1


def _parse_trial_resources(arguments: argparse.Namespace) -> TrialResources | None:
    """Return the resources of a trial on Ray; None without a cluster."""
    from flows.sweep.ray_trials import TrialResources

    if arguments.ray is None:
        for name in ("trial_cpus", "trial_gpus"):
            if getattr(arguments, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise SettingsError(f"{option}: is of a Ray cluster; name it with --ray")
        return None
    return TrialResources(cpus=arguments.trial_cpus or 1, gpus=arguments.trial_gpus)


def _add_retrain_parser(commands: Any) -> None:
    examples = [
        "retrain demo",
        "retrain demo --force --reason 'tools have changed'",
        "retrain gsm8k --start base --set environment.options.path=train.jsonl",
    ]
    summary = (
        "retrain if there is data new to the champion, and promote the result if it passes the gate"
    )
    parser = add_command_parser(commands, "retrain", summary, examples)
    add_config_argument(parser)
    parser.add_argument(
        "--start",
        choices=("champion", "base"),
        help="initial model: the champion, or the configuration's model (default: its retrain.start)",
    )
    parser.add_argument("--force", action="store_true", help="retrain even without new data")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="restart the unfinished stage of an interrupted retraining",
    )
    add_allow_drift_option(parser)
    parser.add_argument(
        "--reason", default="", help="origin of the request; stored with the versions"
    )
    add_quiet_option(parser)


def run_retrain_command(arguments: argparse.Namespace) -> int:
    """Retrain on new data, from the champion; promote through the gate."""
    settings = run_setup.load_pipeline_settings(arguments, check_servers=True)
    run_setup.refuse_bad_rows(settings)
    run_setup.configure_prefect(settings)
    # Retraining uses new episodes, so finished stages run again.
    with run_setup.print_banner_and_start_prefect(settings, quiet=arguments.quiet, fresh=True):
        from flows.retrain import run_retraining

    result = run_retraining(
        settings,
        start=arguments.start,
        force=arguments.force,
        reason=arguments.reason,
        quiet=arguments.quiet,
        allow_drift=arguments.allow_drift,
        fresh=arguments.fresh,
    )
    if result.pipeline is not None:
        print(escape_control_characters(result.pipeline.format_table()))
    print(escape_control_characters(result.message))
    return 0 if result.pipeline is None or result.pipeline.ok else 1


PARSERS: dict[str, Callable[[Any], None]] = {
    "run": _add_run_parser,
    "stage": _add_stage_parser,
    "resume": _add_resume_parser,
    "sweep": _add_sweep_parser,
    "retrain": _add_retrain_parser,
}
