"""The responses API over a real port: text, calls, events of a stream, stored conversations, refusals."""

from __future__ import annotations

import json

import pytest
from helpers.serving import make_folder_of_model, running_server

from posttrain.serving.response_routes import ResponseStore
from rl_core.storage.append_log import read_checked_lines

TOOL = {
    "type": "function",
    "name": "zoom",
    "description": "Look closer.",
    "parameters": {
        "type": "object",
        "properties": {"row": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["row"],
    },
    "strict": True,
}


class Sink:
    num_top_tokens = 0

    def __init__(self):
        self.answers = []

    def record_answers(self, answers):
        self.answers += answers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("responses")
    model = make_folder_of_model(folder / "model", context=1024)
    with running_server(folder, model, context=1000, answers=Sink()) as running:
        yield running


def respond(server, content="row 2", status=200, **options):
    body = {"model": "small", "input": content, **options}
    response = server.client.post("/v1/responses", json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(server, content="row 2", **options):
    body = {"model": "small", "input": content, "stream": True, **options}
    with server.client.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, response.read()
        blocks = "".join(response.iter_text()).strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event.get('type', 'error')}"
        events.append(event)
    return events


def read_text(response):
    (message,) = response["output"]
    return message["content"][0]["text"]


def test_a_text_equals_that_of_the_chat_route(server):
    options = dict(seed=4, temperature=0.8, max_output_tokens=20)
    response = respond(server, instructions="Be short.", **options)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "row 2"},
    ]
    chat = server.chat(messages=messages, seed=4, temperature=0.8, max_tokens=20)
    assert read_text(response) == chat["choices"][0]["message"]["content"]
    assert response["object"] == "response" and response["id"].startswith("resp_")
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    is_cut = chat["choices"][0]["finish_reason"] == "length"
    assert response["status"] == ("incomplete" if is_cut else "completed")
    parts = [
        {
            "role": "system",
            "content": [
                {"type": "input_text", "text": "Be "},
                {"type": "input_text", "text": "short."},
            ],
        },
        {"type": "message", "role": "user", "content": "row 2"},
    ]
    assert read_text(respond(server, parts, **options)) == read_text(response)


def test_events_of_a_stream(server):
    options = dict(seed=4, max_output_tokens=15)
    expected, events = respond(server, **options), stream(server, **options)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    end = "response.completed" if expected["status"] == "completed" else "response.incomplete"
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        end,
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == read_text(expected) and len(deltas) > 3
    final = events[-1]["response"]
    assert read_text(final) == read_text(expected) and final["usage"] == expected["usage"]
    assert final["id"] == events[0]["response"]["id"]
    assert server.client.get(f"/v1/responses/{final['id']}").json() == final


