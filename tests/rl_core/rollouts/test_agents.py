"""Episodes that the user's agent plays: what is recorded, as tokens, and what fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.agents import TWO_TURNS_AGENT, build_agent, build_policy, play, split_contexts
from helpers.waiting import wait_for

import rl_core
from rl_core.environments import agent_process, make_environment
from rl_core.environments.agent_process import AgentFolder
from rl_core.errors import EnvironmentFault, SettingsError
from rl_core.trainers.policy_gradient.turn_credit import build_sample_turns
from rl_core.types import StopReason


@pytest.fixture(scope="module")
def policy():
    return build_policy()


def recompute_logprobs(policy, rollout):
    """Return the log-prob of each sampled token by a forward pass over its context."""
    values, edge = [], 0
    for ids in split_contexts(rollout):
        with torch.no_grad():
            logits = policy.model(torch.tensor([ids])).logits[0]
        log_p = torch.log_softmax(logits.float() / rollout.temperature, dim=-1)
        values += [0.0] + [float(log_p[n, token]) for n, token in enumerate(ids[1:])]
        edge += len(ids)
    return values[len(rollout.prompt_ids) :]


def test_a_conversation_continues_its_token_ids(tmp_path, policy):
    (rollout,) = play(build_agent(tmp_path, TWO_TURNS_AGENT), policy)
    renderer = policy.renderer
    prompt = renderer.prompt_ids([{"role": "user", "content": "code of a"}])
    assert rollout.prompt_ids == prompt and not rollout.context_starts
    sampled = np.flatnonzero(rollout.loss_mask)
    second = int(np.flatnonzero(np.diff(sampled) > 1)[0]) + 1
    first_reply = [rollout.completion_ids[n] for n in sampled[:second]]
    observed = rollout.completion_ids[second : sampled[second]]
    expected = renderer.observation_ids([{"role": "user", "content": "again"}])
    is_ended = first_reply[-1] in renderer.eos_ids
    assert observed == ([] if is_ended else [renderer.eos_id]) + expected
    assert len(rollout.trajectory.turns) == 2
    assert rollout.trajectory.turns[0].observation == "again"
    assert rollout.trajectory.turns[0].action == renderer.action_text(first_reply)
    recomputed = recompute_logprobs(policy, rollout)
    for n in sampled:
        assert rollout.sampler_logprobs[n] == pytest.approx(recomputed[n], abs=1e-4)


def test_the_reward_sees_task_calls_and_what_was_left(tmp_path, policy):
    seen = []

    async def score(task, calls, result):
        seen.append((task, calls, result, (result.folder / "answer.txt").read_bytes().decode()))
        return {"reward": 2.0, "success": False, "note": "scored"}

    tasks = [{"question": "code of a", "answer": "7"}]
    agent = build_agent(tmp_path, TWO_TURNS_AGENT, tasks, reward=score, private=["answer"])
    (rollout,) = play(agent, policy)
    ((task, calls, result, answer),) = seen
    assert task == tasks[0] and result.exit_code == 0
    assert result.score == {"reward": 0.5, "note": "printed"}
    assert [call.conversation for call in calls] == [1, 1]
    assert calls[1].messages[1]["content"] == calls[0].reply["content"]
    assert answer == calls[1].reply["content"]
    assert (rollout.reward, rollout.success) == (2.0, False)
    assert rollout.trajectory.info["note"] == "scored"
    assert not result.folder.exists(), "the folder is removed with its episode"


def test_private_columns_are_not_given_to_the_agent(tmp_path, policy):
    code = """
reply([user("x")])
shown = json.load(open("task.json")) | json.loads(os.environ["TASK"])
print(json.dumps({"reward": float("answer" in shown), "question": os.environ["TASK_QUESTION"]}))
"""
    tasks = [{"question": "code of a", "answer": "7"}]
    agent = build_agent(tmp_path, code, tasks, reward=None, private=["answer"])
    (rollout,) = play(agent, policy)
    assert rollout.reward == 0.0 and rollout.trajectory.row == tasks[0]
    assert rollout.trajectory.info["question"] == "code of a"


@pytest.mark.parametrize("post", ["3", '{"reward": 3, "success": false}'])
def test_a_posted_score_is_the_reward(tmp_path, policy, post):
    code = f"reply([user('x')])\nassert send('/reward', {post.replace('false', 'False')}).status == 200"
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy)
    assert (rollout.reward, rollout.success) == (3.0, "success" not in post)


def test_an_edited_history_begins_a_new_context(tmp_path, policy):
    code = """
