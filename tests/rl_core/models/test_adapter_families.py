"""Adapters on the families of transformers: default targets, experts stacked in one parameter, export, and refusals."""

import copy
import json

import peft
import pytest
import torch
from helpers.tiny_families import DENSE, EXPERTS, create_family_model
from transformers import AutoModelForCausalLM

from rl_core.errors import ModelError, SettingsError
from rl_core.models import causal_lm
from rl_core.models.adapter_targets import describe_adapters, find_stacked_experts
from rl_core.models.lora import (
    add_adapter,
    disable_adapter,
    is_servable_adapter,
    save_merged,
    use_merged_weights,
)
from rl_core.settings import LoraSettings, ModelSettings

IDS = torch.tensor([[5, 9, 11, 7, 3, 4, 8], [8, 6, 5, 12, 13, 14, 3]])


def train_adapter(model, settings):
    """Add an adapter with random weights; return the model and the adapter weights without a gradient."""
    model = add_adapter(model, settings)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in trainable.values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(IDS).logits.square().sum().backward()
    dead = [name for name, p in trainable.items() if p.grad is None or not p.grad.any()]
    return model, dead


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def list_families_and_targets():
    """Return every family with both kinds of targets; `make test` takes one kind of each, in turn."""
    return [
        pytest.param(family, targets, marks=[pytest.mark.slow] * ((number + turn) % 2))
        for number, family in enumerate([*DENSE, *EXPERTS])
        for turn, targets in enumerate(["default", "all-linear"])
    ]


@pytest.mark.parametrize(("family", "targets"), list_families_and_targets())
def test_every_family_trains_and_exports_its_adapter(family, targets, tmp_path):
    """Every adapter gets a gradient; merged, exported and read by peft, the model is the trained one."""
    start = create_family_model(family)
    base = compute_logits(start)
    options = {} if targets == "default" else {"target_modules": targets}
    model, dead = train_adapter(copy.deepcopy(start), LoraSettings(rank=2, **options))
    assert dead == []
    trained, state = compute_logits(model), copy.deepcopy(model.state_dict())
    assert (trained - base).abs().max() > 1e-2
    with disable_adapter(model):
        torch.testing.assert_close(compute_logits(model), base, atol=1e-5, rtol=0)
    with use_merged_weights(model):
        torch.testing.assert_close(compute_logits(model), trained, atol=1e-4, rtol=0)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    save_merged(model, tmp_path / "model")
    model.save_pretrained(tmp_path / "adapter")
    exported, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(compute_logits(exported), trained, atol=1e-4, rtol=0)
    with_peft = peft.PeftModel.from_pretrained(start, tmp_path / "adapter")
    torch.testing.assert_close(compute_logits(with_peft), trained, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_adapted_by_default(family):
    model = create_family_model(family)
    stacks = find_stacked_experts(model)
    assert stacks
    wrapped = add_adapter(model, LoraSettings(rank=2))
    kinds = [type(module).__name__ for module in wrapped.modules()]
    assert kinds.count("ParamWrapper") >= len(stacks)
    assert not is_servable_adapter(wrapped)  # servers get the merged model
    assert "experts" in describe_adapters(wrapped) or family == "jetmoe"


@pytest.mark.parametrize(
    ("family", "targets", "rank"),
    [
        ("qwen3_moe", LoraSettings().target_modules, 0),
        ("qwen3_moe", "all-linear", 0),
        ("qwen3_moe", ("q_proj", "v_proj"), 2),
        ("llama", "all-linear", 2),
    ],
)
def test_validate_knows_whether_a_server_gets_the_adapter(family, targets, rank, tmp_path):
    from tasks.config.machine_checks import compute_adapter_rank

    model = create_family_model(family)
    model.config.save_pretrained(tmp_path)
    settings = LoraSettings(rank=2, target_modules=targets)
    checked = compute_adapter_rank(ModelSettings(path=str(tmp_path), lora=settings))
    assert checked == rank
    assert is_servable_adapter(add_adapter(model, settings)) == (checked > 0)


def test_experts_are_left_out_by_name_and_the_line_says_so():
    model = create_family_model("gpt_oss")
    wrapped = add_adapter(
        model, LoraSettings(rank=2, target_modules=("q_proj", "v_proj"), dropout=0.1)
    )
    text = describe_adapters(wrapped)
    # rank 2: q 2 (32 + 32), v 2 (32 + 16), in 2 layers
    assert text.startswith("adapters: 448 parameters in 4 modules (2 q_proj, 2 v_proj);")
    without = text.partition("layers without an adapter")[2]
    assert "experts.gate_up_proj (" in without and "experts.down_proj (" in without
    assert "q_proj" not in without and "k_proj" in without


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt_oss", {"dropout": 0.1}, r"lora.dropout: .* experts .*experts.gate_up_proj, 4 in all"),
        ("qwen3_moe", {"dora": True}, "lora.dora: "),
        ("qwen3_moe", {"target_modules": ("up_proj",), "dora": True}, "lora.dora: "),
        ("mamba", {"target_modules": ("out_proj",)}, "out_proj of MambaForCausalLM can have no"),
        ("phimoe", {"target_modules": ("router",)}, "router of PhimoeForCausalLM can have no"),
        ("qwen3_moe", {"target_modules": ("nose",)}, "named nose; there are .*gate_up_proj"),
    ],
)
def test_what_peft_cannot_adapt_is_refused_at_once(family, options, message):
    with pytest.raises(SettingsError, match=message):
        add_adapter(create_family_model(family), LoraSettings(rank=2, **options))


def test_what_peft_itself_refuses_is_a_settings_error(monkeypatch):
    def refuse(*_):
        raise ValueError("target module is not supported")

    monkeypatch.setattr(peft, "get_peft_model", refuse)
    with pytest.raises(
        SettingsError, match=r"lora: peft refuses .* target module is not supported"
    ):
        add_adapter(create_family_model("llama"), LoraSettings(rank=2))


def test_the_default_names_stay_where_all_of_them_exist():
    """A model with Llama's layers gets the same adapter as before: its other linear layers stay as they are."""
    wrapped = add_adapter(create_family_model("llama"), LoraSettings(rank=2))
    config = wrapped.peft_config["default"]
    assert sorted(config.target_modules) == sorted(LoraSettings().target_modules)
    assert not config.target_parameters


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [
        ("vocab_size_per_layer_input", 262_144, False),  # Gemma 3n and 4
        ("hidden_size_per_layer_input", 20_000, False),
        ("num_hidden_layers", 10_001, True),
        ("n_layer", 10_001, True),
        ("encoder_layers", 10_001, True),
        ("num_kv_shared_layers", 10_001, True),
    ],
)
@pytest.mark.parametrize("section", [None, "text_config"])
def test_only_counts_of_layers_are_limited(tmp_path, key, value, is_refused, section):
    config = {"model_type": "gemma3n", key: value}
    text = json.dumps({section: config} if section else config)
    (tmp_path / "config.json").write_text(text)
    if is_refused:
        with pytest.raises(ModelError, match=f"sets {key} to {value}"):
            causal_lm._resolve_model_path(tmp_path)
    else:
        assert causal_lm._resolve_model_path(tmp_path) == str(tmp_path)
