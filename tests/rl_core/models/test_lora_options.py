"""Adapter options: engine and trainer agree, exports load with peft, merged models are equal, and the model without
its adapters is the reference.
"""

import copy

import peft
import pytest
import torch
from helpers.letters import FewLetters, make_trainer, weights
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.models import causal_lm
from rl_core.models.lora import (
    add_adapter,
    build_quantization_options,
    disable_adapter,
    is_lora,
    use_merged_weights,
)
from rl_core.settings import LoraSettings, ModelSettings

OPTIONS = {
    "plain": {},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"rank_stabilized": True},
    "dora": {"dora": True, "target_modules": ("q_proj", "down_proj")},
    "whole norms": {"modules_to_save": ("input_layernorm", "norm")},
    "whole head": {"modules_to_save": ("lm_head", "embed_tokens"), "target_modules": ("q_proj",)},
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def create_llama(tokenizer, name=""):
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=32, device="cpu"), tokenizer, 0
    )
    if name != "whole head":
        return model
    torch.manual_seed(0)  # separate head and embedding
    return LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "tie_word_embeddings": False}))


def create_gpt2(tokenizer):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return GPT2LMHeadModel(config)


def add_random_adapter(model, settings):
    """Add adapters that change the output."""
    model = add_adapter(model, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor([[5, 9, 11, 7], [8, 6, 5, 12]])).logits


@pytest.mark.parametrize("name", [*OPTIONS, "gpt2", "gpt2 dora"])
def test_merged_exported_and_switched_off(tokenizer, tmp_path, name):
    """Merged temporarily and restored; the exported folder without peft, and its adapter with peft, give the same
    logits.
    """
    is_gpt2 = name.startswith("gpt2")
    settings = LoraSettings(
        rank=2, **(OPTIONS.get(name) or {"target_modules": "all-linear", "dora": "dora" in name})
    )
    start = create_gpt2(tokenizer) if is_gpt2 else create_llama(tokenizer, name)
    base_logits = compute_logits(start)
    model = add_random_adapter(copy.deepcopy(start), settings)
    changed, state = compute_logits(model), copy.deepcopy(model.state_dict())
    assert (changed - base_logits).abs().max() > 1e-2
    with disable_adapter(model):
        assert torch.equal(compute_logits(model), base_logits)
    with use_merged_weights(model):
        assert torch.allclose(compute_logits(model), changed, atol=1e-4)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(compute_logits(model), changed)
    causal_lm.save(model, tokenizer, tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not is_lora(exported) and torch.allclose(compute_logits(exported), changed, atol=1e-4)
    with_peft = peft.PeftModel.from_pretrained(copy.deepcopy(start), tmp_path / "model" / "adapter")
    assert torch.allclose(compute_logits(with_peft), changed, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_rollouts_agree_and_a_resume_is_exact(tokenizer, name):
    """Log-probs of sampler and trainer; KL to the model without adapters or to a copy; state after a resume."""
    settings = LoraSettings(rank=2, **OPTIONS[name])
    options = {"kl_coef": 0.1, "learning_rate": 2e-2, "epochs": 2}

    def build_trainer(shares_reference):
        torch.manual_seed(3)
        model = add_adapter(create_llama(tokenizer, name), settings)
        reference = model if shares_reference else create_llama(tokenizer, name)
        return make_trainer(tokenizer, FewLetters(), model=model, reference=reference, **options)

    shared, copied = build_trainer(True), build_trainer(False)
    rows = [[each.step() for _ in range(3)] for each in (shared, copied)]
    shared_kl, expected = ([row["policy/ref_kl"] for row in part] for part in rows)
    # the model computes the logits of a wrapped head itself, with other rounding
    if name == "whole head":
        assert shared_kl[0] == pytest.approx(expected[0], rel=1e-2)
    else:  # with tiles (AMX) the products of adapted layers and of plain ones round differently
        assert shared_kl == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(weights(shared), weights(copied), atol=1e-5)
    assert shared_kl[-1] > 1e-6
    assert max(row["policy/sampler_difference_max"] for row in rows[0]) < 1e-4
    assert all(
        parameter.requires_grad == ("lora_" in key or "modules_to_save" in key)
        for key, parameter in shared.policy.named_parameters()
    )
    resumed = build_trainer(True)
    resumed.policy.load_state_dict(copy.deepcopy(shared.policy.state_dict()))
    resumed.optimizer_step.load_state_dict(copy.deepcopy(shared.optimizer_step.state_dict()))
    resumed.load_state_dict(copy.deepcopy(shared.state_dict()))
    shared.step()
    resumed.step()
    assert torch.equal(weights(shared), weights(resumed))


def test_a_policy_without_adapters_cannot_be_its_reference(tokenizer):
    model = create_llama(tokenizer)
    with pytest.raises(SettingsError, match="cannot be its own reference"):
        make_trainer(tokenizer, model=model, reference=model, kl_coef=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ("lm_head",)}, "modules_to_save: lm_head shares its weights"),
        (
            {"modules_to_save": ("embed_tokens",)},
            "modules_to_save: embed_tokens shares its weights",
        ),
        ({"modules_to_save": ("nose",)}, "has no module named nose"),
        (
            {"target_modules": ("c_attn",)},
            r"no linear layer of this model is named c_attn; .*all-linear",
        ),
    ],
)
def test_what_cannot_be_adapted_is_named(tokenizer, options, message):
    with pytest.raises(SettingsError, match=f"^lora.*{message}"):
        add_adapter(create_llama(tokenizer), LoraSettings(**options))


def test_a_module_is_adapted_or_trained_as_a_whole():
    with pytest.raises(
        SettingsError, match="modules_to_save: q_proj is also one of target_modules"
    ):
        LoraSettings(modules_to_save=("q_proj",))


def test_quantisation_needs_a_cuda_device_and_the_library(monkeypatch):
    settings = LoraSettings(quantize="nf4")
    with pytest.raises(
        SettingsError, match=r"quantize: nf4 needs a CUDA device, and the model is to be on cpu"
    ):
        build_quantization_options(settings, torch.device("cpu"), torch.float32)
    assert build_quantization_options(LoraSettings(), torch.device("cpu"), torch.float32) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"needs the package bitsandbytes"):
        build_quantization_options(settings, torch.device("cuda"), torch.bfloat16)


def test_all_linear_in_a_configuration():
    from tasks.config import build_settings, dump_settings

    values = {
        "name": "x",
        "model": {"path": "org/name", "lora": {"target_modules": "all-linear"}},
        "stages": {"prepare_data": {}, "sft": {}},
    }
    settings = build_settings(values, check_files=False)
    assert settings.model.lora.target_modules == "all-linear"
    assert build_settings(dump_settings(settings), check_files=False) == settings