messages = [user("one"), reply([user("one")])]
reply([*messages, user("two")])
messages[1] = {"role": "assistant", "content": messages[1]["content"] + "!"}
reply([*messages, user("two")])
"""
    (rollout,) = play(build_agent(tmp_path, code), policy)
    assert len(rollout.context_starts) == 1 and len(rollout.trajectory.turns) == 3
    start = rollout.context_starts[0]
    first_reply = rollout.trajectory.turns[0].action
    history = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first_reply + "!"},
        {"role": "user", "content": "two"},
    ]
    prompt = policy.renderer.encode_history_prompt(history)
    assert rollout.completion_ids[start : start + len(prompt)] == prompt
    assert not any(rollout.loss_mask[start : start + len(prompt)])
    assert [turn.info["conversation"] for turn in rollout.trajectory.turns] == [1, 1, 2]
    recomputed = recompute_logprobs(policy, rollout)
    for n in np.flatnonzero(rollout.loss_mask):
        assert rollout.sampler_logprobs[n] == pytest.approx(recomputed[n], abs=1e-4)


def test_two_conversations_are_two_contexts(tmp_path, policy):
    code = """
main, helper = [user("main")], [user("helper")]
for n in range(2):
    for messages in (main, helper):
        messages += [reply(messages), user(f"more {n}")]
"""
    (rollout,) = play(build_agent(tmp_path, code), policy)
    contexts = split_contexts(rollout)
    assert len(contexts) == 2
    infos = [
        {name: turn.info[name] for name in ("call", "conversation")}
        for turn in rollout.trajectory.turns
    ]
    assert infos == [
        {"call": 1, "conversation": 1},
        {"call": 3, "conversation": 1},
        {"call": 2, "conversation": 2},
        {"call": 4, "conversation": 2},
    ]
    turns = build_sample_turns(rollout, 1.0)  # in the order of the calls
    starts = [rollout.context_starts[0] if n % 2 else 0 for n in range(4)]
    assert [turn.tokens.start >= start for turn, start in zip(turns, starts, strict=True)] == [
        True
    ] * 4
    assert turns[0].tokens.start < turns[2].tokens.start < starts[1] < turns[1].tokens.start
    assert [turn.state for turn in turns[2:]] == [("observation", "more 0")] * 2
    assert turns[0].state == ("prompt", *rollout.prompt_ids)
    assert turns[1].state == ("prompt", *contexts[1][: turns[1].tokens.start - starts[1]])


def test_choices_and_calls_in_parallel_do_not_depend_on_their_order(tmp_path, policy):
    code = """
order = [0, 1, 2] if int(os.environ["AGENT_SEED"]) is None else {order}
results = {{}}
barrier = threading.Barrier(3)

def work(n):
    barrier.wait()
    time.sleep(0.02 * order.index(n))
    results[n] = ask([user(f"part {{n}}")], n=2, temperature=1.0)

threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
[t.start() for t in threads]
reply([user("while the others wait " * 3)], max_tokens=40)
[t.join() for t in threads]
texts = {{n: [c["message"]["content"] for c in results[n]["choices"]] for n in results}}
print(json.dumps({{"reward": 1, "texts": json.dumps(texts, sort_keys=True)}}))
"""
    texts, digests = [], []
    for number, order in enumerate(([0, 1, 2], [2, 0, 1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        (rollout,) = play(build_agent(folder, code.format(order=order), reward=None), policy)
        texts.append(rollout.trajectory.info["texts"])
        digests.append(sorted(map(tuple, split_contexts(rollout))))
        assert len(split_contexts(rollout)) == 7
    assert texts[0] == texts[1] and digests[0] == digests[1]
    choices = json.loads(texts[0])
    assert choices["0"][0] != choices["0"][1], "choices have their own random numbers"


def test_a_stream_has_the_tokens_of_the_plain_answer(tmp_path, policy):
    code = """
stream = send("/chat/completions", {"model": "policy", "messages": [user("x")], "max_tokens": 12,
    "stream": True, "stream_options": {"include_usage": True}})
