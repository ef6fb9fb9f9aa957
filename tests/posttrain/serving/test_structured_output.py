"""Restricted answers over a real port: JSON of a schema, demanded calls, biases and penalties, and what is learned."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from helpers.serving import make_folder_of_model, offline_answer, running_server

from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.sampling import compute_sequence_seed, draw_uniforms

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "row": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "row"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Look closer.",
            "parameters": {
                "type": "object",
                "properties": {
                    "row": {"type": "integer", "minimum": 0, "maximum": 9},
                    "side": {"$ref": "#/$defs/Side"},
                },
                "required": ["row", "side"],
                "$defs": {"Side": {"enum": ["left", "right"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    return make_folder_of_model(tmp_path_factory.mktemp("wide") / "model", context=1024)


def make_model_with_template(folder, template):
    (folder / "template.jinja").write_text(template)
    path = str(folder / "template.jinja")
    return make_folder_of_model(folder / "model", context=1024, chat_template=path)


class Sink:
    num_top_tokens = 0

    def __init__(self):
        self.answers = []

    def record_answers(self, answers):
        self.answers += answers


@pytest.fixture(scope="module")
def wide(tmp_path_factory, wide_model):
    folder = tmp_path_factory.mktemp("running")
    with running_server(folder, wide_model, context=1000, answers=Sink()) as server:
        yield server


@pytest.fixture(scope="module", params=["engine", "transformers"])
def either(request, tmp_path_factory, wide_model):
    """A server on the engine, and one on transformers' forward pass."""
    folder = tmp_path_factory.mktemp("either")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "transformers":
                patch.setattr("posttrain.serving.served_model.ContinuousBatcher", FallbackBatcher)
            server = stack.enter_context(running_server(folder, wide_model, context=1000))
        yield server


def format_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def read_choice(answer, index=0):
    return answer["choices"][index]


def list_logprobs(choice):
    return [token["logprob"] for token in choice["logprobs"]["content"]]


def compute_next_logits(server, ids):
    model = server.server.model.model
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].double()


def test_answers_fulfil_their_schema(either):
    for seed in range(8):
        choice = read_choice(either.chat(seed=seed, response_format=format_schema(SCHEMA)))
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"colour", "row"} and value["colour"] in ("red", "blue")
        assert 0 <= value["row"] <= 99 and choice["finish_reason"] == "stop"
    request = dict(response_format=format_schema(SCHEMA), n=3, seed=5)
    answer = either.chat(**request)
    assert either.chat(**request)["choices"] == answer["choices"]
    assert len({read_choice(answer, i)["message"]["content"] for i in range(3)}) > 1
    parts = either.stream(**request)
    for index in range(3):
        text = "".join(
            choice["delta"].get("content") or ""
            for part in parts
            for choice in part["choices"]
            if choice["index"] == index
        )
        assert text == read_choice(answer, index)["message"]["content"]
    greedy = [
        read_choice(either.chat(temperature=0, response_format=format_schema(SCHEMA), seed=seed))
        for seed in (1, 2)
    ]
    assert greedy[0] == greedy[1]


