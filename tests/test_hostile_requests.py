"""Hostile HTTP to what this project serves itself: the files of the monitor, and the guard before Prefect's server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.monitor_runs import make_run

from flows.runtime.prefect_access import LoopbackOnlyMiddleware
from posttrain.monitor.reader import RunReader
from posttrain.monitor.server import _add_file_routes

PATIENCE_S = 30.0
HOST = "127.0.0.1"


class Server:
    """The monitor's files behind the guard, and what came through to them."""

    def __init__(self, output: Path) -> None:
        import uvicorn
        from fastapi import FastAPI

        self.reached: list[str] = []
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        _add_file_routes(app, RunReader(output))

        async def noted(scope, receive, send):  # type: ignore[no-untyped-def]
            if scope["type"] == "http":
                self.reached.append(scope["path"])
            await app(scope, receive, send)

        config = uvicorn.Config(
            LoopbackOnlyMiddleware(noted), host=HOST, port=0, log_level="critical", lifespan="off"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        end = time.monotonic() + PATIENCE_S
        while not self.server.started and time.monotonic() < end:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def answer(self, request: bytes) -> bytes:
        """Return the bytes sent back until the server closes the connection."""
        with socket.create_connection((HOST, self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(request.replace(b"PORT", str(self.port).encode()))
            received = b""
            while part := connection.recv(2**16):
                received += part
            return received


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    output = tmp_path_factory.mktemp("outputs")
    (output.parent / "secret.txt").write_text("s3cret")
    make_run(output)
    running = Server(output)
    yield running
    running.server.should_exit = True
    running.thread.join(PATIENCE_S)


def get(
    path: str,
    *headers: str,
    method: str = "GET",
    body: bytes = b"",
    host: str | None = "127.0.0.1:PORT",
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        *([f"Host: {host}"] if host is not None else []),
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


# (name, request, status): 0 = the connection is closed without an answer
REFUSED = [
    ("another name", get("/export/run.json?run=", host="evil.example:PORT"), 403),
    ("rebinding with port", get("/export/run.json?run=", host="127.0.0.1.evil.example:PORT"), 403),
    ("user in the name", get("/", host="127.0.0.1@evil.example"), 403),
    ("path in the name", get("/", host="127.0.0.1:PORT/x"), 403),
    ("no name", get("/", host=None), 400),
    ("two names", get("/", "Host: evil.example"), 400),
    ("empty name", get("/", host=""), 403),
    ("port of letters", get("/", host="127.0.0.1:x"), 403),
    ("port too large", get("/", host="127.0.0.1:99999999"), 403),
    ("broken brackets", get("/", host="[::1"), 403),
    ("another address", get("/", host="0.0.0.0:PORT"), 403),
    ("decimal address", get("/", host="2130706433:PORT"), 403),
    ("another page", get("/export/run.json?run=", "Origin: http://evil.example"), 403),
    ("no page", get("/export/run.json?run=", "Origin: null"), 403),
    ("another local server", get("/", "Origin: http://127.0.0.1:1"), 403),
    ("two pages", get("/", "Origin: http://127.0.0.1:PORT", "Origin: http://evil.example"), 403),
    ("secure page", get("/", "Origin: https://127.0.0.1:PORT"), 403),
    ("unknown path", get("/secret.txt"), 404),
    ("dots in the path", get("/export/../../secret.txt?run="), 404),
    ("dots, escaped", get("/export/..%2f..%2fsecret.txt?run="), 404),
    ("dots, escaped twice", get("/export/%252e%252e%252fsecret.txt?run="), 404),
    ("an absolute path", get("/export//etc/passwd?run="), 404),
    ("a NUL", get("/export/run.json%00.csv?run="), 404),
    ("a surrogate", get("/export/%ed%a0%80?run="), 404),
    ("an unknown file", get("/export/config.yaml?run="), 404),
    ("line breaks in a name", get("/export/a%0d%0aX-Evil:%201?run="), 404),
    ("a run with dots", get("/export/run.json?run=..%2f..%2f.."), 404),
    ("a run with a NUL", get("/export/run.json?run=a%00b"), 404),
    ("a run of 100000 letters", get("/export/run.json?run=" + "x" * 50_000), (400, 404)),
    ("no run", get("/export/run.json"), 422),
    ("an image of no run", get("/image.png?run=x&level=easy&seed=1"), 404),
    ("an image with dots", get("/image.png?run=x&level=../../x&seed=1"), 404),
    ("an image of seed x", get("/image.png?run=x&level=easy&seed=x"), 422),
    ("an image of a large seed", get("/image.png?run=x&level=easy&seed=" + "9" * 900), (404, 422)),
    ("POST", get("/export/run.json?run=", "Content-Length: 2", method="POST", body=b"{}"), 405),
    ("DELETE", get("/export/run.json?run=", method="DELETE"), 405),
    ("TRACE", get("/export/run.json?run=", method="TRACE"), 405),
    (
        "a lie about the length",
        get("/x", "Content-Length: 999999999999", method="POST", body=b"x"),
        (0, 400, 404),
    ),
    ("a negative length", get("/x", "Content-Length: -5", method="POST"), 400),
    (
        "two lengths",
        get("/x", "Content-Length: 1", "Content-Length: 2", method="POST", body=b"ab"),
        400,
    ),
    (
        "chunks of nonsense",
        get("/x", "Transfer-Encoding: chunked", method="POST", body=b"zz\r\n"),
        (0, 400, 404),
    ),
    ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
    ("NULs", bytes(10_000), 400),
    ("a head of 1 MB", get("/", f"X: {'x' * 1_000_000}"), (0, 400, 431)),
    ("100000 header lines", get("/", *(f"X{n}: 1" for n in range(20_000))), (0, 400, 431)),
    ("a method of 100000 letters", get("/", method="X" * 100_000), (0, 400, 404, 405)),
    ("HTTP 0.9", b"GET /\r\n\r\n", 400),
    ("a header without a name", get("/", ": x"), 400),
    ("a folded header", get("/", "X: a\r\n b: c"), (400, 404)),
]


@pytest.mark.parametrize(
    ("request_", "status"), [pytest.param(*rest, id=name) for name, *rest in REFUSED]
)
def test_hostile_requests_are_refused_and_the_server_keeps_answering(
    server: Server, request_: bytes, status: object
) -> None:
    try:
        answer = server.answer(request_)
    except (ConnectionResetError, BrokenPipeError):
        answer = b""
    code = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
    assert code in (status if isinstance(status, tuple) else (status,)), answer[:500]
    assert (
        b"s3cret" not in answer
        and b"Traceback" not in answer
        and b"root:" not in answer
        and b"X-Evil" not in answer
    )
    assert len(answer) < 2000
    assert b"access-control-allow-origin" not in answer.lower()
    good = server.answer(get("/export/run.json?run=", "Origin: http://localhost:PORT"))
    assert good.startswith(b"HTTP/1.1 200 "), "the server still answers its page"


def test_what_the_guard_refuses_never_reaches_the_application(server: Server) -> None:
    before = len(server.reached)
    for name, request, status in REFUSED:
        if status == 403:
            server.answer(request)
            assert len(server.reached) == before, name
    assert (
        server.answer(get("/export/run.json?run=")).startswith(b"HTTP/1.1 200 ")
        and len(server.reached) == before + 1
    )
