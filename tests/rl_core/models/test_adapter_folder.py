"""A run that starts from an adapter's folder: it continues the adapter, or merges it, and fails by name."""

import copy
import json

import pytest
import torch
from helpers.tiny_families import create_family_model

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import ModelError, SettingsError
from rl_core.models import causal_lm
from rl_core.models.adapter_folder import is_adapter_folder, read_adapter_folder
from rl_core.models.lora import add_adapter, disable_adapter, is_fresh_adapter, is_lora
from rl_core.settings import LoraSettings, ModelSettings

IDS = torch.tensor([[5, 9, 11, 7], [8, 6, 5, 12]])
LORA = LoraSettings(rank=2, alpha=8.0, target_modules=("q_proj", "up_proj"))


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(params=["llama", "qwen3_moe"])
def folders(request, tmp_path):
    """Return a base model's folder, a trained adapter's folder without tokenizer, and logits of both."""
    tokenizer = train_tokenizer(["abc xyz"], 300)
    model = create_family_model(request.param)
    model.resize_token_embeddings(len(tokenizer))
    causal_lm.save(model, tokenizer, tmp_path / "base")
    base, _ = causal_lm.load_model(tmp_path / "base", ModelSettings(device="cpu"))
    before = compute_logits(base)
    adapted = add_adapter(base, LORA)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", before, compute_logits(adapted)


def test_the_adapter_is_continued(folders, caplog):
    _, adapter, before, trained = folders
    caplog.set_level("INFO", logger="rl_core.models")
    settings = ModelSettings(device="cpu", lora=LORA)
    model, tokenizer = causal_lm.load_model(adapter, settings)
    assert is_lora(model) and not is_fresh_adapter(model) and len(tokenizer) > 200
    assert torch.equal(compute_logits(model), trained)
    with disable_adapter(model):
        torch.testing.assert_close(compute_logits(model), before)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)
    assert "its adapter is continued on" in caplog.text
    assert "parameters in" in caplog.text and "layers without an adapter" in caplog.text
    on_meta = causal_lm.load_without_weights(adapter, settings)
    assert {n for n, p in on_meta.named_parameters() if p.requires_grad} == trainable


def test_without_lora_the_adapter_is_merged(folders):
    _, adapter, _, trained = folders
    model, _ = causal_lm.load_model(adapter, ModelSettings(device="cpu"))
    assert not is_lora(model) and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(compute_logits(model), trained, atol=1e-5, rtol=0)


def test_a_later_export_holds_the_continued_adapter(folders, tmp_path):
    _, adapter, _, trained = folders
    model, tokenizer = causal_lm.load_model(adapter, ModelSettings(device="cpu", lora=LORA))
    causal_lm.save(model, tokenizer, tmp_path / "out")
    again, _ = causal_lm.load_model(tmp_path / "out", ModelSettings(device="cpu"))
    torch.testing.assert_close(compute_logits(again), trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4}, r"lora.rank: 4, but the adapter in .* has 2; set lora: {rank: 2, alpha: 8.0"),
        ({"alpha": 16.0}, "lora.alpha: 16.0"),
        ({"dora": True}, "lora.dora: True"),
    ],
)
def test_settings_of_another_adapter_are_refused(folders, options, message):
    settings = LoraSettings(**{"rank": 2, "alpha": 8.0, **options})
    with pytest.raises(SettingsError, match=message):
        causal_lm.load_model(folders[1], ModelSettings(device="cpu", lora=settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "adapter of kind LOHA"),
        ({"base_model_name_or_path": ""}, "does not say which model"),
        ({"base_model_name_or_path": "/no/such"}, "is an adapter for '/no/such', and there is no"),
        ({"target_modules": ["k_proj"]}, "does not fit its base model .* weights"),
        ({"r": 3}, "does not fit its base model"),
    ],
)
def test_what_cannot_be_continued_is_named(folders, change, message):
    file = folders[1] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        causal_lm.load_model(folders[1], ModelSettings(device="cpu"))


def test_a_base_beside_the_adapter_is_found(folders):
    file = folders[1] / "adapter_config.json"
    values = json.loads(file.read_text()) | {"base_model_name_or_path": "../base"}
    file.write_text(json.dumps(values))
    adapter = read_adapter_folder(folders[1])
    assert (folders[0] / "config.json").samefile(f"{adapter.base}/config.json")
    assert is_adapter_folder(folders[1]) and not is_adapter_folder(folders[0])


def test_a_changed_base_changes_the_key_of_a_stage(folders):
    from tasks.pipeline.stage_key import digest_input

    base, adapter, *_ = folders
    before = digest_input(adapter)
    assert digest_input(copy.copy(adapter)) == before
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    assert digest_input(adapter) != before


def test_validate_knows_adapter_folders(folders, tmp_path):
    from tasks.config import build_settings
    from tasks.config.problems import ConfigError

    values = {
        "name": "x",
        "output": str(tmp_path / "runs"),
        "model": {"path": str(folders[1]), "lora": {"rank": 2, "alpha": 8}},
        "environment": {"name": "arithmetic"},
        "stages": {"prepare_data": {}, "sft": {}},
    }
    assert build_settings(values).model.path == str(folders[1])
    values["model"]["lora"]["rank"] = 4
    with pytest.raises(ConfigError, match=r"model.lora.rank.*but the adapter in .* has 2"):
        build_settings(values)


def test_the_kl_refers_to_the_start_of_a_continued_adapter(folders):
    """Without its adapters, a policy that continues one is not the model that it started from."""
    from types import SimpleNamespace

    from rl_core.api.policy import load_policy
    from tasks.stages.kl_reference import load_kl_reference

    base, adapter, before, trained = folders
    settings = ModelSettings(device="cpu", lora=LORA)

    def load(folder):
        policy = load_policy(folder, settings)
        pipeline = SimpleNamespace(model=policy.origin)
        context = SimpleNamespace(pipeline=pipeline, inputs={"model": folder})
        return policy, load_kl_reference(context, policy)

    policy, reference = load(adapter)
    assert reference is not policy.model
    torch.testing.assert_close(compute_logits(reference), trained, atol=1e-5, rtol=0)
    policy, reference = load(base)
    assert reference is policy.model  # with new adapters
    with disable_adapter(reference):
        torch.testing.assert_close(compute_logits(reference), before, atol=1e-5, rtol=0)
