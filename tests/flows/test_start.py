"""Output while a run starts: Prefect's embedded server, and what there is to read until it answers."""

import io
import os
import subprocess
import sys

import psutil
import pytest
from helpers import ROOT
from helpers.prefect_tables import migrated
from rich.console import Console

from flows.runtime import embedded_server
from flows.runtime.progress import ProgressDisplay
from flows.runtime.stopping import TerminatedBySignal
from rl_core.errors import BackendError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Timed out while attempting to connect."), BackendError),
        (OSError("read timeout"), BackendError),
        (
            TerminatedBySignal("SIGTERM"),
            TerminatedBySignal,
        ),  # which is nothing that a longer time would mend
    ],
)
def test_a_server_that_does_not_start_is_ended_and_said(monkeypatch, error, said):
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    done = []

    class Stuck:
        def __init__(self, given, home):
            pass

        def wait(self, limit):
            done.append("wait")
            raise error

        def stop(self):
            done.append("stop")

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", Stuck)
    with (
        temporary_settings(
            {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
        ),
        pytest.raises(said) as caught,
    ):
        embedded_server.start_embedded_server()
    assert done == ["wait", "stop"] and embedded_server._server is None
    if said is BackendError:
        assert str(caught.value).startswith("Prefect's embedded server did not start")
        assert str(error) in str(caught.value) and "PREFECT_API_URL=" in str(caught.value)


def test_a_server_that_ends_by_itself_is_not_started_again_and_again(monkeypatch, tmp_path):
    """uvicorn's exit code of a taken port is that of a database that it cannot open, too."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    started = []

    def ends():
        def popen(command, **options):
            started.append(command)
            return subprocess.Popen(
                [sys.executable, "-c", f"raise SystemExit({embedded_server.PORT_TAKEN_EXIT_CODE})"]
            )

        return popen

    monkeypatch.setattr(embedded_server, "build_session_popen", ends)
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


def test_no_server_of_ones_own_and_no_other_one_is_said():
    """It ended in Prefect's traceback, "No Prefect API URL provided"."""
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


def test_the_tables_of_a_home_are_not_kept_where_a_profile_names_another_database(
    monkeypatch, tmp_path
):
    """An old database in that home was taken for the newest tables, and new folders began with it, unmigrated."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        PREFECT_SERVER_DATABASE_CONNECTION_URL,
        temporary_settings,
    )

    class Starting:
        def __init__(self, given, home):
            pass

        def wait(self, limit):
            pass

        def stop(self):
            pass

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", Starting)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    migrated(tmp_path / "home")
    of_home = {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True, PREFECT_HOME: tmp_path / "home"}
    elsewhere = {PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{tmp_path}/other.db"}
    for settings, kept in (({**of_home, **elsewhere}, False), (of_home, True)):
        with temporary_settings(settings, restore_defaults={PREFECT_API_URL}):
            embedded_server.start_embedded_server()
            embedded_server.stop_embedded_server()
        assert (tmp_path / "cache").exists() == kept


def test_libraries_are_imported_while_the_server_starts_and_not_where_nothing_is_waited_for(
    monkeypatch,
):
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    done = []

    class Starting:
        def __init__(self, given, home):
            done.append("begun")

        def wait(self, limit):
            done.append("wait")

        def stop(self):
            done.append("stop")

    def interrupted():
        raise TerminatedBySignal("SIGTERM")

    monkeypatch.setattr(embedded_server, "_EmbeddedServer", Starting)
    with temporary_settings(
        {PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}
    ):
        with pytest.raises(TerminatedBySignal):
            embedded_server.start_embedded_server(interrupted)
        assert done == ["begun", "stop"] and embedded_server._server is None
        embedded_server.start_embedded_server(lambda: done.append("imports"))
        embedded_server.stop_embedded_server()
        assert done[2:] == ["begun", "imports", "wait", "stop"]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api"}):
        embedded_server.start_embedded_server(lambda: done.append("imports"))
    assert done[6:] == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_what_a_run_started_ends_with_it_even_after_kill_9():
    script = (
        "import subprocess, time\n"
        "from flows.runtime.embedded_server import build_session_popen\n"
        "print(build_session_popen()(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert os.getsid(child.pid) == child.pid, "out of reach of the terminal's Ctrl-C"
        parent.kill()
        try:
            child.wait(20)  # seconds; else psutil raises
        finally:
            if child.is_running():
                child.kill()


def test_what_is_waited_for_is_seen_and_goes():
    text = io.StringIO()
    with ProgressDisplay(console=Console(file=text, force_terminal=True, width=100)) as display:
        with display.show_wait("the server starts"):
            display._progress.refresh()
            assert "the server starts" in text.getvalue() and "/?" not in text.getvalue()
        assert not display._progress.tasks
    plain = io.StringIO()
    with (
        ProgressDisplay(console=Console(file=plain, force_terminal=False)) as display,
        display.show_wait("the server starts"),
    ):
        pass
    assert plain.getvalue() == ""
