"""Chat API over a real port: answers, streams, choices, stop texts, tools, sessions, labels, errors."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.serving import TOKEN, offline_answer, running_server
from helpers.waiting import wait_for

from posttrain.serving.chat_server import FeedbackJournal
from posttrain.serving.request_bodies import ChatBody, ToolBody
from rl_core.chat.prompts import PromptBuilder
from rl_core.chat.requests import ChatRequestError, parse_chat_request
from rl_core.chat.responses import TextStream
from rl_core.environments import make_environment
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.inference.serving_requests import build_stop_test
from rl_core.rollouts.episode_sequence import EpisodeRequest, EpisodeSequence
from rl_core.settings import SamplingSettings
from rl_core.storage import faults
from rl_core.storage.append_log import read_checked_lines

TOOLS = make_environment("pixel_grid").tools


def read_content(body, choice=0):
    return body["choices"][choice]["message"]["content"]


def join_stream(parts, choice=0):
    return "".join(
        choice_part["delta"].get("content") or ""
        for part in parts
        for choice_part in part["choices"]
        if choice_part["index"] == choice
    )


def test_answer_equals_offline_engine(served):
    answer = served.chat("row 2 grüße", seed=5, max_tokens=30, logprobs=True, top_logprobs=3)
    expected = offline_answer(served.server.model, "row 2 grüße", seed=5, tokens=30)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == served.server.model.renderer.action_text(expected.tokens)
    assert (
        choice["finish_reason"] == ("length" if expected.hit_limit else "stop")
        and choice["policy_version"] == 0
    )
    np.testing.assert_allclose(
        [token["logprob"] for token in choice["logprobs"]["content"]], expected.logprobs, atol=1e-5
    )
    for token in choice["logprobs"]["content"]:
        values = [other["logprob"] for other in token["top_logprobs"]]
        assert (
            len(values) == 3
            and values == sorted(values, reverse=True)
            and sum(map(math.exp, values)) <= 1.0001
        )
        assert token["bytes"] is None or bytes(token["bytes"]).decode() == token["token"]
    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)


def test_log_probabilities_of_tokens_that_decode_to_lone_surrogates(served, monkeypatch):
    """A Python tokenizer may decode one token to a lone surrogate, or to some bytes of a character."""
    tokenizer = served.server.model.renderer.tokenizer
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: "\xe9\ud800")
    choice = served.chat("row 2", seed=5, max_tokens=3, logprobs=True, top_logprobs=1)["choices"][0]
    assert set(choice["message"]["content"]) == {"\xe9", "?"}
    for token in choice["logprobs"]["content"]:
        assert (
            token["token"] == token["top_logprobs"][0]["token"] == "\xe9\ufffd"
            and token["bytes"] is None
        )


@pytest.mark.parametrize("temperature", [0, 1, 0.6])
def test_streamed_answer_equals_json_answer(served, temperature):
    request = dict(seed=3, max_completion_tokens=40, temperature=temperature, n=3)
    answer = served.chat(**request)
    parts = served.stream(**request, stream_options={"include_usage": True})
    assert [join_stream(parts, choice) for choice in range(3)] == [
        read_content(answer, choice) for choice in range(3)
    ]
    reasons = {
        choice_part["index"]: choice_part["finish_reason"]
        for part in parts
        for choice_part in part["choices"]
        if choice_part["finish_reason"]
    }
    assert reasons == {
        choice_part["index"]: choice_part["finish_reason"] for choice_part in answer["choices"]
    }
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == answer["usage"]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    if temperature:
        assert read_content(answer, 0) != read_content(answer, 1)
    assert served.chat(**request)["choices"] == answer["choices"]


def test_a_stop_text_ends_an_answer_and_is_not_in_it(served):
    full_text = read_content(served.chat(seed=11, max_tokens=60))
    stop = full_text[12:15]
    assert len(stop) == 3 and "\ufffd" not in stop
    cut = served.chat(seed=11, max_tokens=60, stop=[stop, "never there"])
    assert (
        read_content(cut) == full_text[: full_text.index(stop)]
        and cut["choices"][0]["finish_reason"] == "stop"
    )
    assert join_stream(served.stream(seed=11, max_tokens=60, stop=stop)) == read_content(cut)
    assert cut["usage"]["completion_tokens"] < 60


def test_text_of_a_stream_comes_in_whole_characters():
    """Tokens of single bytes: characters of several bytes, text that begins a stop text but does not complete it."""

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    text = "naïve 😀 END it ENDE stop"
    for stops, expected in (((), text), (("ENDE",), "naïve 😀 END it "), (("nope", "e s"), text)):
        stream, parts = TextStream(decode, stops), []
        for token in text.encode():
            parts.append(stream.add_tokens([token]))
        parts.append(stream.finish_text())
        assert "".join(parts) == expected and not any("\ufffd" in part for part in parts)
    stream = TextStream(decode)
    assert stream.add_tokens([0xC3]) == "" and stream.finish_text() == "\ufffd"
    has_stop = build_stop_test(decode, ("ENDE",))
    assert has_stop(list(b"to the ENDE")) and not has_stop(list(b"ENDE" + b"." * 60))


def build_prompt(served, *messages, tools=None, style="template"):
    model = served.server.model
    builder = PromptBuilder(model.renderer, 2000, style)
    body = ChatBody(model="small", messages=list(messages), tools=tools)
    return builder, builder.build_prompt(body.chat_messages, body.tool_schemas)


def test_tools_are_called_as_environments_declare_them(served):
    schema = [ToolBody(**tool) for tool in TOOLS.schema()]
    builder, prompt = build_prompt(
        served, {"role": "user", "content": "colour at row 2 column 3?"}, tools=schema
    )
    parsed = builder.parse_answer("zoom 2 3", prompt.tools)
    assert parsed.content is None and parsed.calls[0]["function"] == {
        "name": "zoom",
        "arguments": '{"row": 2, "column": 3}',
    }
    assert builder.parse_answer("answer red", prompt.tools).content == "answer red"
    wrong = builder.parse_answer("zoom a b", prompt.tools)
    assert (wrong.content, wrong.calls) == ("zoom a b", []), "not a valid call"
    assert "row must be a whole number" in wrong.call_error
    unread = builder.parse_answer("<new_tool_call>zoom</new_tool_call>", prompt.tools)
    assert "not understood" in unread.call_error
    kimi = '<|tool_call_begin|>functions.zoom:0<|tool_call_argument_begin|>{"row": 2, "column": 3}'
    assert (
        builder.parse_answer(kimi, prompt.tools).calls[0]["function"] == parsed.calls[0]["function"]
    )
    assert builder.parse_answer("zoom 2 3", None).content == "zoom 2 3"
    opening = {"role": "user", "content": "colour at row 2 column 3?"}
    call_message = {"role": "assistant", "content": None, "tool_calls": parsed.calls}
    result = {"role": "tool", "tool_call_id": parsed.calls[0]["id"], "content": "5 red"}
    body = ChatBody(model="small", messages=[opening, call_message, result], tools=schema)
    continued = builder.build_prompt(body.chat_messages, body.tool_schemas)
    renderer = served.server.model.renderer
    conversation = [
        opening,
        {"role": "assistant", "content": "zoom 2 3"},
        {"role": "tool", "content": "5 red"},
    ]
    assert continued.ids == renderer.encode_history_prompt(conversation)
    new_builder, _ = build_prompt(served, opening, tools=schema)  # as after a restart
    rebuilt = new_builder.build_prompt(body.chat_messages, body.tool_schemas)
    assert rebuilt.ids == continued.ids
    _, instructed = build_prompt(served, opening, tools=schema, style="instructions")
    system = {"role": "system", "content": prompt.tools.instructions()}
    assert instructed.ids == renderer.encode_history_prompt([system, opening])


def test_null_is_not_set(served):
    options = {name: None for name in ChatBody.model_fields if name not in ("model", "messages")}
    options |= {"seed": 1, "max_tokens": 3}
    assert served.chat(**options)["choices"] == served.chat(seed=1, max_tokens=3)["choices"]
    function = {"name": "look", "description": None, "parameters": None, "strict": None}
    tool = {"type": "function", "function": function}
    bare = {"type": "function", "function": {"name": "look"}}
    answer = served.chat(tools=[tool], seed=1, max_tokens=3)
    assert answer["choices"] == served.chat(tools=[bare], seed=1, max_tokens=3)["choices"]
    parts = served.stream(max_tokens=3, stream_options={"include_usage": None})
    assert all(part["choices"] for part in parts)


def test_errors_name_the_field_and_not_a_type(served):
    """Fields of several types: the reason is that of the type that was sent."""
    for options, param, *reasons in (
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"stop": 5}, "stop", "string", "array"),
        ({"stop": {"a": 1}}, "stop", "string", "array"),
        ({"tool_choice": 5}, "tool_choice", "string", "object"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string", "array"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "required",
        ),
        ({"tools": [TOOLS.schema()[0]] * 2}, "tools", "share a name"),
        ({"colour": "red"}, "colour", "not permitted"),
    ):
        error = served.chat(**options, status=422)["error"]
        assert error["param"] == param and error["message"].startswith(f"{param}: "), error
        assert all(reason in error["message"] for reason in reasons), error


def test_tools_have_the_names_that_openai_takes(served):
    """Letters, digits, '_' and '-' in any order, up to 64; recorded sessions read them alike."""
    opening = {"role": "user", "content": "row 2"}
    for name in ("3d-render", "-look", "_", "a" * 64):
        tool = {"type": "function", "function": {"name": name}}
        builder, prompt = build_prompt(served, opening, tools=[tool])
        written = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        (call,) = builder.parse_answer(written, prompt.tools).calls
        assert call["function"] == {"name": name, "arguments": "{}"}
        body = {"model": "small", "messages": [opening], "tools": [tool]}
        assert parse_chat_request(json.dumps(body).encode()).tools[0]["function"]["name"] == name
    for name in ("", "a b", "größe", "look\n", "a.b", "a" * 65):
        tool = {"type": "function", "function": {"name": name}}
        served.chat(tools=[tool], status=422)
        body = {"model": "small", "messages": [opening], "tools": [tool]}
        with pytest.raises(ChatRequestError, match="name"):
            parse_chat_request(json.dumps(body).encode())


def test_a_client_that_takes_one_call_gets_one(served, monkeypatch):
    """`parallel_tool_calls: false`: of two calls in an answer the first counts, in the next prompt, too."""
    call = '<tool_call>{"name": "zoom", "arguments": {"row": %d, "column": 3}}</tool_call>'
    written = f"{call % 2}\n{call % 5}"
    renderer = served.server.prompt_builder.renderer
    monkeypatch.setattr(type(renderer), "action_text", lambda self, ids: written)
    tools, seed = TOOLS.schema(), 1
    for streams in (False, True):
        for allows_several, rows in ((None, [2, 5]), (True, [2, 5]), (False, [2])):
            options = dict(tools=tools, seed=seed, temperature=1.5)
            options["parallel_tool_calls"] = allows_several
            if streams:
                deltas = [part["choices"][0]["delta"] for part in served.stream(**options)]
                calls = [c for delta in deltas for c in delta.get("tool_calls", ())]
            else:
                calls = served.chat(**options)["choices"][0]["message"]["tool_calls"]
            arguments = [json.loads(call["function"]["arguments"]) for call in calls]
            assert [values["row"] for values in arguments] == rows, (streams, allows_several)
    opening = {"role": "user", "content": "row 2"}
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5 red"}
    body = ChatBody(model="small", messages=[opening, message, result], tools=tools)
    prompt = served.server.prompt_builder.build_prompt(body.chat_messages, body.tool_schemas)
    text = renderer.decode_ids(prompt.ids, is_start=True)
    assert "zoom 2 3" in text and "zoom 5 3" not in text


def test_tool_call_is_a_kind_of_answer(served, monkeypatch):
    monkeypatch.setattr(
        type(served.server.prompt_builder.renderer), "action_text", lambda self, ids: "zoom 2 3"
    )
    answer = served.chat(tools=TOOLS.schema(), seed=1, temperature=1.5)["choices"][0]
    if answer["finish_reason"] == "length":
        pytest.skip("the model did not end its answer")
    parts = served.stream(tools=TOOLS.schema(), seed=1, temperature=1.5)
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    streamed = [
        call_part
        for part in parts
        for call_part in part["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert json.loads(call["function"]["arguments"]) == {"row": 2, "column": 3}
    assert streamed[0]["function"] == call["function"] and streamed[0]["index"] == 0


def test_a_call_that_cannot_be_read_comes_with_the_reason(served, monkeypatch):
    text = "<new_tool_call>zoom</new_tool_call>"
    monkeypatch.setattr(
        type(served.server.prompt_builder.renderer), "action_text", lambda self, ids: text
    )
    answer = served.chat(tools=TOOLS.schema(), seed=1, temperature=1.5)["choices"][0]
    if answer["finish_reason"] == "length":
        pytest.skip("the model did not end its answer")
    assert answer["message"]["content"] == text and answer["finish_reason"] == "stop"
    assert "not understood" in answer["message"]["tool_call_error"]
    parts = served.stream(tools=TOOLS.schema(), seed=1, temperature=1.5)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert [delta["tool_call_error"] for delta in deltas if "tool_call_error" in delta] == [
        answer["message"]["tool_call_error"]
    ]


def test_session_equals_offline_episode(served):
    episode_request = {"name": "pixel_grid", "level": "easy", "seed": 3, "max_turns": 4}
    answer = served.chat(
        messages=[], environment=episode_request, seed=7, n=2, max_tokens=90, stop="e"
    )
    model, environment = served.server.model, make_environment("pixel_grid")
    sampling = SamplingSettings(max_completion_tokens=90, max_turns=4, stop=("e",))
    backend = create_rollout_backend(
        model.model,
        eos_ids=model.renderer.eos_ids,
        pad_id=model.renderer.pad_id,
        max_length=model.context,
    )
    for choice in range(2):
        seed = compute_sequence_seed(7, "pixel_grid", "easy", 3, choice)
        episode = EpisodeSequence(
            environment,
            model.renderer,
            EpisodeRequest("easy", 3),
            sampling,
            None,
            seed,
            choice,
            pytest.fail,
        )
        episode.begin_episode(model.context)
        backend.run_sequences([episode], sampling)
        expected = episode.build_rollout(0).trajectory.to_json()
        session = answer["choices"][choice]["session"]
        assert session["turns"] == expected["turns"] and session["reward"] == expected["reward"]
        assert session["stop_reason"] == expected["stop_reason"]
    assert any(len(choice["session"]["turns"]) > 1 for choice in answer["choices"])
    for unknown in (
        {"name": "os:system"},
        {"name": "pixel_grid", "level": "none"},
        {"name": "prompts"},
    ):
        assert (
            "environment"
            in served.chat(messages=[], environment=unknown, status=422)["error"]["param"]
        )
    assert served.chat(environment=episode_request, status=422)["error"]["param"] == "messages"


def test_labels_are_on_the_disk_before_the_response(served):
    answer = served.chat(max_tokens=2)["id"]
    label = {"id": answer, "score": 0.5, "comment": "fine 😀", "user": "anna"}
    assert served.client.post("/v1/feedback", json=label).status_code == 200
    (line,) = [line.record for line in read_checked_lines(served.server.folder / "feedback.jsonl")][
        -1:
    ]
    assert (line["answer_id"], line["score"], line["thumb"], line["comment"]) == (
        answer,
        0.5,
        None,
        "fine 😀",
    )
    for bad_label, status in (
        ({"id": answer[:-1] + "0", "thumb": "up"}, 404),
        ({"id": "chatcmpl-ü", "thumb": "up"}, 404),
        ({"id": answer}, 422),
        ({"id": answer, "thumb": "sideways"}, 422),
        ({"id": answer, "score": "high"}, 422),
    ):
        if bad_label["id"] == answer[:-1] + "0" == answer:
            continue
        assert served.client.post("/v1/feedback", json=bad_label).status_code == status


def test_a_torn_line_of_the_journal_is_cut_off(tmp_path):
    from rl_core.inference.serving_requests import FeedbackLabel

    journal = FeedbackJournal(tmp_path / "labels" / "feedback.jsonl")
    journal.accept_label("a", 0, FeedbackLabel(thumb="up"))
    complete = journal.path.read_bytes()
    journal.path.write_bytes(complete + complete[:20])
    FeedbackJournal(journal.path).accept_label("b", 1, FeedbackLabel(answer="red"))
    assert [line.record["answer_id"] for line in read_checked_lines(journal.path)] == ["a", "b"]
    assert "feedback.kept" in faults.FAULT_POINTS


def test_errors_have_openai_format(served):
    bad_requests = [
        (dict(temperature="hot"), "temperature"),
        (dict(temperature=-1), "temperature"),
        (dict(temperature=1e-300), "temperature"),
        (dict(n=0), "n"),
        (dict(n=1000), "n"),
        (dict(top_p=0), "top_p"),
        (dict(stop=[""]), "stop"),
        (dict(seed=2**70), "seed"),
        (dict(frequency_penalty=5), "frequency_penalty"),
        (dict(functions=[{"name": "f"}]), "functions"),
        (dict(messages=[]), "messages"),
        (dict(messages=[{"role": "user", "content": 5}]), "messages"),
        (dict(messages=[{"role": "robot", "content": "x"}]), "messages"),
        (dict(unknown_thing=1), "unknown_thing"),
        (dict(top_logprobs=3), "top_logprobs"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(messages=[{"role": "user", "content": "x" * 5000}]), "messages"),
        (dict(deadline_seconds=-1), None),
        (dict(tools=[{"type": "function", "function": {"name": "no name"}}]), "tools"),
        (
            dict(
                tools=[
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}
                ]
            ),
            "tools",
        ),
    ]
    for options, param in bad_requests:
        error = served.chat(**options, status=422)["error"]
        assert (
            set(error) == {"message", "type", "param", "code"}
            and error["type"] == "invalid_request_error"
        )
        assert param is None or error["param"].split(".")[0] == param, error
    assert served.chat(model="other", status=404)["error"]["code"] == "model_not_found"
    assert served.chat(frequency_penalty=0.0, store=False, metadata={"a": "b"}, max_tokens=1)["id"]
    for path, method, status in (
        ("/v1/other", "GET", 404),
        ("/v1/models", "POST", 405),
        ("/v1/models/x", "GET", 404),
    ):
        response = served.client.request(method, path)
        assert response.status_code == status and response.json()["error"]["message"]
    assert served.client.get("/v1/models/small").json()["id"] == "small"


def test_token_is_required(served):
    for authorization in (None, "Bearer", "Bearer x", f"Basic {TOKEN}"):
        headers = {"Authorization": authorization} if authorization else {}
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/v1/feedback"),
            ("GET", "/metrics"),
        ):
            served.client.headers.pop("Authorization", None)
            response = served.client.request(method, path, headers=headers)
            assert (
                response.status_code == 401
                and response.json()["error"]["code"] == "invalid_api_key"
            )
            assert response.headers["x-should-retry"] == "false"
    assert (
        served.client.get("/readyz").text == "ready\n"
        and served.client.get("/healthz").status_code == 200
    )
    served.client.headers["Authorization"] = f"Bearer {TOKEN}"
    assert served.client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert (
        served.client.get("/v1/models", headers={"Origin": "http://evil.example"}).status_code
        == 403
    )
    served.chat(max_tokens=1)
    text = served.client.get("/metrics").text
    assert (
        'posttrain_serving_requests_total{code="200"}' in text
        and "posttrain_serving_capacity 4.0" in text
    )


def test_overload_deadlines_and_missing_model(tmp_path, model_folder):
    with running_server(tmp_path, model_folder, max_waiting=2, begins=False) as server:
        early = server.client.post("/v1/chat/completions", json={"model": "small", "messages": []})
        assert (
            early.status_code == 503
            and early.headers["retry-after"]
            and server.client.get("/readyz").status_code == 503
        )
        server.server.start_serving(server.loaded(model_folder))
        late = server.chat(deadline_seconds=1e-6, status=504)
        assert (
            late["error"]["type"] == "timeout_error"
            and "deadline_seconds: 1e-06" in late["error"]["message"]
        )
        assert "error" in server.stream(deadline_seconds=1e-6)[-1]
        loop = server.server.engine.loop
        step, loop.step = loop.step, lambda: False  # no request begins
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(server.chat, max_tokens=2) for _ in range(2)]
            wait_for(lambda: server.state.waiting == 2, "a full queue")
            body = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
            full = server.client.post("/v1/chat/completions", json=body)
            loop.step = step
            assert all(answer.result(20)["choices"] for answer in waiting)
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert (
            full.json()["error"]["type"] == "rate_limit_error"
            and full.headers["x-should-retry"] == "true"
        )
        assert server.chat(max_tokens=2)["choices"]


class RecordingSink:
    num_top_tokens = 2

    def __init__(self):
        self.answers = []

    def record_answers(self, answers):
        self.answers += answers


def test_a_sink_gets_what_was_sampled(tmp_path, model_folder):
    sink = RecordingSink()
    with running_server(tmp_path, model_folder, answers=sink) as server:
        first = server.chat(seed=2, max_tokens=9, temperature=0.5, n=2, user="anna")
        server.stream(seed=2, max_tokens=9, temperature=0.5)
        server.chat(messages=[], environment={"name": "pixel_grid", "seed": 1}, max_tokens=20)
        expected = offline_answer(server.server.model, "row 2", seed=2, tokens=9, temperature=0.5)
    assert [answer.choice for answer in sink.answers] == [0, 1, 0, 0]
    for answer in (sink.answers[0], sink.answers[2]):
        assert answer.completion_ids == expected.tokens and answer.policy_version == 0
        np.testing.assert_allclose(answer.sampler_logprobs, expected.logprobs, atol=1e-5)
        assert (
            answer.top.ids_TK.shape == (len(expected.tokens), 2) and (answer.top.rest_T >= 0).all()
        )
    assert sink.answers[0].answer_id == first["id"] and sink.answers[0].caller == "anna"
    assert sink.answers[3].rollout.trajectory.environment == "pixel_grid"
