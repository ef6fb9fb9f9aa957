"""Command `posttrain online`: update worker, gate, replay of a recorded buffer, report."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.arguments import add_set_option

if TYPE_CHECKING:
    from rl_core.settings import OnlineSettings

_CONFIG_HELP = "the YAML file of online learning, or the name of a shipped one (default: online)"
_SET_HELP = "override a setting, as in model.path=models/demo; may be repeated"
_FOLDER_HELP = "folder of the service, as outputs/demo/online/version-1"

EXAMPLES = (
    "online worker my_online.yaml    (until Ctrl-C)",
    "online replay my_online.yaml --buffer outputs/online/buffer --to outputs/replayed",
    "online report outputs/demo/online/version-1",
    "online resume outputs/demo/online/version-1    (after an alarm)",
    "online consolidate demo",
    "online replay online --buffer recorded --to again --set update.kl_max=0.5",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    subcommands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="part"
    )
    worker = subcommands.add_parser(
        "worker", help="learn from the buffer that a server writes, until Ctrl-C"
    )
    replay = subcommands.add_parser(
        "replay", help="learn from a recorded buffer alone, with the live worker's numbers"
    )
    gate = subcommands.add_parser(
        "gate", help="play canary episodes of every new snapshot, until Ctrl-C"
    )
    standby = subcommands.add_parser("standby")  # internal: started by the server, without help
    for process in (worker, gate, standby):
        # Descriptor of the supervisor's socket.
        process.add_argument("--heartbeat", metavar="N", type=int, help=argparse.SUPPRESS)
    for process in (worker, gate, standby, replay):
        process.add_argument(
            "config", metavar="CONFIG", nargs="?", default="online", help=_CONFIG_HELP
        )
        add_set_option(process, _SET_HELP)
    replay.add_argument(
        "--buffer",
        metavar="DIR",
        required=True,
        help="folder of the recorded buffer, or the service's folder",
    )
    _add_target_option(
        replay, "FOLDER", "folder of the replay; an interrupted one resumes", ("--output",)
    )
    report = subcommands.add_parser(
        "report", help="one HTML file about a service: learning, guardrails, gate, alarms"
    )
    report.add_argument("folder", metavar="FOLDER", help=_FOLDER_HELP)
    _add_target_option(report, "FILE", "default: report.html in that folder", required=False)
    resume = subcommands.add_parser(
        "resume", help="resume learning after an alarm, with a new reference"
    )
    resume.add_argument("folder", metavar="FOLDER", help=_FOLDER_HELP)
    export = subcommands.add_parser(
        "export", help="write correct answers of a recorded buffer as demonstrations, for `retrain`"
    )
    export.add_argument("config", metavar="FILE", help="online.yaml of the service's folder")
    add_set_option(export, _SET_HELP)
    _add_target_option(export, "FILE", "JSON lines; overwritten")
    consolidate = subcommands.add_parser(
        "consolidate", help="submit the live snapshot to the promotion gate of its pipeline"
    )
    consolidate.add_argument(
        "config", metavar="CONFIG", help="the pipeline: its YAML file, or the name of a shipped one"
    )
    add_set_option(consolidate, _SET_HELP)
    consolidate.add_argument(
        "--output", "-o", metavar="FOLDER", help="overrides the pipeline's `output`"
    )


def _add_target_option(
    parser: argparse.ArgumentParser,
    metavar: str,
    help_text: str,
    former_names: tuple[str, ...] = ("--output", "-o"),
    *,
    required: bool = True,
) -> None:
    """Add the option `--to`, and its hidden names of the last release."""
    target = parser.add_mutually_exclusive_group(required=required)
    target.add_argument("--to", metavar=metavar, help=help_text)
    target.add_argument(*former_names, dest="to", help=argparse.SUPPRESS)


def run_command(arguments: argparse.Namespace) -> int:
    """Run one of its subcommands."""
    if arguments.part == "report":
        return _write_service_report(arguments)
    if arguments.part == "resume":
        from rl_core.online.learning_folder import request_resume

        print(request_resume(Path(arguments.folder)))
        return 0
    if arguments.part == "consolidate":
        return _consolidate_snapshot(arguments)
    from posttrain.settings_files import load_online_settings

    settings = load_online_settings(arguments.config, arguments.set)
    from transformers.utils.logging import disable_progress_bar

    from posttrain.online.worker_processes import REPLAY_FILE, replay_buffer

    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.part == "export":
        return _export_demonstrations(settings, Path(arguments.to))
    if arguments.part in ("worker", "gate", "standby"):
        return _run_online_process(arguments, settings)
    output = Path(arguments.to)
    totals = replay_buffer(
        settings, Path(arguments.buffer), output, lambda text: print(text, flush=True)
    )
    counts = (
        f"{totals['online/updates']:g} updates over {totals['online/records']:g} records, "
        f"{totals['online/updates_taken']:g} taken"
    )
    print(f"{counts}; {output / REPLAY_FILE}")
    print(f"weights {totals['weights']}\naverage {totals['average']}")
    return 0


def _run_online_process(arguments: argparse.Namespace, settings: OnlineSettings) -> int:
    """Run a process that accompanies a server until it is asked to stop."""
    from posttrain.online.worker_processes import learn_from_buffer, run_gate
    from rl_core.processes.heartbeats import Heartbeat

    part = arguments.part
    if arguments.heartbeat is not None:
        os.nice(settings.service.nice)  # requests have priority
    if part == "standby":
        from posttrain.online.worker_processes import wait_for_role

        if not (part := wait_for_role(arguments.heartbeat, settings)):
            return 0
    run = learn_from_buffer if part == "worker" else run_gate
    with Heartbeat(arguments.heartbeat, settings.service.update_seconds) as heartbeat:
        return 128 + run(settings, lambda text: print(text, flush=True), heartbeat)


def _write_service_report(arguments: argparse.Namespace) -> int:
    """Write the report of a service folder."""
    from posttrain.online.service_report import write_service_report

    output = Path(arguments.to) if arguments.to else None
    print(write_service_report(Path(arguments.folder), output))
    return 0


def _consolidate_snapshot(arguments: argparse.Namespace) -> int:
    """Evaluate the live snapshot and submit it to the promotion gate."""
    from posttrain.cli.run_setup import connect_mlflow, print_warning
    from tasks.config import load_settings

    overrides = list(arguments.set)
    if arguments.output:
        overrides.append(f"output={arguments.output}")
    settings = load_settings(arguments.config, overrides, check_servers=False, warn=print_warning)
    connect_mlflow(Path(settings.output).resolve())
    from flows.consolidate import run_consolidation

    result = run_consolidation(settings)
    print(f"{result.status}: {result.message}")
    return 0


def _export_demonstrations(settings: OnlineSettings, output: Path) -> int:
    """Write the successful episodes, or correct answers of conversations, of the service's buffer."""
    import json

    from rl_core.online.build_worker import BUFFER_FOLDER, create_online_environment
    from rl_core.online.labelled_rewards import extract_demonstrations
    from rl_core.storage.atomic_files import write_text_atomic

    environment = create_online_environment(settings.environment)
    buffer = Path(settings.folder) / BUFFER_FOLDER
    rows = list(extract_demonstrations(buffer, settings.labels, environment))
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_text_atomic(output, "\n".join(lines) + "\n")
    unit = "episodes" if environment is not None else "conversations"
    print(
        f"{output}: {len(rows)} {unit}; set `stages.prepare_data.demonstrations` to this file to retrain on them"
    )
    return 0
