"""Samplers: seeds, stops, log-probabilities of the sampling distribution, snapshots and in-flight samplers."""

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


def sample(engine, sampler="base", prompt=PROMPT, seed=7, **changes):
    parameters = SampleParameters(**{"max_tokens": 6, "stop": (), **changes.pop("parameters", {})})
    request = SampleRequest(
        sampler_id=sampler, prompt=prompt, seed=seed, parameters=parameters, **changes
    )
    (answer,) = engine.sample([request])
    if isinstance(answer, Exception):
        raise answer
    return answer


def list_tokens(answer):
    return [sequence.tokens.tolist() for sequence in answer.sequences]


def compute_logits(engine, ids, sampler="base"):
    """Return the logits at every position from transformers' forward pass over the sampler's weights."""
    base, weights = engine._samplers[sampler].base, engine._samplers[sampler].weights
    input_ids = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
    with base.swap_weights(weights.merge_weights()) as model, torch.no_grad():
        return model(input_ids, use_cache=False).logits[0].double()


def test_equal_seeds_give_equal_samples_in_any_batch(engine):
    alone = sample(engine, num_samples=3)
    assert list_tokens(alone) == list_tokens(sample(engine, num_samples=3))
    assert len({tuple(row) for row in list_tokens(sample(engine, num_samples=8))}) > 1
    assert list_tokens(alone) != list_tokens(sample(engine, num_samples=3, seed=8))
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
    request = SampleRequest(
        sampler_id="base", prompt=PROMPT, seed=7, num_samples=3, parameters=parameters
    )
    batched = engine.sample([*others, request])[-1]
    assert list_tokens(batched) == list_tokens(alone)
    for sequence, other in zip(batched.sequences, alone.sequences, strict=True):
        assert np.allclose(sequence.logprobs, other.logprobs, atol=1e-6)
    # A sample does not depend on the number of samples.
    assert list_tokens(sample(engine, num_samples=1)) == list_tokens(alone)[:1]


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
def test_logprobs_are_of_the_sampling_distribution(engine, sampler, parameters):
    answer = sample(engine, sampler, num_samples=4, parameters=parameters, topk_sample_logprobs=3)
    for sequence in answer.sequences:
        assert len(sequence.tokens) == 6 and sequence.stop_reason == "length"
        logits = compute_logits(engine, [*PROMPT, *sequence.tokens], sampler)[len(PROMPT) - 1 : -1]
        temperature = parameters.get("temperature", 1.0)
        p = torch.softmax(logits / (temperature or 1.0), -1)
        if parameters.get("top_k"):
            p = torch.where(p >= p.topk(parameters["top_k"], -1).values[:, -1:], p, 0)
        if parameters.get("top_p"):
            order = p.sort(-1, descending=True)
            keep = (order.values.cumsum(-1) - order.values) < parameters["top_p"]
            p = torch.zeros_like(p).scatter(1, order.indices, torch.where(keep, order.values, 0))
        p = p / p.sum(-1, keepdim=True)
        chosen = p.gather(1, torch.from_numpy(sequence.tokens.astype(np.int64))[:, None])[:, 0]
        assert np.allclose(sequence.logprobs, chosen.log().numpy(), atol=1e-4)
        best = p.topk(3, -1)
        assert sequence.topk.tokens.shape == (6, 3)
        assert np.allclose(sequence.topk.logprobs[:, 0], best.values[:, 0].log().numpy(), atol=1e-4)
        if temperature == 0:
            assert sequence.tokens.tolist() == best.indices[:, 0].tolist()


def test_samples_follow_the_distribution(engine):
    """Compare 800 first tokens with their probabilities: the largest deviation stays within 4.5 standard errors."""
    answer = sample(engine, num_samples=800, parameters={"max_tokens": 1})
    p = torch.softmax(compute_logits(engine, PROMPT)[-1], -1).numpy()
    counts = np.bincount([row[0] for row in list_tokens(answer)], minlength=len(p))
    assert float(np.abs((counts - 800 * p) / np.sqrt(800 * p * (1 - p) + 1)).max()) < 4.5


def test_stops(engine):
    free = list_tokens(sample(engine, parameters={"max_tokens": 30}))[0]
    end = free[4]  # any sampled token, as an id and as a text
    first = free.index(end)
    by_id = sample(engine, parameters={"max_tokens": 30, "stop": (end,)}).sequences[0]
    by_text = sample(engine, parameters={"max_tokens": 30, "stop": (f"t{end}",)}).sequences[0]
    assert by_id.tokens.tolist() == free[: first + 1] and by_id.stop_reason == "stop"
    texts = [f"t{token}" for token in free]
    cut = next(i for i in range(len(free)) if f"t{end}" in " ".join(texts[: i + 1]))
    assert by_text.tokens.tolist() == free[: cut + 1] and by_text.stop_reason == "stop"


