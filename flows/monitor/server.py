"""`posttrain monitor`: serves the page on loopback until Ctrl-C, without external requests or telemetry."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from flows.monitor.answers import Answers
from flows.monitor.document import OwnDocument
from flows.monitor.episodes import Images
from flows.monitor.export import export_run, metrics_csv, run_json, stages_csv
from flows.monitor.reader import Reader
from flows.runtime.prefect_access import OnlyFromHere
from rl_core.errors import BackendError, DataError, SettingsError

__all__ = ["export", "make_app", "serve"]

HOST = "127.0.0.1"
PORT = 7860
PORTS_TRIED = 100
NICE = 10  # lower priority than training

# The browser refuses content from other origins.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; frame-src 'none'"
)


def _open(output: Path) -> Reader:
    if not output.exists():
        raise SettingsError(
            f"--output: {output.absolute()} does not exist; name the folder that runs write to, or start one: "
            "posttrain run demo"
        )
    if not output.is_dir():
        raise SettingsError(f"--output: {output.absolute()} is a file; name the folder that runs write to")
    try:
        next(output.iterdir(), None)
    except OSError as error:
        raise SettingsError(f"--output: {output.absolute()} cannot be read: {error.strerror}") from None
    return Reader(output)


def export(output: Path, run: str, folder: Path) -> list[Path]:
    """Export a run as files, without a page. `run`: see `Reader.choose`; "" = the newest.

    Raises: SettingsError for an unknown folder or run, DataError without runs or disk space.
    """
    reader = _open(output)
    found = reader.run(reader.choose(run) if run else "")
    if found is None:
        raise DataError(f"no runs in {reader.output}; start one: posttrain run demo")
    for stage in found.stages:
        if stage.journal is not None:
            offset = -1  # a truncated last line is never read: stop when there is no progress
            while stage.journal.tail.offset > offset:
                offset = stage.journal.tail.offset
                stage.journal.refresh_metrics()
    return export_run(found, folder)


def free_port(wanted: int) -> int:
    """`wanted`, or the next free port. Raises: SettingsError, BackendError without one."""
    for port in range(wanted, min(65536, wanted + PORTS_TRIED)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((HOST, port))
                return port
            except PermissionError as error:
                raise SettingsError(f"--port {wanted}: {error.strerror}; use one above 1023") from None
            except OSError:
                continue
    raise BackendError(f"no free port on {HOST} from {wanted} on; name another with --port")


def make_app(reader: Reader, run: str = "") -> Any:
    """The web application (FastAPI): the page at /, images and files.

    Raises: SettingsError if Gradio is not installed.
    """
    for name, value in (("GRADIO_ANALYTICS_ENABLED", "False"), ("HF_HUB_OFFLINE", "1"), ("DO_NOT_TRACK", "1")):
        os.environ[name] = value  # before Gradio is imported, overriding the user's environment
    try:
        import gradio as gr
    except ImportError as error:
        raise SettingsError(
            f"the live page needs Gradio ({error.name} is missing): pip install 'posttrain[monitor]'"
        ) from None
    from fastapi import FastAPI

    from flows.monitor.page import build_page

    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OnlyFromHere)
    app.add_middleware(_ContentPolicy)
    app.add_middleware(OwnDocument)
    _add_view(app, Answers(reader, run))
    _add_files(app, reader)
    fonts = ["system-ui", "sans-serif"]
    theme = gr.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"])
    return gr.mount_gradio_app(
        app, build_page(reader, run), path="/", server_name=HOST, footer_links=[], run_history=False, theme=theme,
        ssr_mode=False, pwa=False, mcp_server=False, enable_monitoring=False,
    )  # fmt: skip


class _ContentPolicy:
    """Middleware that adds the CSP header; plain ASGI, so that streams and disconnects pass through unchanged."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"content-security-policy", _POLICY.encode())]
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)


def _add_view(app: Any, answers: Answers) -> None:
    """Add the route that the page asks for what it shows, and the one that says that the page answers."""
    from fastapi.responses import PlainTextResponse, Response

    def shown(request: Any) -> Response:
        data = answers.answer(dict(request.query_params))
        return Response(data, media_type="application/json", headers={"Cache-Control": "no-store"})

    app.add_route("/view", shown, methods=["GET"])  # on a thread of its own, as it reads files
    app.add_route("/healthz", lambda request: PlainTextResponse("ok"), methods=["GET"])


def _add_files(app: Any, reader: Reader) -> None:
    """Add routes for episode images and for downloads of a run."""
    from fastapi.responses import Response, StreamingResponse

    images = Images()

    @app.get("/image.png")
    def image(run: str, level: str, seed: int) -> Response:
        found = reader.run(run)
        data = images.png(found.config.get("environment") or {}, level, seed) if found is not None else None
        if data is None:
            return Response(status_code=404)
        return Response(data, media_type="image/png", headers={"Cache-Control": "max-age=3600"})

    @app.get("/export/{name}")
    def files(name: str, run: str) -> Response:
        found = reader.run(run)
        if found is None:
            return Response("this run is gone", status_code=404, media_type="text/plain")
        attached = {"Content-Disposition": f'attachment; filename="{name}"'}
        if name == "metrics.csv":
            return StreamingResponse(metrics_csv(found), media_type="text/csv", headers=attached)
        if name == "stages.csv":
            return Response(stages_csv(found), media_type="text/csv", headers=attached)
        if name == "run.json":
            return Response(run_json(found), media_type="application/json", headers=attached)
        return Response("no such file", status_code=404, media_type="text/plain")


def serve(output: Path, run: str = "", port: int | None = None) -> None:
    """Serve the page until Ctrl-C or SIGTERM; prints the link once it answers.

    Args:
        run: see `Reader.choose`; "" follows the newest run.
        port: if taken, the next free port is used; None = 7860.
    Raises: SettingsError for an invalid folder, run or port, or without Gradio; BackendError without a free port.
    """
    reader = _open(output)
    chosen = reader.choose(run) if run else ""
    wanted = port or PORT
    number = free_port(wanted)
    app = make_app(reader, chosen)
    import uvicorn

    with contextlib.suppress(OSError):  # not permitted; reading is cheap anyway
        os.nice(NICE)
    server = uvicorn.Server(
        uvicorn.Config(app, host=HOST, port=number, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )
    note = f"  (port {wanted} is taken)" if number != wanted else ""

    def announce() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.05)
        if server.started:
            print(f"monitor  http://{HOST}:{number}{note}\nCtrl-C stops the page; runs continue", flush=True)

    threading.Thread(target=announce, daemon=True).start()
    threading.Thread(target=reader.run, args=(chosen,), daemon=True).start()  # before a browser asks for it
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
        server.run()
    print("\nstopped", flush=True)
