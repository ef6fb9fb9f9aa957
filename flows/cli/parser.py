"""Argument parser of the `posttrain` command. Standard library only, so that `--help` starts at once."""

from __future__ import annotations

import argparse
from typing import Any

from flows.cli import (
    comparison_parsers,
    online_parsers,
    pipeline_parsers,
    review_parsers,
    service_parsers,
    serving_parsers,
    training_service_parsers,
)

__all__ = ["build_parser"]

_ABOUT = """\
Post-train language-model policies: prepare data, SFT, preference optimisation (DPO), reward model, policy
optimisation, evaluation, analysis, promotion. A pipeline is one YAML file.
"""

_START = """\
start here:
  posttrain run demo                       the whole pipeline on an environment that needs no download
  posttrain init my_task                   a config, an environment and a reward to start from
  posttrain validate demo                  check a configuration without running anything
  posttrain up                             Prefect, a worker and MLflow, with schedules (down, status)
  posttrain ui                             browse results in MLflow and Prefect
  posttrain monitor                        watch a run live
  posttrain doctor                         check this machine for missing requirements

exit codes:
  0 done   1 failed   2 wrong settings or data   130, 143 stopped; the same command resumes from the last checkpoint
"""

# as `--help` lists them
_ORDER = (
    "init", "convert", "data",
    "run", "sweep", "retrain", "validate", "stage", "why", "profile",
    "evaluate", "analyze", "promote",
    "approve", "resume", "up", "down", "status", "serve", "service", "online",
    "ui", "monitor", "runs", "compare", "replay", "verify-resume", "sync", "gc", "doctor",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="posttrain", description=_ABOUT, epilog=_START, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    rooms = (
        pipeline_parsers, comparison_parsers, review_parsers, service_parsers, serving_parsers,
        training_service_parsers, online_parsers,
    )  # fmt: skip
    parsers = {name: add for room in rooms for name, add in room.PARSERS.items()}
    for name in sorted(parsers, key=_ORDER.index):
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
