"""Recorded sessions of `posttrain serve --record`: what is recorded, scored once, and used as demonstrations."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import httpx
import pytest
import torch
from helpers.serving import TOKEN, RunningServer, make_folder_of_model, running_server
from helpers.waiting import free_ports, wait_for

import rl_core
from rl_core.api.data import load_conversations
from rl_core.data.records import read_demonstrations
from rl_core.data.token_ids import find_textless_ids
from rl_core.errors import DataError, FolderBusy, RecordsError
from rl_core.storage import faults
from rl_core.storage.append_log import read_records

LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


@pytest.fixture
def recording(tmp_path, model_folder):
    with running_server(tmp_path / "serving", model_folder, record=True) as server:
        yield server


def open_session(server, task="17", status=201, **options):
    response = server.client.post("/v1/sessions", json={"task": task, **options})
    assert response.status_code == status, response.text
    return response.json()


def ask(session, messages, status=200, key=None, **options):
    """Return the reply to the agent's request; messages are texts of the user or whole messages."""
    messages = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    response = httpx.post(
        f"{session['base_url']}/chat/completions",
        json={"model": "any", "messages": messages, "max_tokens": 12, **options},
        headers={"Authorization": f"Bearer {key or session['api_key']}"},
        timeout=60,
    )
    assert response.status_code == status, response.text
    if status != 200:
        return response.json()["error"]
    if options.get("stream"):
        chunks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        parts = [json.loads(c)["choices"][0]["delta"].get("content") for c in chunks[:-1]]
        return {"role": "assistant", "content": "".join(part or "" for part in parts)}
    return response.json()["choices"][0]["message"]


def score(server, session, status=200, **values):
    path = f"/v1/sessions/{session['id']}/score"
    response = server.client.post(path, json={"reward": 1.0, **values})
    assert response.status_code == status, response.text
    return response.json()


def read_episodes(folder):
    return list(read_records(folder / "recorded" / "episodes.jsonl"))


def split_runs(sequence):
    """Return (start, end) of the observed and of the sampled runs."""
    edges = list(pairwise([0, *accumulate(sequence["runs"])]))
    return edges[::2], edges[1::2]