lines = [line.decode().strip() for line in stream if line.strip()]
assert lines[-1] == "data: [DONE]", lines
chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
assert chunks[-1]["usage"]["completion_tokens"] > 0
print(json.dumps({"reward": 1, "text": text, "chunks": len(chunks)}))
"""
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy)
    assert rollout.trajectory.info["text"] == rollout.trajectory.turns[0].action
    assert rollout.trajectory.info["chunks"] > 2, "text comes as it is sampled"
    plain = "reply([user('x')], max_tokens=12)\nprint('{\"reward\": 1}')"
    folder = tmp_path / "plain"
    folder.mkdir()
    (other,) = play(build_agent(folder, plain, reward=None), policy)
    assert other.completion_ids == rollout.completion_ids


def test_tool_calls_have_ids_and_their_results_continue_the_context(tmp_path, policy, monkeypatch):
    monkeypatch.setattr(type(policy.renderer), "action_text", lambda self, ids: "lookup a")
    code = """
tools = [{"type": "function", "function": {"name": "lookup", "parameters": {
    "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}}]
messages = [user("x")]
for stream in (False, True):
    if stream:
        lines = [l.decode().strip() for l in send("/chat/completions", {"messages": messages, "tools": tools,
            "stream": True}) if l.strip()]
        deltas = [json.loads(l[6:])["choices"][0]["delta"] for l in lines[:-1]]
        calls = next(d["tool_calls"] for d in deltas if d.get("tool_calls"))
    else:
        message = reply(messages, tools=tools, max_tokens=60)
        calls = message["tool_calls"]
        assert message["content"] is None
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "7"})
    assert json.loads(calls[0]["function"]["arguments"]) == {"name": "a"}, calls
print(json.dumps({"reward": 1, "id": calls[0]["id"]}))
"""
    agent = build_agent(tmp_path, code, reward=None)
    rollouts = [play(agent, policy, max_completion_tokens=200, stop=("lookup",)) for _ in range(2)]
    ((first,), (second,)) = rollouts
    assert not first.context_starts and first.trajectory.turns[0].observation == "7"
    assert first.trajectory.turns[0].tool_call.arguments == {"name": "a"}
    assert first.trajectory.info["id"] == second.trajectory.info["id"] != ""


def test_own_sampling_of_a_request(tmp_path, policy):
    code = """
greedy = [reply([user("x")], temperature=0)["content"] for _ in range(2)]
assert greedy[0] == greedy[1] or task["question"] == "run"
reply([user("y")], temperature=0.5, max_tokens=20)
reply([user("z")], temperature=0.5, top_p=0.3)
print(json.dumps({"reward": 1}))
"""
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy)
    assert rollout.temperature == 0.5
    contexts = split_contexts(rollout)
    assert len(contexts) == 4 and sum(rollout.loss_mask) > 0
    masks = np.split(np.array(rollout.loss_mask), rollout.context_starts)
    assert [bool(mask.any()) for mask in masks] == [False, False, True, False]
    turns = rollout.trajectory.turns
    assert [turn.is_trained for turn in turns] == [False, False, True, False]
    credited = build_sample_turns(rollout, 1.0)
    assert [len(turn.tokens) for turn in credited] == [0, 0, turns[2].num_tokens, 0]
    assert [turn.reward for turn in credited] == [0, 0, 0, rollout.reward] != [0] * 4
    assert rollout.trajectory.num_action_tokens == int(masks[2].sum())
    agent = build_agent(tmp_path, code, [{"question": "run"}], reward=None, sampling="run")
    (other,) = play(agent, policy, temperature=1.3)
    assert other.temperature == 1.3 and all(
        mask.any() for mask in np.split(np.array(other.loss_mask), other.context_starts)
    ), "the run's sampling replaces the agent's"


def test_answers_under_rules_carry_no_loss(tmp_path, policy):
    """Their log-probs are of another distribution than the policy's; a demanded call is left to the policy."""
    code = """
tools = [{"type": "function", "function": {"name": "lookup"}}]
reply([user("a")], max_tokens=9)
reply([user("b")], max_tokens=9, presence_penalty=1.0)
reply([user("c")], max_tokens=9, logit_bias={"70": 5})
demanded = reply([user("d")], max_tokens=9, tools=tools, tool_choice="required")
assert demanded["content"], demanded
print(json.dumps({"reward": 1}))
"""
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy)
    turns = rollout.trajectory.turns
    assert [turn.is_trained for turn in turns] == [True, False, False, True]
    agent = build_agent(tmp_path, code, reward=None, sampling="run")
    (other,) = play(agent, policy)
    assert all(turn.is_trained for turn in other.trajectory.turns), "the run's sampling counts"


def test_a_schema_restricts_the_answers_of_an_agent(tmp_path, policy):
    pytest.importorskip("llguidance")
    code = """
schema = {"enum": ["a", "b"]}
form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
values = [reply([user("a")], response_format=form)["content"] for _ in range(4)]
assert set(values) <= {'"a"', '"b"'}, values
reply([user("b")], max_tokens=9)
print(json.dumps({"reward": 1, "values": values}))
"""
    rollouts = [
        play(build_agent(tmp_path, code, reward=None, sampling=kind), policy)[0]
        for kind in ("agent", "agent", "run")
    ]
    for rollout in rollouts:
        trained = [turn.is_trained for turn in rollout.trajectory.turns]
        assert trained == [False, False, False, False, True]
    values = [rollout.trajectory.info["values"] for rollout in rollouts]
    assert values[0] == values[1], "the same episode gives the same answers"


@pytest.mark.parametrize("preset", ["tiny", "nano"])
def test_concurrent_episodes_have_their_own_answers_and_repeat_bit_for_bit(tmp_path, preset):
    """Whatever the speed of the agents is; compiled decoding gives the same bits with other episodes, too."""
    code = "time.sleep(float(open(task['path']).read()) * (os.getpid() % 3))\n" + TWO_TURNS_AGENT
    path = tmp_path / "seconds"
    tasks = [{"question": f"code of {name}", "path": str(path)} for name in "abc"]
    agent = build_agent(tmp_path, code, tasks, reward=None, readable=[str(tmp_path)])
    policy = build_policy(preset=preset)
    path.write_text("0.2")
    rollouts = play(agent, policy, group_size=3, max_concurrent_steps=5)
    assert len(rollouts) == 9
    assert len({tuple(row.completion_ids) for row in rollouts}) == 9
    path.write_text("0.01")
    again = play(agent, policy, group_size=3, max_concurrent_steps=2 if preset == "tiny" else 5)
    for row, other in zip(rollouts, again, strict=True):
        assert row.completion_ids == other.completion_ids and row.loss_mask == other.loss_mask
        assert [x.hex() for x in row.sampler_logprobs] == [x.hex() for x in other.sampler_logprobs]
        assert row.trajectory == other.trajectory


def test_an_agent_that_fails_is_left_out_with_its_log(tmp_path, policy):
    code = """
print("before", file=sys.stderr)
reply([user("x")])
if task["kind"] == "crash": raise ValueError("broken agent")
if task["kind"] == "hang": time.sleep(60)
if task["kind"] == "kill": os.kill(os.getpid(), 9)
if task["kind"] == "memory": block = bytearray(2**28); time.sleep(60)
"""
    kinds = ["fine", "crash", "hang", "kill", "memory"]
    tasks = [{"question": kind, "kind": kind} for kind in kinds]
    failed = []
    began = time.monotonic()
    agent = build_agent(tmp_path, code, tasks, timeout_s=4.0, memory_gib=0.2)
    rollouts = play(agent, policy, failed=failed)
    assert time.monotonic() - began < 30
    assert [row.trajectory.kind for row in rollouts] == ["fine"]
    errors = {episode.trajectory.kind: episode for episode in failed}
    assert "exit code 1: ValueError: broken agent" in errors["crash"].error
    assert "before" in errors["crash"].trace and "broken agent" in errors["crash"].trace
    assert "has not ended within 4 s" in errors["hang"].error
    assert "sampling.max_concurrent_steps" in errors["hang"].error
    assert "SIGKILL" in errors["kill"].error or "exit code 137" in errors["kill"].error
    assert "above options.memory_gib" in errors["memory"].error
    crashed = errors["crash"]
    assert crashed.failed_in == "the agent" and crashed.trajectory.stop_reason == "failed"
    assert len(crashed.trajectory.turns) == 1 and crashed.messages[0]["content"] == "x"


def test_an_agent_without_a_call_or_a_reward_is_named(tmp_path, policy):
    failed = []
    assert play(build_agent(tmp_path, "print('hello')"), policy, failed=failed) == []
    assert "without a call of the policy" in failed[0].error
    failed.clear()
    agent = build_agent(tmp_path, "reply([user('x')])", reward=None)
    assert play(agent, policy, failed=failed) == []
    assert failed[0].failed_in == "its reward" and "options.reward" in failed[0].error
    failed.clear()

    def broken(task, calls, result):
        raise KeyError("column")

    agent = build_agent(tmp_path, "reply([user('x')])", reward=broken)
    assert play(agent, policy, failed=failed) == []
    assert "KeyError: 'column'" in failed[0].error and "column" in failed[0].trace
    with pytest.raises(EnvironmentFault, match="without a call"):
        play(build_agent(tmp_path, "pass"), policy, max_failed_share=0.0)


def test_a_crash_can_be_scored(tmp_path, policy):
    code = "reply([user('x')])\nsys.exit(3)"

    def score(task, calls, result):
        return float(result.exit_code)

    (rollout,) = play(build_agent(tmp_path, code, reward=score, crash="score"), policy)
    assert rollout.reward == 3.0


def test_limits_of_the_run_cut_the_episode_off(tmp_path, policy):
    code = """
messages = [user("x")]
try:
    for n in range(9):
        messages += [reply(messages), user("more")]
except urllib.error.HTTPError as error:
    detail = json.load(error)["error"]
    assert error.code == 400 and detail["code"] == "context_length_exceeded", detail
    assert error.headers["x-should-retry"] == "false"
    print(json.dumps({"reward": len(messages), "message": detail["message"]}))
"""
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy, max_turns=3)
    assert rollout.trajectory.stop_reason == StopReason.MAX_TURNS and rollout.is_truncated
    assert rollout.reward == 7.0 and "sampling.max_turns" in rollout.trajectory.info["message"]
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy, max_completion_tokens=20)
    assert rollout.trajectory.stop_reason == StopReason.MAX_TOKENS
    assert rollout.num_episode_tokens <= 20
    (rollout,) = play(build_agent(tmp_path, code, reward=None, context=40), policy)
    assert "environment.options.context" in rollout.trajectory.info["message"]
    crash = "messages = [user('x')]\nwhile True: messages += [reply(messages), user('more')]"
    (rollout,) = play(build_agent(tmp_path, crash, reward=None), policy, max_turns=2)
    assert rollout.reward == 0.0 and rollout.success is False, "a limit is no failure of the agent"