def test_log_probabilities_are_those_of_the_restricted_distribution(either):
    """The texts of an enum are few: which tokens may follow is found here by comparing texts."""
    texts = ['"red"', '"row 2"', '"blue"']
    schema = {"enum": [json.loads(text) for text in texts]}
    prompts, renderer = either.server.prompt_builder, either.server.model.renderer
    prompt = renderer.prompt_ids([{"role": "user", "content": "row 2"}])
    vocab_size = either.server.model.vocab_size
    for temperature in (1.0, 0.6):
        for seed in range(4):
            answer = either.chat(
                seed=seed,
                temperature=temperature,
                response_format=format_schema(schema),
                logprobs=True,
                top_logprobs=3,
            )
            choice = read_choice(answer)
            assert choice["message"]["content"] in texts
            uniforms = draw_uniforms(compute_sequence_seed("chat", seed, 0), 40)
            ids, text = list(prompt), ""
            for step, token in enumerate(choice["logprobs"]["content"]):
                allowed = [
                    other
                    for other in range(vocab_size)
                    if other not in renderer.eos_ids
                    and (piece := prompts.decode_token(other))
                    and any(full.startswith(text + piece) for full in texts)
                ]
                if text in texts:
                    allowed += list(renderer.eos_ids)
                logits = compute_next_logits(either, ids) / temperature
                masked = torch.full_like(logits, -torch.inf)
                masked[allowed] = logits[allowed]
                log_p = torch.log_softmax(masked, dim=-1)
                drawn = int(torch.searchsorted(log_p.exp().cumsum(0), uniforms[step], right=True))
                assert drawn in allowed
                assert token["logprob"] == pytest.approx(float(log_p[drawn]), abs=1e-4)
                best = [other["logprob"] for other in token["top_logprobs"]]
                expected = [max(float(value), -9999.0) for value in log_p.topk(3).values]
                np.testing.assert_allclose(best, expected, atol=1e-4)
                ids.append(drawn)
                if drawn not in renderer.eos_ids:
                    text += prompts.decode_token(drawn)
            assert text == choice["message"]["content"]


def test_restricted_and_free_answers_do_not_affect_one_another(compiled):
    """Eight requests at once over four slots, each equal to itself alone, to the last bit."""
    requests = [
        dict(seed=1, max_tokens=30),
        dict(seed=2, response_format=format_schema(SCHEMA)),
        dict(seed=3, response_format={"type": "json_object"}, max_tokens=25),
        dict(seed=4, frequency_penalty=1.5, presence_penalty=-0.5, max_tokens=30),
        dict(seed=5, max_tokens=30, temperature=0.7, top_p=0.9),
        dict(seed=6, tools=TOOLS, tool_choice="required"),
        dict(seed=7, logit_bias={"70": 4.5}, max_tokens=30),
        dict(seed=8, max_tokens=30),
    ]

    def ask(request):
        choice = read_choice(compiled.chat(logprobs=True, top_logprobs=2, **request))
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
        return choice

    alone = [ask(request) for request in requests]
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, requests)) == alone
    expected = offline_answer(compiled.server.model, "row 2", seed=1, tokens=30)
    np.testing.assert_allclose(list_logprobs(alone[0]), expected.logprobs, atol=1e-5)


def test_requests_without_rules_take_the_compiled_steps(compiled, monkeypatch):
    calls = []
    decoder = type(compiled.server.engine.loop._weights[-1].slots._decoder)
    sample_steps = decoder.sample_steps
    monkeypatch.setattr(
        decoder,
        "sample_steps",
        lambda self, *a, **k: calls.append(1) or sample_steps(self, *a, **k),
    )
    compiled.chat(seed=1, max_tokens=20, logit_bias={"70": 0.5})
    assert not calls
    compiled.chat(seed=1, max_tokens=20, presence_penalty=0, logit_bias={}, frequency_penalty=0.0)
    assert calls


