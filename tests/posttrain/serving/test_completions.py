"""Completions over a real port: texts and token ids, batches, echo with log-probabilities, streams, stop texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.serving import offline_answer

from rl_core.inference.fallback_batching import FallbackBatcher
from rl_core.inference.prompt_scores import score_prompt


def complete(served, prompt="row 2 grüße", status=200, **options):
    body = {"model": "small", "prompt": prompt, **options}
    response = served.client.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(served, prompt="row 2 grüße", **options):
    body = {"model": "small", "prompt": prompt, "stream": True, **options}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def join_text(parts, index=0):
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def encode(served, text):
    return served.server.model.renderer.tokenizer.encode(text)


def compute_reference(served, ids):
    """Return log softmax of the model's own logits, [S, V]."""
    model = served.server.model.model
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), dim=-1)


def test_a_text_is_completed_as_its_token_ids(served):
    text = "row 2 grüße"
    options = dict(seed=3, max_tokens=20, logprobs=2)
    by_text, by_ids = (
        complete(served, text, **options),
        complete(served, encode(served, text), **options),
    )
    assert by_text["choices"] == by_ids["choices"] and by_text["object"] == "text_completion"
    assert by_text["usage"]["prompt_tokens"] == len(encode(served, text))
    ids = served.server.model.renderer.prompt_ids([{"role": "user", "content": text}])
    chat = complete(served, ids, seed=3, max_tokens=20, return_token_ids=True)["choices"][0]
    assert len(chat["token_ids"]) == 20 or chat["finish_reason"] == "stop"


