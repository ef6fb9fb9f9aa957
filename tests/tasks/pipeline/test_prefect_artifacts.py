"""Prefect artifacts while its API is away: asked for once, until it answers again."""

import logging
import socket

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

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