def test_a_request_with_another_key_is_refused(tmp_path, policy):
    code = """
def status(path, body, **options):
    try:
        return send(path, body, **options).status
    except urllib.error.HTTPError as error:
        return error.code

body = {"messages": [user("x")], "max_tokens": 4}
url = os.environ["OPENAI_BASE_URL"]
seen = [
    status("/chat/completions", body, key="sk-other"),
    status("/chat/completions", body, url=url.replace("/e/0/", "/e/1/").replace("/e/2/", "/e/1/")),
    status("/chat/completions", body),
    status("/completions", body),
    status("/chat/completions", {"messages": []}),
    status("/chat/completions", {"messages": [user("x")], "response_format": {"type": "yaml"}}),
    status("/reward", "many"),
]
request = urllib.request.Request(url + "/models", headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
models = json.load(urllib.request.urlopen(request))["data"]
print(json.dumps({"reward": 1, "seen": seen, "model": models[0]["id"]}))
"""
    tasks = [{"question": "0"}, {"question": "1"}, {"question": "2"}]
    rollouts = play(build_agent(tmp_path, code, tasks, reward=None), policy)
    for number in (0, 2):  # episode 1 is asked by the others with their own keys
        info = rollouts[number].trajectory.info
        assert info["seen"] == [401, 401, 200, 404, 422, 400, 422] and info["model"] == "policy"
    assert all(len(row.trajectory.turns) == (2 if n == 1 else 1) for n, row in enumerate(rollouts))


