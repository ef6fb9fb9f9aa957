"""Requests to servers on this machine: none is sent through a proxy of the environment."""

import ast
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
import requests
from helpers import ROOT

from flows.consolidate import consolidate
from flows.evaluate_champion import evaluate_champion
from flows.post_training import post_training
from flows.retrain import retrain
from flows.runtime.embedded_server import _EmbeddedServer
from flows.single_stage import compare_models, single_stage
from flows.sweep.sweep_flow import sweep
from posttrain.cli import check_machine as doctor
from posttrain.cli.ui import PageServer
from posttrain.monitor import service_views
from posttrain.operations import connection, services
from posttrain.operations.database import DatabaseAddresses
from posttrain.operations.state import ServerOptions
from rl_core.json_client import (
    JsonConnections,
    RequestLimits,
    ServerErrorResponse,
    exempt_loopback_from_proxies,
    fetch_json,
    post_with_retries,
)
from rl_core.service.client import ServiceClient

PROXY_VARIABLES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)


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


def request_as_prefect_does(url):
    exempt_loopback_from_proxies()
    with httpx.Client() as client:
        return client.get(url).json() == {"status": "ok"}


def request_as_mlflow_does(url):
    exempt_loopback_from_proxies()
    return requests.get(url, timeout=5).json() == {"status": "ok"}


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
    "Prefect's client": request_as_prefect_does,
    "Prefect's client, by name": lambda url: request_as_prefect_does(
        url.replace("127.0.0.1", "localhost")
    ),
    "MLflow's client": request_as_mlflow_does,
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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "corp.example, 127.0.0.1"}, "corp.example,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_the_users_exemptions_from_the_proxy_are_extended(proxy, monkeypatch, before, after):
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    exempt_loopback_from_proxies()
    exempt_loopback_from_proxies()
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == after


def test_nothing_is_set_without_a_proxy(monkeypatch):
    for name in (*PROXY_VARIABLES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    exempt_loopback_from_proxies()
    assert not {"no_proxy", "NO_PROXY"} & os.environ.keys()


def test_a_socks_proxy_without_its_package_stops_no_client(monkeypatch, local_server):
    """httpx raises an ImportError for every address, loopback ones included."""
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert request_as_prefect_does(local_server.url)
    assert "all_proxy" not in os.environ


@pytest.mark.parametrize("program", ["posttrain.cli.entry", "posttrain.cli.main"])
def test_every_command_and_its_children_exempt_loopback(program):
    code = (
        f"import os, sys; from {program} import command; from posttrain.cli import runs\n"
        "runs.run_command = lambda arguments: os.system('echo $NO_PROXY')\n"
        "sys.argv = ['posttrain', 'runs']; command()"
    )
    without = ("no_proxy", "NO_PROXY")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"ALL_PROXY": "http://proxy.example:1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "localhost,127.0.0.1,::1\n"), done.stderr


CLIENT_LIBRARIES = ("urllib.request.", "http.client.", "httpx.", "requests.", "aiohttp.")
# Modules that may open HTTP requests by themselves.
CLIENTS = {
    "rl_core/json_client.py": "the client of this project",
    "rl_core/service/client.py": "public, synchronous and asynchronous; never through a proxy",
    "posttrain/cli/schedule.py": "opens none; catches what Prefect's client raises",
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


@pytest.mark.parametrize(
    "flow",
    [consolidate, evaluate_champion, post_training, retrain, single_stage, compare_models, sweep],
    ids=lambda flow: flow.name,
)
def test_a_flow_that_a_script_calls_meets_no_proxy(flow, monkeypatch):
    """Prefect's client starts before the flow's body: the exemption is made by the call."""
    import prefect.flow_engine

    for name in (*PROXY_VARIABLES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    seen = []
    monkeypatch.setattr(
        prefect.flow_engine, "run_flow", lambda **_: seen.append(dict(os.environ)) or "ran"
    )
    required = [name for name in flow.parameters.required]
    assert flow(**dict.fromkeys(required, "x")) == "ran"
    hosts = seen[0]["NO_PROXY"].split(",")
    assert {"127.0.0.1", "localhost", "::1"} <= set(hosts) and hosts == seen[0]["no_proxy"].split(
        ","
    )
    has_socks = importlib.util.find_spec("socksio") is not None
    assert (
        "all_proxy" in seen[0]
    ) == has_socks  # without the package, httpx refuses to work at all
    assert seen[0]["http_proxy"] == "http://127.0.0.1:9"
