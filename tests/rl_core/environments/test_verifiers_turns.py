"""verifiers environments of several turns: each turn replays the episode from its start."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.adapters import stand_in

from rl_core.environments import Environment, make_environment
from rl_core.environments.verifiers_tasks import MAX_OTHER_REPLIES
from rl_core.errors import EnvironmentFault, SettingsError

fake = stand_in("verifiers")

OPENING = [
    {"role": "system", "content": "guess"},
    {"role": "user", "content": "a number below ten?"},
]


def guessing(**options):
    return make_environment(
        "verifiers", {"taskset": "guessing_tasks", "heldout": 0.3, "workers": 1, **options}
    )


def find_episode_with_answer(environment, wanted):
    """Return an episode with that answer."""
    episodes = (environment.episode(seed, "all") for seed in environment.seeds("train"))
    return next(episode for episode in episodes if wanted in ("", episode.target))


def test_a_game_by_hand(fake: None) -> None:
    environment = guessing()
    assert len(environment.seeds("train")) + len(environment.seeds("heldout")) == 20, (
        "equal prompts, other tasks"
    )
    assert 2 < len(environment.seeds("heldout")) < 18
    episode = find_episode_with_answer(environment, "4")
    assert episode.reset() == OPENING
    step = episode.step("7")
    assert step.messages == [{"role": "user", "content": "smaller"}]
    assert (step.reward, step.terminated, step.success, step.info) == (0.0, False, None, {})
    step = episode.step("4")
    assert (step.messages, step.terminated, step.success, step.is_error) == ([], True, True, False)
    assert step.reward == 2.0  # right 1, and the game's 1 for two turns
    assert step.info["rewards"] == {"right": 1.0, "game": 1.0}
    # its setup's 10 guesses less two turns; `length` is set by the fake
    assert step.info["metrics"] == {"length": 1.0, "finalized": 1.0, "left": 8.0, "stopped": 0.0}
    assert episode.reset() == OPENING


def test_a_limit_and_a_stop_end_the_game(fake: None) -> None:
    episode = find_episode_with_answer(guessing(), "4")
    replies = [episode.step(reply).messages for reply in ("5", "1", "5")]
    assert [messages[0]["content"] for messages in replies] == ["smaller", "greater", "smaller"]
    step = episode.step("1")  # its fourth turn, the agent's limit
    assert step.terminated and step.reward == 0.5 and step.info["metrics"]["stopped"] == 1.0
    step = find_episode_with_answer(guessing(), "4").step("I give up")
    assert (
        step.terminated
        and step.reward == 1.0
        and step.info["rewards"] == {"right": 0.0, "game": 1.0}
    )


def test_its_settings_and_messages_as_objects(fake: None) -> None:
    environment = guessing(environment_config={"polite": True})
    assert find_episode_with_answer(environment, "4").step("5").messages == [
        {"role": "user", "content": "please smaller"}
    ]
    with pytest.raises(SettingsError, match="extra inputs are not permitted: \\['rude'\\]"):
        guessing(environment_config={"rude": True}).seeds("train")


def test_an_environment_that_speaks_first(fake: None) -> None:
    names = {"taskset": "guessing_tasks:Unprompted", "environment": "guessing_tasks:Asking"}
    episode = find_episode_with_answer(guessing(**names), "4")
    assert episode.reset() == [OPENING[0], {"role": "user", "content": "is it 4?"}]
    assert episode.step("4").reward == 1.0


def test_what_it_draws_is_the_same_each_time_or_refused(fake: None) -> None:
    episode = find_episode_with_answer(guessing(), "4")
    first = episode.step("chance").messages[0]["content"]
    with pytest.raises(
        EnvironmentFault, match=r"has a different conversation .* each time it is loaded"
    ):
        episode.step("5")
    again = find_episode_with_answer(guessing(), "4").step("chance").messages[0]["content"]
    assert again.split()[0] == first.split()[0] and again.split()[1] != first.split()[1]


def test_faults_of_the_environment_are_no_zeros_and_those_of_a_reward_are(fake: None) -> None:
    with pytest.raises(EnvironmentFault, match=r"task \d+: KeyError: 'broken'"):
        find_episode_with_answer(guessing(), "4").step("bad environment")
    episode = find_episode_with_answer(guessing(), "4")
    for _ in range(3):
        episode.step("5")
    step = episode.step("bad reward")
    assert (step.reward, step.terminated, step.success, step.is_error) == (0.0, True, False, True)
    assert "scoring failed: RuntimeError: boom" in step.info["scoring"]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            {"environment": "guessing_tasks:Meeting"},
            "Meeting has the agents one, two; options.agent names the one that the policy plays",
        ),
        (
            {"environment": "guessing_tasks:Meeting", "agent": "three"},
            "Meeting has no agent 'three'; one, two",
        ),
        (
            {"environment": "guessing_tasks:Meeting", "agent": "one"},
            "the policy plays one; options.others has to say who plays two",
        ),
        ({"environment": "guessing_tasks:Served"}, "Served has a start()"),
        ({"environment": "guessing_tasks:Silent"}, "ended without asking the agent"),
        ({"environment": "guessing_tasks:Nothing"}, "AttributeError"),
        (
            {"taskset": "guessing_tasks:Unprompted"},
            "it has no prompt, and its environment sends no message",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(fake: None, options: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        guessing(**options).seeds("train")
    assert part in str(caught.value)


def test_an_agent_is_taken_once(fake: None) -> None:
    episode = find_episode_with_answer(guessing(environment="guessing_tasks:Repeated"), "4")
    with pytest.raises(EnvironmentFault, match="uses the agent twice in an episode"):
        episode.step("4")


FRIEND = """
openings = []