def test_proxies_do_not_capture_the_requests(tmp_path, policy, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    code = "assert os.environ['http_proxy']\nreply([user('x')])"
    agent = build_agent(tmp_path, code, pass_variables=["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
    assert len(play(agent, policy)) == 1

    def run(task, client):
        return float(len(client.chat([{"role": "user", "content": "x"}])["content"]) >= 0)

    assert len(play(rl_core.Agent(run, [{"prompt": "x"}], heldout=0), policy)) == 1


def test_a_confined_agent_sees_its_folder_and_no_secrets(tmp_path, policy, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    code = """
reply([user("x")])
open("kept.txt", "w").write("here")
try:
    open("/etc/agent-was-here", "w")
    wrote = True
except OSError:
    wrote = False
print(json.dumps({"reward": 1, "wrote": wrote, "token": os.environ.get("SECRET_TOKEN", ""),
    "folder": sorted(os.listdir("."))}))
"""
    (rollout,) = play(build_agent(tmp_path, code, reward=None), policy)
    info = rollout.trajectory.info
    assert info["token"] == "" and info["folder"] == ["kept.txt", "task.json"]
    assert not info["wrote"]


def test_functions_sync_and_async(policy):
    def run(task, client):
        reply = client.chat([{"role": "user", "content": task["prompt"]}], max_tokens=6)
        return {"reward": len(reply["content"]), "seed": client.seed}

    async def run_async(task, client):
        reply = await client.chat_async([{"role": "user", "content": task["prompt"]}], max_tokens=6)
        return {"reward": len(reply["content"]), "seed": client.seed}

    rows = [play(rl_core.Agent(f, ["code of a"], heldout=0), policy) for f in (run, run_async)]
    ((first,), (second,)) = rows
    assert first.completion_ids == second.completion_ids and first.reward == second.reward
    assert first.trajectory.info == second.trajectory.info

    def crash(task, client):
        client.chat([{"role": "user", "content": "x"}], max_tokens=4)
        raise SystemExit(3)

    def hang(task, client):
        while True:
            time.sleep(0.01)

    failed = []
    assert play(rl_core.Agent(crash, ["x"], heldout=0), policy, failed=failed) == []
    assert play(rl_core.Agent(hang, ["x"], heldout=0, timeout_s=1), policy, failed=failed) == []
    assert "raised SystemExit: 3" in failed[0].error and "has not ended" in failed[1].error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ""}, "options.command: is empty"),
        (
            {"command": "no-such-program x"},
            "options.command: there is no program 'no-such-program'",
        ),
        ({"command": "python no_such_file.py"}, "options.command: no such file"),
        ({"command": "no_such_module:run"}, "options.command: module 'no_such_module'"),
        ({"tasks": "no.jsonl"}, "options.tasks: no such file"),
        ({"reward": "json:nothing"}, "options.reward: no function 'nothing'"),
        ({"reward": "json:loads"}, r"options.reward: 'json:loads' takes"),
        ({"private": ["answr"]}, "options.private: no task has a column 'answr'"),
        ({"heldout": 1.5}, "options.heldout: 1.5"),
        ({"timeout_s": 0.0}, "timeout_s and memory_gib must be above 0"),
        ({"sampling": "mine"}, "options.sampling: 'mine' is not one of"),
    ],
)
def test_options_are_checked_before_anything_runs(options, message):
    tasks = [{"question": str(n), "answer": "1"} for n in range(10)]
    values = {"command": "python -c pass", "tasks": tasks, **options}
    with pytest.raises(SettingsError, match=message):
        make_environment("agent", values)


