"""verifiers environments of several turns: each turn replays the episode from its start."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.adapters import stand_in

from rl_core.environments import make_environment
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
    return next(episode for episode in episodes if episode.target == wanted)


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
            "Meeting has the agents one, two; only environments with one",
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