def test_an_episode_is_recorded_as_tokens_logprobs_and_versions(recording):
    session = open_session(recording, seed=3, tenant="a")
    messages = ["row 2"]
    messages.append(ask(session, messages, temperature=0.7))
    messages.append("column 3")
    messages.append(ask(session, messages, stream=True))
    side = ask(session, ["another conversation"])
    assert score(recording, session, reward=0.5, success=True, info={"note": 1}) == {
        "id": session["id"],
        "object": "session.score",
        "repeated": False,
    }
    (row,) = read_episodes(recording.server.folder)
    names = ("session", "task", "seed", "tenant", "reward", "success", "info")
    expected = [session["id"], "17", 3, "a", 0.5, True, {"note": 1}]
    assert [row[name] for name in names] == expected
    assert [m["content"] for m in row["messages"]][::2] == ["row 2", "column 3"]
    main, other = row["sequences"]
    assert [len(s["versions"]) for s in row["sequences"]] == [2, 1]
    assert main["temperatures"] == [0.7, 1.0] and main["versions"] == [0, 0]
    renderer = recording.server.prompt_builder.renderer
    texts = [
        renderer.action_text(s["ids"][start:end])
        for s in row["sequences"]
        for start, end in split_runs(s)[1]
    ]
    replies = [messages[1], messages[3], side]
    assert texts == [reply["content"] for reply in replies]
    model = copy.deepcopy(recording.server.model.model).double()  # an oracle
    size = model.get_input_embeddings().weight.shape[0]
    textless = sorted(find_textless_ids(renderer.tokenizer, size))
    for sequence in (main, other):
        ids = torch.tensor(sequence["ids"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        logits[:, textless] = -torch.inf
        expected = []
        for (start, end), heat in zip(
            split_runs(sequence)[1], sequence["temperatures"], strict=True
        ):
            logps = torch.log_softmax(logits[start - 1 : end - 1] / heat, -1)
            expected += logps.gather(1, ids[start:end, None])[:, 0].tolist()
        assert sequence["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_task_and_a_seed_give_the_same_episode(recording):
    def play(seed, task="17"):
        session = open_session(recording, task=task, seed=seed)
        first = ask(session, ["row 2"])
        return first["content"], ask(session, ["row 2", first, "and?"])["content"]

    alone = play(5)
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(play, (4, 5, 6, 5)))
    assert together[1] == together[3] == alone
    assert len({alone, together[0], together[2], play(5, task="18")}) == 4


def test_keys_belong_to_their_session(recording):
    first, second = open_session(recording), open_session(recording)
    assert ask(first, ["x"], status=401, key=second["api_key"])["code"] == "invalid_api_key"
    ask(first, ["x"], status=401, key=TOKEN)
    ask(first, ["x"])
    headers = {"Authorization": f"Bearer {first['api_key']}"}
    for path, body in (("score", {"reward": 1}), ("", None)):
        url = f"{recording.url}/v1/sessions/{first['id']}/{path}".rstrip("/")
        sent = httpx.request("POST" if body else "GET", url, json=body, headers=headers)
        assert sent.status_code == 401, "an agent neither scores nor inspects"
    assert httpx.post(f"{recording.url}/v1/sessions", json={"task": "1"}).status_code == 401
    models = httpx.get(f"{first['base_url']}/models", headers=headers)
    assert models.json()["data"][0]["id"] == "small"


def test_a_score_counts_once_and_is_final(recording, model_folder):
    session, empty = open_session(recording), open_session(recording)
    assert score(recording, empty, status=409)["error"]["code"] == "session_empty"
    ask(session, ["row 2"])
    with ThreadPoolExecutor(8) as threads:
        sent = list(threads.map(lambda _: score(recording, session), range(8)))
    assert sorted(reply["repeated"] for reply in sent) == [False] + [True] * 7
    assert score(recording, session, status=409, reward=0.0)["error"]["code"] == "session_scored"
    assert ask(session, ["x"], status=404)["code"] == "session_not_open"
    assert len(read_episodes(recording.server.folder)) == 1
    with pytest.raises(FolderBusy):
        RunningServer(recording.server.folder, model_folder, record=True)
    recording.stop()
    with running_server(recording.server.folder, model_folder, record=True) as again:
        again.server.recorded.file._scores.clear()  # as of an old session: looked up in the file
        assert score(again, session)["repeated"]
        score(again, session, status=409, reward=0.0)
        score(again, empty, status=404)
        assert len(read_episodes(again.server.folder)) == 1


def test_a_full_disk_loses_no_session(recording, monkeypatch):
    session = open_session(recording)
    reply = ask(session, ["row 2"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "no space")))
        score(recording, session, status=503)
    assert ask(session, ["row 2", reply, "x"], status=409)["code"] == "session_scored"
    assert not score(recording, session)["repeated"]
    assert len(read_episodes(recording.server.folder)) == 1


def test_a_session_is_not_dropped_while_its_score_is_recorded(recording, monkeypatch):
    session, began, may_end = open_session(recording), threading.Event(), threading.Event()
    ask(session, ["x"])
    file = recording.server.recorded.file
    append_episode = file.append_episode

    def append_late(row):
        began.set()
        assert may_end.wait(30)
        append_episode(row)

    monkeypatch.setattr(file, "append_episode", append_late)
    with ThreadPoolExecutor(1) as threads:
        scored = threads.submit(score, recording, session)
        assert began.wait(30)
        dropped = recording.client.delete(f"/v1/sessions/{session['id']}")
        may_end.set()
        assert scored.result()["repeated"] is False
    assert dropped.status_code == 409 and dropped.json()["error"]["code"] == "session_scored"
    assert recording.server.recorded.counts == {"opened": 1, "scored": 1}
    assert len(read_episodes(recording.server.folder)) == 1


def test_limits_bound_sessions_tenants_and_time(tmp_path, model_folder):
    limits = dict(max_sessions=3, max_tenant_sessions=2, session_calls=2, session_tokens=40)
    with running_server(tmp_path, model_folder, record=True, **limits) as server:
        first = open_session(server, tenant="a")
        open_session(server, tenant="a")
        assert (
            "max_tenant_sessions"
            in open_session(server, status=429, tenant="a")["error"]["message"]
        )
        third = open_session(server, tenant="b", seconds=0.3)
        assert "max_sessions" in open_session(server, status=429, tenant="c")["error"]["message"]
        wait_for(
            lambda: len(server.client.get("/v1/sessions").json()["data"]) == 2, "the third's end"
        )
        ask(third, ["x"], status=404)
        score(server, third, status=404)
        server.client.delete(f"/v1/sessions/{first['id']}").raise_for_status()
        ask(first, ["x"], status=404)
        session = open_session(server, tenant="a")
        ask(session, ["x"], max_tokens=2)
        ask(session, ["y"], max_tokens=2)
        assert "2 calls" in ask(session, ["z"], status=400)["message"]
        long = open_session(server, tenant="b")
        ask(long, ["x"], max_tokens=200)
        body = server.client.get(f"/v1/sessions/{long['id']}").json()
        assert body["num_answers"] == 1 and 0 < body["num_tokens"] <= 40
        report = server.client.get("/v1/sessions").json()
        assert report["counts"] == {"opened": 5, "expired": 1, "dropped": 1}
        assert report["num_episodes"] == 0 and len(report["data"]) == 3


def test_bad_bodies_are_refused_by_name(recording, tmp_path, model_folder):
    for body, field in (
        ({}, "task"),
        ({"task": ""}, "task"),
        ({"task": "1", "seed": -1}, "seed"),
        ({"task": "1", "seconds": 0}, "seconds"),
        ({"task": "1", "user": "x"}, "user"),
    ):
        response = recording.client.post("/v1/sessions", json=body)
        assert response.status_code == 422 and field in response.json()["error"]["message"]
    session = open_session(recording)
    ask(session, ["x"])
    path = f"/v1/sessions/{session['id']}/score"
    infinite = ('{"reward": 1, "info": {"loss": NaN}}', '{"reward": 1, "info": {"loss": 1e999}}')
    for text in ('{"reward": NaN}', '{"reward": "1"}', "{}", '{"reward": true}', "[]", *infinite):
        assert recording.client.post(path, content=text).status_code == 422, text
    assert "role" in ask(session, [{"role": "robot", "content": "x"}], status=422)["message"]
    with running_server(tmp_path / "plain", model_folder) as server:
        assert "--record" in open_session(server, status=404)["error"]["message"]


def test_an_abandoned_stream_ends_its_call(recording):
    session = open_session(recording)
    body = {"model": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    with httpx.stream(
        "POST", f"{session['base_url']}/chat/completions", json=body, headers=headers
    ) as response:
        next(response.iter_raw(1))
    record = recording.server.recorded.find_session(session["id"]).record
    wait_for(lambda: not record._in_flight, "the end of the call")
    wait_for(lambda: recording.state.active == 0, "the slot")
    assert score(recording, session, status=409)["error"]["code"] == "session_empty"


def test_episodes_are_demonstrations_with_exact_tokens(recording, tmp_path):
    for seed, reward in ((0, 1.0), (1, 0.0)):
        session = open_session(recording, task=f"task {seed}", seed=seed)
        first = ask(session, ["row 2"], tools=[LOOKUP])
        ask(session, ["row 2", first, "and?"], tools=[LOOKUP])
        ask(session, ["elsewhere"])
        score(recording, session, reward=reward)
    path = recording.server.recorded.file.path
    policy = rl_core.load_policy(recording.place.reference)
    rows = read_demonstrations(path)
    assert rows.formats == {"recorded episode": 2} and not rows.unread_columns
    good = [row for row in read_episodes(recording.server.folder) if row["reward"] >= 1]
    split = load_conversations(good, 0, policy.renderer, policy.context, 0)
    assert len(split.train) == 2
    for (ids, mask), sequence in zip(split.train, good[0]["sequences"], strict=True):
        observed, sampled = split_runs(sequence)
        assert ids == sequence["ids"]
        assert all(all(mask[start:end]) for start, end in sampled)
        assert not any(any(mask[start:end]) for start, end in observed)
        assert sum(mask) == len(sequence["logprobs"])
    last = load_conversations(good, 0, policy.renderer, policy.context, 0, "last").train[0][1]
    start, end = split_runs(good[0]["sequences"][0])[1][-1]
    assert [i for i, counts in enumerate(last) if counts] == list(range(start, end))
    settings = rl_core.SFTSettings(max_steps=1, batch_size=1, eval_every=0)
    rl_core.sft(policy, good, heldout=0, settings=settings).run()
    other = rl_core.load_policy(make_folder_of_model(tmp_path / "other", texts=["abc"] * 9))
    with pytest.raises(RecordsError, match="another tokenizer"):
        load_conversations(good, 0, other.renderer, other.context, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": None}, "reward: must be a finite number"),
        ({"sequences": [{"ids": [1, 2], "runs": [1, 2]}]}, "sum to 3, but there are 2"),
        ({"sequences": [{"ids": [1, 2], "runs": [2]}]}, "hold no sampled token"),
        ({"sequences": [{"ids": [1, -2], "runs": [1, 1]}]}, "integers from 0"),
        ({"sequences": []}, "sequences: must be a list"),
        ({"tokenizer": 5}, "tokenizer: must be text"),
        ({"messages": ["x"]}, r"messages\[0\]: must be a message"),
    ],
)
def test_damaged_rows_are_refused_by_field(change, words):
    row = {
        "reward": 1.0,
        "messages": [{"role": "user", "content": "x"}],
        "sequences": [{"ids": [1, 2], "runs": [1, 1]}],
        "tokenizer": "digest",
    }
    read_demonstrations([row])
    with pytest.raises((RecordsError, DataError), match=words):
        read_demonstrations([{**row, **change}])


@pytest.mark.slow
def test_killed_servers_lose_no_scored_session_and_count_none_twice(tmp_path, model_folder):
    assert "session.recorded" in faults.FAULT_POINTS
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "posttrain", "serve", str(model_folder), "--record"]
    command += ["--port", str(port), "--output", str(tmp_path), "--set", "serving.threads=1"]
    command += ["--set", "model.device=cpu"]
    url, acknowledged = f"http://127.0.0.1:{port}", {}

    class Server:
        url = f"http://127.0.0.1:{port}"
        client = httpx.Client(base_url=url, timeout=60)

    def run_until_killed(fault, score_again=()):
        environment = {**os.environ, "POSTTRAIN_FAULT": fault, "OMP_NUM_THREADS": "1"}
        with (tmp_path / "log").open("ab") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            wait_for(lambda: _is_ready(url, process), "the server", seconds=120)
            token = (tmp_path / "serving" / "token").read_text().strip()
            Server.client.headers["Authorization"] = f"Bearer {token}"
            repeated = [score(Server, session)["repeated"] for session in score_again]
            pending = None
            for number in range(3):
                pending = open_session(Server, task=str(number))
                ask(pending, ["row 2"])
                try:
                    score(Server, pending)
                except httpx.TransportError:
                    break
                acknowledged[pending["id"]] = pending
                pending = None
            return repeated, pending
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

    _, pending = run_until_killed("session.recorded:2:kill")
    assert pending is not None and len(acknowledged) == 1
    repeated, _ = run_until_killed("session.recorded:99:kill", [pending, *acknowledged.values()])
    assert repeated == [True, True], "the line was written before the kill"
    sessions = [row["session"] for row in read_episodes(tmp_path / "serving")]
    assert sorted(sessions) == sorted([*acknowledged, pending["id"]])
    assert len(set(sessions)) == 5


