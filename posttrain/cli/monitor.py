"""Command `posttrain monitor`: serve the live page, or export a run as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli.arguments import add_output_option, parse_port

EXAMPLES = ("monitor", "monitor --run demo --port 7861", "monitor --run demo --export numbers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output_option(parser)
    parser.add_argument(
        "--run",
        metavar="NAME",
        help="a pipeline (its newest run) or PIPELINE/STARTED (default: follow the newest run)",
    )
    parser.add_argument(
        "--port", type=parse_port, metavar="PORT", help="default: 7860, or the next free port"
    )
    parser.add_argument(
        "--export",
        metavar="FOLDER",
        help="write the run as CSV and JSON into FOLDER instead of serving the page",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Serve the live page until Ctrl-C, or export a run as files."""
    from posttrain.monitor import server

    output, run = Path(arguments.output), arguments.run or ""
    if arguments.export is None:
        server.serve_page(output, run, arguments.port)
        return 0
    for path in server.export_run_files(output, run, Path(arguments.export)):
        print(path)
    return 0
