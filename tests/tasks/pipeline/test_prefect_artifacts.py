"""Prefect artifacts while its API is away: asked for once, until it answers again."""

import logging
import socket
import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    get_current_settings,
    temporary_settings,
)

from tasks.pipeline import prefect_task


@pytest.fixture(autouse=True)
def answering():
    yield
    prefect_task._away.clear()


def test_an_api_that_is_away_is_asked_once_and_again_when_it_is_back(caplog):
    calls = []

    def make(fails):
        calls.append(fails)
        if fails:
            raise ConnectionError("refused")
        return "made"

    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            assert [prefect_task._quietly(make, True) for _ in range(3)] == [None] * 3
        with temporary_settings({PREFECT_API_URL: address}):
            assert prefect_task._quietly(make, True) is None
            assert prefect_task._quietly(make, False) == "made"
    assert calls == [True, True, False]
    assert caplog.text.count("takes no artifact (ConnectionError: refused)") == 1


def test_progress_is_told_with_the_password_of_the_run_s_own_server(monkeypatch):
    told, said = [], threading.Event()

    def update(*, artifact_id, progress):
        told.append((progress, get_current_settings().api.auth_string.get_secret_value()))
        said.set()

    monkeypatch.setattr(prefect_task, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(prefect_task, "create_progress_artifact", lambda **_: uuid4())
    monkeypatch.setattr(prefect_task, "update_progress_artifact", update)
    run = SimpleNamespace(settings=SimpleNamespace(name="demo"), fraction=0.25)
    with temporary_settings({PREFECT_API_AUTH_STRING: "user:word"}), prefect_task._progress_artifact(run, "sft"):
        assert said.wait(10)
    assert told == [(25.0, "user:word"), (100.0, "user:word")]
