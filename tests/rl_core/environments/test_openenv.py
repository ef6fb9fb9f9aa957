"""`openenv`: episodes at a server of its own process, against a stand-in of OpenEnv 0.10's protocol."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers import ROOT
from helpers.waiting import wait_for

from rl_core.environments import make_environment
from rl_core.environments.environment import Environment
from rl_core.environments.openenv_tasks import OpenEnv
from rl_core.errors import EnvironmentFault, SettingsError

SERVER = ROOT / "tests" / "helpers" / "fakes" / "openenv_server.py"
ACT = '<tool_call>{"name": "act", "arguments": %s}</tool_call>'


def serve(kind: str, sessions: int = 64, **options: object) -> OpenEnv:
    """Return an environment that starts the stand-in."""
    command = f"{sys.executable} {SERVER} {{port}} {kind} {sessions}"
    environment = make_environment("openenv", {"command": command, **options})
    assert isinstance(environment, OpenEnv)
    return environment


@pytest.fixture(scope="module")
def guess() -> OpenEnv:
    return serve("guess", fields=["text"])


def read_texts(messages: list) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_game_by_hand(guess: OpenEnv) -> None:
    episode = guess.episode(3, "default")  # random.Random(3).randint(0, 9) is 3
    assert read_texts(episode.reset()) == [("user", "Game 3: guess a number from 0 to 9.")]
    step = episode.step("<think>low</think>2")
    assert read_texts(step.messages) == [("user", "wrong")]
    assert (step.reward, step.terminated, step.is_error, step.success) == (
        -0.25,
        False,
        False,
        None,
    )
    step = episode.step("3")
    assert (step.messages, step.reward, step.terminated) == ([], 1.0, True)
    # -0.25 and 1 do not reach success_at 1
    assert (step.success, step.answer, step.info) == (False, "3", {"number": 3})
    episode.close()
    assert guess.episode(3, "default").reset() == guess.episode(3, "default").reset()


def test_the_environment_s_word_on_success_counts(guess: OpenEnv) -> None:
    episode = guess.episode(4, "default")
    episode.reset()
    step = episode.step("give up")
    assert (step.reward, step.success) == (0.5, True)
    episode.close()


def test_a_limit_of_actions_truncates() -> None:
    environment = serve("guess", max_steps=2)
    episode = environment.episode(3, "default")
    episode.reset()
    assert not episode.step("x").truncated
    step = episode.step("y")
    assert (step.truncated, step.terminated, step.success, step.messages) == (
        True,
        False,
        False,
        [],
    )
    episode.close()


def test_levels_are_parameters_of_the_reset() -> None:
    environment = serve(
        "guess", reset={"high": 20}, levels={"easy": {"high": 3}, "hard": {}}, instructions="Play."
    )
    easy, hard = environment.episode(1, "easy"), environment.episode(1, "hard")
    assert read_texts(easy.reset()) == [
        ("system", "Play."),
        ("user", "text: Game 1: guess a number from 0 to 3.\ntries: 0"),
    ]
    assert "from 0 to 20." in hard.reset()[1]["content"]
    easy.close()
    hard.close()


def test_actions_of_several_fields_are_calls() -> None:
    environment = serve("move", success_at=5.0)
    assert list(environment.tools.tools) == ["act"]
    assert environment.tools.tools["act"].optional == ("dy",)
    episode = environment.episode(0, "default")
    system = episode.reset()[0]
    assert system["role"] == "system" and "Move by two numbers." in system["content"]
    step = episode.step("go")
    assert read_texts(step.messages) == [("user", "error: write a call of the tool act")]
    assert step.is_error and not step.reward
    step = episode.step(ACT % '{"dx": "far"}')
    assert step.is_error and "dx must be a whole number" in step.messages[0]["content"]
    step = episode.step(ACT % '{"dx": 2}')
    assert read_texts(step.messages) == [("tool", "text: at 2 0\ntries: 1")]
    assert step.tool_call is not None and step.tool_call.arguments == {"dx": 2}
    step = episode.step(ACT % '{"dx": 3, "dy": 1}')
    assert (step.reward, step.terminated, step.success) == (3.0, True, True)
    episode.close()


def test_one_field_may_be_chosen() -> None:
    environment = serve("move", action="dx")
    assert not environment.tools.tools
    episode = environment.episode(0, "default")
    episode.reset()
    step = episode.step("I go far")
    assert read_texts(step.messages) == [("user", "error: end with the dx, an integer")]
    assert episode.step("by `-2`.").reward == -2.0
    episode.close()
    with pytest.raises(SettingsError, match="action has no field 'dz'; known: dx, dy"):
        serve("move", action="dz").parse_action("1")


def test_mcp_tools_and_a_reply_that_ends() -> None:
    environment = serve("tools", success_at=0.0)
    assert list(environment.tools.tools) == ["add"]
    episode = environment.episode(7, "default")
    assert episode.reset()[1]["content"] == "add 7 and 1"
    step = episode.step('<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>')
    assert read_texts(step.messages) == [("tool", "8")] and not step.is_error
    step = episode.step('<tool_call>{"name": "add", "arguments": {"a": -7}}</tool_call>')
    assert read_texts(step.messages) == [("tool", "error: Error calling tool 'add': a is negative")]
    assert step.is_error
    step = episode.step("it is 8")
    assert (step.terminated, step.answer, step.success, step.messages) == (
        True,
        "it is 8",
        True,
        [],
    )
    episode.close()


def test_failures_are_no_zeros(guess: OpenEnv) -> None:
    episode = guess.episode(3, "default")
    episode.reset()
    with pytest.raises(
        EnvironmentFault, match=r"failed on an action: the game broke.*on_error: misuse"
    ):
        episode.step("crash")
    with pytest.raises(EnvironmentFault, match="the reward is 'much', not a number"):
        episode.step("nan")
    episode.close()
    with pytest.raises(EnvironmentFault, match="session is closed"):
        episode.step("3")
    forgiving = serve("guess", on_error="misuse").episode(3, "default")
    forgiving.reset()
    step = forgiving.step("crash")
    assert step.is_error and read_texts(step.messages) == [("user", "error: the game broke")]
    assert forgiving.step("3").terminated
    forgiving.close()
    with pytest.raises(EnvironmentFault, match="has no field 'txt'; did you mean 'text'"):
        serve("guess", fields=["txt"]).episode(0, "default").reset()
    with pytest.raises(EnvironmentFault, match="done before the first action"):
        serve("guess", reset={"high": -0.5}, max_steps=1).episode(0, "default").reset()


@pytest.mark.parametrize("capacity", [1, 2])
def test_more_episodes_than_sessions_are_replayed(capacity: int) -> None:
    environment = serve("guess", capacity, timeout_s=20.0)
    episodes = [environment.episode(seed, "default") for seed in range(4)]
    openings = [episode.reset()[0]["content"] for episode in episodes]
    assert [text.split(":")[1] for text in openings] == [f" Game {seed}" for seed in range(4)]
    for number in range(2):  # in another order: each one's place is taken by then
        for episode in reversed(episodes):
            step = episode.step("none")
            assert read_texts(step.messages) == [("user", f"text: wrong\ntries: {number + 1}")]
            assert step.reward == -0.25
    assert environment._server._max_sessions == capacity  # learned from the first refusal
    for episode in episodes:
        episode.close()


def test_a_replay_that_differs_is_refused() -> None:
    environment = serve("drift", 1, timeout_s=20.0)
    one, two = environment.episode(0, "default"), environment.episode(1, "default")
    one.reset()
    one.step("a")
    two.reset()
    with pytest.raises(
        EnvironmentFault, match=r"its step 1 gave another result.*max_concurrent_envs"
    ):
        one.step("b")
    one.close()
    two.close()


def test_sessions_of_other_clients_are_waited_for() -> None:
    environment = serve("guess", 1, timeout_s=1.0)
    other = OpenEnv(url=_find_url(environment), timeout_s=1.0)
    held = other.episode(0, "default")
    held.reset()
    started_at = time.monotonic()
    with pytest.raises(
        EnvironmentFault, match=r"no session became free within 1 s.*at capacity: 1/1"
    ):
        environment.episode(1, "default").reset()
    assert 0.9 < time.monotonic() - started_at < 20
    held.close()
    environment.episode(1, "default").reset()


def _find_url(environment: OpenEnv) -> str:
    return environment._server._find_address()


def test_questions_are_held_out_by_content(guess: OpenEnv) -> None:
    assert guess.held_out("default").by == "content"
    train, heldout = guess.seeds_of("train", "default"), guess.seeds_of("heldout", "default")
    questions = {guess.question(train[i], "default") for i in range(5)}
    assert questions.isdisjoint(guess.question(heldout[i], "default") for i in range(2))


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"ended at its start \(exit status 1\)[\s\S]*no game here"
    ):
        serve("broken").episode(0, "default").reset()
    command = f"{sys.executable} -c 'import time; time.sleep(60)' {{port}}"
    slow = make_environment("openenv", {"command": command, "start_timeout_s": 0.5})
    with pytest.raises(EnvironmentFault, match=r"not up within 0.5 s \(options.start_timeout_s\)"):
        slow.episode(0, "default").reset()


def test_a_server_that_dies_fails_its_episodes() -> None:
    environment = serve("guess")
    episode = environment.episode(0, "default")
    episode.reset()
    keeper = environment._server._process
    assert keeper is not None
    for child in psutil.Process(keeper.pid).children(recursive=True):
        child.kill()
    with pytest.raises(EnvironmentFault, match="OpenEnv server: "):
        episode.step("1")
    wait_for(lambda: keeper.poll() is not None)
    with pytest.raises(EnvironmentFault, match="it ended"):
        environment.episode(1, "default").reset()


def test_the_server_outlives_the_thread_that_uses_it_first() -> None:
    """The check for held-out questions opens its episodes in threads that end at once."""
    environment = serve("guess")
    thread = threading.Thread(target=environment.episode(0, "default").reset)
    thread.start()
    thread.join()
    time.sleep(1.0)
    assert environment.episode(1, "default").reset()
    assert environment._server._process is not None
    assert environment._server._process.poll() is None


PARENT = """
import sys, time
sys.path[:0] = [{tests!r}]
from rl_core.environments import make_environment
environment = make_environment("openenv", {{"command": {command!r}}})
environment.episode(0, "default").reset()
keeper = environment._server._process.pid
import psutil
print(*[p.pid for p in psutil.Process(keeper).children(recursive=True)], flush=True)
time.sleep(600)
"""


def test_the_server_ends_with_its_process() -> None:
    command = f"{sys.executable} {SERVER} {{port}} guess"
    code = PARENT.format(tests=str(ROOT / "tests"), command=command)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert pids and all(psutil.pid_exists(pid) for pid in pids)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(_is_running(pid) for pid in pids), 30)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_address_without_a_server(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = make_environment("openenv", {"url": f"http://127.0.0.1:{port}", "timeout_s": 2.0})
    with pytest.raises(EnvironmentFault, match="no connection"):
        environment.episode(0, "default").reset()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "give either url"),
        ({"url": "http://x", "command": "y {port}"}, "give either url"),
        ({"url": "x:1"}, "must begin with http://"),
        ({"command": "y"}, "must name its port as {port}"),
        ({"url": "http://x", "max_sessions": 0}, "options.max_sessions: 0"),
        ({"url": "http://x", "timeout_s": 0.0}, "options.timeout_s: 0.0"),
        ({"url": "http://x", "max_steps": 0}, "options.max_steps: 0"),
        ({"url": "http://x", "reset": {"seed": 1}}, "'reset' sets the seed"),
        ({"url": "http://x", "on_error": "zero"}, "options.on_error"),
    ],
)
def test_options_are_checked(options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make_environment("openenv", options)
    assert part in str(caught.value)


REAL = """
import random
from fastmcp import FastMCP
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class GuessAction(Action):
    message: str

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **options):
        self.number = random.Random(seed).randint(0, 9)
        return Observation(metadata={"text": f"guess {seed}"})
    def step(self, action, timeout_s=None, **options):
        if action.message == "crash":
            raise RuntimeError("the game broke")
        if action.message == str(self.number):
            return Observation(reward=1.0, done=True)
        return Observation(reward=0.0, metadata={"text": "wrong"})
    @property
    def state(self):
        return State()

