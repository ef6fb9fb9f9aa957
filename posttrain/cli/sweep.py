"""Command `posttrain sweep`: run trials of a configuration and choose the best."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from flows.runtime.stopping import schedule_sigterm
from flows.runtime.terminal import escape_control_characters
from posttrain.cli import run_setup
from posttrain.cli.arguments import (
    add_config_argument,
    add_quiet_option,
    add_stop_after_option,
    parse_positive_integer,
    parse_positive_number,
    parse_stage_name,
)
from rl_core.errors import SettingsError

if TYPE_CHECKING:
    from flows.sweep.ray_trials import TrialResources

SWEEP_METHODS = ("grid", "random", "bayes", "halving")

EXAMPLES = (
    "sweep demo --set stages.policy.learning_rate=1e-4,3e-4,1e-3 --seeds 3 --seed-stage policy",
    "sweep demo --set stages.policy.group_size=4,8 --set stages.policy.learning_rate=1e-4..1e-2:5:log --parallel 2",
    "sweep demo --set stages.policy.learning_rate=1e-5..1e-2:log --method halving --trials 30",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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


def run_command(arguments: argparse.Namespace) -> int:
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
