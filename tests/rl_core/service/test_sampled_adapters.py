"""Samplers with different adapters in one batch: tokens and log-probabilities are bitwise those of each alone."""

import copy

import numpy as np
import pytest
import torch
from helpers.service import bits, make_base, make_engine, new_run
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.capabilities import check_slot_adapters
from rl_core.cpu import packed_gemm
from rl_core.errors import ServiceError
from rl_core.inference.engine import Engine
from rl_core.service.requests import CreateModel, CreateSampler, SampleParameters, SampleRequest

RUNS = {
    "a": dict(rank=4),
    "attention": dict(rank=3, train_mlp=False, train_unembed=False),
    "mlp": dict(rank=16, train_attn=False, train_unembed=False),
    "head": dict(rank=1, train_attn=False, train_mlp=False),
}


def build_engine(folder, names, **settings):
    """Create samplers of runs, and one of the base model."""
    engine = make_engine(folder, **settings)
    generator = torch.Generator().manual_seed(9)
    for name, weight in engine._load_base_model("base").model.named_parameters():
        if "norm" in name:  # norms are folded into the packed weights, including adapters
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


def build_requests(names):
    """Mix lengths and parameters, with equal prompts among them; some end early, some draw from few tokens."""
    requests = []
    for number, name in enumerate([*names, *names]):
        prompt = np.array([5, 9, 23, 4] if number % 2 else [7, 8 + number, 11, 30, 12, 3])
        options = {0: {"stop": tuple(range(2, 16))}, 1: {"top_k": 7}, 2: {"stop": ("a",)}}[
            number // len(names) + number % 2
        ]
        parameters = SampleParameters(
            **{"max_tokens": 9, "stop": (), "temperature": 0.8, **options}
        )
        requests.append(
            SampleRequest(
                sampler_id=name,
                prompt=prompt,
                seed=number,
                num_samples=4,
                parameters=parameters,
                prompt_logprobs=number % 3 == 0,
            )
        )
    return requests


def to_comparable(answer):
    prompt = None if answer.prompt_logprobs is None else bits(answer.prompt_logprobs)
    return prompt, [
        (bits(sequence.tokens), bits(sequence.logprobs), sequence.stop_reason)
        for sequence in answer.sequences
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen3", "float32"), ("qwen3", "bfloat16")]
)
def test_a_sampler_in_a_batch_is_the_sampler_alone(
    base_folder, tmp_path, threads, family, dtype, monkeypatch
):
    if family == "qwen3":  # norms of heads, tied weights
        base_folder = make_base(
            tmp_path / "base", config_class=Qwen3Config, model_class=Qwen3ForCausalLM
        )
    names = ["base", *RUNS]
    batch_sizes = []
    run = Engine.run_sequences
    monkeypatch.setattr(
        Engine,
        "run_sequences",
        lambda self, rows, *arguments: (batch_sizes.append(len(rows)), run(self, rows, *arguments))[
            1
        ],
    )
    torch.set_num_threads(threads)
    try:
        together = build_engine(base_folder, names, slots=7, dtype=dtype)
        requests = build_requests(names)
        answers = together.sample(requests)
        assert batch_sizes == [12, 16, 12]  # one batch for each kind of parameters
        distinct = set()
        for name in names:
            indices = [
                index for index, request in enumerate(requests) if request.sampler_id == name
            ]
            alone = build_engine(base_folder, [name], dtype=dtype).sample(
                [requests[index] for index in indices]
            )
            for index, answer in zip(indices, alone, strict=True):
                assert to_comparable(answer) == to_comparable(answers[index]), (name, index)
            distinct.add(str(to_comparable(alone[0])))
        assert len(distinct) == len(names)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_by_slot_are_the_merged_weights_to_rounding(base_folder, dtype):
    """Compare the log-probabilities of samples with transformers' pass over the merged weights, in float32: an adapter
    is not rounded to the base's bfloat16.
    """
    engine = build_engine(base_folder, list(RUNS), dtype=dtype)
    is_rounded = dtype == "bfloat16" and packed_gemm.load_bf16_products().kernel != "widened"
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
        for sequence in answer.sequences:
            ids = torch.tensor([[5, 9, 23, 4, *sequence.tokens.tolist()]])
            model = copy.deepcopy(base.model).float()
            for layer, update in weights.adapter.items():
                linear = model.get_submodule(layer)
                linear.weight.data = update.add_to_weight(linear.weight.data)
            with torch.no_grad():
                log_p = torch.log_softmax(model(ids).logits[0, 3:-1] / 0.7, -1)
            expected = log_p.gather(1, ids[0, 4:, None])[:, 0].numpy()
            assert np.abs(sequence.logprobs - expected).max() < (0.2 if is_rounded else 1e-5)


def test_an_error_in_one_adapter_affects_only_it(base_folder):
    engine = build_engine(base_folder, ["a", "mlp"])
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
    assert to_comparable(answers[0]) == to_comparable(
        build_engine(base_folder, ["a"]).sample(requests[:1])[0]
    )


def test_a_run_that_trains_all_weights_is_sampled_separately(base_folder):
    engine = build_engine(base_folder, ["a"])
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
    assert to_comparable(full) == to_comparable(base)  # nothing was trained yet
