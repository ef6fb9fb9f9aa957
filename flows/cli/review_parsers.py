"""Parsers of the commands in `flows.cli.review_commands`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.cli.arguments import (
    add_command,
    add_config,
    add_config_or_output,
    add_json,
    add_note,
    add_quiet,
    positive,
)

__all__ = ["PARSERS"]


def _add_evaluate(commands: Any) -> None:
    examples = [
        "evaluate models:/demo@champion --config demo",
        "evaluate path/to/model -c demo --set stages.evaluate.episodes=100",
    ]
    about = "evaluate a model on the held-out episodes of a configuration"
    parser = add_command(commands, "evaluate", about, examples)
    parser.add_argument("model", metavar="MODEL", help="model folder, hub name or models:/NAME@ALIAS")
    add_config(parser, option=True, required=True)
    add_quiet(parser)


def _add_analyze(commands: Any) -> None:
    examples = [
        "analyze outputs/demo/stages/evaluate/KEY --out report",
        "analyze sft.jsonl policy.jsonl --config demo",
        "analyze path/to/sft path/to/policy models:/demo@champion --config demo",
    ]
    about = "analyse trajectory files, or models on the same episodes: tables, figures, an HTML report"
    parser = add_command(commands, "analyze", about, examples)
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="trajectories.jsonl files, folders with some, or models"
    )
    add_config(parser, option=True)
    add_quiet(parser)
    parser.add_argument("--out", default="analysis", help="output folder of the report (default: analysis)")


def _add_promote(commands: Any) -> None:
    examples = [
        "promote --config demo --note 'loops on hard questions'    (back to the champion before)",
        "promote --version 3 --config demo",
    ]
    about = "move the alias champion manually: back to the previous champion, or to any version"
    parser = add_command(commands, "promote", about, examples)
    parser.add_argument("--version", type=positive, metavar="N", help="version of the registered model")
    add_note(parser)
    add_config(parser, option=True, required=True)


def _add_approve(commands: Any) -> None:
    examples = [
        "approve",
        "approve 'demo · 2026-11-21 14:00:00' --yes --note 'looked at the regressions'",
        "approve demo --no --note 'worse on hard questions'",
    ]
    about = "approve or reject a pending promotion; without RUN, list pending ones"
    parser = add_command(commands, "approve", about, examples)
    parser.add_argument("run", metavar="RUN", nargs="?", help="name or id of the run, or its pipeline (posttrain runs)")
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument("--yes", dest="approve", action="store_true", help="promote", default=None)
    decision.add_argument("--no", dest="approve", action="store_false", help="reject", default=None)
    add_note(parser)
    parser.add_argument("--by", default="", help="reviewer (default: this user and machine)")
    add_json(parser, "without RUN: pending ones, for programs")
    add_config_or_output(parser)


def _add_replay(commands: Any) -> None:
    examples = [
        "replay    (lists the failed episodes that are kept)",
        "replay policy/12/easy/345/0",
        "replay evaluate/policy/hard/17/0 --config demo",
    ]
    about = "play a recorded episode again, failed or not, and say where the result differs from the recording"
    parser = add_command(commands, "replay", about, examples)
    parser.add_argument(
        "episode",
        metavar="EPISODE",
        nargs="?",
        help="STAGE/ITERATION/LEVEL/SEED/SAMPLE, or evaluate/MODEL/LEVEL/SEED/SAMPLE",
    )
    add_json(parser, "without EPISODE: the list for programs")
    add_config_or_output(parser)


def _add_sync(commands: Any) -> None:
    examples = ["sync", "sync --config gsm8k", "sync --output /data/outputs"]
    about = "deliver to the tracking store what runs recorded while it was away, or before it lost its database"
    parser = add_command(commands, "sync", about, examples)
    add_config_or_output(parser)


def _add_gc(commands: Any) -> None:
    examples = ["gc --keep 5", "gc --keep 5 --pipeline demo --yes"]
    about = "remove data needed by no alias, champion lineage or open run; a dry run unless --yes is given"
    parser = add_command(commands, "gc", about, examples)
    parser.add_argument(
        "--keep", type=positive, default=5, metavar="N", help="newest runs to keep per pipeline (default: 5)"
    )
    parser.add_argument(
        "--pipeline", metavar="NAME", action="append", default=[], help="only this pipeline; may be repeated"
    )
    parser.add_argument("--yes", action="store_true", help="actually remove")
    add_json(parser)
    add_config_or_output(parser)


PARSERS: dict[str, Callable[[Any], None]] = {
    "evaluate": _add_evaluate,
    "analyze": _add_analyze,
    "promote": _add_promote,
    "approve": _add_approve,
    "replay": _add_replay,
    "sync": _add_sync,
    "gc": _add_gc,
}
