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
    if arguments.part == "resume":
        from flows.online.learning_folder import ask_to_resume

        print(ask_to_resume(Path(arguments.folder)))
        return 0
    if arguments.part == "consolidate":
        return _consolidate(arguments)
    from flows.online.online_settings import load_online_settings

    settings = load_online_settings(arguments.config, arguments.set)
    from transformers.utils.logging import disable_progress_bar

    from flows.online.worker_process import REPLAY, replay_buffer

    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.part == "export":
        return _export(settings, Path(arguments.output))
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
    from flows.online.heartbeat import LifeSign
    from flows.online.worker_process import follow_buffer

    part = arguments.part
    if arguments.heartbeat is not None:
        os.nice(settings.service.nice)  # answers come first
    if part == "standby":
        from flows.online.standby_process import wait_for_part

        if not (part := wait_for_part(arguments.heartbeat, settings)):
            return 0
    run = follow_buffer if part == "worker" else run_gate
    with LifeSign(arguments.heartbeat, settings.service.update_seconds) as heart:
        return 128 + run(settings, lambda text: print(text, flush=True), heart)


def _report(arguments: argparse.Namespace) -> int:
    """Write the report of a service's folder."""
    from flows.online.service_report import write_report

    print(write_report(Path(arguments.folder), Path(arguments.output) if arguments.output else None))
    return 0


def _consolidate(arguments: argparse.Namespace) -> int:
    """The live snapshot through evaluation and promotion gate."""
    from flows.cli.arguments_to_settings import connect_mlflow, warn
    from tasks.config import load

    given = [*arguments.set, *([f"output={arguments.output}"] if arguments.output else [])]
    settings = load(arguments.config, given, ask_servers=False, warn=warn)
    connect_mlflow(Path(settings.output).resolve())
    from flows.consolidate import run_consolidation

    result = run_consolidation(settings)
    print(f"{result.status}: {result.message}")
    return 0


def _export(settings: OnlineSettings, output: Path) -> int:
    """Write the right episodes, or answers of conversations, of the service's buffer."""
    import json

    from rl_core.online.assembly import BUFFER, online_environment
    from rl_core.online.demonstrations import demonstrations
    from rl_core.storage.single_files import write_text_atomic

    environment = online_environment(settings.environment)
    rows = [
        json.dumps(row, ensure_ascii=False)
        for row in demonstrations(Path(settings.folder) / BUFFER, settings.labels, environment)
    ]
    write_text_atomic(output, "\n".join(rows) + "\n")
    what = "episodes" if environment is not None else "conversations"
    print(f"{output}: {len(rows)} {what}; `stages.prepare_data.demonstrations` of a retraining takes them")
    return 0
