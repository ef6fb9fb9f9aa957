"""Samplers with different adapters in one batch: each one's tokens and log-probabilities are the bits of it alone."""

import numpy as np
import pytest
import torch
from helpers.service import bits, make_base, make_engine, new_run
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.capabilities import check_slot_adapters
from rl_core.errors import ServiceError
from rl_core.inference.engine import Engine
from rl_core.service.requests import CreateModel, CreateSampler, SampleParameters, SampleRequest

RUNS = {
    "a": dict(rank=4),
    "attention": dict(rank=3, train_mlp=False, train_unembed=False),
    "mlp": dict(rank=16, train_attn=False, train_unembed=False),
    "head": dict(rank=1, train_attn=False, train_mlp=False),
}


def engine_with(folder, names, **settings):
    """Samplers of runs, and one of the base model."""
    engine = make_engine(folder, **settings)
    generator = torch.Generator().manual_seed(9)
    for name, weight in engine._load_base_model("base").model.named_parameters():
        if "norm" in name:  # they are multiplied into what is packed, adapters included
            weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    for name in names:
        if name != "base":
            new_run(engine, name, seed=sorted(RUNS).index(name), **RUNS[name])
        engine.create_sampler(
            CreateSampler(
                sampler_id=name, **{"base": "base"} if name == "base" else {"model_id": name}
            )
        )
    if not engine._load_base_model("base").samples_adapters.allowed:
        pytest.skip(check_slot_adapters(engine._load_base_model("base").model).reason)
    return engine


def requests_of(names):
    """Mixed lengths and parameters, equal prompts among them; some end early, some draw from few tokens."""
    found = []
    for number, name in enumerate([*names, *names]):
        prompt = np.array([5, 9, 23, 4] if number % 2 else [7, 8 + number, 11, 30, 12, 3])
        kind = {0: {"stop": tuple(range(2, 16))}, 1: {"top_k": 7}, 2: {"stop": ("a",)}}[
            number // len(names) + number % 2
        ]
        parameters = SampleParameters(**{"max_tokens": 9, "stop": (), "temperature": 0.8, **kind})
        found.append(
            SampleRequest(
                sampler_id=name,
                prompt=prompt,
                seed=number,
                num_samples=4,
                parameters=parameters,
                prompt_logprobs=number % 3 == 0,
            )
        )
    return found


def plain(answer):
    prompt = None if answer.prompt_logprobs is None else bits(answer.prompt_logprobs)
    return prompt, [
        (bits(one.tokens), bits(one.logprobs), one.stop_reason) for one in answer.sequences
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sampler_in_a_batch_is_the_sampler_alone(
    base_folder, tmp_path, threads, family, monkeypatch
):
    if family == "qwen3":  # norms of heads, tied weights
        base_folder = make_base(
            tmp_path / "base", config_class=Qwen3Config, model_class=Qwen3ForCausalLM
        )
    names = ["base", *RUNS]
    played = []
    run = Engine.run_sequences
    monkeypatch.setattr(
        Engine,
        "run_sequences",
        lambda self, rows, *more: (played.append(len(rows)), run(self, rows, *more))[1],
    )
    torch.set_num_threads(threads)
    try:
        together = engine_with(base_folder, names, slots=7)
        requests = requests_of(names)
        answers = together.sample(requests)
        assert played == [12, 16, 12]  # one for each kind of parameters
        seen = set()
        for name in names:
            mine = [index for index, request in enumerate(requests) if request.sampler_id == name]
            alone = engine_with(base_folder, [name]).sample([requests[index] for index in mine])
            for index, answer in zip(mine, alone, strict=True):
                assert plain(answer) == plain(answers[index]), (name, index)
            seen.add(str(plain(alone[0])))
        assert len(seen) == len(names)
    finally:
        torch.set_num_threads(1)


def test_adapters_by_slot_are_the_merged_weights_to_rounding(base_folder):
    """Log-probabilities of what was sampled, against transformers' pass over the merged weights."""
    engine = engine_with(base_folder, list(RUNS))
    for name in RUNS:
        request = SampleRequest(
            sampler_id=name,
            prompt=np.array([5, 9, 23, 4]),
            seed=3,
            num_samples=4,
            parameters=SampleParameters(max_tokens=12, stop=(), temperature=0.7),
        )
        (answer,) = engine.sample([request])
        base, weights = engine._load_base_model("base"), engine._find_sampler(name).weights
        for one in answer.sequences:
            ids = torch.tensor([[5, 9, 23, 4, *one.tokens.tolist()]])
            with base.swap_weights(weights.merge_weights()) as model, torch.no_grad():
                log_p = torch.log_softmax(model(ids).logits[0, 3:-1] / 0.7, -1)
            expected = log_p.gather(1, ids[0, 4:, None])[:, 0].numpy()
            assert np.abs(one.logprobs - expected).max() < 1e-5


def test_a_fault_of_one_adapter_is_its_own(base_folder):
    engine = engine_with(base_folder, ["a", "mlp"])
    state = engine.state_dict("mlp")
    next(value for name, value in state["model"].items() if "lora_B" in name).fill_(float("nan"))
    engine.restore_model("broken", state)
    engine.create_sampler(CreateSampler(sampler_id="broken", model_id="broken"))
    requests = [
        SampleRequest(
            sampler_id=name,
            prompt=np.array([5, 9]),
            seed=1,
            parameters=SampleParameters(max_tokens=4),
        )
        for name in ("a", "broken", "mlp")
    ]
    answers = engine.sample(requests)
    assert (
        isinstance(answers[1], ServiceError)
        and len(answers[0].sequences) == len(answers[2].sequences) == 1
    )
    assert plain(answers[0]) == plain(engine_with(base_folder, ["a"]).sample(requests[:1])[0])


def test_a_run_that_trains_all_weights_is_sampled_by_itself(base_folder):
    engine = engine_with(base_folder, ["a"])
    engine.create_model(CreateModel(model_id="full", base="base", adapter=None))
    engine.create_sampler(CreateSampler(sampler_id="full", model_id="full"))
    engine.create_sampler(CreateSampler(sampler_id="base", base="base"))
    requests = [
        SampleRequest(
            sampler_id=name,
            prompt=np.array([5, 9]),
            seed=1,
            parameters=SampleParameters(max_tokens=4),
        )
        for name in ("full", "a", "base")
    ]
    full, _, base = engine.sample(requests)
    assert plain(full) == plain(base)  # nothing was trained yet
