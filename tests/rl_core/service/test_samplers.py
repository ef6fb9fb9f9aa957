"""Samplers: seeds, stops, log-probabilities of the distribution sampled from, snapshots and in-flight ones."""

import numpy as np
import pytest
import torch
from helpers.service import CONTEXT, loss_request, make_engine, new_run, random_data, step_request

from rl_core.errors import ServiceError
from rl_core.service.requests import CreateModel, CreateSampler, SampleParameters, SampleRequest

PROMPT = np.array([5, 9, 23, 4])


@pytest.fixture(scope="module")
def engine(base_folder):
    engine = make_engine(base_folder)
    new_run(engine, "r", seed=3)
    engine.create_sampler(CreateSampler(sampler_id="base", base="base"))
    engine.create_sampler(CreateSampler(sampler_id="run", model_id="r"))
    return engine


def ask(engine, sampler="base", prompt=PROMPT, seed=7, **changes):
    parameters = SampleParameters(**{"max_tokens": 6, "stop": (), **changes.pop("parameters", {})})
    request = SampleRequest(
        sampler_id=sampler, prompt=prompt, seed=seed, parameters=parameters, **changes
    )
    (answer,) = engine.sample([request])
    if isinstance(answer, Exception):
        raise answer
    return answer


def tokens(answer):
    return [sequence.tolist() for sequence in (one.tokens for one in answer.sequences)]


def logits_of(engine, ids, sampler="base"):
    """Logits at every position by transformers' own forward pass over the sampler's weights."""
    found = engine._samplers[sampler]
    with found.base.swap_weights(found.weights.merge_weights()) as model, torch.no_grad():
        return (
            model(torch.from_numpy(np.asarray(ids, dtype=np.int64))[None], use_cache=False)
            .logits[0]
            .double()
        )


