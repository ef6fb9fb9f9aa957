"""stable_reinforce: value and gradient against numpy float64, on and off policy, what sampling records, refusals."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from helpers.service import VOCAB, bits, engine_with, loss_request, make_engine, new_run
from oracles import service_oracles

from rl_core.errors import ServiceError
from rl_core.service.loss_function import LossInputs
from rl_core.service.loss_registry import LOSSES
from rl_core.service.requests import CreateSampler, Datum, SampleParameters, SampleRequest

LOSS = LOSSES["stable_reinforce"]
NO_TOKEN = -99999.0
LENGTHS, K = (5, 1, 7), 4


def draw_rows(seed, sign):
    """Draw recorded distributions, some cut off, current ones, and advantages of a sign (0: both)."""
    rng = np.random.default_rng([seed, 5])
    rows, current = [], []
    for size in LENGTHS:
        q, p = (np.log(rng.dirichlet(np.ones(9), size)) for _ in range(2))
        recorded = q[:, :K].copy()
        recorded[rng.random((size, K)) < 0.2] = NO_TOKEN
        recorded[rng.random(size) < 0.2] = NO_TOKEN  # not sampled
        sampled = (recorded > -1e4).any(1)
        advantages = rng.exponential(1.0, size) * (sign or rng.choice([-1.0, 1.0], size)) * sampled
        advantages[rng.random(size) < 0.2] = 0.0
        rows.append({"sampler_top_logprobs": recorded, "advantages": advantages})
        current.append(np.concatenate([p[:, 5:6], p[:, :K]], axis=1))
    return rows, current


def pad(arrays):
    width = max(map(len, arrays))
    padded = [np.pad(a, [(0, width - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in arrays]
    return torch.from_numpy(np.stack(padded))


@pytest.mark.parametrize("kl_coeff", [0.0, 0.3])
@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_the_formula(seed, sign, kl_coeff):
    rows, current = draw_rows(seed, sign)
    options = {"temperature": 1.0, "kl_coeff": kl_coeff}
    mask = pad([np.ones(size) for size in LENGTHS]) != 0
    inputs = {name: pad([row[name] for row in rows]) for name in rows[0]}
    leaf = pad(current).requires_grad_()
    loss_inputs = LossInputs(mask, options, inputs, logprobs=leaf)
    loss = LOSS.loss(loss_inputs)

    def expected():
        return service_oracles.stable_reinforce(current, current, rows, options)

    assert float(loss.detach()) == pytest.approx(expected(), rel=1e-9, abs=1e-12)
    loss.backward()
    slopes = []
    for array in current:
        slope = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            original, values = array[index], []
            for step in (1e-6, -1e-6):
                array[index] = original + step
                values.append(expected())
            array[index] = original
            slope[index] = (values[0] - values[1]) / 2e-6
        slopes.append(slope)
    assert torch.allclose(leaf.grad, pad(slopes), rtol=1e-6, atol=1e-7)
    assert loss_inputs.outputs["logprobs"].shape == mask.shape
    assert float(loss_inputs.outputs["sampler_kl"].min()) >= 0


@pytest.mark.parametrize(("advantage", "value"), [(1.0, 0.62774), (-1.0, -0.49693)])
def test_one_token_by_hand(advantage, value):
    # q = (3/4, 1/4), p = (1/2, 1/2), the first token was sampled; kl_coeff 0.5
    # KL = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.13081; ln p = -0.69315
    # A = +1: 0.69315 - 0.5 * 0.13081; A = -1: -0.69315 + 1.5 * 0.13081
    logp = torch.log(torch.tensor([[[0.5, 0.5, 0.5]]], dtype=torch.float64))
    inputs = {
        "sampler_top_logprobs": torch.log(torch.tensor([[[0.75, 0.25]]], dtype=torch.float64)),
        "advantages": torch.tensor([[advantage]], dtype=torch.float64),
    }
    options = {"temperature": 1.0, "kl_coeff": 0.5}
    loss = LOSS.loss(LossInputs(torch.ones(1, 1).bool(), options, inputs, logprobs=logp))
    assert float(loss) == pytest.approx(value, abs=1e-5)


@pytest.fixture(scope="module")
def engine(base_folder):
    return make_engine(base_folder)


def record_samples(engine, run, sampler, count=3, seed=0, **parameters):
    """Sample from a run's current weights and build the datums of the samples, with both signs of advantages."""
    engine.create_sampler(CreateSampler(sampler_id=sampler, model_id=run))
    prompt = np.array([5, 6, 7])
    request = SampleRequest(
        sampler_id=sampler,
        prompt=prompt,
        seed=seed,
        num_samples=count,
        parameters=SampleParameters(max_tokens=6, stop=(), **parameters),
        recorded_tokens=VOCAB,
    )
    (answer,) = engine.sample([request])
    assert not isinstance(answer, ServiceError), answer
    data = []
    for number, sequence in enumerate(answer.sequences):
        ids = np.concatenate([prompt, sequence.tokens])
        skipped, size = len(prompt) - 1, len(sequence.tokens)
        recorded = sequence.recorded
        assert recorded is not None and recorded.tokens.shape == (size, VOCAB)
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": np.pad(sequence.logprobs, (skipped, 0)),
            "advantages": np.pad(np.full(size, [1.0, -0.7, 0.4][number]), (skipped, 0)),
            "sampler_top_tokens": np.pad(recorded.tokens, ((skipped, 0), (0, 0))),
            "sampler_top_logprobs": np.pad(
                recorded.logprobs, ((skipped, 0), (0, 0)), constant_values=NO_TOKEN
            ),
        }
        data.append(Datum(ids[:-1], inputs))
    return tuple(data)


