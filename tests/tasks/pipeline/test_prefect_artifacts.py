"""Prefect artifacts while its API is down: one attempt, until it answers again."""

import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_TLS_INSECURE_SKIP_VERIFY,
    PREFECT_API_URL,
    get_current_settings,
    temporary_settings,
)

from tasks.pipeline import prefect_stages
from tasks.pipeline.stage_result import StageResult


@pytest.fixture(autouse=True)
def reset_unreachable():
    yield
    prefect_stages._api_unreachable.clear()


@pytest.fixture
def calls(monkeypatch):
    """Return a list of calls that reached the API, or tried to."""
    monkeypatch.setattr(prefect_stages, "FIRST_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(prefect_stages, "REPEAT_TIMEOUT_SECONDS", 0.1)
    return []


def test_an_unreachable_api_is_not_called_until_it_answers(calls, caplog):
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)  # any answer will do
            calls.append(self.path)

        def log_message(self, *_):
            pass

    with caplog.at_level(logging.WARNING), HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            assert [prefect_stages._call_prefect_api(calls.append, "call") for _ in range(3)] == [
                None
            ] * 3
        assert not calls
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{server.server_port}/api"}):
            assert prefect_stages._call_prefect_api(lambda: "done") == "done"
        server.shutdown()
    assert calls == ["/api/health"]
    assert caplog.text.count("does not accept artifacts (ConnectionRefusedError: ") == 1


@pytest.mark.parametrize(
    ("scheme", "skips", "read"),
    [("http", False, False), ("https", False, True), ("https", True, False)],
)
def test_certificates_are_loaded_only_if_they_are_checked(monkeypatch, scheme, skips, read):
    """A stage's page is written every three seconds, and loading certificates takes 50 ms."""
    requests = []
    monkeypatch.setattr("socket.create_connection", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("httpx.get", lambda url, *, timeout, verify: requests.append((url, verify)))
    settings = {
        PREFECT_API_URL: f"{scheme}://host/api",
        PREFECT_API_TLS_INSECURE_SKIP_VERIFY: skips,
    }
    with temporary_settings(settings):
        prefect_stages.check_prefect_api(1.0)
    assert requests == [(f"{scheme}://host/api/health", read)]


def test_an_api_that_accepts_connections_without_answering_is_not_called(calls, caplog):
    """A server that is stopped or hangs: Prefect's client would wait for minutes and retry."""
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
    with caplog.at_level(logging.WARNING), silent, temporary_settings({PREFECT_API_URL: address}):
        assert [prefect_stages._call_prefect_api(calls.append, "call") for _ in range(3)] == [
            None
        ] * 3
    assert not calls
    assert caplog.text.count("did not answer for 0.5 s") == 1


def test_a_failing_api_is_reported_once(calls, caplog):
    def fail():
        calls.append("call")
        raise ConnectionError("reset")

    with caplog.at_level(logging.WARNING), temporary_settings({PREFECT_API_URL: None}):
        assert [prefect_stages._call_prefect_api(fail) for _ in range(3)] == [None] * 3
    assert calls == ["call"]  # a server that Prefect started itself does not come back
    assert caplog.text.count("does not accept artifacts (ConnectionError: reset)") == 1


def test_a_stage_has_one_page_written_with_the_server_s_password(monkeypatch, caplog):
    """The page shows the stage's progress while it runs, then its result."""
    identity, updates, updated = uuid4(), [], threading.Event()

    def replace(artifact_id, markdown, description):
        updates.append(
            (
                artifact_id,
                markdown,
                description,
                get_current_settings().api.auth_string.get_secret_value(),
            )
        )
        updated.set()
        return True

    calls = []
    caplog.set_level("INFO", logger=prefect_stages.logger.name)
    monkeypatch.setattr(prefect_stages, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(
        prefect_stages,
        "create_markdown_artifact",
        lambda text, **named: calls.append(named) or identity,
    )
    monkeypatch.setattr(prefect_stages, "_replace_artifact", replace)
    tracking = SimpleNamespace(format_run_reference=lambda run: f"[MLflow run](http://page/{run})")
    run = SimpleNamespace(
        settings=SimpleNamespace(name="My demo"),
        fraction=0.25,
        progress="sft, 1 of 4",
        tracking=tracking,
    )
    summary = {"note": "4 steps", "metrics": {"train/loss": 0.5}}
    result = StageResult(
        "sft", "/f", "d", "k", cached=False, seconds=2.0, run_id="r1", summary=summary
    )
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: "user:word"}),
        prefect_stages.publish_stage_progress(run, "sft") as finish,
    ):
        assert updated.wait(10)
        finish(result)
    assert calls == [{"key": "my-demo-sft", "description": "sft: starting"}]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines == ["25% · sft, 1 of 4", "sft: 4 steps"]  # in the log of the task run
    assert updates[0] == (identity, "## sft\n\n25% · sft, 1 of 4", "25% · sft, 1 of 4", "user:word")
    artifact_id, page, description, _ = updates[-1]
    assert artifact_id == identity and description == "4 steps" and len(updates) == 2
    assert (
        "**4 steps**" in page
        and "[MLflow run](http://page/r1)" in page
        and "| train/loss | 0.5 |" in page
    )


def test_a_stopped_stage_waits_only_briefly_for_an_update_of_its_page(monkeypatch):
    """An update that a busy server holds for ten seconds would use all the time of a preempted run."""
    waits = []
    thread = SimpleNamespace(start=lambda: None, join=lambda timeout: waits.append(timeout))
    monkeypatch.setattr(
        prefect_stages,
        "threading",
        SimpleNamespace(Event=threading.Event, Thread=lambda **_: thread),
    )
    monkeypatch.setattr(prefect_stages, "publish_page", lambda *_, **__: "")
    run = SimpleNamespace(settings=SimpleNamespace(name="demo"))
    with pytest.raises(KeyboardInterrupt), prefect_stages.publish_stage_progress(run, "sft"):
        raise KeyboardInterrupt
    assert len(waits) == 1 and sum(waits) <= 2.0


def test_a_picture_is_in_the_page_unless_it_is_large(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"png")
    assert (
        prefect_stages.embed_figure(tmp_path / "a.png", "stages")
        == "![stages](data:image/png;base64,cG5n)"
    )
    assert prefect_stages.embed_figure(tmp_path / "none.png", "stages") == ""
    monkeypatch.setattr(prefect_stages, "MAX_FIGURE_BYTES", 2)
    assert prefect_stages.embed_figure(tmp_path / "a.png", "stages") == ""