def test_equal_seeds_give_equal_samples_whatever_is_beside_them(engine):
    alone = ask(engine, num_samples=3)
    assert tokens(alone) == tokens(ask(engine, num_samples=3))
    assert len({tuple(row) for row in tokens(ask(engine, num_samples=8))}) > 1
    assert tokens(alone) != tokens(ask(engine, num_samples=3, seed=8))
    parameters = SampleParameters(max_tokens=6, stop=())
    others = [
        SampleRequest(
            sampler_id=name,
            prompt=np.array([2 + i, 3]),
            seed=i,
            num_samples=4,
            parameters=parameters,
        )
        for i, name in enumerate(["base", "run", "base"])
    ]
    asked = SampleRequest(
        sampler_id="base", prompt=PROMPT, seed=7, num_samples=3, parameters=parameters
    )
    beside = engine.sample([*others, asked])[-1]
    assert tokens(beside) == tokens(alone)
    for one, other in zip(beside.sequences, alone.sequences, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-6)
    # a sample does not depend on their number
    assert tokens(ask(engine, num_samples=1)) == tokens(alone)[:1]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 5},
        {"top_p": 0.7},
        {"temperature": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampler", ["base", "run"])
def test_logprobs_are_of_the_distribution_sampled_from(engine, sampler, parameters):
    answer = ask(engine, sampler, num_samples=4, parameters=parameters, topk_sample_logprobs=3)
    for one in answer.sequences:
        assert len(one.tokens) == 6 and one.stop_reason == "length"
        logits = logits_of(engine, [*PROMPT, *one.tokens], sampler)[len(PROMPT) - 1 : -1]
        temperature = parameters.get("temperature", 1.0)
        p = torch.softmax(logits / (temperature or 1.0), -1)
        if parameters.get("top_k"):
            p = torch.where(p >= p.topk(parameters["top_k"], -1).values[:, -1:], p, 0)
        if parameters.get("top_p"):
            order = p.sort(-1, descending=True)
            keep = (order.values.cumsum(-1) - order.values) < parameters["top_p"]
            p = torch.zeros_like(p).scatter(1, order.indices, torch.where(keep, order.values, 0))
        p = p / p.sum(-1, keepdim=True)
        chosen = p.gather(1, torch.from_numpy(one.tokens.astype(np.int64))[:, None])[:, 0]
        assert np.allclose(one.logprobs, chosen.log().numpy(), atol=1e-4)
        best = p.topk(3, -1)
        assert one.topk.tokens.shape == (6, 3)
        assert np.allclose(one.topk.logprobs[:, 0], best.values[:, 0].log().numpy(), atol=1e-4)
        if temperature == 0:
            assert one.tokens.tolist() == best.indices[:, 0].tolist()


def test_samples_follow_the_distribution(engine):
    """800 first tokens against their probabilities: the largest deviation stays within 4.5 standard errors."""
    answer = ask(engine, num_samples=800, parameters={"max_tokens": 1})
    p = torch.softmax(logits_of(engine, PROMPT)[-1], -1).numpy()
    counts = np.bincount([row[0] for row in tokens(answer)], minlength=len(p))
    assert float(np.abs((counts - 800 * p) / np.sqrt(800 * p * (1 - p) + 1)).max()) < 4.5


def test_stops(engine):
    free = tokens(ask(engine, parameters={"max_tokens": 30}))[0]
    end = free[4]  # any token that comes: as an id, and as a text
    first = free.index(end)
    by_id = ask(engine, parameters={"max_tokens": 30, "stop": (end,)}).sequences[0]
    by_text = ask(engine, parameters={"max_tokens": 30, "stop": (f"t{end}",)}).sequences[0]
    assert by_id.tokens.tolist() == free[: first + 1] and by_id.stop_reason == "stop"
    texts = [f"t{token}" for token in free]
    cut = next(i for i in range(len(free)) if f"t{end}" in " ".join(texts[: i + 1]))
    assert by_text.tokens.tolist() == free[: cut + 1] and by_text.stop_reason == "stop"


def test_null_stops_at_the_end_token_alone_and_nothing_at_nothing(engine):
    """Token 1 is the model's end of sequence: among 200 continuations some have it."""
    asked = {"num_samples": 200, "parameters": {"max_tokens": 20, "stop": None}}
    ended, free = (
        ask(engine, **asked),
        ask(engine, **asked | {"parameters": {"max_tokens": 20, "stop": ()}}),
    )
    assert {one.stop_reason for one in ended.sequences} == {"stop", "length"}
    for one, whole in zip(tokens(ended), tokens(free), strict=True):
        assert len(whole) == 20
        assert one == (whole[: whole.index(1) + 1] if 1 in whole else whole)
    assert {one.stop_reason for one in free.sequences} == {"length"}


def test_the_context_ends_a_sequence(engine):
    full = np.arange(CONTEXT) % 50 + 2
    answer = ask(engine, prompt=full, prompt_logprobs=True, num_samples=2)
    assert tokens(answer) == [[], []] and {one.stop_reason for one in answer.sequences} == {
        "length"
    }
    assert (
        answer.prompt_logprobs.shape == (CONTEXT,) and np.isfinite(answer.prompt_logprobs[1:]).all()
    )
    nearly = ask(engine, prompt=full[:-2], parameters={"max_tokens": None})
    assert len(tokens(nearly)[0]) == 2


def test_logprobs_of_prompts(engine):
    targets = np.array([[3, -1], [-1, -1], [7, 8]])
    answer = ask(
        engine,
        "run",
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=targets,
        parameters={"temperature": 0.3},
    )
    p = torch.log_softmax(logits_of(engine, PROMPT, "run"), -1).numpy()
    assert np.isnan(answer.prompt_logprobs[0])
    assert np.allclose(
        answer.prompt_logprobs[1:], [p[i, PROMPT[i + 1]] for i in range(3)], atol=1e-4
    )
    assert (
        answer.topk_prompt.tokens[0].tolist() == [0, 0]
        and answer.topk_prompt.logprobs[0].tolist() == [-99999.0] * 2
    )
    assert np.allclose(answer.topk_prompt.logprobs[1:], -np.sort(-p[:3])[:, :2], atol=1e-4)
    found = answer.target_prompt_logprobs
    assert np.isnan(found[targets == -1]).all()
    assert np.allclose(found[[0, 2, 2], [0, 0, 1]], [p[0, 3], p[2, 7], p[2, 8]], atol=1e-4)


def test_prompts_agree_with_training(engine):
    """compute_logprobs of a run's sampler is what forward gives for the shifted sequence (to 1e-4)."""
    datum = random_data(4, 1)[0]
    whole = np.append(datum.tokens, datum.inputs["target_tokens"][-1])
    (forward,) = engine.forward_backward([loss_request("r", (datum,), forward_only=True)])
    answer = ask(engine, "run", prompt=whole, prompt_logprobs=True)
    assert np.allclose(answer.prompt_logprobs[1:], forward.outputs[0]["logprobs"], atol=1e-4)


@pytest.mark.parametrize("kind", ["adapter", "whole"])
def test_a_snapshot_stays_and_inflight_samplers_follow_what_is_published(
    base_folder, tmp_path, kind
):
    engine = make_engine(base_folder)
    if kind == "adapter":
        new_run(engine, "r")
    else:
        engine.create_model(CreateModel(model_id="r", base="base", adapter=None))
    engine.create_sampler(CreateSampler(sampler_id="then", model_id="r"))
    engine.create_sampler(CreateSampler(sampler_id="now", model_id="r", kind="inflight"))
    engine.create_sampler(CreateSampler(sampler_id="base", base="base"))
    engine.save_sampler_weights("r", tmp_path / "saved")

    def look(name):
        return ask(engine, name, prompt_logprobs=True).prompt_logprobs[1:].tolist()

    before, base = look("then"), look("base")
    assert look("now") == before and (kind == "whole") == (before == base)
    for _ in range(2):
        engine.forward_backward([loss_request("r", random_data(0))])
        engine.optim_step(step_request("r", 0.05))
    engine.create_sampler(CreateSampler(sampler_id="loaded", folder=str(tmp_path / "saved")))
    assert look("then") == before == look("loaded") and look("base") == base
    assert look("now") == before  # updates alone publish nothing
    engine.create_sampler(CreateSampler(sampler_id="fresh", model_id="r"))
    engine.create_sampler(CreateSampler(sampler_id="next", model_id="r", kind="inflight"))
    assert look("fresh") == look("now") == look("next") != before
    saved = CreateSampler(
        sampler_id="old", model_id="r", kind="inflight", folder=str(tmp_path / "saved")
    )
    engine.create_sampler(saved)
    assert look("now") == look("next") == look("old") == before
    for wrong in (dict(base="base", kind="inflight"), dict(base="base", model_id="r"), {}):
        with pytest.raises(ServiceError, match="create_sampler: "):
            engine.create_sampler(CreateSampler(sampler_id="wrong", **wrong))
    engine.unload_sampler("then")
    with pytest.raises(ServiceError, match="no sampler 'then'"):
        look("then")


def test_a_stop_text_may_span_many_tokens(engine):
    free = ask(engine, parameters={"max_tokens": 12})
    ids = free.sequences[0].tokens.tolist()
    text = engine._load_base_model("base").tokenizer.decode(ids[2:9], skip_special_tokens=False)
    assert len(text) >= 7
    found = ask(engine, parameters={"max_tokens": 12, "stop": (text,)}).sequences[0]
    assert found.stop_reason == "stop" and found.tokens.tolist() == ids[:9]