def test_stop_none_is_the_end_token_and_stop_empty_is_never(engine):
    """Check that some of 200 continuations contain token 1, the model's end of sequence."""
    options = {"num_samples": 200, "parameters": {"max_tokens": 20, "stop": None}}
    ended, free = (
        sample(engine, **options),
        sample(engine, **options | {"parameters": {"max_tokens": 20, "stop": ()}}),
    )
    assert {sequence.stop_reason for sequence in ended.sequences} == {"stop", "length"}
    for tokens, full in zip(list_tokens(ended), list_tokens(free), strict=True):
        assert len(full) == 20
        assert tokens == (full[: full.index(1) + 1] if 1 in full else full)
    assert {sequence.stop_reason for sequence in free.sequences} == {"length"}


def test_the_context_ends_a_sequence(engine):
    full = np.arange(CONTEXT) % 50 + 2
    answer = sample(engine, prompt=full, prompt_logprobs=True, num_samples=2)
    assert list_tokens(answer) == [[], []] and {
        sequence.stop_reason for sequence in answer.sequences
    } == {"length"}
    assert (
        answer.prompt_logprobs.shape == (CONTEXT,) and np.isfinite(answer.prompt_logprobs[1:]).all()
    )
    nearly = sample(engine, prompt=full[:-2], parameters={"max_tokens": None})
    assert len(list_tokens(nearly)[0]) == 2


def test_logprobs_of_prompts(engine):
    targets = np.array([[3, -1], [-1, -1], [7, 8]])
    answer = sample(
        engine,
        "run",
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        target_prompt_logprobs=targets,
        parameters={"temperature": 0.3},
    )
    p = torch.log_softmax(compute_logits(engine, PROMPT, "run"), -1).numpy()
    assert np.isnan(answer.prompt_logprobs[0])
    assert np.allclose(
        answer.prompt_logprobs[1:], [p[i, PROMPT[i + 1]] for i in range(3)], atol=1e-4
    )
    assert (
        answer.topk_prompt.tokens[0].tolist() == [0, 0]
        and answer.topk_prompt.logprobs[0].tolist() == [-99999.0] * 2
    )
    assert np.allclose(answer.topk_prompt.logprobs[1:], -np.sort(-p[:3])[:, :2], atol=1e-4)
    logprobs = answer.target_prompt_logprobs
    assert np.isnan(logprobs[targets == -1]).all()
    assert np.allclose(logprobs[[0, 2, 2], [0, 0, 1]], [p[0, 3], p[2, 7], p[2, 8]], atol=1e-4)


def test_prompts_agree_with_training(engine):
    """Compare compute_logprobs of a run's sampler with forward for the shifted sequence (to 1e-4)."""
    datum = random_data(4, 1)[0]
    sequence = np.append(datum.tokens, datum.inputs["target_tokens"][-1])
    (forward,) = engine.forward_backward([loss_request("r", (datum,), forward_only=True)])
    answer = sample(engine, "run", prompt=sequence, prompt_logprobs=True)
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

    def read_logprobs(name):
        return sample(engine, name, prompt_logprobs=True).prompt_logprobs[1:].tolist()

    before, base = read_logprobs("then"), read_logprobs("base")
    assert read_logprobs("now") == before and (kind == "whole") == (before == base)
    for _ in range(2):
        engine.forward_backward([loss_request("r", random_data(0))])
        engine.optim_step(step_request("r", 0.05))
    engine.create_sampler(CreateSampler(sampler_id="loaded", folder=str(tmp_path / "saved")))
    assert (
        read_logprobs("then") == before == read_logprobs("loaded") and read_logprobs("base") == base
    )
    assert read_logprobs("now") == before  # updates do not publish weights
    engine.create_sampler(CreateSampler(sampler_id="fresh", model_id="r"))
    engine.create_sampler(CreateSampler(sampler_id="next", model_id="r", kind="inflight"))
    assert read_logprobs("fresh") == read_logprobs("now") == read_logprobs("next") != before
    saved = CreateSampler(
        sampler_id="old", model_id="r", kind="inflight", folder=str(tmp_path / "saved")
    )
    engine.create_sampler(saved)
    assert read_logprobs("now") == read_logprobs("next") == read_logprobs("old") == before
    for options in (dict(base="base", kind="inflight"), dict(base="base", model_id="r"), {}):
        with pytest.raises(ServiceError, match="create_sampler: "):
            engine.create_sampler(CreateSampler(sampler_id="wrong", **options))
    engine.unload_sampler("then")
    with pytest.raises(ServiceError, match="no sampler 'then'"):
        read_logprobs("then")


def test_a_stop_text_may_span_many_tokens(engine):
    free = sample(engine, parameters={"max_tokens": 12})
    ids = free.sequences[0].tokens.tolist()
    text = engine._load_base_model("base").tokenizer.decode(ids[2:9], skip_special_tokens=False)
    assert len(text) >= 7
    sequence = sample(engine, parameters={"max_tokens": 12, "stop": (text,)}).sequences[0]
    assert sequence.stop_reason == "stop" and sequence.tokens.tolist() == ids[:9]
