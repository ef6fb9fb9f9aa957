"""Base models whose passes are those of transformers: every run has separate passes, as exact as for other families."""

import pytest
from helpers.service import (
    RANKS,
    bits,
    engine_with,
    loss_request,
    make_base,
    make_engine,
    merged_gradient,
    random_data,
    step_request,
)
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from rl_core.errors import ServiceError
from rl_core.service.requests import AdapterConfig, CreateModel

FAMILIES = {
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi": (PhiConfig, PhiForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}
RUNS = ("a", "b")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    config, model = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "base"
    return make_base(folder, config_class=config, model_class=model, tie_word_embeddings=False)


def train_runs(folder, names):
    """Return states with a gradient, after an update and another pass."""
    engine = engine_with(folder, names)
    assert not engine.base_info("base").batches_runs
    assert "is not of a known family (Llama, Qwen2, Qwen3)" in engine.base_info("base").note
    for seed in (1, 2):
        results = engine.forward_backward(
            [loss_request(name, random_data(seed * RANKS[name])) for name in names]
        )
        assert not any(isinstance(result, ServiceError) for result in results), results
        if seed == 1:
            engine.optim_steps([step_request(name) for name in names])
    return {name: bits(engine.state_dict(name)) for name in names}


def test_concurrent_runs_are_the_bits_of_each_alone(folder):
    together = train_runs(folder, RUNS)
    for name in RUNS:
        assert train_runs(folder, [name])[name] == together[name]


def test_the_gradient_is_autograds_of_the_merged_model(folder):
    """Compare with torch in float64, up to float32 rounding of the gradient's largest value."""
    engine, data = engine_with(folder, ["a"]), random_data(5, 3)
    (answer,) = engine.forward_backward([loss_request("a", data)])
    run, gradients = engine._find_run("a"), engine.state_dict("a")["gradient"]
    loss, expected = merged_gradient(run, data)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert set(gradients) == set(expected) and largest > 1e-3
    assert (
        max(float((gradients[name].double() - expected[name]).abs().max()) for name in gradients)
        < 5e-6 * largest
    )
    assert answer.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)


def test_layers_without_adapter_support_are_named_and_all_weights_can_be_trained(tmp_path):
    """Use GPT-2, whose layers are not linear modules: an adapter would otherwise silently train only the head."""
    folder = make_base(tmp_path / "base", config_class=GPT2Config, model_class=GPT2LMHeadModel)
    engine = make_engine(folder)
    with pytest.raises(
        ServiceError, match=r"'base' \(GPT2LMHeadModel\) has no linear layers for train_attn"
    ):
        engine.create_model(CreateModel(model_id="a", base="base", adapter=AdapterConfig(rank=2)))
    engine.create_model(CreateModel(model_id="full", base="base", adapter=None))
    losses = []
    for _ in range(3):
        (result,) = engine.forward_backward([loss_request("full", random_data(0))])
        engine.optim_step(step_request("full", 1e-3))
        losses.append(result.metrics["loss:sum"])
    assert losses[2] < losses[1] < losses[0]


def test_a_head_that_caps_logits_is_refused(tmp_path):
    folder = make_base(tmp_path / "base", config_class=Gemma2Config, model_class=Gemma2ForCausalLM)
    with pytest.raises(ServiceError, match="base model 'base' cannot be served"):
        make_engine(folder).create_model(
            CreateModel(model_id="a", base="base", adapter=AdapterConfig(rank=2))
        )