def compute_gradient(engine, run, data, loss, **config):
    """Compute a request's gradient in the run, and forget it; return gradient and result."""
    state = engine.state_dict(run)
    (result,) = engine.forward_backward([loss_request(run, data, loss, loss_fn_config=config)])
    assert not isinstance(result, ServiceError), result
    gradient = copy.deepcopy(engine.state_dict(run)["gradient"])
    engine.restore_model(run, state)
    return gradient, result


def without_recording(data):
    return tuple(
        Datum(
            datum.tokens,
            {key: value for key, value in datum.inputs.items() if not key.startswith("sampler")},
        )
        for datum in data
    )


def test_on_policy_it_is_reinforce(engine):
    new_run(engine, "on", rank=4, seed=0)
    data = record_samples(engine, "on", "on.sampler")
    gradient, result = compute_gradient(engine, "on", data, "stable_reinforce", kl_coeff=0.5)
    plain, _ = compute_gradient(engine, "on", without_recording(data), "importance_sampling")
    assert gradient and all(
        torch.allclose(gradient[name], plain[name], rtol=1e-3, atol=2e-5) for name in plain
    )
    assert result.metrics["sampler_kl:max"] < 1e-5
    assert result.metrics["recorded_mass:min"] == pytest.approx(1, abs=1e-5)
    assert result.metrics["tokens:sum"] == 18 and result.outputs[0]["logprobs"].shape == (8,)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_off_policy_gradient_is_centred_exactly(engine, temperature):
    """Against torch in float64 over the complete vocabulary: -A (grad p(a) - sum q grad p) + k grad KL(q || p)."""
    name = f"off{temperature}"
    new_run(engine, name, rank=4, seed=3)
    data = record_samples(engine, name, f"{name}.sampler", temperature=temperature)
    moved = engine.state_dict(name)
    for key, tensor in moved["model"].items():
        if "lora_B" in key:
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    engine.restore_model(name, moved)
    gradient, result = compute_gradient(
        engine, name, data, "stable_reinforce", kl_coeff=0.3, temperature=temperature
    )
    run = engine._runs[name]
    model = copy.deepcopy(run.base.model).double()
    factors = {
        key: value.detach().double().requires_grad_()
        for key, value in run.parameters.items()
        if "lora" in key
    }
    merged = {
        f"{key}.weight": model.get_submodule(key).weight
        + update.scale * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
        for key, update in run.adapter.items()
    }
    surrogate = torch.zeros((), dtype=torch.float64)
    for datum in data:
        ids = torch.from_numpy(datum.tokens)[None]
        logits = torch.func.functional_call(model, merged, (ids,), {"use_cache": False}).logits[0]
        logp = torch.log_softmax(logits / temperature, -1)
        for t in range(len(datum.tokens)):
            top = torch.from_numpy(datum.inputs["sampler_top_logprobs"][t]).double()
            if bool((top <= -1e4).all()):
                continue
            order = torch.from_numpy(datum.inputs["sampler_top_tokens"][t]).long()
            q = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, order, top.exp())
            a = float(datum.inputs["advantages"][t])
            centred = logp[t, datum.inputs["target_tokens"][t]] - (q * logp[t]).sum()
            surrogate = surrogate - a * centred - 0.3 * (q * logp[t]).sum()
    surrogate.backward()
    for key, factor in factors.items():
        scale = float(factor.grad.abs().max())
        assert torch.allclose(gradient[key].double(), factor.grad, atol=2e-4 * scale), key
    assert result.metrics["sampler_kl:mean"] > 0.05


