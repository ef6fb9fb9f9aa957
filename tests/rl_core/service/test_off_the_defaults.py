"""Base models and adapters with unusual settings: dropout, bfloat16, parts of a model, all weights.

Each trains, samples at a temperature, and resumes from a state taken in the middle of an accumulation.
"""

import numpy as np
import pytest
from helpers.service import bits, loss_request, make_base, make_engine, random_data, step_request

from rl_core.service.requests import (
    AdapterConfig,
    CreateModel,
    CreateSampler,
    Datum,
    SampleParameters,
    SampleRequest,
)

KINDS = {
    "dropout": (dict(attention_dropout=0.4), {}, {}),
    "dropout in all weights": (dict(attention_dropout=0.4), {}, None),
    "bfloat16": ({}, dict(dtype="bfloat16"), {}),
    "all weights": ({}, {}, None),
    "attention": ({}, {}, dict(train_mlp=False, train_unembed=False)),
    "mlp": ({}, {}, dict(train_attn=False, train_unembed=False)),
    "head, tied": (dict(tie_word_embeddings=True), {}, dict(train_attn=False, train_mlp=False)),
}
TEMPERATURE = 0.6


@pytest.fixture(params=KINDS, ids=list(KINDS))
def setup(request, tmp_path):
    """Return (kind, function that creates an engine with the run 'r')."""
    shape, settings, adapter = KINDS[request.param]
    folder = make_base(tmp_path / "base", **shape)

    def make():
        engine = make_engine(folder, **settings)
        config = None if adapter is None else AdapterConfig(rank=3, seed=1, **adapter)
        engine.create_model(CreateModel(model_id="r", base="base", adapter=config))
        return engine

    return request.param, make


def train(engine, seeds):
    for seed in seeds:
        (answer,) = engine.forward_backward([loss_request("r", random_data(seed))])
        assert np.isfinite(answer.loss)
        engine.optim_step(step_request("r"))


def test_training_reduces_the_loss_and_evaluation_is_deterministic(setup):
    kind, make = setup
    engine = make()
    data = random_data(1, rows=6)
    data = tuple(
        Datum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"]}) for datum in data
    )
    losses = []
    for _ in range(6):
        evaluated = engine.forward_backward(
            [loss_request("r", data, forward_only=True) for _ in range(2)]
        )
        assert evaluated[0].loss == evaluated[1].loss, "dropout is on"
        engine.forward_backward([loss_request("r", data)])
        engine.optim_step(step_request("r"))
        losses.append(evaluated[0].loss)
    assert losses[-1] < (0.995 if kind == "head, tied" else 0.97) * losses[0], losses


def test_sampled_logprobs_are_those_of_training_at_the_temperature(setup):
    kind, make = setup
    engine = make()
    train(engine, range(2))
    engine.create_sampler(CreateSampler(sampler_id="s", model_id="r"))
    prompt = np.array([5, 9, 23, 4])
    parameters = SampleParameters(max_tokens=10, stop=(), temperature=TEMPERATURE)
    request = SampleRequest(
        sampler_id="s", prompt=prompt, seed=2, num_samples=4, parameters=parameters
    )
    (sampled,) = engine.sample([request])
    data = []
    for sequence in sampled.sequences:
        tokens = np.concatenate([prompt, sequence.tokens])
        prompt_zeros = np.zeros(len(prompt) - 1, np.float32)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([prompt_zeros, sequence.logprobs]),
            "advantages": np.concatenate([prompt_zeros, np.ones(len(sequence.tokens), np.float32)]),
        }
        data.append(Datum(tokens[:-1], inputs))
    for temperature, is_same in ((TEMPERATURE, True), (1.0, False)):
        config = {"temperature": temperature}
        (answer,) = engine.forward_backward(
            [
                loss_request(
                    "r",
                    tuple(data),
                    "importance_sampling",
                    loss_fn_config=config,
                    forward_only=True,
                )
            ]
        )
        difference = answer.metrics["sampler_difference:max"]
        assert (difference < (0.3 if kind == "bfloat16" else 1e-4)) == is_same, difference


def test_resuming_from_a_state_in_the_middle_of_an_accumulation(setup):
    """Resume as after kill -9: load the state, then repeat the later requests."""
    _, make = setup
    uninterrupted, first, second = make(), make(), make()
    for engine in (uninterrupted, first):
        train(engine, range(2))
        engine.forward_backward([loss_request("r", random_data(7))])
    second.restore_model("r", first.state_dict("r"))
    for engine in (uninterrupted, second):
        engine.forward_backward([loss_request("r", random_data(8, policy=True), "ppo")])
        engine.optim_step(step_request("r"))
    assert bits(second.state_dict("r")) == bits(uninterrupted.state_dict("r"))
