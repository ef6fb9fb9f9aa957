"""`posttrain monitor`: serves the page on loopback until Ctrl-C, without external requests or telemetry.

The live page among the servers of `posttrain up --monitor`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from flows.runtime.prefect_access import LoopbackOnlyMiddleware, build_python_path
from posttrain.monitor.document import PageDocumentMiddleware
from posttrain.monitor.episodes import EpisodeImages
from posttrain.monitor.export import (
    export_run,
    format_metrics_csv,
    format_run_json,
    format_stages_csv,
)
from posttrain.monitor.page_responses import PageResponses
from posttrain.monitor.reader import RunReader
from posttrain.operations.services import ROOT, ServiceSpec, build_base_environment, fetch_json
from rl_core.errors import BackendError, DataError, SettingsError

PAGE_HOST = "127.0.0.1"
DEFAULT_PORT = 7860
MAX_PORTS_TRIED = 100
PROCESS_NICENESS = 10  # lower priority than training

# The browser refuses content from other origins.
_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-src 'none'"
)


def _open_reader(output: Path) -> RunReader:
    if not output.exists():
        raise SettingsError(
            f"--output: {output.absolute()} does not exist; name the folder that runs write to, or start one: "
            "posttrain run demo"
        )
    if not output.is_dir():
        raise SettingsError(
            f"--output: {output.absolute()} is a file; name the folder that runs write to"
        )
    try:
        next(output.iterdir(), None)
    except OSError as error:
        raise SettingsError(
            f"--output: {output.absolute()} cannot be read: {error.strerror}"
        ) from None
    return RunReader(output)


def export_run_files(output: Path, run: str, folder: Path) -> list[Path]:
    """Export a run as files, without a page. `run`: see `Reader.choose`; "" = the newest.

    Raises: SettingsError for an unknown folder or run, DataError without runs or disk space.
    """
    reader = _open_reader(output)
    found = reader.load_run(reader.resolve_run_id(run) if run else "")
    if found is None:
        raise DataError(f"no runs in {reader.output}; start one: posttrain run demo")
    for stage in found.stages:
        if stage.journal is not None:
            offset = -1  # a truncated last line is never read: stop when there is no progress
            while stage.journal.tail.offset > offset:
                offset = stage.journal.tail.offset
                stage.journal.read_new_metrics()
    return export_run(found, folder)


def find_free_port(preferred_port: int) -> int:
    """`wanted`, or the next free port. Raises: SettingsError, BackendError without one."""
    for port in range(preferred_port, min(65536, preferred_port + MAX_PORTS_TRIED)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((PAGE_HOST, port))
                return port
            except PermissionError as error:
                raise SettingsError(
                    f"--port {preferred_port}: {error.strerror}; use one above 1023"
                ) from None
            except OSError:
                continue
    raise BackendError(
        f"no free port on {PAGE_HOST} from {preferred_port} on; name another with --port"
    )


def build_app(reader: RunReader, run: str = "") -> Any:
    """The web application (FastAPI): the page at /, images and files.

    Raises: SettingsError if Gradio is not installed.
    """
    for name, value in (
        ("GRADIO_ANALYTICS_ENABLED", "False"),
        ("HF_HUB_OFFLINE", "1"),
        ("DO_NOT_TRACK", "1"),
    ):
        os.environ[name] = value  # before Gradio is imported, overriding the user's environment
    try:
        import gradio as gr
    except ImportError as error:
        raise SettingsError(
            f"the live page needs Gradio ({error.name} is missing): pip install 'posttrain[monitor]'"
        ) from None
    from fastapi import FastAPI

    from posttrain.monitor.page import build_page

    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(LoopbackOnlyMiddleware)
    app.add_middleware(_ContentPolicyMiddleware)
    app.add_middleware(PageDocumentMiddleware)
    _add_view_routes(app, PageResponses(reader, run))
    _add_file_routes(app, reader)
    fonts = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"])
    return gr.mount_gradio_app(
        app,
        build_page(reader, run),
        path="/",
        server_name=PAGE_HOST,
        footer_links=[],
        run_history=False,
        theme=theme,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
    )


class _ContentPolicyMiddleware:
    """Middleware that adds the CSP header; plain ASGI, so that streams and disconnects pass through unchanged."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
                ]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)