class Tools(MCPEnvironment):
    def __init__(self):
        server = FastMCP("tools")
        @server.tool
        def add(a: int, b: int = 1) -> int:
            "Add two numbers."
            if a < 0:
                raise ValueError("a is negative")
            return a + b
        super().__init__(server)
    def reset(self, seed=None, episode_id=None, **options):
        return Observation(metadata={"message": f"add {seed} and 1"})
    def _step_impl(self, action, timeout_s=None, **options):
        return Observation()
    @property
    def state(self):
        return State()

guess = create_app(Guess, GuessAction, Observation, env_name="guess", max_concurrent_envs=2)
tools = create_app(Tools, CallToolAction, CallToolObservation, env_name="tools")
"""


def test_with_the_package(tmp_path: Path) -> None:
    """Play with the real package: OPENENV_PYTHON names a Python that has it, or it is installed here."""
    python = os.environ.get("OPENENV_PYTHON")
    if python is None:
        pytest.importorskip("openenv.core.env_server")
        python = sys.executable
    (tmp_path / "real_app.py").write_text(REAL)

    def start(name: str) -> Environment:
        command = f"{python} -m uvicorn real_app:{name} --port {{port}}"
        options = {"command": command, "cwd": str(tmp_path), "start_timeout_s": 200.0}
        return make_environment("openenv", options)

    guess = start("guess")
    episodes = [guess.episode(seed, "default") for seed in range(4)]  # of two sessions
    assert [episode.reset()[0]["content"] for episode in episodes] == [
        f"guess {seed}" for seed in range(4)
    ]
    assert [episode.step("x").messages[0]["content"] for episode in episodes] == ["wrong"] * 4
    with pytest.raises(EnvironmentFault, match="the game broke"):
        episodes[0].step("crash")
    step = episodes[3].step("3")
    assert (step.reward, step.terminated, step.success) == (1.0, True, True)
    tools = start("tools")
    episode = tools.episode(7, "default")
    assert episode.reset()[-1]["content"] == "add 7 and 1"
    step = episode.step('<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>')
    assert read_texts(step.messages) == [("tool", "8")]
    step = episode.step('<tool_call>{"name": "add", "arguments": {"a": -7}}</tool_call>')
    assert step.is_error and "a is negative" in step.messages[0]["content"]
    assert episode.step("8").terminated
