"""Output while a run starts: Prefect's embedded server, and the display until it answers."""

import io
import os
import subprocess
import sys

import psutil
import pytest
from helpers import ROOT
from helpers.prefect_tables import create_migrated_database
from rich.console import Console

from flows.runtime import embedded_server
from flows.runtime.progress import ProgressDisplay
from flows.runtime.stopping import TerminatedBySignal
from rl_core.errors import BackendError


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("Timed out while attempting to connect."), BackendError),
        (OSError("read timeout"), BackendError),
        (
            TerminatedBySignal("SIGTERM"),
            TerminatedBySignal,
        ),  # a longer time would not help
    ],
)
def test_a_server_that_does_not_start_is_ended_and_reported(monkeypatch, error, raised):
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    calls = []

    class Stuck:
        def __init__(self, extra_environment, home):
            pass

        def wait_until_healthy(self, limit):
            calls.append("wait")
            raise error

        def stop_process(self):
            calls.append("stop")

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", Stuck)
    with (
        temporary_settings(
            {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
        ),
        pytest.raises(raised) as caught,
    ):
        embedded_server.start_embedded_server()
    assert calls == ["wait", "stop"] and embedded_server._server is None
    if raised is BackendError:
        assert str(caught.value).startswith("Prefect's embedded server did not start")
        assert str(error) in str(caught.value) and "PREFECT_API_URL=" in str(caught.value)


def test_a_server_that_exits_is_not_restarted_endlessly(monkeypatch, tmp_path):
    """Limit the restarts: uvicorn's exit code for a taken port is also that for a database it cannot open."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    started = []

    def start_failing_child(command, **options):
        started.append(command)
        return subprocess.Popen(
            [sys.executable, "-c", f"raise SystemExit({embedded_server.PORT_TAKEN_EXIT_CODE})"]
        )

    monkeypatch.setattr(embedded_server, "start_child", start_failing_child)
    ephemeral = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True, PREFECT_HOME: tmp_path}
    with (
        temporary_settings(ephemeral, restore_defaults={PREFECT_API_URL}),
        pytest.raises(BackendError) as caught,
    ):
        embedded_server.start_embedded_server()
    assert (
        len(started) == 3
        and len({command[command.index("--port") + 1] for command in started}) == 3
    )
    assert "exited with code 3" in str(caught.value) and f"{tmp_path}/prefect.db" in str(
        caught.value
    )
    assert "busy" not in str(caught.value)


def test_a_missing_server_is_reported():
    """Report a missing server: it ended in Prefect's traceback, "No Prefect API URL provided"."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    with (
        temporary_settings(
            {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}, restore_defaults={PREFECT_API_URL}
        ),
        pytest.raises(
            BackendError, match="set PREFECT_API_URL, or PREFECT_SERVER_EPHEMERAL_ENABLED=true"
        ),
    ):
        embedded_server.start_embedded_server()


def test_the_tables_of_a_home_are_not_cached_if_a_profile_names_another_database(
    monkeypatch, tmp_path
):
    """Cache no unused database: an old one was taken for the newest tables, and new folders began with it."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        PREFECT_SERVER_DATABASE_CONNECTION_URL,
        temporary_settings,
    )

    class FakeServer:
        def __init__(self, extra_environment, home):
            pass

        def wait_until_healthy(self, limit):
            pass

        def stop_process(self):
            pass

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", FakeServer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    create_migrated_database(tmp_path / "home")
    of_home = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True, PREFECT_HOME: tmp_path / "home"}
    elsewhere = {PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/other.db"}
    for settings, is_cached in (({**of_home, **elsewhere}, False), (of_home, True)):
        with temporary_settings(settings, restore_defaults={PREFECT_API_URL}):
            embedded_server.start_embedded_server()
            embedded_server.stop_embedded_server()
        assert (tmp_path / "cache").exists() == is_cached


def test_libraries_are_imported_while_the_server_starts_but_not_without_a_wait(
    monkeypatch,
):
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    calls = []

    class FakeServer:
        def __init__(self, extra_environment, home):
            calls.append("start")

        def wait_until_healthy(self, limit):
            calls.append("wait")

        def stop_process(self):
            calls.append("stop")

    def interrupt():
        raise TerminatedBySignal("SIGTERM")

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", FakeServer)
    with temporary_settings(
        {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
    ):
        with pytest.raises(TerminatedBySignal):
            embedded_server.start_embedded_server(interrupt)
        assert calls == ["start", "stop"] and embedded_server._server is None
        embedded_server.start_embedded_server(lambda: calls.append("imports"))
        embedded_server.stop_embedded_server()
        assert calls[2:] == ["start", "imports", "wait", "stop"]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        embedded_server.start_embedded_server(lambda: calls.append("imports"))
    assert calls[6:] == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_processes_of_a_run_end_with_it_even_after_kill_9():
    script = (
        "import signal, time\n"
        "from rl_core.processes.children import start_child\n"
        "print(start_child(['sleep', '600'], death_signal=signal.SIGTERM).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert os.getsid(child.pid) == child.pid, "Ctrl-C of the terminal does not reach it"
        parent.kill()
        try:
            child.wait(20)  # seconds; else psutil raises
        finally:
            if child.is_running():
                child.kill()


def test_a_wait_is_shown_and_removed():
    text = io.StringIO()
    with ProgressDisplay(console=Console(file=text, force_terminal=True, width=100)) as display:
        with display.show_wait("the server starts"):
            display._progress.refresh()
            assert "the server starts" in text.getvalue() and "/?" not in text.getvalue()
        assert not display._progress.tasks
    pipe = io.StringIO()
    with (
        ProgressDisplay(console=Console(file=pipe, force_terminal=False)) as display,
        display.show_wait("the server starts"),
    ):
        pass
    assert pipe.getvalue() == ""