def _is_ready(url, process):
    assert process.poll() is None, "the server ended"
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        time.sleep(0.2)
        return False


def test_the_least_reward_selects_episodes_in_the_pipeline():
    from rl_core.data.row_sequences import CompressedRows
    from rl_core.errors import SettingsError
    from tasks.stages.prepare_data import LocatedRows, _select_rewarded_rows

    def select(rewards, least):
        rows = CompressedRows({"messages": [], "reward": reward} for reward in rewards)
        table, summary = LocatedRows(rows, "file", [("file", 1)] * len(rewards)), {}
        _select_rewarded_rows(table, least, summary)
        return [row["reward"] for row in table.rows], summary

    assert select([0.0, 1.0, 0.5, 1.0], 0.5)[0] == [1.0, 0.5, 1.0]
    assert select([0.0, 1.0], 1.0)[1] == {"demonstrations_below_min_reward": 1}
    assert select([None, None], None) == ([None, None], {})
    with pytest.raises(SettingsError, match="2 recorded episodes"):
        select([0.0, 1.0], None)
    with pytest.raises(SettingsError, match="no recorded episodes"):
        select([None], 1.0)
    with pytest.raises(DataError, match="has a reward of 2"):
        select([0.0, 1.0], 2.0)


def test_restricted_answers_of_a_session_are_marked(recording):
    """A session obeys the request; what was drawn under rules is marked in the file."""
    pytest.importorskip("llguidance")
    session = open_session(recording)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    messages = ["row 2"]
    messages.append(ask(session, messages, response_format=form, max_tokens=40))
    assert json.loads(messages[1]["content"]) in (1, 2)
    messages.append("again")
    messages.append(ask(session, messages))
    call = ask(session, ["x"], tools=[LOOKUP], tool_choice="required", max_tokens=60)
    assert call["tool_calls"][0]["function"] == {"name": "lookup", "arguments": "{}"}
    ask(session, ["y"], presence_penalty=1.0)
    ask(session, ["z"])
    error = ask(session, ["x"], response_format={"type": "yaml"}, status=400)
    assert error["param"] == "response_format"
    record = recording.server.recorded.find_session(session["id"]).record
    assert [record._can_train(answer) for answer in record.answers] == [
        False,
        True,
        False,
        False,
        True,
    ]
    score(recording, session)
    (row,) = read_episodes(recording.server.folder)
    marks = [sequence.get("has_rules") for sequence in row["sequences"]]
    assert marks == [[True, False], [True], [True], None]
    path = recording.server.folder / "recorded" / "episodes.jsonl"
    assert read_demonstrations(path).formats == {"recorded episode": 1}
