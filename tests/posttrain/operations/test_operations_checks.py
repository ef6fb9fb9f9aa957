"""Errors about Prefect's address, availability, version and profile, and explanations of server errors."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata

import pytest

from posttrain.operations import connection
from posttrain.operations.connection import (
    check_mlflow_server,
    check_prefect_api,
    explain_known_error,
    read_configured_api,
)
from rl_core.errors import BackendError, SettingsError


@contextmanager
def run_server(answers: dict[str, tuple[int, str]]):
    """Run a server on loopback with these responses; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            code, text = answers.get(self.path, (404, "{}"))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def answer_version(text: str) -> dict[str, tuple[int, str]]:
    return {"/api/admin/version": (200, json.dumps(text)), "/version": (200, text)}


def test_same_version_is_accepted():
    with run_server(answer_version(metadata.version("prefect"))) as url:
        assert check_prefect_api(f"{url}/api", "PREFECT_API_URL") == ""
    with run_server(answer_version(metadata.version("mlflow"))) as url:
        check_mlflow_server(url, "MLFLOW_TRACKING_URI")


def test_another_major_version_is_refused():
    with run_server(answer_version("2.20.1")) as url:
        with pytest.raises(
            SettingsError,
            match=r"has version 2\.20\.1, this client 3\.\d.*pip install 'prefect==2\.20\.1'",
        ):
            check_prefect_api(f"{url}/api", "PREFECT_API_URL")
        with pytest.raises(SettingsError, match=r"has version 2\.20\.1, this client 3"):
            check_mlflow_server(url, "MLFLOW_TRACKING_URI")


def test_warning_about_an_older_server_only(monkeypatch):
    monkeypatch.setattr(connection.metadata, "version", lambda name: "3.8.8")
    with run_server(answer_version("3.8.7")) as url:
        assert "3.8.7, older than this client (3.8.8); upgrade" in check_prefect_api(
            f"{url}/api", "PREFECT_API_URL"
        )
    with run_server(answer_version("3.9.0")) as url:
        assert check_prefect_api(f"{url}/api", "PREFECT_API_URL") == ""


def test_unreachable_servers():
    with pytest.raises(
        BackendError,
        match=r"no Prefect server answers at http://127\.0\.0\.1:9/api \(from PREFECT_API_URL",
    ):
        check_prefect_api("http://127.0.0.1:9/api", "PREFECT_API_URL")
    with pytest.raises(BackendError, match=r"posttrain up.*profile use ephemeral"):
        check_prefect_api("http://127.0.0.1:9/api", "profile 'team' of x")
    with pytest.raises(
        BackendError, match=r"no MLflow server answers at .*unset MLFLOW_TRACKING_URI"
    ):
        check_mlflow_server("http://127.0.0.1:9", "MLFLOW_TRACKING_URI")


def test_other_servers_are_refused_without_showing_a_password():
    with run_server({"/admin/version": (200, "<html>")}) as url:
        with pytest.raises(SettingsError, match="it answered 404; the address ends in /api"):
            check_prefect_api(f"{url}/somewhere", "PREFECT_API_URL")
        secret = url.replace("//", "//me:secret@")
        with pytest.raises((SettingsError, BackendError)) as raised:
            check_prefect_api(secret, "PREFECT_API_URL")
        assert "secret" not in str(raised.value)
    with pytest.raises(
        SettingsError,
        match=r"'garbage' \(from PREFECT_API_URL\) is no address of a server; one is http",
    ):
        check_prefect_api("garbage", "PREFECT_API_URL")
    assert (
        check_prefect_api("https://api.prefect.cloud/api/accounts/a/workspaces/b", "x") == ""
    )  # left to Prefect's client
    with run_server(
        {"/api/admin/version": (401, "")}
    ) as url:  # needs a token, which the client has
        assert check_prefect_api(f"{url}/api", "x") == ""


def test_configured_address_and_origin(tmp_path):
    home = {"PREFECT_HOME": str(tmp_path)}
    assert read_configured_api(home) == ("", "")
    (tmp_path / "profiles.toml").write_text(
        'active = "team"\n[profiles.team]\nPREFECT_API_URL = "http://team:4200/api"\n[profiles.empty]\n'
    )
    assert read_configured_api(home) == (
        "http://team:4200/api",
        f"profile 'team' of {tmp_path / 'profiles.toml'}",
    )
    assert read_configured_api({**home, "PREFECT_PROFILE": "empty"})[0] == ""
    assert read_configured_api({**home, "PREFECT_PROFILE": "ephemeral"})[0] == ""
    assert read_configured_api({**home, "PREFECT_API_URL": "http://x/api"}) == (
        "http://x/api",
        "PREFECT_API_URL",
    )
    with pytest.raises(
        SettingsError,
        match=r"profile 'taem' \(PREFECT_PROFILE\) does not exist; did you mean 'team'\?",
    ):
        read_configured_api({**home, "PREFECT_PROFILE": "taem"})
    (tmp_path / "profiles.toml").write_text("active = ")
    with pytest.raises(SettingsError, match="profiles cannot be read"):
        read_configured_api(home)


@pytest.mark.parametrize(
    ("printed", "advice"),
    [
        (
            "ERROR: [Errno 98] error while attempting to bind on address: Address already in use",
            "another process has taken",
        ),
        (
            "alembic.util.exc.CommandError: Can't locate revision identified by 'abc123'",
            "another version of this",
        ),
        (
            "references work pool 'gpu' which does not \nexist. This",
            "prefect work-pool create gpu --type process",
        ),
        (
            "Value error, Validation failed for field 'fresh'. Failure reason: 'banana' is not of type 'boolean'\", 'x",
            "parameter 'fresh': 'banana' is not of type 'boolean'; correct it under `parameters`",
        ),
        (
            "MissingFlowError: Flow function with name 'no' not found in 'flows/x.py'.",
            "flows/x.py has no flow 'no'",
        ),
        ('FATAL:  password authentication failed for user "me"', "check user and password"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ModuleNotFoundError: No module named 'asyncpg'", "python -m posttrain.install"),
        ("Error while applying deployment:\n    raise\nhttpx.ReadTimeout", "the machine is busy"),
        (
            "/opt/x/python: Error while finding module (No module named 'vllm')",
            "rollouts.server.python has no vLLM",
        ),
        (
            "ValueError: Free memory is less than desired GPU memory utilization (0.9)",
            "uses the GPU's memory",
        ),
    ],
)
def test_known_errors_have_a_next_step(printed, advice):
    assert advice in explain_known_error(f"Traceback ...\n{printed}\nAn exception occurred.")


def test_unknown_error_has_no_next_step():
    assert explain_known_error("Segmentation fault") == ""


def test_slow_server_is_used(monkeypatch):
    monkeypatch.setattr(connection, "VERSION_SECONDS", 0.1)
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as silent:  # accepts connections but does not answer
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        assert check_prefect_api(url, "PREFECT_API_URL").endswith(
            "took longer than 0.1 s for its version"
        )