def _add_view_routes(app: Any, answers: PageResponses) -> None:
    """Add the route that the page asks for what it shows, and the one that says that the page answers."""
    from fastapi.responses import PlainTextResponse, Response

    def shown(request: Any) -> Response:
        data = answers.build_response(dict(request.query_params))
        return Response(data, media_type="application/json", headers={"Cache-Control": "no-store"})

    app.add_route("/view", shown, methods=["GET"])  # on a thread of its own, as it reads files
    app.add_route("/healthz", lambda request: PlainTextResponse("ok"), methods=["GET"])


def _add_file_routes(app: Any, reader: RunReader) -> None:
    """Add routes for episode images and for downloads of a run."""
    from fastapi.responses import Response, StreamingResponse

    images = EpisodeImages()

    @app.get("/image.png")
    def image(run: str, level: str, seed: int) -> Response:
        found = reader.load_run(run)
        data = (
            images.render_png(found.config.get("environment") or {}, level, seed)
            if found is not None
            else None
        )
        if data is None:
            return Response(status_code=404)
        return Response(data, media_type="image/png", headers={"Cache-Control": "max-age=3600"})

    @app.get("/export/{name}")
    def files(name: str, run: str) -> Response:
        found = reader.load_run(run)
        if found is None:
            return Response("this run is gone", status_code=404, media_type="text/plain")
        attached = {"Content-Disposition": f'attachment; filename="{name}"'}
        if name == "metrics.csv":
            return StreamingResponse(
                format_metrics_csv(found), media_type="text/csv", headers=attached
            )
        if name == "stages.csv":
            return Response(format_stages_csv(found), media_type="text/csv", headers=attached)
        if name == "run.json":
            return Response(format_run_json(found), media_type="application/json", headers=attached)
        return Response("no such file", status_code=404, media_type="text/plain")


def serve_page(output: Path, run: str = "", port: int | None = None) -> None:
    """Serve the page until Ctrl-C or SIGTERM; prints the link once it answers.

    Args:
        run: see `Reader.choose`; "" follows the newest run.
        port: if taken, the next free port is used; None = 7860.
    Raises: SettingsError for an invalid folder, run or port, or without Gradio; BackendError without a free port.
    """
    reader = _open_reader(output)
    chosen = reader.resolve_run_id(run) if run else ""
    wanted = port or DEFAULT_PORT
    number = find_free_port(wanted)
    app = build_app(reader, chosen)
    import uvicorn

    with contextlib.suppress(OSError):  # not permitted; reading is cheap anyway
        os.nice(PROCESS_NICENESS)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=PAGE_HOST,
            port=number,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    note = f"  (port {wanted} is taken)" if number != wanted else ""

    def announce() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.05)
        if server.started:
            print(
                f"monitor  http://{PAGE_HOST}:{number}{note}\nCtrl-C stops the page; runs continue",
                flush=True,
            )

    threading.Thread(target=announce, daemon=True).start()
    threading.Thread(
        target=reader.load_run, args=(chosen,), daemon=True
    ).start()  # before a browser asks for it
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
        server.run()
    print("\nstopped", flush=True)


def choose_page_port(preferred_port: int | None) -> int:
    """Port of the page; None = the usual one. Raises: SettingsError where Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise SettingsError(
            "--monitor: the live page needs Gradio: pip install 'posttrain[monitor]'"
        )
    return preferred_port or DEFAULT_PORT


def build_page_services(port: int, output: Path, mlflow: str) -> list[ServiceSpec]:
    """The page on exactly this port. `mlflow` is not used: the page reads files."""
    url = f"http://{PAGE_HOST}:{port}"
    environment = build_base_environment(output, "monitor")
    environment["PYTHONPATH"] = build_python_path(
        environment
    )  # this posttrain, even if another version is installed
    command = (
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "monitor",
        "--output",
        str(output),
        "--port",
        str(port),
    )

    def works() -> bool:
        try:
            return bool(fetch_json(f"{url}/healthz") == "ok")
        except (OSError, ValueError):
            return False

    return [ServiceSpec("monitor", command, environment, ROOT, url, works, "--monitor-port", port)]
