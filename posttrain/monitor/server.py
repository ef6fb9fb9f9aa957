"""Server of the live page: `posttrain ui --live`, and one of the servers of `posttrain up --monitor`.

It listens on loopback and makes no external requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import threading
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
from posttrain.monitor.run_notes import MAX_BODY_BYTES, handle_notes_request
from posttrain.operations.services import ROOT, ServiceSpec, build_base_environment
from posttrain.web.server_setup import LOOPBACK_HOST, find_free_port, run_server
from posttrain.web.tokens import has_bearer_token
from rl_core.errors import DataError, PosttrainError, SettingsError
from rl_core.json_client import RequestError, fetch_json
from tasks.mlflow_environment import record_served_page

DEFAULT_PORT = 7860
PROCESS_NICENESS = 10  # lower priority than training

# The browser refuses content from other origins.
_CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-src 'none'"
)
# Set before Gradio is imported, overriding the user's environment.
_GRADIO_ENVIRONMENT = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


def serve_page(output: Path, run: str = "", port: int | None = None) -> None:
    """Serve the page until Ctrl-C or SIGTERM; print the link once it answers.

    Args:
        run: see `RunReader.resolve_run_id`; "" follows the newest run.
        port: if taken, the next free port is used; None = 7860.
    Raises: SettingsError for an invalid folder, run or port, or without Gradio; BackendError without a free port.
    """
    reader = _open_reader(output)
    run_id = reader.resolve_run_id(run) if run else ""
    preferred_port = port or DEFAULT_PORT
    free_port = find_free_port(preferred_port)
    app = build_app(reader, run_id)
    import uvicorn

    with contextlib.suppress(OSError):  # not permitted; reading is cheap anyway
        os.nice(PROCESS_NICENESS)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=LOOPBACK_HOST,
            port=free_port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )

    def print_link() -> None:
        note = f"  (port {preferred_port} is taken)" if free_port != preferred_port else ""
        print(
            f"live     http://{LOOPBACK_HOST}:{free_port}{note}\nCtrl-C stops the page; runs continue",
            flush=True,
        )
        with contextlib.suppress(OSError, PosttrainError):  # a folder that this user only reads
            record_served_page(output, "live", f"http://{LOOPBACK_HOST}:{free_port}")

    # Before a browser asks for it.
    threading.Thread(target=reader.load_run, args=(run_id,), daemon=True).start()
    run_server(server, print_link)
    print("\nstopped", flush=True)


def export_run_files(output: Path, run: str, folder: Path) -> list[Path]:
    """Export a run as files, without a page. `run`: see `RunReader.resolve_run_id`; "" = the newest.

    Raises: SettingsError for an unknown folder or run, DataError without runs or disk space.
    """
    reader = _open_reader(output)
    view = reader.load_run(reader.resolve_run_id(run) if run else "")
    if view is None:
        raise DataError(f"no runs in {reader.output}; start one: posttrain run demo")
    for stage in view.stages:
        if stage.journal is not None:
            offset = -1  # a truncated last line is never read: stop when there is no progress
            while stage.journal.tail.offset > offset:
                offset = stage.journal.tail.offset
                stage.journal.read_new_metrics()
    return export_run(view, folder)


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


def build_app(reader: RunReader, run: str = "") -> Any:
    """Build the web application (FastAPI): the page at /, images and files.

    Raises: SettingsError if Gradio is not installed.
    """
    os.environ.update(_GRADIO_ENVIRONMENT)
    try:
        import gradio as gr
    except ImportError as error:
        raise SettingsError(
            f"the live page needs Gradio ({error.name} is missing): python -m posttrain.install --extras monitor"
        ) from None
    from fastapi import FastAPI

    from posttrain.monitor.page import build_page

    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(LoopbackOnlyMiddleware)
    app.add_middleware(_ContentPolicyMiddleware)
    app.add_middleware(PageDocumentMiddleware)
    _add_view_routes(app, PageResponses(reader, run), reader)
    _add_file_routes(app, reader)
    fonts = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"])
    return gr.mount_gradio_app(
        app,
        build_page(reader, run),
        path="/",
        server_name=LOOPBACK_HOST,
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
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
                ]
            await send(message)

        await self.app(scope, receive, send_with_policy if scope["type"] == "http" else send)


def _add_view_routes(app: Any, responses: PageResponses, reader: RunReader) -> None:
    """Add the routes for the contents of the page and for notes, and the health check."""
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse, PlainTextResponse, Response

    def respond(request: Any) -> Response:
        data = responses.build_response(dict(request.query_params))
        return Response(data, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def respond_to_notes(request: Any) -> Response:
        if not has_bearer_token(request, responses.token):
            message = "the server of this page was restarted; save again in a few seconds"
            return JSONResponse({"error": message}, 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                break
        folder = await run_in_threadpool(find_run_folder, request.query_params.get("run", ""))
        status, values = await run_in_threadpool(handle_notes_request, folder, body)
        return JSONResponse(values, status)

    def find_run_folder(run: str) -> Path | None:
        view = next((view for view in reader.list_runs() if view.id == run), None)
        return view.folder if view is not None else None

    app.add_route("/notes", respond_to_notes, methods=["POST"])
    app.add_route("/view", respond, methods=["GET"])  # runs on a thread, as it reads files
    app.add_route("/healthz", lambda request: PlainTextResponse("ok"), methods=["GET"])


def _add_file_routes(app: Any, reader: RunReader) -> None:
    """Add routes for episode images and for downloads of a run."""
    from fastapi.responses import Response, StreamingResponse

    images = EpisodeImages()

    @app.get("/image.png")
    def serve_image(run: str, level: str, seed: int) -> Response:
        view, data = reader.load_run(run), None
        if view is not None:
            data = images.render_png(view.config.get("environment") or {}, level, seed)
        if data is None:
            return Response(status_code=404)
        return Response(data, media_type="image/png", headers={"Cache-Control": "max-age=3600"})

    @app.get("/export/{name}")
    def serve_export(name: str, run: str) -> Response:
        view = reader.load_run(run)
        if view is None:
            return Response("this run no longer exists", status_code=404, media_type="text/plain")
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        if name == "metrics.csv":
            content = format_metrics_csv(view)
            return StreamingResponse(content, media_type="text/csv", headers=headers)
        if name == "stages.csv":
            return Response(format_stages_csv(view), media_type="text/csv", headers=headers)
        if name == "run.json":
            return Response(format_run_json(view), media_type="application/json", headers=headers)
        return Response("no such file", status_code=404, media_type="text/plain")


def choose_page_port(preferred_port: int | None) -> int:
    """Return the port of the page; None = the default one. Raises: SettingsError if Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise SettingsError(
            "--monitor: the live page needs Gradio: python -m posttrain.install --extras monitor"
        )
    return preferred_port or DEFAULT_PORT


def build_page_services(port: int, output: Path, mlflow: str) -> list[ServiceSpec]:
    """Build the specification of the page on exactly this port. `mlflow` is not used: the page reads files."""
    url = f"http://{LOOPBACK_HOST}:{port}"
    environment = build_base_environment(output, "monitor")
    # This posttrain, even if another version is installed.
    environment["PYTHONPATH"] = build_python_path(environment)
    command = [sys.executable, "-m", "posttrain.cli.main", "ui", "--live"]
    command += ["--output", str(output), "--port", str(port)]

    def check_health() -> bool:
        try:
            return bool(fetch_json(f"{url}/healthz") == "ok")
        except RequestError:
            return False

    return [
        ServiceSpec(
            "monitor",
            tuple(command),
            environment,
            ROOT,
            url,
            check_health,
            "--monitor-port",
            port,
        )
    ]
