"""Argument parser of the `posttrain` command. Standard library only, so that `--help` starts at once."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli import (
    comparison_parsers,
    online_parsers,
    pipeline_parsers,
    planning_parsers,
    prefer_parsers,
    review_parsers,
    service_parsers,
    serving_parsers,
    training_service_parsers,
)
from flows.cli.help_overview import ABOUT, ORDER, OverviewParser
from flows.cli.hinting_parser import HintingParser

__all__ = ["build_parser"]


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = OverviewParser(prog="posttrain", description=ABOUT)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.set_defaults(debug=False, command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=HintingParser)
    rooms = (
        pipeline_parsers, planning_parsers, comparison_parsers, review_parsers, service_parsers, serving_parsers,
        training_service_parsers, online_parsers, prefer_parsers,
    )  # fmt: skip
    parsers = {name: add for room in rooms for name, add in room.PARSERS.items()}
    for name in sorted(parsers, key=ORDER.index):
        parsers[name](commands)
    return parser


class _Version(argparse.Action):
    """Action that prints the version, looked up lazily."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"posttrain {version('posttrain')}")
        except PackageNotFoundError:
            print("posttrain, not installed")
        parser.exit()
