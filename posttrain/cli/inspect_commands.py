"""Parsers of the commands that look at several runs: sweep, runs, compare, diff. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from posttrain.cli.arguments import (
    add_command_parser,
    add_config_and_output_options,
    add_config_argument,
    add_quiet_option,
    add_stop_after_option,
    parse_positive_integer,
    parse_positive_number,
    parse_stage_name,
)

SWEEP_METHODS = ("grid", "random", "bayes", "halving")


def _add_sweep_parser(commands: Any) -> None:
    """`posttrain sweep`."""
    examples = [
        "sweep demo --set stages.policy.learning_rate=1e-4,3e-4,1e-3 --seeds 3 --seed-stage policy",
        "sweep demo --set stages.policy.group_size=4,8 --set stages.policy.learning_rate=1e-4..1e-2:5:log --parallel 2",
        "sweep demo --set stages.policy.learning_rate=1e-5..1e-2:log --method halving --trials 30",
    ]
    about = "run trials that differ in some settings and seeds, sharing all stages that do not change; choose the best"
    parser = add_command_parser(commands, "sweep", about, examples)
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
        help="run trials on the nodes of a Ray cluster: host:port of its head, auto, or local for one of its own here",
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


def _add_runs_parser(commands: Any) -> None:
    """`posttrain runs`."""
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


def _add_compare_parser(commands: Any) -> None:
    """`posttrain compare`."""
    examples = [
        "compare 'demo · 2026-11-21 14:00:00' 'demo · 2026-11-21 15:00:00'",
        "compare demo other_demo --out comparison",
        "compare RUN_ID RUN_ID RUN_ID --format json",
    ]
    about = "compare runs: settings that differ, stages, curves, results on the same episodes, where they part"
    parser = add_command_parser(commands, "compare", about, examples)
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


def _add_diff_parser(commands: Any) -> None:
    """`posttrain diff`."""
    examples = [
        "diff sft policy --config demo",
        "diff models:/demo@champion path/to/model --config demo --set stages.evaluate.episodes=1000",
        "diff sft/epochs/1 sft/epochs/3 -c demo --format json",
    ]
    about = (
        "two models on the same held-out episodes: what got better and worse, and where they part"
    )
    parser = add_command_parser(commands, "diff", about, examples)
    names = "model folder, hub name, models:/NAME@ALIAS, or a stage of the pipeline: STAGE, STAGE/KEY, .../epochs/N"
    parser.add_argument("first", metavar="MODEL", help=names)
    parser.add_argument("second", metavar="MODEL", help="the one that is compared with it")
    add_config_and_output_options(parser)
    parser.add_argument(
        "--episodes",
        type=parse_positive_integer,
        default=5,
        metavar="N",
        help="episodes to tell, of lost and won ones (default: 5)",
    )
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="default: table"
    )
    _add_json_format_option(parser)
    add_quiet_option(parser)


def _add_json_format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        dest="format",
        action="store_const",
        const="json",
        help="the same as --format json",
    )


PARSERS: dict[str, Callable[[Any], None]] = {
    "sweep": _add_sweep_parser,
    "runs": _add_runs_parser,
    "compare": _add_compare_parser,
    "diff": _add_diff_parser,
}
