"""Parser of `posttrain online`. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from flows.cli.arguments import add_command

__all__ = ["PARSERS"]

_CONFIG = "the YAML file of online learning, or the name of a shipped one (default: online)"


def _add_online(commands: Any) -> None:
    examples = [
        "online worker my_online.yaml    (until Ctrl-C)",
        "online replay my_online.yaml --buffer outputs/online/buffer --output outputs/replayed",
        "online report outputs/demo/online/version-1",
        "online resume outputs/demo/online/version-1    (after an alarm)",
        "online consolidate demo",
        "online replay online --buffer recorded --output again --set update.kl_limit=0.5",
    ]
    about = "learn from recorded traffic under guardrails: worker, gate (beside a server), replay (of a buffer), report"
    parser = add_command(commands, "online", about, examples)
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="part")
    worker = parts.add_parser("worker", help="learn from what a server writes into the buffer, until Ctrl-C")
    replay = parts.add_parser("replay", help="learn from a recorded buffer alone, with the live worker's numbers")
    gate = parts.add_parser("gate", help="play canary episodes of every new snapshot, until Ctrl-C")
    report = parts.add_parser("report", help="one HTML file about a service: learning, guardrails, gate, alarms")
    resume = parts.add_parser("resume", help="have learning go on after an alarm, with a new reference")
    resume.add_argument("folder", metavar="FOLDER", help="of the service, as outputs/demo/online/version-1")
    standby = parts.add_parser("standby")  # of the server's own: no help
    for one in (worker, gate, standby):
        one.add_argument("--heartbeat", metavar="N", type=int, help=argparse.SUPPRESS)  # socket of the supervisor
    report.add_argument("folder", metavar="FOLDER", help="of the service, as outputs/demo/online/version-1")
    report.add_argument("--output", "-o", metavar="FILE", help="default: report.html in that folder")
    for one in (worker, gate, standby, replay):
        one.add_argument("config", metavar="CONFIG", nargs="?", default="online", help=_CONFIG)
        _add_overrides(one)
    export = parts.add_parser("export", help="what was right in a recorded buffer as demonstrations, for `retrain`")
    export.add_argument("config", metavar="FILE", help="online.yaml of the service's folder")
    _add_overrides(export)
    export.add_argument("--output", "-o", metavar="FILE", required=True, help="JSON lines, written anew")
    consolidate = parts.add_parser("consolidate", help="take what went live to the promotion gate of its pipeline")
    consolidate.add_argument(
        "config", metavar="CONFIG", help="the pipeline: its YAML file, or the name of a shipped one"
    )
    _add_overrides(consolidate)
    consolidate.add_argument("--output", "-o", metavar="FOLDER", help="in place of the pipeline's `output`")
    replay.add_argument(
        "--buffer", metavar="DIR", required=True, help="folder of the recorded buffer, or the service's folder"
    )
    replay.add_argument("--output", metavar="DIR", required=True, help="folder of the replay; a stopped one goes on")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", "-s", metavar="KEY=VALUE", action="append", default=[],
        help="override a setting, as in model.path=models/demo; may be repeated",
    )  # fmt: skip


PARSERS: dict[str, Callable[[Any], None]] = {"online": _add_online}