def test_datums_split_into_requests_add_up_to_the_whole(base_folder):
    engine = engine_with(base_folder, ["a"])
    data = record_samples(engine, "a", "a.sampler")
    _, whole = compute_gradient(engine, "a", data, "stable_reinforce", kl_coeff=0.2)
    parts = [
        compute_gradient(engine, "a", (datum,), "stable_reinforce", kl_coeff=0.2) for datum in data
    ]
    assert whole.loss == pytest.approx(sum(result.loss for _, result in parts), rel=1e-5)
    again, _ = compute_gradient(engine, "a", data, "stable_reinforce", kl_coeff=0.2)
    first, _ = compute_gradient(engine, "a", data, "stable_reinforce", kl_coeff=0.2)
    assert bits(again) == bits(first)


def change(datum, **inputs):
    return dataclasses.replace(datum, inputs={**datum.inputs, **inputs})


def test_refusals_name_the_input(engine):
    new_run(engine, "r", rank=2)
    first, second, _ = record_samples(engine, "r", "r.sampler")
    tokens, logprobs = (first.inputs[f"sampler_top_{name}"] for name in ("tokens", "logprobs"))
    cases = [
        (
            (change(first, advantages=np.ones(8)),),
            "not 0 at position 0, whose token was not sampled",
        ),
        ((change(first, sampler_top_tokens=tokens[:, 0]),), "sampler_top_tokens.*shape"),
        ((change(first, sampler_top_tokens=tokens + VOCAB),), "outside the vocabulary"),
        ((change(first, sampler_top_logprobs=logprobs[:, :3]),), r"expected \(8, 60\)"),
        ((change(first, sampler_top_logprobs=np.abs(logprobs)),), "expected at most 0"),
        ((change(first, sampler_top_logprobs=np.full_like(logprobs, np.nan)),), "finite"),
        (
            (
                second,
                change(
                    first,
                    sampler_top_tokens=tokens[:, :3],
                    sampler_top_logprobs=logprobs[:, :3],
                ),
            ),
            "as in the first datum",
        ),
        (without_recording((first,)), "needs 'sampler_top_tokens'"),
    ]
    for data, message in cases:
        (error,) = engine.forward_backward([loss_request("r", data, "stable_reinforce")])
        assert isinstance(error, ServiceError) and error.category == "user"
        with pytest.raises(ServiceError, match=message):
            raise error


def test_a_sample_without_recording_has_none(engine):
    engine.create_sampler(CreateSampler(sampler_id="plain", base="base"))
    request = SampleRequest(
        sampler_id="plain", prompt=np.array([5]), seed=1, parameters=SampleParameters(max_tokens=2)
    )
    (plain,) = engine.sample([request])
    (recorded,) = engine.sample([dataclasses.replace(request, recorded_tokens=4)])
    assert plain.sequences[0].recorded is None
    assert recorded.sequences[0].recorded.tokens.shape == (len(recorded.sequences[0].tokens), 4)
    assert np.array_equal(plain.sequences[0].tokens, recorded.sequences[0].tokens)
    full = dataclasses.replace(request, prompt=np.full(48, 5), recorded_tokens=4)
    (empty,) = engine.sample([full])  # the prompt fills the context
    assert empty.sequences[0].recorded.tokens.shape == (0, 4)
