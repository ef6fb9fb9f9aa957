"""Requests to servers on this machine: none is sent through a proxy of the environment."""

import ast
import http.server
import json
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from helpers import ROOT

from flows.runtime.embedded_server import _EmbeddedServer
from posttrain.cli import doctor
from posttrain.cli.ui import PageServer
from posttrain.monitor import service_views
from posttrain.operations import connection, services
from posttrain.operations.database import DatabaseAddresses
from posttrain.operations.state import ServerOptions
from rl_core.json_client import (
    JsonConnections,
    RequestLimits,
    ServerErrorResponse,
    fetch_json,
    post_with_retries,
)
from rl_core.service.client import ServiceClient

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every request with the server's status and body, and records its target."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.targets.append(self.path)
        body = json.dumps(self.server.body).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@contextmanager
def run_server(status, body, **headers):
    """Run a server on loopback; `targets` = what was requested from it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.status, server.body, server.headers, server.targets = status, body, headers, []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(monkeypatch):
    """Run a proxy that refuses every request, and name it in the environment."""
    with run_server(502, "refused by the proxy") as server:
        for name in PROXY_VARIABLES:
            monkeypatch.setenv(name, server.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def local_server():
    with run_server(200, {"status": "ok"}) as server:
        yield server


def wait_for_embedded_server(url):
    server = object.__new__(_EmbeddedServer)
    server.port = urlsplit(url).port
    server.process = SimpleNamespace(poll=lambda: None)
    server.wait_until_healthy(limit=5.0)
    return True


def check_supervised_server(url):
    options = ServerOptions(mlflow_port=urlsplit(url).port)
    with tempfile.TemporaryDirectory() as output:
        mlflow, *_ = services.build_service_specs(Path(output), options, DatabaseAddresses())
    return mlflow.check_health()


def check_mlflow_version(url):
    with pytest.raises(connection.SettingsError, match="does not report its version"):
        connection.check_mlflow_server(url, "MLFLOW_TRACKING_URI")
    return True


def check_training_service(url):
    with ServiceClient(url, key="tml-x", patience=0.0) as client:
        return client.is_up()


REQUESTS = {
    "fetch_json": lambda url: fetch_json(url) == {"status": "ok"},
    "fetch_json by name": lambda url: fetch_json(url.replace("127.0.0.1", "localhost")),
    "post_with_retries": lambda url: post_with_retries(
        url, {}, RequestLimits(5.0, 0, 0.0), parse_response=lambda response: response["status"]
    ),
    "JsonConnections": lambda url: JsonConnections(url).get_json("/", 5.0),
    "doctor": lambda url: doctor._check_mlflow_store(url, ROOT).state == "ok",
    "posttrain ui": lambda url: PageServer("MLflow", url, health=url).is_healthy(),
    "monitor": lambda url: service_views._is_server_healthy(
        {"server": {"host": "127.0.0.1", "port": urlsplit(url).port}}
    ),
    "posttrain up": check_supervised_server,
    "posttrain up, version": check_mlflow_version,
    "embedded server": wait_for_embedded_server,
    "training service": check_training_service,
}


@pytest.mark.parametrize("send_request", REQUESTS.values(), ids=REQUESTS)
def test_loopback_is_requested_directly(proxy, local_server, send_request):
    assert send_request(local_server.url)
    assert local_server.targets and not proxy.targets


def test_other_servers_are_requested_through_the_proxy(proxy):
    with pytest.raises(ServerErrorResponse, match="405"):
        proxy.status = 405
        fetch_json("http://server.example/health")
    assert proxy.targets == ["http://server.example/health"]


def test_a_redirection_to_loopback_leaves_the_proxy(proxy, local_server):
    proxy.status, proxy.headers = 302, {"Location": local_server.url}
    assert fetch_json("http://server.example/health") == {"status": "ok"}
    assert len(proxy.targets) == len(local_server.targets) == 1


CLIENT_LIBRARIES = ("urllib.request.", "http.client.", "httpx.", "requests.", "aiohttp.")
# Modules that may open HTTP requests by themselves.
CLIENTS = {
    "rl_core/json_client.py": "the client of this project",
    "rl_core/service/client.py": "public, synchronous and asynchronous; never through a proxy",
    "tasks/pipeline/prefect_stages.py": "asks Prefect's API as Prefect's client does, with its TLS settings",
}


def test_one_module_opens_requests():
    modules = set()
    for package in ("rl_core", "tasks", "flows", "posttrain"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{name}" for name in names]
                if any(f"{name}.".startswith(CLIENT_LIBRARIES) for name in names):
                    modules.add(path.relative_to(ROOT).as_posix())
    assert modules == set(CLIENTS)
