"""Agents that do what no agent should do: each costs its episode at most, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.agents import CLIENT, build_agent, build_policy, play
from helpers.waiting import wait_for

import rl_core
from rl_core.environments import make_environment
from rl_core.errors import DataError

ONE_CALL = "reply([user('x')])\n"
DETACH = """
import subprocess
code = "import time, pathlib, os, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", code, os.path.abspath("pid")], start_new_session=True)
while not os.path.exists("pid") or not open("pid").read(): time.sleep(0.01)
"""
SEND_RAW = """
import http.client, socket, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])

def send_raw(headers, body=b""):
    connection = socket.create_connection((url.hostname, url.port))
    head = [f"POST {url.path}/chat/completions HTTP/1.1", *headers, "", ""]
    connection.sendall("\\r\\n".join(head).encode() + body)
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status
"""


@pytest.fixture(scope="module")
def policy():
    return build_policy()


@pytest.mark.parametrize("end", ["", "time.sleep(60)"])
def test_detached_processes_end_with_an_unconfined_episode(tmp_path, policy, end):
    """A process in a session of its own is in no process group of the agent's."""
    pids = tmp_path / "pids"
    copy = f"open({str(pids)!r}, 'w').write(open('pid').read())\n"
    agent = build_agent(tmp_path, ONE_CALL + DETACH + copy + end, sandbox=False, timeout_s=3.0)
    play(agent, policy, failed=[])
    assert not (Path("/proc") / pids.read_text()).exists()


def test_detached_processes_end_with_the_trainer(tmp_path):
    child = os.fork()
    if child == 0:
        copy = f"open({str(tmp_path / 'pids')!r}, 'w').write(open('pid').read())\ntime.sleep(60)"
        agent = build_agent(tmp_path, ONE_CALL + DETACH + copy, sandbox=False)
        play(agent, build_policy())
        os._exit(0)
    pids = tmp_path / "pids"
    try:
        wait_for(lambda: pids.exists() and pids.read_text(), "the detached process", 60)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    process = Path("/proc") / pids.read_text()
    wait_for(lambda: not process.exists(), "the end of the detached process", 10)
    assert not process.exists()


def test_a_late_signal_to_an_ended_agent_is_no_error():
    """SIGTERM to the group may end the agent before it reaches the process that waits for it."""
    code = """
import os, signal
from rl_core.environments import agent_child

def wait_and_be_signalled(wait=os.wait):
    outcome = wait()
    os.kill(os.getpid(), signal.SIGTERM)
    return outcome

os.wait = wait_and_be_signalled
agent_child._fork_and_exit_with_child()
os._exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_malformed_requests_are_refused_by_name(tmp_path, policy, caplog):
    code = f"""{SEND_RAW}
seen = [
    send_raw(["Content-Length: -5"]),
    send_raw(["Content-Length: x"]),
    send_raw(["Transfer-Encoding: chunked"], b"zz\\r\\n"),
    send_raw(["Transfer-Encoding: chunked"], b"-5\\r\\n"),
]
try:
    reply([user("x" * 20_000_000)])
except urllib.error.HTTPError as error:
    seen.append(error.code)
try:
    reply([user("a " + chr(0xd800))])
except urllib.error.HTTPError as error:
    seen += [error.code, json.load(error)["error"]["message"]]
{ONE_CALL}
print(json.dumps({{"reward": 1, "seen": seen}}))
"""
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy)
    *codes, message = rollout.trajectory.info["seen"]
    assert codes == [400, 400, 400, 400, 413, 422]
    assert message == "the body holds half of a surrogate pair (\\ud800)"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("success", ["false", "yes", 2, [True]])
def test_a_success_that_is_neither_true_nor_false_is_refused(tmp_path, policy, success):
    failed = []
    score = {"reward": 0.0, "success": success}
    code = ONE_CALL + f"send('/reward', {score!r})"
    assert play(build_agent(tmp_path, code, reward=None), policy, failed=failed) == []
    assert failed[0].failed_in == "its reward" and "as the success" in failed[0].error


def test_a_reward_that_is_cancelled_fails_its_episode(tmp_path, policy):
    async def score(task, calls, result):
        raise asyncio.CancelledError("by a client")

    failed = []
    assert play(build_agent(tmp_path, ONE_CALL, reward=score), policy, failed=failed) == []
    assert "CancelledError: by a client" in failed[0].error


def test_a_task_that_no_file_can_hold_is_refused():
    with pytest.raises(DataError, match=r"options.tasks: row 1: question: holds half of a surrog"):
        rl_core.Agent("python -c pass", [{"question": "a"}, {"question": "\ud800"}], heldout=0)
    rows = [{"question": "a", "date": time, "number": float("nan")}]
    assert rl_core.Agent("python -c pass", rows, heldout=0).columns == (*rows[0],)


def test_a_column_named_file_does_not_hide_the_file_of_the_task(tmp_path, policy):
    code = (
        ONE_CALL
        + "print(json.dumps({'reward': float(json.load(open(os.environ['TASK_FILE'])) == task)}))"
    )
    agent = build_agent(tmp_path, code, [{"question": "x", "file": "notes.txt"}], reward=None)
    (rollout,) = play(agent, policy)
    assert rollout.reward == 1.0


def test_a_long_word_in_a_command_is_no_path():
    code = "print(1) # " + "x" * 300
    options = {"command": f"python -c '{code}'", "tasks": ["a"], "heldout": 0}
    assert make_environment("agent", options).levels == ("all",)


def test_a_function_reaches_the_policy_with_a_client_that_obeys_proxies(policy, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")

    def run(task, client):
        client.chat([{"role": "user", "content": "x"}])
        headers = {"Authorization": f"Bearer {client.api_key}"}
        request = urllib.request.Request(f"{client.base_url}/models", headers=headers)
        return float(urllib.request.urlopen(request).status == 200)

    (rollout,) = play(rl_core.Agent(run, ["x"], heldout=0), policy)
    assert rollout.reward == 1.0


LOOKING_AGENT = """
import library

