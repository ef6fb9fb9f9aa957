"""Clients of the training service that connect and send nothing, or half of something."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers import ROOT
from helpers.waiting import free_ports, wait_for

from posttrain.settings_files import parse_service_settings
from posttrain.training_service.store import ServiceStore
from tasks.config import dump_settings

MAX_CONNECTIONS = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Run a server process with narrow limits; yield its port and an API key."""
    folder = tmp_path_factory.mktemp("service")
    (port,) = free_ports(1)
    limits = {
        "port": port,
        "idle_seconds": 1.0,
        "body_seconds": 1.0,
        "max_connections": MAX_CONNECTIONS,
    }
    settings = parse_service_settings({"folder": str(folder), "server": limits})
    with contextlib.closing(ServiceStore(settings.store_url)) as store:
        _, key = store.create_key("me")
    (folder / "settings.json").write_text(json.dumps(dump_settings(settings)))
    command = [
        sys.executable,
        "-m",
        "posttrain.training_service.process",
        "server",
        str(folder / "settings.json"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ),
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: is_healthy(port), "the server", 60)
        yield port, key
    finally:
        process.terminate()
        process.wait(30)


def is_healthy(port):
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v1/healthz", timeout=5
        ) as response:
            return response.status == 200
    except OSError:
        return False


def read_to_end(connection):
    """Read until the server closes the connection."""
    connection.settimeout(20)
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(4096):
            received += part
    return received


def test_silent_connections_are_closed_and_do_not_lock_others_out(server):
    """They stayed open without end, and as many as the system allowed."""
    port, _ = server
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * MAX_CONNECTIONS)]
    with contextlib.ExitStack() as stack:
        for connection in silent:
            stack.enter_context(connection)
            assert read_to_end(connection) == b""
    wait_for(lambda: is_healthy(port), "an answer", 10)


@pytest.mark.parametrize("path", ["create_session", "forward_backward"])
def test_a_body_that_does_not_arrive_is_answered_and_ended(server, path):
    port, key = server
    kind = "x-protobuf" if path == "forward_backward" else "json"
    head = (
        f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-API-Key: {key}\r\n"
        f"Content-Type: application/{kind}\r\nContent-Length: 1000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + b"{")
        started_at = time.monotonic()
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"the body was not complete in 1 s" in answer
    assert b"connection: close" in answer.lower() and time.monotonic() - started_at < 15
