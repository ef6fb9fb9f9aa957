"""Replay of agents' episodes: the agent runs again and gets the recorded answers."""

from __future__ import annotations

import pytest
from helpers.agents import build_agent, build_policy, play

from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.rollouts.agent_replay import replay_agent
from rl_core.rollouts.replay import replay_episode
from rl_core.types import Trajectory


@pytest.fixture(scope="module")
def policy():
    return build_policy()


REPLAYED_AGENT = """
import random
random.seed(int(os.environ["AGENT_SEED"]))
messages = [user(task["question"])]
for _ in range(2):
    messages.append(reply(messages, stream=False))
    messages.append(user(f"again {random.random()}"))
side = [user("aside")]
side.append(reply(side))
reply(messages)
open("left.txt", "w").write(messages[1]["content"])
if "CRASH" in task["question"]:
    print(side[-1]["content"][:3], file=sys.stderr)
    sys.exit(3)
"""


def reward_file(task, calls, result):
    """Reward what the agent left and the number of calls."""
    return len((result.folder / "left.txt").read_text()) + 1000.0 * len(calls)


def test_an_episode_is_replayed_without_a_model(tmp_path, policy):
    agent = build_agent(tmp_path, REPLAYED_AGENT, reward=reward_file)
    first, second = (rollout.trajectory for rollout in play(agent, policy, group_size=2))
    assert first.turns[0].info["agent_seed"] != second.turns[0].info["agent_seed"]
    for trajectory in (first, Trajectory.from_json(second.to_json())):
        assert trajectory.rewards["task"] > 4000
        replay = replay_episode(agent, trajectory)
        assert (replay.differences, replay.error) == ([], ""), replay.lines
        assert sum(line.startswith("call ") for line in replay.lines) == 4
    changed = Trajectory.from_json(first.to_json())
    changed.turns[0].action += "!"
    assert [d.split(":")[0] for d in replay_episode(agent, changed).differences] == [
        "reward of the environment"
    ]
    asks_less = build_agent(tmp_path, "reply([user(task['question'])])\n" + LEAVE_NOTHING)
    differences = replay_episode(asks_less, first).differences
    assert "recorded calls that were not made" in differences[0]
    asks_more = build_agent(tmp_path, REPLAYED_AGENT + "reply([user('one more')])\n")
    assert any("call 5" in d for d in replay_episode(asks_more, first).differences)


def test_a_failure_before_the_first_call_that_does_not_occur_again_is_named(tmp_path, policy):
    failed = []
    silent = build_agent(tmp_path, "time.sleep(60)\n", timeout_s=1.0)
    play(silent, policy, failed=failed)
    repaired = build_agent(tmp_path, "reply([user('now')])\n")
    replay = replay_episode(repaired, failed[0])
    assert "as the episode failed before it" in replay.error
    assert "limits of the run" not in "\n".join([replay.error, *replay.lines, *replay.differences])
    assert replay.differences[0].startswith("call 1: recorded none")


LEAVE_NOTHING = "open('left.txt', 'w').write('')\n"


def test_a_crash_is_replayed_with_its_log(tmp_path, policy):
    failed = []
    agent = build_agent(tmp_path, REPLAYED_AGENT, [{"question": "CRASH"}])
    play(agent, policy, failed=failed)
    (episode,) = [FailedEpisode.from_json(episode.to_json()) for episode in failed]
    replay = replay_episode(agent, episode)
    assert replay.differences == [] and "exit code 3" in replay.error
    assert replay.trace == episode.trace
    repaired = build_agent(tmp_path, REPLAYED_AGENT.replace("sys.exit(3)", "pass"))
    repaired._tasks["train"][0]["question"] = "CRASH"
    assert "none" in replay_episode(repaired, episode).differences[0]
    silent = build_agent(tmp_path, "sys.exit(0)\n")
    failed.clear()
    play(silent, policy, failed=failed)
    assert replay_episode(silent, failed[0]).differences == []


STREAMING_AGENT = """
body = {"model": "x", "messages": [user("x")], "stream": True, "max_tokens": 8, "tools": [LOOKUP],
        "stream_options": {"include_usage": True}}
lines = [l[6:] for l in send("/chat/completions", body).read().decode().split("\\n\\n") if l]
assert lines[-1] == "[DONE]"
chunks = [json.loads(l) for l in lines[:-1]]
deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
text = "".join(d.get("content") or "" for d in deltas)
calls = [c for d in deltas for c in d.get("tool_calls") or []]
assert chunks[-1]["usage"]["total_tokens"] >= 0
both = ask([user("y")], n=2)["choices"]
ends = [c["finish_reason"] for c in both]
print(json.dumps({"reward": 1.0, "seen": [text, [c["message"]["content"] for c in both], ends]}))
"""


def test_streams_choices_and_ends_are_replayed(tmp_path, policy):
    lookup = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    agent = build_agent(tmp_path, f"LOOKUP = {lookup!r}\n" + STREAMING_AGENT, reward=None)
    (rollout,) = play(agent, policy)
    seen = rollout.trajectory.info["seen"]
    replay = replay_episode(agent, rollout.trajectory)
    assert replay.differences == [] and len(seen[1]) == 2
    replayed = replay_agent(agent, rollout.trajectory, 0)
    assert replayed.score.info["seen"] == seen
