"""Access to the Prefect servers that are started here: password, hosts, origins."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys

import pytest
from helpers import ROOT

from flows.runtime import prefect_access
from flows.runtime.prefect_access import (
    LoopbackOnlyMiddleware,
    build_server_environment,
    load_or_create_password,
)
from posttrain.cli.ui import PageServers
from posttrain.operations.database import DatabaseAddresses
from posttrain.operations.services import build_client_environment, build_service_specs
from posttrain.operations.state import ServerOptions
from tasks.tracking import build_offline_environment


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (
        prefect_access.SERVER_AUTH_VARIABLE,
        prefect_access.CLIENT_AUTH_VARIABLE,
        "PREFECT_API_URL",
        "MLFLOW_TRACKING_URI",
    ):
        monkeypatch.delenv(name, raising=False)


def test_the_password_is_created_once_and_readable_by_its_owner_only(tmp_path, monkeypatch):
    first = load_or_create_password(tmp_path)
    user, _, secret = first.partition(":")
    assert user == "posttrain" and len(secret) == 32 and load_or_create_password(tmp_path) == first
    assert os.listdir(tmp_path / "prefect") == ["password"]
    assert stat.S_IMODE((tmp_path / "prefect" / "password").stat().st_mode) == 0o600
    assert load_or_create_password(tmp_path / "other") != first
    (tmp_path / "prefect" / "password").write_text(
        ""
    )  # after a power cut: an empty password would admit everybody
    assert (
        len(load_or_create_password(tmp_path)) > 40 and load_or_create_password(tmp_path) != first
    )
    assert os.listdir(tmp_path / "prefect") == ["password"]
    monkeypatch.setenv(prefect_access.SERVER_AUTH_VARIABLE, "me:mine")
    assert load_or_create_password(tmp_path) == "me:mine"


def request_status(headers: list[tuple[str, str]], kind: str = "http") -> int:
    """Return the answer to one request: 200 from the application behind the check, or the refusal."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    asyncio.run(LoopbackOnlyMiddleware(app)(scope, receive, send))
    return sent[0].get("status") or sent[0]["code"]


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:4200", None, 200),
        ("localhost:4200", None, 200),
        ("[::1]:4200", None, 200),
        ("127.0.0.1:4200", "http://127.0.0.1:4200", 200),
        (
            "127.0.0.1:4200",
            "http://localhost:4200",
            200,
        ),  # the page was opened under the other name
        ("127.0.0.1", "http://localhost", 200),  # port 80
        ("127.0.0.1:4200", "http://localhost:8888", 403),  # a page of another local server
        ("127.0.0.1:4200", "http://evil.example", 403),
        ("127.0.0.1:4200", "http://evil.example:4200", 403),
        ("127.0.0.1:4200", "https://127.0.0.1:4200", 403),
        ("127.0.0.1:4200", "null", 403),
        ("127.0.0.1:4200", "", 403),
        ("127.0.0.1:4200", "http://localhost:4200@evil.example", 403),
        ("127.0.0.1:4200", "http://localhost:x", 403),
        ("evil.example:4200", None, 403),  # DNS rebinding
        ("evil.example:4200", "http://evil.example:4200", 403),
        ("localhost.evil.example", None, 403),
        ("localhost/x", None, 403),
        ("", None, 403),
    ],
)
def test_only_local_hosts_and_origins_are_answered(host, origin, status):
    headers = [("host", host), *([("origin", origin)] if origin is not None else [])]
    assert request_status(headers) == status
    assert request_status(headers, "websocket") == (200 if status == 200 else 1008)


def test_two_hosts_or_none_are_refused():
    assert request_status([]) == 403
    assert request_status([("host", "127.0.0.1:4200"), ("host", "evil.example")]) == 403
    twice = [("origin", "http://localhost:1"), ("origin", "http://evil.example")]
    assert request_status([("host", "localhost:1"), *twice]) == 403


def test_the_servers_of_up_get_a_password_and_no_command_shows_it(tmp_path):
    options = ServerOptions(prefect_port=4567, mlflow_port=5678)
    mlflow, prefect, worker = build_service_specs(tmp_path, options, DatabaseAddresses("", ""))
    password = load_or_create_password(tmp_path)
    assert prefect.environment["PREFECT_SERVER_API_AUTH_STRING"] == password
    origins = "http://127.0.0.1:4567,http://localhost:4567,http://[::1]:4567"
    assert prefect.environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == origins
    assert prefect.command[1:5] == ("-m", "flows.runtime.prefect_access", "server", "start")
    index = mlflow.command.index("--cors-allowed-origins")
    assert mlflow.command[index + 1] == origins.replace("4567", "5678")
    assert worker.environment["PREFECT_API_AUTH_STRING"] == password
    assert (
        build_client_environment(tmp_path, "x", options, "")["PREFECT_API_AUTH_STRING"] == password
    )
    assert not [name for name in mlflow.environment if name.endswith("AUTH_STRING")]
    assert not [
        part for spec in (mlflow, prefect, worker) for part in spec.command if password in part
    ]