def speak(messages, seed):
    if messages[-1]["content"] == "hello":
        openings.append(seed)
        return f"opening {len(openings)} after {len(messages)}, seed {seed}"
    if messages[-1]["content"] == "break":
        raise OSError("asleep")
    return None if messages[-1]["content"] == "nothing" else f"{len(messages)} {messages[-1]['content']} {seed}"
"""


@pytest.fixture
def conversing(tmp_path: Path, fake: None) -> Environment:
    """Return an environment of two agents: a function plays the friend, who opens the conversation."""
    path = tmp_path / "friend.py"
    path.write_text(FRIEND)
    others = {"friend": f"{path}:speak"}
    return guessing(environment="guessing_tasks:Conversing", others=others)


def test_another_agent_opens_and_answers(conversing: Environment) -> None:
    episode = find_episode_with_answer(conversing, "")
    index = episode._index
    first = index * MAX_OTHER_REPLIES
    # the friend has read its system message and hello, and is asked once for all episodes of the task
    opening = f"opening 1 after 2, seed {first}"
    assert episode.reset() == [OPENING[0], {"role": "user", "content": opening}]
    twin = conversing.episode(episode.seed, "all")
    assert twin.reset() == episode.reset()
    step = episode.step("5")
    assert step.messages == [{"role": "user", "content": f"4 5 {first + 1}"}]
    assert twin.step("6").messages == [{"role": "user", "content": f"4 6 {first + 1}"}]
    # The friend's limit of two turns ends the conversation; the player's last reply is scored.
    step = episode.step(str(index % 10))
    assert (step.reward, step.terminated, step.success) == (1.0, True, True)
    assert step.info["metrics"]["friend_turns"] == 2.0


def test_an_agent_that_fails_fails_the_episode(conversing: Environment) -> None:
    episode = find_episode_with_answer(conversing, "")
    episode.reset()
    with pytest.raises(EnvironmentFault, match=r"friend\.py:speak': OSError: asleep"):
        episode.step("break")
    episode = find_episode_with_answer(conversing, "")
    episode.reset()
    with pytest.raises(EnvironmentFault, match="returned None, not a text"):
        episode.step("nothing")


class ChatServer(BaseHTTPRequestHandler):
    """Answers with the number of messages; records what it was sent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers["Authorization"], body))
        answer = {"choices": [{"message": {"content": f"{len(body['messages'])} messages"}}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_a_model_behind_a_url_plays_the_other_agent(
    fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRIEND_KEY", "secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatServer)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    player = {
        "url": f"http://127.0.0.1:{server.server_port}/v1",
        "model": "m",
        "max_tokens": 7,
        "api_key": "FRIEND_KEY",
    }
    try:
        environment = guessing(
            environment="guessing_tasks:Conversing", agent="player", others={"friend": player}
        )
        episode = environment.episode(0, "all")
        assert episode.reset()[-1]["content"] == "2 messages"
        assert episode.step("5").messages[0]["content"] == "4 messages"
    finally:
        server.shutdown()
        server.server_close()
    assert [(path, key) for path, key, _ in server.requests] == [
        ("/v1/chat/completions", "Bearer secret")
    ] * 2
    body = server.requests[1][2]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0.0)
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("others", "part"),
    [
        ({"friend": {"url": "http://x"}}, "must be {url: ADDRESS, model: NAME}"),
        ({"friend": {"url": "http://x", "model": "m", "temprature": 1}}, "did you mean"),
        ({"friend": {"url": "http://x", "model": 3}}, "3 is not"),
        ({"friend": 7}, "7 must be"),
    ],
)
def test_players_are_checked(fake: None, others: dict, part: str) -> None:
    with pytest.raises(SettingsError) as caught:
        guessing(environment="guessing_tasks:Conversing", others=others)
    assert part in str(caught.value) and "options.others.friend" in str(caught.value)