def test_tasks_are_split_by_content_and_level():
    tasks = [{"question": str(n), "level": "even" if n % 2 == 0 else "odd"} for n in range(40)]
    agent = rl_core.Agent("python -c pass", tasks, heldout=0.25)
    assert agent.levels == ("even", "odd")
    train = [
        agent.episode(s, level).row
        for level in agent.levels
        for s in agent.seeds_of("train", level)
    ]
    held = [
        agent.episode(s, level).row
        for level in agent.levels
        for s in agent.seeds_of("heldout", level)
    ]
    assert len(train) + len(held) == 40 and len(held) > 2
    assert not {r["question"] for r in train} & {r["question"] for r in held}
    with pytest.raises(EnvironmentFault, match="played by its agent"):
        agent.episode(0, agent.levels[0]).step("x")


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "ppo", "turn_credit"])
def test_a_function_is_trained_on_all_of_its_conversations(algorithm):
    def run(task, client):
        texts = [
            client.chat([{"role": "user", "content": f"{n} {task['prompt']}"}], max_tokens=5)
            for n in range(2)
        ]
        return float(sum(len(text["content"]) for text in texts))

    by_turn = rl_core.TurnCreditSettings() if algorithm == "turn_credit" else None
    settings = rl_core.PolicySettings(
        algorithm="grpo" if by_turn else algorithm,
        turn_credit=by_turn,
        iterations=2,
        prompts_per_iteration=2,
        group_size=2,
        learning_rate=1e-3,
        warmup_steps=0,
        sampling=rl_core.SamplingSettings(max_completion_tokens=40),
    )
    policy = build_policy(preset="nano")
    training = rl_core.policy_gradient(policy, agent=run, prompts=["a", "b"], settings=settings)
    before = [weight.detach().clone() for weight in training.model.parameters()]
    training.run()
    metrics = training.metrics()
    assert metrics["policy/loss"].notna().all() and metrics["reward/mean"].iloc[0] > 0
    assert metrics["policy/sampler_difference_max"].max() < 1e-4
    pairs = zip(before, training.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


def test_a_reward_of_trajectories_needs_no_other():
    def run(task, client):
        client.chat([{"role": "user", "content": task["prompt"]}], max_tokens=5)

    def reward(trajectories, answer):
        lengths = [len(trajectory.turns[-1].action) for trajectory in trajectories]
        return [1000 * float(text) + length for text, length in zip(answer, lengths, strict=True)]

    tasks = [{"prompt": "a", "answer": "2"}, {"prompt": "b", "answer": "2"}]
    settings = rl_core.PolicySettings(
        iterations=1,
        prompts_per_iteration=2,
        group_size=2,
        sampling=rl_core.SamplingSettings(max_completion_tokens=40),
    )
    training = rl_core.grpo(
        build_policy(preset="nano"), agent=run, prompts=tasks, reward=reward, settings=settings
    )
    training.run()
    assert training.metrics()["reward/mean"].iloc[0] >= 2000
    with pytest.raises(SettingsError, match="agent: takes its tasks from prompts"):
        rl_core.grpo(build_policy(preset="nano"), agent=run)


TRAINING = """
import sys
from helpers.agents import TWO_TURNS_AGENT, build_agent, build_policy
import rl_core

folder, output = sys.argv[1:]
tasks = [{"question": f"code of {name}"} for name in "abcd"]
agent = build_agent(folder, TWO_TURNS_AGENT, tasks)
settings = rl_core.PolicySettings(
    iterations=3, prompts_per_iteration=2, group_size=2, learning_rate=1e-2, warmup_steps=0,
    checkpoint_every=1, sampling=rl_core.SamplingSettings(max_completion_tokens=60),
)
rl_core.grpo(build_policy(), environment=agent, settings=settings, output=output).run()
"""


@pytest.mark.slow
def test_a_killed_training_resumes_bit_for_bit(tmp_path):
    def train(output, **variables):
        return subprocess.run(
            [sys.executable, "-c", TRAINING, str(tmp_path), str(tmp_path / output)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr
    killed = train("killed", POSTTRAIN_FAULT="rollouts.played:2:kill")
    assert killed.returncode == -signal.SIGKILL
    resumed = train("killed")
    assert resumed.returncode == 0, resumed.stderr
    expected, resumed_rows = (
        [
            {name: repr(value) for name, value in row.items() if not name.startswith("perf/")}
            for row in rl_core.read_metrics(tmp_path / name).to_dict("records")
        ]
        for name in ("whole", "killed")
    )
    assert len(expected) == 3 and resumed_rows == expected
    rows = [(tmp_path / name / "rewards.jsonl").read_text() for name in ("whole", "killed")]
    assert rows[0] == rows[1] and rows[0].count("\n") == 12, "no episode counts twice"


def test_the_folder_of_a_killed_episode_is_removed_by_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, running = AgentFolder({"question": "a"}), AgentFolder({})
    assert json.loads(killed.task.read_text()) == {"question": "a"}
    (killed.work / "left").mkdir()
    killed._session.release_lock()
    agent_process._remove_stale_folders.cache_clear()
    new = AgentFolder({})
    assert not killed.work.exists() and running.work.is_dir()
    new.remove()
    running.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_agent_dies_with_the_trainer(tmp_path):
    """A trainer that is killed in the middle of an episode leaves no agent behind."""
    code = "reply([user('x')])\nopen(task['path'], 'w').write(str(os.getpid()))\ntime.sleep(120)"
    script = f"""
import sys
from helpers.agents import build_agent, build_policy, play
tasks = [{{"question": "x", "path": sys.argv[2]}}]
play(build_agent(sys.argv[1], {code!r}, tasks, timeout_s=120.0, sandbox=False), build_policy())
"""
    pid_file = tmp_path / "pid"
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(pid_file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text(), "the agent", 300)
        agent = Path("/proc") / pid_file.read_text()
        assert agent.exists()
    finally:
        trainer.kill()
        trainer.wait()
    wait_for(lambda: not agent.exists(), "the end of the agent", 10)
