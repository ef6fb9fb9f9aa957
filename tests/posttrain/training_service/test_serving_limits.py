"""Limits of the server's process: one connection per waiting client, whatever the shell allows."""

import resource
import sys

import pytest
import uvicorn

from posttrain.settings_files import parse_service_settings
from posttrain.training_service.http.application import serve_http


@pytest.fixture
def shell_limits():
    """Set the limits of a usual shell and the default switch interval; restore the previous ones afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    interval = sys.getswitchinterval()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, soft), hard))
    sys.setswitchinterval(0.005)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sys.setswitchinterval(interval)


def test_a_thousand_clients_may_wait_though_the_shell_allows_fewer_files(
    tmp_path, monkeypatch, shell_limits
):
    """Each waiting client holds a connection, and most systems start with 1,024 files."""
    results = {}

    def run(server):
        results["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        results["interval"] = sys.getswitchinterval()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    serve_http(parse_service_settings({"folder": str(tmp_path)}))
    assert results["files"] == (
        16_384 if shell_limits == resource.RLIM_INFINITY else min(16_384, shell_limits)
    )
    assert results["interval"] < 0.005