def test_the_reason_within_a_task_group_is_given(fake: None) -> None:
    with pytest.raises(EnvironmentFault, match=r"task \d+: LookupError: no such card"):
        guessing(environment="guessing_tasks:Grouped").episode(0, "all").step("5")
    step = find_episode_with_answer(guessing(), "4")
    for _ in range(3):
        step.step("5")
    scored = step.step("bad group")
    assert "ArithmeticError: a judge divides by zero" in scored.info["scoring"]
    assert "TaskGroup" not in scored.info["scoring"]


REAL = """
import random
import verifiers.v1 as vf
__all__ = ["Counting", "CountingEnv"]

class Data(vf.TaskData):
    answer: str = ""

class ReportedState(vf.State):
    hints: int = 0

class Counter(vf.Task[Data, ReportedState, vf.TaskConfig]):
    async def setup(self, trace):
        trace.state.hints = 1

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer and trace.state.hints == 1)

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)

class CountingEnv(vf.Env[Config]):
    async def run(self, task, agents):
        lucky = random.randint(0, 10**6)
        async with agents.player.interaction(task) as exchange:
            segment = await exchange.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await exchange.turn(f"no, {lucky}")
        exchange.trace.record_reward("turns", 1.0 / exchange.trace.num_turns)

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("agents", float(len(episode.traces)))

class Counting(vf.Taskset[Counter, vf.TasksetConfig]):
    def load(self):
        for number in range(30):
            yield Counter(Data(prompt="count", answer=str(number)), self.config.task)
"""


def test_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "counting_tasks.py").write_text(REAL)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = make_environment("verifiers", {"taskset": "counting_tasks", "success_at": 2.5})
    episode = environment.episode(0, "all")
    assert episode.reset() == [{"role": "user", "content": "count"}]
    assert episode.step("x").messages[0]["content"].startswith("no, ")
    step = episode.step(episode.target)
    assert (step.reward, step.success, step.info["metrics"]) == (2.5, True, {"agents": 1.0})
    step = environment.episode(1, "all").step("stop")
    assert step.terminated and step.reward == 1.0


def test_the_package_simulates_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "counting_tasks.py").write_text(REAL)
    (tmp_path / "customer.py").write_text(CUSTOMER)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"taskset": "counting_tasks", "environment": "user-sim"}
    with pytest.raises(SettingsError, match=r"the policy plays assistant; options\.others"):
        make_environment("verifiers", options).seeds("train")
    others = {"user": f"{tmp_path / 'customer.py'}:speak"}
    environment = make_environment("verifiers", {**options, "others": others})
    episode = environment.episode(0, "all")
    assert episode.reset() == [{"role": "user", "content": "hello, I ask for count"}]
    assert episode.step("one").messages == [{"role": "user", "content": "and then?"}]
    step = episode.step(episode.target)
    assert (step.terminated, step.reward) == (True, 2.0)
    assert step.info["metrics"] == {"user_turns": 3.0}


# The scenario is in the system message of the simulated user; it answers twice, then ends the conversation.
CUSTOMER = """
def speak(messages, seed):
    said = sum(message["role"] == "assistant" for message in messages)
    scenario = "count" if "count" in messages[0]["content"] else "nothing"
    return [f"hello, I ask for {scenario}", "and then?", "###DONE###"][said]
"""