def test_prompts_of_a_batch_are_answered_as_if_sent_alone(compiled):
    prompts = ["row 2", "answer red", "zoom 2 3 你好"]
    options = dict(seed=7, max_tokens=12, n=2, logprobs=1)
    batch = complete(compiled, prompts, **options)["choices"]
    assert [choice["index"] for choice in batch] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = complete(compiled, prompt, **options)["choices"]
        for choice in (0, 1):
            got = batch[2 * number + choice] | {"index": choice}
            assert got == alone[choice]
    ids = [encode(compiled, prompt) for prompt in prompts]
    assert complete(compiled, ids, **options)["choices"] == batch
    usage = complete(compiled, prompts, **options)["usage"]
    assert usage["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_scores_the_prompt(served, max_tokens):
    """What lm-eval's loglikelihood reads: token_logprobs and the likeliest tokens of the prompt."""
    text = "answer red 5 grüße 你好"
    ids = encode(served, text)
    answer = complete(
        served, text, max_tokens=max_tokens, echo=True, logprobs=3, temperature=0, seed=1
    )
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    plain = complete(served, text, max_tokens=max(max_tokens, 1), temperature=0, logprobs=3)
    sampled = plain["choices"][0] if max_tokens else None
    assert choice["text"] == text + (sampled["text"] if sampled else "")
    reference = compute_reference(served, ids)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected = [float(reference[i, token]) for i, token in enumerate(ids[1:])]
    np.testing.assert_allclose(logprobs["token_logprobs"][1 : len(ids)], expected, atol=1e-4)
    for position in range(1, len(ids)):
        best = logprobs["top_logprobs"][position]
        assert max(best.values()) == pytest.approx(float(reference[position - 1].max()), abs=1e-4)
    if sampled:
        assert logprobs["token_logprobs"][len(ids) :] == sampled["logprobs"]["token_logprobs"]
    assert (
        len(logprobs["tokens"])
        == len(logprobs["text_offset"])
        == len(ids) + (len(sampled["logprobs"]["tokens"]) if sampled else 0)
    )
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    if not max_tokens:
        assert answer["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    whole = [i for i, token in enumerate(logprobs["tokens"]) if "\ufffd" not in token]
    for i in whole:
        start = logprobs["text_offset"][i]
        assert choice["text"][start:].startswith(logprobs["tokens"][i])


def test_echo_of_token_ids_and_of_one_token(served):
    ids = encode(served, "answer red")
    choice = complete(served, ids, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "answer red" and len(choice["logprobs"]["tokens"]) == len(ids)
    one = complete(served, ids[:1], max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert one["logprobs"]["token_logprobs"] == [None]
    bare = complete(served, "answer red", max_tokens=2, echo=True, seed=1)["choices"][0]
    assert bare["text"].startswith("answer red") and bare["logprobs"] is None
    empty = complete(served, "answer red", max_tokens=0)["choices"][0]
    assert empty["text"] == "" and empty["finish_reason"] == "length"


def test_scores_do_not_depend_on_the_batch(compiled):
    prompts = ["answer red 5", "row 2", "zoom 2 3 grüße"]
    options = dict(max_tokens=1, echo=True, logprobs=2, temperature=0)
    together = complete(compiled, prompts, **options)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        alone = complete(compiled, prompt, **options)["choices"][0]
        assert alone["logprobs"] == choice["logprobs"]


def test_prompts_are_scored_in_chunks_and_by_models_that_scale_their_logits(served, monkeypatch):
    import rl_core.inference.prompt_scores as prompt_scores
    from rl_core.capabilities.decision import Decision

    model, ids = served.server.model.model, encode(served, "answer red 5 grüße 你好")
    expected = score_prompt(model, ids, 2)
    monkeypatch.setattr(prompt_scores, "compute_chunk_tokens", lambda *_: 2)
    chunked = score_prompt(model, ids, 2)
    monkeypatch.setattr(
        prompt_scores, "check_chunked_head", lambda _: Decision("chunked head", False, "", "")
    )
    for scores in (chunked, score_prompt(model, ids, 2)):
        np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=1e-5)
        np.testing.assert_array_equal(scores.top.ids_TK, expected.top.ids_TK)


def test_a_failing_score_concerns_its_own_request(served, monkeypatch):
    import rl_core.inference.prompt_scores as prompt_scores

    def fail(*_):
        raise RuntimeError("no score")

    monkeypatch.setattr(prompt_scores, "score_prompt", fail)
    error = complete(served, "row 2", max_tokens=1, echo=True, logprobs=1, status=500)["error"]
    assert "no score" in error["message"]
    assert complete(served, "row 2", max_tokens=1, logprobs=1)["choices"]


def test_fallback_batcher_scores_prompts(tmp_path, model_folder, served):
    from helpers.serving import running_server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.serving.served_model.ContinuousBatcher", FallbackBatcher)
        with running_server(tmp_path, model_folder) as server:
            options = dict(max_tokens=2, echo=True, logprobs=2, temperature=0)
            fallback = complete(server, "answer red", **options)["choices"][0]["logprobs"]
    engine = complete(served, "answer red", **options)["choices"][0]["logprobs"]
    np.testing.assert_allclose(
        fallback["token_logprobs"][1:], engine["token_logprobs"][1:], atol=1e-4
    )


@pytest.mark.parametrize("echo", [False, True])
def test_streams_equal_responses(served, echo):
    options = dict(seed=5, max_tokens=25, n=2, logprobs=1, echo=echo)
    answer = complete(served, ["row 2", "answer 你"], **options)
    parts = stream(
        served, ["row 2", "answer 你"], stream_options={"include_usage": True}, **options
    )
    for choice in answer["choices"]:
        assert join_text(parts, choice["index"]) == choice["text"]
        chunks = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        joined = [
            value for c in chunks if c["logprobs"] for value in c["logprobs"]["token_logprobs"]
        ]
        assert joined == choice["logprobs"]["token_logprobs"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    assert parts[-1]["usage"] == answer["usage"] and parts[-1]["choices"] == []
    assert {part["object"] for part in parts} == {"text_completion"}
    nothing = stream(served, "row 2", max_tokens=0, echo=True, logprobs=1)
    assert join_text(nothing) == "row 2"


def test_stop_texts(served):
    full = complete(served, seed=11, max_tokens=40)["choices"][0]["text"]
    stop = full[10:13]
    for value in (stop, [stop, "never"], None):
        cut = complete(served, seed=11, max_tokens=40, stop=value)["choices"][0]
        assert cut["text"] == (full if value is None else full[: full.index(stop)])
        assert value is None or cut["stop_reason"] == stop
    assert join_text(stream(served, seed=11, max_tokens=40, stop=stop)) == full[: full.index(stop)]


def test_penalties_bias_and_null(served):
    plain = complete(served, seed=1, max_tokens=8, n=None, stop=None, suffix=None, logit_bias=None)
    assert plain["choices"] == complete(served, seed=1, max_tokens=8)["choices"]
    biased = complete(served, seed=1, max_tokens=8, logit_bias={"70": 100}, return_token_ids=True)
    assert biased["choices"][0]["token_ids"] == [70] * 8
    punished = complete(
        served,
        seed=1,
        max_tokens=8,
        logit_bias={"70": 8, "71": 8, "72": 8, "73": 8},
        presence_penalty=2,
        frequency_penalty=2,
        temperature=0,
        return_token_ids=True,
    )
    assert len(set(punished["choices"][0]["token_ids"][:4])) == 4
    negative = complete(served, seed=-5, max_tokens=8)["choices"]
    assert negative == complete(served, seed=-5, max_tokens=8)["choices"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": ["a"] * 65}, "n"),
        ({"prompt": ["a"] * 10, "n": 7}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": ["a", "b"], "drawn": 1}, "drawn"),
        ({"prompt": "a" * 250}, "prompt"),
    ],
)
def test_refusals_name_the_parameter(served, change, param):
    error = complete(served, status=422, **{"prompt": "row 2", **change})["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"].split(".")[0] == param, error


def test_the_engine_equals_the_offline_engine(served):
    """A chat's prompt as token ids gives the distribution of the chat."""
    expected = offline_answer(served.server.model, "row 2", seed=2, tokens=12, temperature=0)
    got = complete(
        served, expected.prompt_ids, temperature=0, max_tokens=12, return_token_ids=True
    )["choices"][0]
    assert got["token_ids"] == expected.tokens


def test_the_likeliest_of_tokens_with_one_text_is_reported(served, monkeypatch):
    """lm-eval takes a token for greedy if no reported one is likelier."""
    monkeypatch.setattr(
        type(served.server.prompt_builder), "decode_token", lambda self, token: "\ufffd"
    )
    choice = complete(served, "answer red", max_tokens=0, echo=True, logprobs=5)["choices"][0]
    monkeypatch.undo()
    reference = compute_reference(served, encode(served, "answer red"))
    for position, best in enumerate(choice["logprobs"]["top_logprobs"][1:]):
        assert list(best.values()) == [pytest.approx(float(reference[position].max()), abs=1e-4)]


def test_parameters_of_the_old_api_without_effect_are_taken(served):
    plain = complete(served, seed=1, max_tokens=3, n=2)["choices"]
    for options in ({"best_of": 2}, {"suffix": ""}, {"best_of": None, "suffix": None}):
        assert complete(served, seed=1, max_tokens=3, n=2, **options)["choices"] == plain
    for options in ({"best_of": 3}, {"suffix": "x"}, {"best_of": True}):
        error = complete(served, status=422, **options)["error"]
        assert error["param"] in options and "not supported here" in error["message"], error
