"""`posttrain online`: the update worker, and replays of a recorded buffer.

Everything is imported at its call, so that `posttrain --help` starts at once.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_core.settings import OnlineSettings

__all__ = ["online"]


def online(arguments: argparse.Namespace) -> int:
    """Run one of its commands."""
    if arguments.part == "report":
        return _report(arguments)
    from flows.online.online_settings import load_online_settings

    settings = load_online_settings(arguments.config, arguments.set)
    from transformers.utils.logging import disable_progress_bar

    from flows.online.worker_process import REPLAY, replay_buffer

    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.part in ("worker", "gate", "standby"):
        return _run(arguments, settings)
    output = Path(arguments.output)
    found = replay_buffer(settings, Path(arguments.buffer), output, lambda text: print(text, flush=True))
    taken, updates = found["online/updates_taken"], found["online/updates"]
    print(f"{updates:g} updates over {found['online/records']:g} records, {taken:g} taken; {output / REPLAY}")
    print(f"weights {found['weights']}\naverage {found['average']}")
    return 0


def _run(arguments: argparse.Namespace, settings: OnlineSettings) -> int:
    """A process beside a server, until it is asked to stop."""
    from flows.online.gate_process import run_gate
    from flows.online.heartbeat import Heartbeat
    from flows.online.worker_process import follow_buffer

    part = arguments.part
    if arguments.heartbeat is not None:
        os.nice(settings.service.nice)  # answers come first
    if part == "standby":
        from flows.online.standby_process import wait_for_part

        if not (part := wait_for_part(arguments.heartbeat, settings)):
            return 0
    run = follow_buffer if part == "worker" else run_gate
    with Heartbeat(arguments.heartbeat, settings.service.update_seconds) as heart:
        return 128 + run(settings, lambda text: print(text, flush=True), heart)


def _report(arguments: argparse.Namespace) -> int:
    """Write the report of a service's folder."""
    from flows.online.service_report import write_report

    print(write_report(Path(arguments.folder), Path(arguments.output) if arguments.output else None))
    return 0
