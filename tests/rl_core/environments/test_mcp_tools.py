"""MCP servers as tools, against real servers of the official package on standard streams and over HTTP."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import free_ports, wait_for

from rl_core.environments.prompts import Prompts
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.types import ToolCall

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = str(Path(__file__).parents[2] / "helpers" / "mcp_server.py")
ROWS = [{"prompt": "count", "answer": "3"}]


PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # where the test's package lies


def environment(env=None, **options):
    options["env"] = PATHS | (env or {})
    return Prompts(
        ROWS, mcp={"count": {"command": [sys.executable, SERVER], **options}}, verifier="exact"
    )


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def is_alive(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_each_episode_has_a_session_that_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_FOR_TEST", "secret")
    started = tmp_path / "started"
    acting = environment(env={"STARTED": str(started), "GIVEN": "yes"})
    assert not started.exists()  # nothing runs before it is needed
    first, second = acting.episode(0, "all"), acting.episode(0, "all")
    assert '"name": "add"' in first.reset()[0]["content"]
    assert (
        len(started.read_text().split()) == 1
    )  # to list the tools; episodes begin with their first call
    step = first.step(call("add", numbers=[1, 2]) + call("add", numbers=[2], twice=True))
    assert sorted(m["content"] for m in step.messages)[-1] == "7" and step.tool_call == ToolCall(
        "add", {"numbers": [1, 2]}
    )
    assert second.step(call("add", numbers=[5])).messages[0]["content"] == "5"
    pid, passed, secret = first.step(call("whoami")).messages[0]["content"].split()
    assert (passed, secret) == ("yes", "-")  # it sees the passed variable and no other
    assert is_alive(int(pid))
    assert first.step("3").success
    wait_for(lambda: not is_alive(int(pid)), "the server's end")
    other = int(second.step(call("whoami")).messages[0]["content"].split()[0])
    second.close()  # cut off by a limit
    wait_for(lambda: not is_alive(other), "the server's end")


def test_failures_and_limits_are_shown_to_the_policy():
    episode = environment(timeout_s=60, tools=["fail", "hang", "add"]).episode(0, "all")
    step = episode.step(call("fail", reason="no such thing"))
    assert step.is_error and "fail" in step.messages[0]["content"]
    slow = environment(timeout_s=0.5, tools=["hang"]).episode(0, "all")
    step = slow.step(call("hang"))
    slow.close()
    assert (
        step.is_error
        and step.messages[0]["content"] == "error: hang did not answer within 0.5 seconds"
    )
    step = episode.step(call("add", numbers=["x"]))
    assert step.is_error and "numbers[0] must be a whole number" in step.messages[0]["content"]
    assert (
        "no tool 'whoami'" in episode.step(call("whoami")).messages[0]["content"]
    )  # not among `tools`
    episode.close()


def test_over_http():
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, SERVER, "http", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        acting = Prompts(
            ROWS, mcp={"count": {"url": f"http://127.0.0.1:{port}/mcp", "start_timeout_s": 30}}
        )

        def answers():
            with contextlib.suppress(EnvironmentFault):
                return acting.tools.tools

        assert set(wait_for(answers, "the server")) == {"add", "fail", "hang", "whoami"}
        episode = acting.episode(0, "all")
        assert episode.step(call("add", numbers=[4])).messages[0]["content"] == "4"
        episode.close()
    finally:
        process.kill()
        process.wait()


def test_a_server_that_does_not_start_is_no_fault_of_the_policy():
    with pytest.raises(EnvironmentFault, match=r"MCP server 'count' .*cannot be used"):
        environment(command=["no_such_program_here"]).episode(0, "all")
    with pytest.raises(EnvironmentFault, match=r"did not answer within 0\.3 s"):
        environment(
            command=[sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_s=0.3
        ).episode(0, "all")
    with pytest.raises(
        SettingsError, match=r"options.mcp.count.tools: no tool 'ad'; did you mean 'add'"
    ):
        environment(tools=["ad"]).episode(0, "all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": [], "url": ""}, "give either command"),
        ({"command": ["x"], "url": "http://x"}, "give either command"),
        ({"comand": ["x"]}, "no such option; did you mean 'command'"),
        ({"command": ["x"], "timeout_s": 0}, "must be a number of seconds"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(SettingsError, match=message):
        Prompts(ROWS, mcp={"count": options})


def test_errors_show_the_last_line_of_a_server_that_does_not_start(tmp_path):
    server = tmp_path / "server.py"
    server.write_text("import no_such_package")
    acting = Prompts(
        ROWS, mcp={"shop": {"command": [sys.executable, str(server)]}}, verifier="exact"
    )
    with pytest.raises(
        EnvironmentFault, match=r"cannot be used: .*; last line on stderr: .*no_such_package"
    ):
        acting.episode(0, "all").reset()


def test_a_server_that_writes_garbage_gives_one_warning(caplog):
    """The package logged a traceback for every line."""
    code = (
        "import runpy, sys, threading, time\n"
        "def write():\n"
        "    while True: print('loading 50%', flush=True); time.sleep(0.02)\n"
        "threading.Thread(target=write, daemon=True).start()\n"
        f"sys.argv = [{SERVER!r}]; runpy.run_path({SERVER!r}, run_name='__main__')"
    )
    acting = Prompts(
        ROWS,
        mcp={"noisy": {"command": [sys.executable, "-c", code], "env": PATHS}},
        verifier="exact",
    )
    for _ in range(2):
        episode = acting.episode(0, "all")
        assert episode.step(call("add", numbers=[5])).messages[0]["content"] == "5"
        episode.close()
    texts = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert [text for text in texts if "MCP server 'noisy' writes lines" in text] == texts[:1]
    assert len(texts) == 1
