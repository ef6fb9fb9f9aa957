"""Adapters on quantised frozen weights: merged, restored, written. Needs bitsandbytes, which also runs on a CPU."""

import pytest
import torch
from helpers.policy_stage import save_base

from rl_core.models import causal_lm, lora
from rl_core.models.lora import find_quantized_layers
from rl_core.settings import LoraSettings, ModelSettings

pytest.importorskip("bitsandbytes")
BITS = {"nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int8": {"load_in_8bit": True}}


@pytest.mark.parametrize(
    # without int8 and DoRA, for which bitsandbytes 0.50 under peft 0.21 has no forward pass
    ("bits", "options"),
    [("nf4", {}), ("nf4", {"dora": True}), ("nf4", {"target_modules": ("q_proj",)}), ("int8", {})],
)
def test_the_merged_model_equals_the_trained_one_which_is_restored(tmp_path, bits, options):
    from transformers import BitsAndBytesConfig

    base = save_base(tmp_path / "base")
    settings = ModelSettings(path=str(base), device="cpu", lora=LoraSettings(rank=4, **options))
    quantized = {
        "quantization_config": BitsAndBytesConfig(
            **BITS[bits], bnb_4bit_compute_dtype=torch.float32
        )
    }
    model, tokenizer = causal_lm.load_model(
        base, settings, options={**quantized, "device_map": {"": torch.device("cpu")}}
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    ids = torch.arange(5, 17)[None]
    trained = model(ids).logits.detach()
    count = len(find_quantized_layers(model))
    with lora.use_merged_weights(model):
        assert not find_quantized_layers(model)
        torch.testing.assert_close(model(ids).logits.detach(), trained, rtol=0, atol=1e-5)
    assert len(find_quantized_layers(model)) == count > 0 and torch.equal(
        model(ids).logits.detach(), trained
    )

    causal_lm.save(model, tokenizer, tmp_path / "out")
    written, _ = causal_lm.load_model(tmp_path / "out", ModelSettings(device="cpu"))
    assert not hasattr(written.config, "quantization_config") and not find_quantized_layers(written)
    torch.testing.assert_close(written(ids).logits.detach(), trained, rtol=0, atol=1e-5)
    assert torch.equal(model(ids).logits.detach(), trained)
