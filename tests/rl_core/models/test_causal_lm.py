"""Creating, loading and saving causal language models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.model_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rl_core.errors import CheckpointError, SettingsError
from rl_core.models.causal_lm import (
    count_parameters,
    create_model,
    load_model,
    resolve_device,
    save,
    use_eval_mode,
)
from rl_core.models.lora import is_lora
from rl_core.settings import LoraSettings, ModelSettings
from rl_core.settings.common import PRESETS


def build_settings(**options: object) -> ModelSettings:
    return ModelSettings(**{"preset": "nano", "context": 32, "device": "cpu", **options})


def compute_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad(), use_eval_mode(model):
        return model(torch.tensor([[3, 4, 5, 6]])).logits


@pytest.mark.parametrize(
    ("preset", "low", "high"), [("nano", 3e4, 6e4), ("tiny", 8e5, 9e5), ("small", 2.9e6, 3.2e6)]
)
def test_presets_have_the_size_they_say(preset: str, low: float, high: float) -> None:
    assert preset in PRESETS
    model = create_model(build_settings(preset=preset), make_tokenizer(512), seed=0)
    assert low < count_parameters(model) < high
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (512, 32)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = create_model(build_settings(), make_tokenizer(), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    repeated, other = (
        create_model(build_settings(), make_tokenizer(), seed=3),
        create_model(build_settings(), make_tokenizer(), seed=4),
    )
    assert torch.equal(compute_logits(first), compute_logits(repeated)) and not torch.equal(
        compute_logits(first), compute_logits(other)
    )


def test_dtype() -> None:
    assert (
        create_model(build_settings(dtype="bfloat16"), make_tokenizer(), seed=0).dtype
        == torch.bfloat16
    )


def test_save_and_load(tmp_path: Path) -> None:
    model, tokenizer = create_model(build_settings(), make_tokenizer(), seed=0), make_tokenizer()
    save(model, tokenizer, tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()
    assert not list((tmp_path / "m").glob("*.bin"))
    loaded, loaded_tokenizer = load_model(tmp_path / "m", build_settings())
    assert torch.equal(compute_logits(model), compute_logits(loaded)) and loaded.training
    assert (
        loaded_tokenizer.get_vocab() == tokenizer.get_vocab() and loaded_tokenizer.pad_token_id == 0
    )
    assert (
        load_model(str(tmp_path / "m"), build_settings(dtype="bfloat16"))[0].dtype == torch.bfloat16
    )


def test_adapters_are_saved_merged_and_alone(tmp_path: Path) -> None:
    lora_settings = build_settings(
        lora=LoraSettings(rank=2, target_modules=("q_proj", "down_proj"))
    )
    model = create_model(lora_settings, make_tokenizer(), seed=0)
    assert is_lora(model)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    base_logits = compute_logits(create_model(build_settings(), make_tokenizer(), seed=0))
    assert torch.equal(compute_logits(model), base_logits), "a new adapter has no effect"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save(model, make_tokenizer(), tmp_path / "m")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m")  # without peft
    assert type(merged).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(compute_logits(merged), compute_logits(model), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(compute_logits(merged), base_logits, atol=1e-3)
    assert (tmp_path / "m" / "adapter" / "adapter_model.safetensors").is_file()
    loaded, _ = load_model(tmp_path / "m", lora_settings)
    assert is_lora(loaded) and torch.equal(compute_logits(loaded), compute_logits(merged))


def test_adapters_on_unknown_or_tied_layers() -> None:
    with pytest.raises(
        SettingsError, match=r"no linear layer of this model is named c_attn; there are .*q_proj"
    ):
        create_model(
            build_settings(lora=LoraSettings(target_modules=("c_attn",))), make_tokenizer(), seed=0
        )
    with pytest.raises(SettingsError, match="lm_head shares its weights with the embedding"):
        create_model(
            build_settings(lora=LoraSettings(target_modules=("lm_head",))), make_tokenizer(), seed=0
        )


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    model = create_model(build_settings(), make_tokenizer(), seed=0)
    model.config.pad_token_id = None
    core = make_tokenizer().backend_tokenizer
    save(model, PreTrainedTokenizerFast(tokenizer_object=core, eos_token="t1"), tmp_path / "m")
    loaded, tokenizer = load_model(tmp_path / "m", build_settings())
    assert tokenizer.pad_token_id == 1 and loaded.config.pad_token_id == 1


def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    save(create_model(build_settings(), make_tokenizer(), seed=0), make_tokenizer(), tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    content = weights.read_bytes()

    def check_refusal(path: str | Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            load_model(path, build_settings())

    check_refusal(tmp_path / "nothing", "no model folder")
    check_refusal("./nothing", "no model folder")
    check_refusal(weights, "it is a file")
    check_refusal(
        "nobody-at-all/no-such-model",
        "no model folder or cached hub model named 'nobody-at-all/no-such-model'",
    )
    (tmp_path / "empty").mkdir()
    check_refusal(tmp_path / "empty", "without a config.json")
    weights.write_bytes(content[: len(content) // 2])
    check_refusal(tmp_path / "m", "model in .* cannot be read")
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    check_refusal(tmp_path / "m", "model in .* cannot be read")
    weights.unlink()
    check_refusal(tmp_path / "m", "holds no weights")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    check_refusal(tmp_path / "m", "a pickle, which can run code and is never read")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    check_refusal(tmp_path / "m", "cannot be read|a pickle")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save(create_model(build_settings(), make_tokenizer(), seed=0), make_tokenizer(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        CheckpointError, match=r"9 are missing, first model\.layers\.2\.input_layernorm"
    ):
        load_model(tmp_path / "m", build_settings())


def test_devices() -> None:
    assert resolve_device(build_settings(device="cpu")) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert resolve_device(build_settings(device="auto")) == torch.device("cpu")
        with pytest.raises(SettingsError, match="device: 'cuda'"):
            resolve_device(build_settings(device="cuda"))


def test_evaluating_restores_every_module() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout()))
    model[1].eval()
    with use_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False]
