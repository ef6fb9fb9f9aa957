"""Parser of `posttrain service`. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from flows.cli.arguments import add_command, add_json, positive

__all__ = ["PARSERS"]

_CONFIG = "the service's YAML file, or the name of a shipped one (default: service)"


def _add_service(commands: Any) -> None:
    examples = [
        "service up service --set engine.bases.small=models/small    (until Ctrl-C)",
        "service key create anna --limit 600 --queue 64",
        "service runs",
        "service cancel r-0123456789abcdef01234567",
        "service promote tinker://RUN/weights/best",
    ]
    about = "serve training to clients of the tinker SDK: up, key, runs, queue, cancel, promote, logs, audit"
    parser = add_command(commands, "service", about, examples)
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="part")
    up = parts.add_parser("up", help="start server and worker; they are started again when they die")
    up.add_argument("config", metavar="CONFIG", nargs="?", default="service", help=_CONFIG)
    _add_overrides(up)
    key = _part(parts, "key", "API keys: create, list, revoke")
    actions = key.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")
    create = actions.add_parser("create", help="a new key; its secret is printed once")
    create.add_argument("name", metavar="NAME", help="name of its user")
    create.add_argument("--limit", type=positive, metavar="N", help="requests per minute (default: no limit)")
    create.add_argument("--queue", type=positive, metavar="N", help="requests that wait or run (default: no limit)")
    add_json(actions.add_parser("list", help="all keys, without secrets"))
    revoke = actions.add_parser("revoke", help="make a key useless within seconds")
    revoke.add_argument("name", metavar="NAME", help="name or id of the key")
    for action in (create, actions.choices["list"], revoke):
        _add_config(action)
    runs = _part(parts, "runs", "training runs, the newest first")
    runs.add_argument("--number", "-n", type=positive, default=20, metavar="N", help="at most (default: 20)")
    add_json(runs)
    add_json(_part(parts, "queue", "open requests by kind, and waiting and service times"))
    cancel = _part(parts, "cancel", "cancel a request that waits, or all that wait of a run")
    cancel.add_argument("name", metavar="REQUEST|RUN", help="id of a request (r-...) or of a training run")
    promote = _part(parts, "promote", "make the version of a saved path the champion of its registered model")
    promote.add_argument(
        "path", metavar="PATH", help="tinker://RUN/weights/NAME, saved while worker.registered was set"
    )
    logs = _part(parts, "logs", "last lines of the logs")
    logs.add_argument("process", metavar="PROCESS", nargs="?", choices=("server", "worker"), help="server or worker")
    logs.add_argument("--number", "-n", type=positive, default=20, metavar="N", help="lines (default: 20)")
    audit = _part(parts, "audit", "who did what, the newest first")
    audit.add_argument("--number", "-n", type=positive, default=20, metavar="N", help="at most (default: 20)")
    add_json(audit)


def _part(parts: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parts.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    if name != "key":
        _add_config(parser)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", "-c", metavar="CONFIG", default="service", help=_CONFIG)
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", "-s", metavar="KEY=VALUE", action="append", default=[],
        help="override a setting, as in folder=/data/service; may be repeated",
    )  # fmt: skip


PARSERS: dict[str, Callable[[Any], None]] = {"service": _add_service}