def test_the_pages_of_ui_are_started_with_it(tmp_path, monkeypatch):
    started = {}
    monkeypatch.setattr(
        PageServers,
        "_start_process",
        lambda self, service, arguments, environment: started.update(
            {service.name: (arguments, environment, service)}
        ),
    )
    pages = PageServers(tmp_path, mlflow_port=0, prefect_port=0)
    pages._ports = {"MLflow": 5678, "Prefect": 4567}
    monkeypatch.setattr(pages, "_find_free_port", lambda host, wanted: wanted)
    pages._start_mlflow(), pages._start_prefect()
    arguments, environment, service = started["Prefect"]
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == load_or_create_password(tmp_path)
    assert arguments[0] == "flows.runtime.prefect_access"
    assert environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"].startswith("http://127.0.0.1:4567,")
    assert service.notes == [
        f"(asks once for the password: cat {tmp_path / 'prefect' / 'password'})"
    ]
    assert "http://127.0.0.1:5678,http://localhost:5678,http://[::1]:5678" in started["MLflow"][0]


EMBEDDED = """
import json, urllib.error, urllib.request
import sys
from flows.runtime import embedded_server
from flows.runtime.prefect_home import apply_prefect_defaults

def answer(path, **headers):
    request = urllib.request.Request(embedded_server._server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code

with apply_prefect_defaults():
    embedded_server.start_embedded_server()
    embedded_server.start_embedded_server()  # it is running
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings
    with embedded_server.use_embedded_address(), get_client(sync_client=True) as client:
        mine = len(client.read_flows())
        assert embedded_server.read_external_address() == ""
        beats = [get_current_settings().flows.heartbeat_frequency]
    assert [*beats, get_current_settings().flows.heartbeat_frequency] == [None, 30], "no heartbeats here"
    assert "prefect.server.api.server" not in sys.modules, "it would take seconds of every start"
    statuses = [answer("/health"), answer("/admin/version"), answer("/health", Origin="http://evil.example"),
                answer("/health", Host="evil.example")]
    process = embedded_server._server.process
    embedded_server.stop_embedded_server()
    assert process.poll() is not None and embedded_server._server is None
print(json.dumps([mine, *statuses]))
"""


def test_the_embedded_server_of_a_run_answers_its_client_alone(tmp_path):
    elsewhere = (
        "PREFECT_API_URL",
        "PREFECT_PROFILE",
        prefect_access.SERVER_AUTH_VARIABLE,
        prefect_access.CLIENT_AUTH_VARIABLE,
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in elsewhere
    } | build_offline_environment()
    environment |= {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }
    environment |= {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 200, 401, 403, 403]


@pytest.mark.parametrize(("chosen", "status"), [(None, 200), ("true", 307)])
def test_the_address_of_the_server_shows_the_pages_that_links_lead_to(
    tmp_path, monkeypatch, chosen, status
):
    """Prefect's address would redirect to its new pages at /v2/, and a link to a flow run shows the others."""
    from fastapi.testclient import TestClient
    from prefect.server.api.server import create_ui_app
    from prefect.settings import PREFECT_SERVER_UI_V2_ENABLED, temporary_settings

    monkeypatch.delenv(prefect_access.NEW_UI_VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(prefect_access.NEW_UI_VARIABLE, chosen)
    value = build_server_environment(tmp_path, 4200)[prefect_access.NEW_UI_VARIABLE]
    with temporary_settings({PREFECT_SERVER_UI_V2_ENABLED: value}):
        client = TestClient(create_ui_app(ephemeral=False), follow_redirects=False)
        pages = [
            client.get(path, headers={"Accept": "text/html"}) for path in ("/", "/runs/flow-run/x")
        ]
    assert [page.status_code for page in pages] == [status, 200]
    assert pages[0].headers.get("Location", "") == ("" if chosen is None else "/v2/")


def test_prefects_pages_do_not_advertise_its_cloud(tmp_path, monkeypatch):
    monkeypatch.delenv(prefect_access.PROMOTION_VARIABLE, raising=False)
    assert build_server_environment(tmp_path, 4200)[prefect_access.PROMOTION_VARIABLE] == "false"
    monkeypatch.setenv(prefect_access.PROMOTION_VARIABLE, "true")
    assert build_server_environment(tmp_path, 4200)[prefect_access.PROMOTION_VARIABLE] == "true"
    from prefect.settings.models.server.ui import ServerUISettings

    assert ServerUISettings().show_promotional_content  # the name is one that Prefect reads
    monkeypatch.setenv(prefect_access.PROMOTION_VARIABLE, "false")
    assert not ServerUISettings().show_promotional_content