def test_length_is_incomplete(server):
    response = respond(server, seed=1, max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream(server, seed=1, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_allowed_tools_are_named_without_a_level_in_between(server):
    pytest.importorskip("llguidance")
    other = TOOL | {"name": "look"}
    for name in ("zoom", "look"):
        allowed = [{"type": "function", "name": name}]
        choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
        response = respond(server, tools=[TOOL, other], tool_choice=choice, seed=3)
        assert [call["name"] for call in response["output"]] == [name]
        assert response["tool_choice"] == choice
    hosted = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    error = respond(server, tools=[TOOL], tool_choice=hosted, status=422)["error"]
    assert error["param"] == "tool_choice" and "allowed_tools" in error["message"]


def test_functions_are_called_and_their_results_continue_the_conversation(server):
    pytest.importorskip("llguidance")
    options = dict(tools=[TOOL], tool_choice={"type": "function", "name": "zoom"}, seed=3)
    first = respond(server, **options)
    (call,) = first["output"]
    assert call["type"] == "function_call" and call["name"] == "zoom"
    assert set(json.loads(call["arguments"])) == {"row"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "red"}
    second = respond(
        server,
        [result],
        previous_response_id=first["id"],
        tools=[TOOL],
        seed=5,
        max_output_tokens=10,
    )
    asked = {"type": "message", "role": "user", "content": "row 2"}
    whole = respond(server, [asked, call, result], tools=[TOOL], seed=5, max_output_tokens=10)
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert second["usage"] == whole["usage"] and second["previous_response_id"] == first["id"]
    events = stream(server, **options)
    done = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert done[0]["arguments"] == call["arguments"]
    third = respond(server, "and?", previous_response_id=second["id"], max_output_tokens=3)
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_structured_text(server):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    options = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    assert json.loads(read_text(respond(server, **options)))["a"] in (1, 2)
    options["text"]["format"]["schema"] = {"not": {}}
    error = respond(server, status=400, **options)["error"]
    assert error["param"] == "text.format" and error["message"].startswith("text.format:")


def test_instructions_are_those_of_the_request_alone(server):
    first = respond(server, instructions="Answer in French.", max_output_tokens=4, seed=1)
    second = respond(server, "more", previous_response_id=first["id"], max_output_tokens=4)
    messages = [
        {"role": "user", "content": "row 2"},
        {"role": "assistant", "content": read_text(first)},
        {"role": "user", "content": "more"},
    ]
    chat = server.chat(messages=messages, max_tokens=4)
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_stored_responses(server):
    response = respond(server, max_output_tokens=3)
    path = f"/v1/responses/{response['id']}"
    assert server.client.get(path).json() == response
    (item,) = server.client.get(f"{path}/input_items").json()["data"]
    assert item["content"][0]["text"] == "row 2" and item["id"]
    assert server.client.delete(path).json() == {
        "id": response["id"],
        "object": "response",
        "deleted": True,
    }
    for answer in (server.client.get(path), server.client.delete(path)):
        assert answer.status_code == 404 and "was deleted" in answer.json()["error"]["message"]
    error = respond(server, previous_response_id=response["id"], status=404)["error"]
    assert error["param"] == "previous_response_id" and error["code"] == "response_not_found"
    unstored = respond(server, store=False, max_output_tokens=2)
    error = respond(server, previous_response_id=unstored["id"], status=404)["error"]
    assert "store: false" in error["message"]
    error = respond(server, previous_response_id="resp_never", status=404)["error"]
    assert "no such response" in error["message"]


def test_the_store_is_bounded_by_number_and_size():
    store = ResponseStore(2, max_characters=10_000)
    for number in range(4):
        store.add_response({"id": f"resp_{number}"}, [], [])
    assert len(store) == 2 and store.find_response("resp_3")
    with pytest.raises(Exception, match=r"newest 2 \(serving.stored_responses\)"):
        store.find_response("resp_1")
    store.add_response({"id": "resp_big"}, [], [{"role": "user", "content": "x" * 9_930}])
    assert len(store) == 1 and store.find_response("resp_big")
    store.add_response({"id": "resp_huge"}, [], [{"role": "user", "content": "x" * 20_000}])
    assert len(store) == 1 and store.find_response("resp_big")
    with pytest.raises(Exception, match="characters that are held"):
        store.find_response("resp_huge")
    for number in range(3):
        store.add_response({"id": f"resp_n{number}"}, [], [])
    store.delete_response("resp_n2")
    assert len(store) == 1
    none = ResponseStore(0)
    none.add_response({"id": "resp_0"}, [], [])
    assert len(none) == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "no name"}]}, "tools"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"instructions": 5}, "instructions"),
        ({"store": "yes"}, "store"),
        ({"n": 2}, "n"),
        ({"vote": True}, "vote"),
        ({"input": "x" * 50_000}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
    ],
)
def test_refusals_name_the_parameter(server, change, param):
    body = {"model": "small", "input": "row 2", **change}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"] or "").split(".0")[0] == param, error


def test_logprobs_are_included_on_request(server):
    response = respond(
        server,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=3,
        seed=1,
    )
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == response["usage"]["output_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in logprobs)
    assert respond(server, max_output_tokens=3)["output"][0]["content"][0]["logprobs"] == []


def test_feedback_for_a_response_reaches_its_answer(server):
    sink = server.server.answers
    sink.answers.clear()
    responses = [respond(server, max_output_tokens=2), stream(server, max_output_tokens=2)[-1]]
    ids = [responses[0]["id"], responses[1]["response"]["id"]]
    server.server.wait_until_recorded()
    recorded = [answer.answer_id for answer in sink.answers]
    assert recorded == [name.replace("resp_", "chatcmpl-") for name in ids]
    label = {"id": ids[0], "thumb": "up"}
    assert server.client.post("/v1/feedback", json=label).status_code == 200
    lines = list(read_checked_lines(server.server.folder / "feedback.jsonl"))
    assert lines[-1].record["answer_id"] == recorded[0]
    assert (
        server.client.post("/v1/feedback", json={"id": "resp_x", "thumb": "up"}).status_code == 404
    )


def test_every_route_needs_the_key(server):
    for method, path in (
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("POST", "/v1/embeddings"),
    ):
        answer = server.client.request(method, path, headers={"Authorization": "Bearer x"})
        assert answer.status_code == 401, path
    error = server.client.post("/v1/embeddings", json={"input": "x"}).json()["error"]
    assert "embeddings" in error["message"] and error["code"] == "unsupported_route"


def test_a_failing_stream_ends_with_an_error_event(server, monkeypatch):
    events = stream(server, deadline_seconds=1e-6)
    assert events[-1]["error"]["type"] == "timeout_error"
