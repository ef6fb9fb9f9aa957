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

from tasks.pipeline import prefect_artifacts
from tasks.pipeline.result import StageResult


@pytest.fixture(autouse=True)
def answering():
    yield
    prefect_artifacts._away.clear()


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
            assert [prefect_artifacts._quietly(make, True) for _ in range(3)] == [None] * 3
        with temporary_settings({PREFECT_API_URL: address}):
            assert prefect_artifacts._quietly(make, True) is None
            assert prefect_artifacts._quietly(make, False) == "made"
    assert calls == [True, True, False]
    assert caplog.text.count("takes no artifact (ConnectionError: refused)") == 1


def test_a_stage_has_one_page_told_with_the_password_of_the_run_s_own_server(monkeypatch):
    """It tells how far the stage is while it runs, and its result in place of that."""
    identity, told, said = uuid4(), [], threading.Event()

    def replace(which, markdown, description):
        told.append((which, markdown, description, get_current_settings().api.auth_string.get_secret_value()))
        said.set()
        return True

    made = []
    monkeypatch.setattr(prefect_artifacts, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(
        prefect_artifacts, "create_markdown_artifact", lambda text, **named: made.append(named) or identity
    )
    monkeypatch.setattr(prefect_artifacts, "_replace", replace)
    tracking = SimpleNamespace(run_url=lambda run: f"http://page/{run}")
    run = SimpleNamespace(
        settings=SimpleNamespace(name="My demo"), fraction=0.25, progress="sft, 1 of 4", tracking=tracking
    )
    summary = {"note": "4 steps", "metrics": {"train/loss": 0.5}}
    result = StageResult("sft", "/f", "d", "k", cached=False, seconds=2.0, run_id="r1", summary=summary)
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: "user:word"}),
        prefect_artifacts.stage_artifact(run, "sft") as finish,
    ):
        assert said.wait(10)
        finish(result)
    assert made == [{"key": "my-demo-sft", "description": "sft: begins"}]
    assert told[0] == (identity, "## sft\n\n25% · sft, 1 of 4", "25% · sft, 1 of 4", "user:word")
    which, page, description, _ = told[-1]
    assert which == identity and description == "4 steps" and len(told) == 2
    assert "**4 steps**" in page and "[MLflow run](http://page/r1)" in page and "| train/loss | 0.5 |" in page


def test_a_picture_is_in_the_page_unless_it_is_large(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"png")
    assert prefect_artifacts.figure(tmp_path / "a.png", "stages") == "![stages](data:image/png;base64,cG5n)"
    assert prefect_artifacts.figure(tmp_path / "none.png", "stages") == ""
    monkeypatch.setattr(prefect_artifacts, "MAX_FIGURE_BYTES", 2)
    assert prefect_artifacts.figure(tmp_path / "a.png", "stages") == ""
