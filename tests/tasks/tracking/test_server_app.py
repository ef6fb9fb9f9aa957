"""MLflow's server as `posttrain up` and `ui` start it: its Assistant is refused, everything else is served."""

from __future__ import annotations

import importlib.metadata

import pytest
from starlette.testclient import TestClient

from rl_core.errors import SettingsError
from tasks.mlflow_environment import build_server_options
from tasks.tracking import server_app

ASSISTANT = "/ajax-api/3.0/mlflow/assistant"


@pytest.fixture(scope="module")
def client():
    return TestClient(server_app.create_app(), base_url="http://127.0.0.1:5000")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", f"{ASSISTANT}/config"),
        ("POST", f"{ASSISTANT}/message"),
        ("GET", f"{ASSISTANT}/config"),
        ("GET", ASSISTANT),
        ("GET", f"{ASSISTANT}/sessions/1/stream"),
        ("PUT", "/ajax-api/3.0/mlflow/%61ssistant/config"),
        ("PUT", f"/behind{ASSISTANT}/config"),  # --static-prefix
    ],
)
def test_the_assistant_which_has_a_shell_here_is_refused(client, method, path):
    config = {"providers": {"ollama": {"selected": True, "permissions": {"full_access": True}}}}
    answer = client.request(method, path, **({"json": config} if method != "GET" else {}))
    assert (answer.status_code, answer.json()) == (403, {"detail": server_app.REFUSAL_MESSAGE})


def test_the_page_keeps_the_assistant_s_panel_shut_and_the_rest_is_served(client):
    page = client.get("/").text
    head = page.partition("</head>")[0]
    assert (
        "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1','true'" in head
        and "[data-assistant-ui=true]" in head
    )
    assert head.index("autoOpened") < head.index("static-files/static/js/main")
    assert client.get("/health").text == "OK" and client.get("/version").status_code == 200


def test_the_installed_package_names_the_app_to_mlflow(monkeypatch):
    name, app = build_server_options()
    (entry_point,) = importlib.metadata.entry_points(group="mlflow.app", name=app)
    assert name == "--app-name" and entry_point.load() is server_app.create_app
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **options: [])
    with pytest.raises(SettingsError, match="older than this code"):
        build_server_options()