def read(path):
    try:
        return open(os.path.join(library.FOLDER, path)).read()
    except OSError:
        return "hidden"

reply([user("x")])
paths = ["data/tasks.jsonl", "data/notes.txt", "link.jsonl", ".env", "outputs/episodes.jsonl", "outputs/model/a"]
print(json.dumps({"reward": 1.0, "seen": {path: read(path) for path in paths}}))
"""


def look_into_project(project, policy, **options):
    """Play an agent whose program lies in the current folder, and return what it could read."""
    tasks = options.pop("tasks")
    command = f"{sys.executable} agent.py"
    agent = rl_core.Agent(command, tasks, heldout=0, timeout_s=20.0, **options)
    (rollout,) = play(agent, policy)
    return {
        path for path, text in rollout.trajectory.info["seen"].items() if text.strip() != "hidden"
    }


def test_an_agent_cannot_read_hidden_files_nor_the_right_answers(tmp_path, policy, monkeypatch):
    for path, text in {
        "agent.py": CLIENT + LOOKING_AGENT,
        "library.py": "import os; FOLDER = os.path.dirname(os.path.abspath(__file__))",
        "data/tasks.jsonl": '{"question": "x", "answer": "17"}\n',
        "data/notes.txt": "notes",
        ".env": "SECRET=1",
        "outputs/episodes.jsonl": "17",
        "outputs/model/a": "a",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "link.jsonl").symlink_to("data/tasks.jsonl")
    (tmp_path / "circle").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    tasks = "data/tasks.jsonl"
    private = look_into_project(tmp_path, policy, tasks=tasks, private=["answer"])
    assert private == {"data/notes.txt"}
    named = ["data", "outputs/model"]  # a folder that is named still hides the file of tasks
    readable = look_into_project(tmp_path, policy, tasks=tasks, private=["answer"], readable=named)
    assert readable == {"data/notes.txt", "outputs/model/a"}
    public = look_into_project(tmp_path, policy, tasks=tasks)
    assert public == {
        "data/tasks.jsonl",
        "data/notes.txt",
        "link.jsonl",
        "outputs/episodes.jsonl",
        "outputs/model/a",
    }


LANDLOCK_ALONE = """
import os, sys
from rl_core.environments import agent_process, sandbox

def refuse(network, missing):
    missing |= dict.fromkeys(("files", "processes"), "no namespaces")
    return False

sandbox._unshare_namespaces = refuse
project, root = os.path.realpath("project"), os.environ["ROOT"]
entries = agent_process.exclude_hidden_paths(
    agent_process._list_visible_entries(project), [os.path.join(project, "tasks.jsonl")]
)
missing = sandbox.enter(
    os.path.realpath("work"), memory_gib=None, network=True, readable=[*entries, root], writable=[], listed=[project]
)
if "Landlock holds" not in missing["files"]:
    sys.exit(77)
sys.path.insert(0, project)
import library
for name in ("tasks.jsonl", ".env"):
    try:
        open(os.path.join(project, name))
    except PermissionError:
        continue
    sys.exit(f"{name} was read")
"""


def test_landlock_alone_hides_them_and_lists_the_folder_for_imports(tmp_path):
    for name in ("library.py", "tasks.jsonl", ".env"):
        (tmp_path / "project").mkdir(exist_ok=True)
        (tmp_path / "project" / name).write_text("")
    (tmp_path / "work").mkdir()
    ended = subprocess.run(
        [sys.executable, "-P", "-c", LANDLOCK_ALONE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ROOT": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if ended.returncode == 77:
        pytest.skip("no Landlock here")
    assert ended.returncode == 0, ended.stderr
