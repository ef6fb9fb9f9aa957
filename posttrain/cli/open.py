"""Command `posttrain open`: the pages of a run that answer now."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from posttrain.cli import run_setup
from posttrain.cli.arguments import RUN_HELP, add_json_option, add_output_option
from posttrain.cli.logs import open_run
from posttrain.cli.parser import ExitCode
from rl_core.errors import BackendError
from rl_core.json_client import RequestError, fetch_json, find_health_problem
from tasks.command_hints import format_posttrain_command

if TYPE_CHECKING:
    from posttrain.monitor.runs import RunView
    from posttrain.operations.state import SupervisorState

ANSWER_SECONDS = 3.0  # longest wait for a page
_DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")

EXAMPLES = ("open    (the newest run)", "open demo-7f3a", "open demo-7f3a --no-browser")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help=f"{RUN_HELP} (default: the newest run)"
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="only print the links (default without a display)"
    )
    add_output_option(parser)
    add_json_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the pages of a run that answer, and open them in the browser; exit with 1 if none answers."""
    from posttrain.cli.tables import print_requested_data

    output = Path(arguments.output)
    run_setup.refuse_unreadable_folder(output)
    reader, identity = open_run(output, arguments.run)
    view = reader.load_run(identity)
    assert view is not None  # `resolve_run_id` has listed it
    pages = dict(list_pages(view))
    if not print_requested_data(arguments, {"id": view.short_id, "run": view.id, "pages": pages}):
        for name, link in pages.items():
            print(f"{name:8} {link}")
        missing = [name for name in ("live", "mlflow", "prefect") if name not in pages]
        if missing:
            command = format_posttrain_command("ui", output)
            print(
                f"posttrain: {', '.join(missing)}: no page of this run answers; `{command}` serves the web UI",
                file=sys.stderr,
            )
        if not arguments.no_browser and _has_browser():
            for link in pages.values():
                webbrowser.open_new_tab(link)
    return ExitCode.OK if pages else ExitCode.FAILED


def _has_browser() -> bool:
    """Return whether a browser with windows can open: one in this terminal would hide the output."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in _DISPLAY_VARIABLES
    )


def list_pages(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield (name, link) of the pages of a run that answer: live, mlflow, prefect, and the report's file."""
    from posttrain.operations.connection import find_running_servers

    state = find_running_servers(view.output)
    live = find_page_address(view.output, "live", state)
    if live and not find_health_problem(f"{live}/healthz", ANSWER_SECONDS):
        yield "live", f"{live}/?{urlencode({'run': view.id}, quote_via=quote)}"
    if link := _find_mlflow_page(view, state):
        yield "mlflow", link
    if link := _find_prefect_page(view, state):
        yield "prefect", link
    for stage in reversed(view.stages):
        report = stage.folder / "report.html" if stage.folder is not None else None
        if stage.label == "analyze" and report is not None and report.is_file():
            yield "report", report.as_uri()
            return


def find_page_address(output: Path, name: str, state: SupervisorState | None) -> str:
    """Return the address at which `posttrain up` or `posttrain ui` serves a page; "" = neither does."""
    from tasks.mlflow_environment import find_served_page

    services = {} if state is None else {service.name: service.url for service in state.services}
    if served := services.get({"live": "monitor"}.get(name, name)):
        return served
    if name == "live":
        return find_served_page(output, "live")
    return find_served_page(output, "mlflow" if name == "mlflow" else "prefect")


def _find_mlflow_page(view: RunView, state: SupervisorState | None) -> str:
    """Return the run's page in MLflow if the server has the run."""
    from tasks.tracking import Tracking
    from tasks.tracking.journal import DeliveryCursor

    assert view.folder is not None  # a run of the output folder
    cursor = DeliveryCursor.load(view.folder)
    uri = view.config.get("tracking", {}).get("uri") or os.environ.get("MLFLOW_TRACKING_URI") or ""
    address = uri if uri.startswith("http") else find_page_address(view.output, "mlflow", state)
    if not cursor.run_id or not cursor.experiment_id or not address:
        return ""
    address = address.rstrip("/")
    try:
        fetch_json(
            f"{address}/api/2.0/mlflow/runs/get?run_id={cursor.run_id}", timeout_s=ANSWER_SECONDS
        )
    except RequestError as error:
        if error.status not in (401, 403):  # the browser asks for a password
            return ""
    store = Tracking(None, view.output).store
    return f"{address}/{store.build_run_link(cursor.run_id, cursor.experiment_id)}"


def _find_prefect_page(view: RunView, state: SupervisorState | None) -> str:
    """Return the run's page in Prefect if the server has the flow run."""
    from flows.runtime.prefect_access import (
        CLIENT_AUTH_VARIABLE,
        build_basic_auth_header,
        load_or_create_password,
    )

    if not view.flow_run_id:
        return ""
    own_address = find_page_address(view.output, "prefect", state)
    configured = os.environ.get("PREFECT_API_URL", "").rstrip("/").removesuffix("/api")
    for address in filter(None, dict.fromkeys((own_address, configured))):
        password = os.environ.get(CLIENT_AUTH_VARIABLE, "")
        if address == own_address:
            with contextlib.suppress(BackendError):  # another user's servers
                password = load_or_create_password(view.output)
        try:
            fetch_json(
                f"{address}/api/flow_runs/{view.flow_run_id}",
                timeout_s=ANSWER_SECONDS,
                headers=build_basic_auth_header(password),
            )
        except RequestError as error:
            if error.status not in (401, 403):  # the page asks for a password
                continue
        return f"{address}/runs/flow-run/{view.flow_run_id}"
    return ""