def test_penalties_and_biases_follow_the_documented_formula(either):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j], c counts sampled tokens of the answer alone."""
    renderer = either.server.model.renderer
    ids = renderer.prompt_ids([{"role": "user", "content": "row 2"}])
    num_repeated = 0
    bias = {"70": 3.0, "71": 2.5, str(renderer.eos_id): -100.0}
    for frequency, presence, temperature in ((2.0, 0.0, 1.0), (-1.5, 1.0, 0.5), (0.0, 2.0, 0)):
        choice = read_choice(
            either.chat(
                seed=3,
                max_tokens=24,
                temperature=temperature,
                frequency_penalty=frequency,
                presence_penalty=presence,
                logit_bias=bias,
                logprobs=True,
            )
        )
        sequence, counts = list(ids), Counter()
        uniforms = draw_uniforms(compute_sequence_seed("chat", 3, 0), 24)
        logprobs = list_logprobs(choice)
        assert len(logprobs) == 24, "the end token has a bias of -100"
        for step, logprob in enumerate(logprobs):
            logits = compute_next_logits(either, sequence)
            for token, count in counts.items():
                logits[token] -= count * frequency + presence
            for token, value in bias.items():
                logits[int(token)] += value
            log_p = torch.log_softmax(logits / (temperature or 1), dim=-1)
            if temperature:
                drawn = int(torch.searchsorted(log_p.exp().cumsum(0), uniforms[step], right=True))
            else:
                drawn = int(log_p.argmax())
            assert logprob == pytest.approx(float(log_p[drawn]), abs=1e-4), (frequency, step)
            sequence.append(drawn)
            counts[drawn] += 1
        text = renderer.action_text(sequence[len(ids) :])
        assert choice["message"]["content"] == text
        num_repeated += max(counts.values()) > 1
    assert num_repeated


def test_a_call_is_demanded(either):
    names = Counter()
    for seed in range(6):
        choice = read_choice(either.chat(seed=seed, tools=TOOLS, tool_choice="required"))
        (call,) = choice["message"]["tool_calls"]
        names[call["function"]["name"]] += 1
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "zoom":
            assert 0 <= arguments["row"] <= 9 and arguments["side"] in ("left", "right")
        else:
            assert arguments == {}
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert len(names) == 2, "both tools can be called"
    named = {"type": "function", "function": {"name": "stop"}}
    for seed in range(3):
        message = read_choice(either.chat(seed=seed, tools=TOOLS, tool_choice=named))["message"]
        assert message["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}
    parts = either.stream(seed=1, tools=TOOLS, tool_choice=named)
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["stop"]
    for choice, tools in ((named, TOOLS[:1]), ("required", None), (named, [])):
        error = either.chat(tools=tools, tool_choice=choice, status=400)["error"]
        assert error["param"] == "tool_choice"
    assert either.chat(tools=TOOLS, tool_choice="sometimes", status=422)["error"]["param"] == (
        "tool_choice"
    )


def test_allowed_tools_leave_the_others_out(either):
    """The answer to a request with some tools allowed is that to a request with these tools alone."""

    def ask(**request):
        choice = read_choice(either.chat(**request))
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
        return choice

    def allow(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for seed in range(3):
        chosen = ask(seed=seed, tools=TOOLS, tool_choice=allow("required", "stop"))
        assert chosen["message"]["tool_calls"][0]["function"]["name"] == "stop"
        assert chosen == ask(seed=seed, tools=TOOLS[1:], tool_choice="required")
        options = dict(seed=seed, max_tokens=30)
        chosen = ask(tools=TOOLS, tool_choice=allow("auto", "stop"), **options)
        assert chosen == ask(tools=TOOLS[1:], **options)
    options = dict(tools=TOOLS, seed=1)
    assert ask(tool_choice=allow("required", "stop", "zoom"), **options) == ask(
        tool_choice="required", **options
    )
    unnamed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}
    for choice, status in (
        (allow("auto", "none"), 400),
        (allow("auto"), 422),
        (allow("any", "stop"), 422),
        (unnamed, 422),
        ({"type": "allowed_tools", "allowed_tools": "stop"}, 422),
    ):
        error = either.chat(tools=TOOLS, tool_choice=choice, status=status)["error"]
        assert error["param"] == "tool_choice", error


def test_tools_and_a_schema_give_a_call_or_a_value(wide):
    kinds = Counter()
    for seed in range(12):
        choice = read_choice(
            wide.chat(seed=seed, tools=TOOLS, response_format=format_schema(SCHEMA), temperature=3)
        )
        kinds[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"colour", "row"}
    assert set(kinds) == {"stop", "tool_calls"}, kinds


def test_limits_and_stop_texts_end_restricted_answers(wide):
    cut = read_choice(wide.chat(seed=1, response_format=format_schema(SCHEMA), max_tokens=4))
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith("{")
    with pytest.raises(ValueError):
        json.loads(cut["message"]["content"])
    call = read_choice(wide.chat(seed=1, tools=TOOLS, tool_choice="required", max_tokens=4))
    assert call["finish_reason"] == "length" and "tool_calls" not in call["message"]
    stopped = read_choice(
        wide.chat(seed=1, response_format=format_schema(SCHEMA), stop=["colour"], max_tokens=200)
    )
    assert stopped["finish_reason"] == "stop" and "colour" not in stopped["message"]["content"]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "nsatisfiable"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
        ({"enum": []}, "nsatisfiable"),
        (False, "nsatisfiable"),
        ({"type": "banana"}, "banana"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"enum": ["x" * 100_000, "y" * 100_001]}, "characters"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(wide, schema, reason):
    error = wide.chat(response_format=format_schema(schema), status=400)["error"]
    assert error["param"] == "response_format" and reason in error["message"], error
    assert error["code"] == "unsupported_schema" and error["type"] == "invalid_request_error"
    assert "%json" not in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("depth", [20, 60, 200, 2000])
def test_deep_schemas_are_refused_or_answered(wide, depth):
    deep = {"type": "integer", "maximum": 9, "minimum": 0}
    for _ in range(depth):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": format_schema(deep),
        "max_tokens": 8,
    }
    text = json.dumps(body) if depth < 500 else '{"a":' * depth + "1" + "}" * depth
    response = wide.client.post("/v1/chat/completions", content=text)
    assert response.status_code in (200, 400, 422), response.text
    assert depth > 20 or response.status_code == 200
    assert read_choice(wide.chat(max_tokens=2))["message"]


def test_malformed_rules_are_refused_by_name(wide):
    bad = [
        (dict(response_format={"type": "yaml"}), "response_format", 400),
        (dict(response_format={"type": "json_schema"}), "response_format", 400),
        (dict(response_format=format_schema("text")), "response_format", 400),
        (dict(logit_bias={"a": 1}), "logit_bias", 422),
        (dict(logit_bias={"-1": 1}), "logit_bias", 422),
        (dict(logit_bias={"1": 101}), "logit_bias", 422),
        (dict(logit_bias={"1": "1"}), "logit_bias", 422),
        (dict(logit_bias={"1": 1, "01": 2}), "logit_bias", 422),
        (dict(logit_bias={"400000": 1}), "logit_bias", 422),
        (dict(presence_penalty=2.1), "presence_penalty", 422),
        (dict(frequency_penalty=True), "frequency_penalty", 422),
        (dict(reasoning_effort="low"), "reasoning_effort", 422),
        (dict(reasoning_effort="a b"), "reasoning_effort", 422),
        (
            dict(messages=[], environment={"name": "pixel_grid"}, presence_penalty=1),
            "environment",
            422,
        ),
    ]
    for options, param, status in bad:
        assert wide.chat(**options, status=status)["error"]["param"] == param


def test_restricted_answers_are_marked_for_the_learner(wide):
    sink = wide.server.answers
    sink.answers.clear()
    wide.chat(max_tokens=3)
    wide.chat(max_tokens=3, presence_penalty=0.0)
    wide.chat(max_tokens=3, presence_penalty=0.1)
    wide.chat(max_tokens=3, logit_bias={"70": 1})
    wide.chat(max_tokens=3, response_format={"type": "json_object"})
    wide.chat(max_tokens=3, tools=TOOLS, tool_choice="required")
    wide.chat(max_tokens=3, tools=TOOLS, tool_choice="auto")
    wide.stream(max_tokens=3, frequency_penalty=1)
    wide.server.wait_until_recorded()
    flags = [answer.is_restricted for answer in sink.answers]
    assert flags == [False, False, True, True, True, True, False, True]


def test_a_grammar_that_fails_ends_its_own_answer_alone(wide, monkeypatch):
    from rl_core.chat.grammars import MatcherState
    from rl_core.inference.token_rules import RulesFailed

    compute_mask, counts = MatcherState.compute_mask, Counter()

    def fail_at_third_token(self):
        counts["masks"] += 1
        if counts["masks"] == 3:
            raise RulesFailed("the answer's grammar failed: too complex")
        return compute_mask(self)

    expected = wide.chat(seed=1, max_tokens=40)["choices"]
    monkeypatch.setattr(MatcherState, "compute_mask", fail_at_third_token)
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(wide.chat, seed=1, max_tokens=40)
        error = wide.chat(response_format=format_schema(SCHEMA), status=400)["error"]
        assert "too complex" in error["message"]
        assert free.result()["choices"] == expected
    counts.clear()
    assert "error" in wide.stream(response_format=format_schema(SCHEMA))[-1]


def test_the_error_without_the_package_names_the_extra(tmp_path, wide_model, monkeypatch):
    monkeypatch.setattr("rl_core.chat.grammars.is_installed", lambda: False)
    with running_server(tmp_path, wide_model, context=1000) as server:
        error = server.chat(response_format={"type": "json_object"}, status=400)["error"]
        assert "python -m posttrain.install --extras structured" in error["message"]
        assert error["param"] == "response_format"
        answer = server.chat(max_tokens=3, presence_penalty=1.0)
        assert read_choice(answer)["message"]["content"], "penalties need no package"
    assert "llguidance" in sys.modules


def test_a_prompt_that_is_read_in_pieces(wide):
    """The grammar begins after the last piece; tokens sampled within the prompt are discarded."""
    content = "row 2 column 3 " * 120
    request = dict(content=content, response_format=format_schema(SCHEMA), seed=3)
    answer = wide.chat(**request, presence_penalty=0.5)
    assert answer["usage"]["prompt_tokens"] > 2 * 256
    assert set(json.loads(read_choice(answer)["message"]["content"])) == {"colour", "row"}


def test_paused_answers_stay_restricted(tmp_path, wide_model):
    """One slot that changes hands every four tokens."""
    requests = [
        dict(seed=seed, response_format=format_schema(SCHEMA), frequency_penalty=0.3)
        for seed in range(4)
    ]
    with running_server(tmp_path, wide_model, context=1000, slots=1, turn_tokens=4) as server:
        alone = [server.chat(**request)["choices"] for request in requests]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda r: server.chat(**r)["choices"], requests))
        assert together == alone and server.state.parkings > 0


def test_a_thought_precedes_the_restricted_answer(tmp_path):
    """A chat template that opens a thought: the grammar begins after </think>, and content is JSON alone."""
    folder = make_model_with_template(tmp_path, THINKING_TEMPLATE)
    with running_server(tmp_path, folder, context=1000) as server:
        assert server.server.model.renderer.opened_thought
        end = server.server.model.renderer.tokenizer.encode("</think>", add_special_tokens=False)
        bias = {str(token): 30 for token in end}
        choice = read_choice(
            server.chat(
                seed=2, response_format=format_schema(SCHEMA), logit_bias=bias, max_tokens=900
            )
        )
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"colour", "row"}
            assert choice["message"]["reasoning_content"].endswith("</think>")
        else:
            assert not choice["message"]["content"].startswith("<think>")
        parts = server.stream(
            seed=2, response_format=format_schema(SCHEMA), logit_bias=bias, max_tokens=900
        )
        deltas = [part["choices"][0]["delta"] for part in parts]
        streamed = {
            name: "".join(delta.get(name) or "" for delta in deltas)
            for name in ("content", "reasoning_content")
        }
        assert streamed == {name: choice["message"][name] for name in streamed}


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)


def test_reasoning_effort_is_a_variable_of_the_chat_template(tmp_path):
    template = (
        "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}{{ eos_token }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    folder = make_model_with_template(tmp_path, template)
    sink = Sink()
    with running_server(tmp_path, folder, context=500, answers=sink) as server:
        plain = server.chat(max_tokens=3)
        high = server.chat(max_tokens=3, reasoning_effort="high")
        assert high["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        server.server.wait_until_recorded()
        texts = [
            server.server.model.renderer.decode_ids(answer.prompt_ids, is_start=True)
            for answer in sink.answers
        ]
        assert "effort high" in texts[1] and "effort" not in texts[0]
        assert [answer.is_restricted for answer in sink.answers] == [False, True]


def test_choices_of_a_vote_are_restricted(wide):
    answer = wide.chat(vote=True, seed=1, response_format=format_schema({"enum": ["a", "b"]}))
    assert json.loads(read_choice(answer)["message"]["content"]) in ("a", "b")
    assert math.isfinite(answer["vote"]["confidence"])
