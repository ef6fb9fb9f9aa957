"""Saved models that transformers 4 and llama.cpp's converter read as transformers 5 does, and their model card.

The comparison with transformers 4 itself needs it in a folder of its own, which POSTTRAIN_TRANSFORMERS4 names
(`make transformers4-test`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import tiny_families
from helpers.tiny_families import DENSE, EXPERTS, create_family_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_core.data.tokenizer import train_tokenizer
from rl_core.models import causal_lm, export_verification_child
from rl_core.settings import ModelSettings

TEXT = "abc xyz 12 <|user|>abc<|end|>"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3],
    "original_max_position_embeddings": 8,
}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
# family, rotary parameters, and what transformers 4 and llama.cpp read
FORMER_NAMES = {
    "default": ("llama", {"rope_type": "default"}, {"rope_theta": 700.0, "rope_scaling": None}),
    "yarn": (
        "llama",
        YARN,
        {"rope_theta": 700.0, "rope_scaling": YARN, "torch_dtype": "float32"},
    ),
    "gpt_oss": ("gpt_oss", {"rope_type": "default"}, {"rope_scaling": None}),
    "phi3": (
        "phi3",
        LONGROPE,
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": LONGROPE["short_factor"],
                "long_factor": LONGROPE["long_factor"],
            }
        },
    ),
    "gemma3": (
        "gemma3_text",
        NESTED,
        {
            "rope_theta": 900.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rotary_emb_base": 700.0, "rotary_pct": 0.5},
    ),
    "qwen3_moe": ("qwen3_moe", {"rope_type": "default"}, {"num_experts": 4, "rope_theta": 700.0}),
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def create_model_with_rope(family, rope, monkeypatch):
    table = DENSE if family in DENSE else EXPERTS
    options = {
        "rope_parameters": rope if "full_attention" in rope else {"rope_theta": 700.0, **rope}
    }
    if rope.get("rope_type") == "longrope":
        options["original_max_position_embeddings"] = 8
    if "full_attention" in rope:
        options["layer_types"] = ["sliding_attention", "full_attention"]
    monkeypatch.setitem(
        getattr(tiny_families, "DENSE" if table is DENSE else "EXPERTS"),
        family,
        {**table[family], **options},
    )
    return create_family_model(family)


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_config_holds_the_former_names_and_reads_as_before(
    name, tokenizer, tmp_path, monkeypatch
):
    family, rope, expected = FORMER_NAMES[name]
    model = create_model_with_rope(family, rope, monkeypatch)
    causal_lm.save(model, tokenizer, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert {key: values[key] for key in expected} == expected
    again = AutoConfig.from_pretrained(tmp_path)
    mine, read = (
        {key: value for key, value in config.rope_parameters.items() if key != "type"}
        for config in (model.config, again)
    )
    assert read == mine
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 11, 7, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    causal_lm.save(loaded, tokenizer, tmp_path / "again")  # a later stage writes the same
    assert (tmp_path / "again" / "config.json").read_text() == (
        tmp_path / "config.json"
    ).read_text()


def test_a_config_that_would_read_otherwise_stays(tokenizer, tmp_path, monkeypatch):
    """Former names that transformers 5 would prefer to the true ones are not written."""
    from rl_core.models import portable_files

    model = create_family_model("llama")
    model.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()

    def add_wrong_names(values, *, with_scaling):
        return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}

    monkeypatch.setattr(portable_files, "_add_former_names", add_wrong_names)
    portable_files.adapt_config(tmp_path, model.config)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt2"])
def test_a_tokenizer_has_a_class_of_transformers_4_and_reads_as_before(family, tokenizer, tmp_path):
    model = create_family_model(family)
    causal_lm.save(model, tokenizer, tmp_path / "model")
    values = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["model_max_length"] == 64  # the model's, as the tokenizer names none
    # transformers 4 fails on a list under `extra_special_tokens`
    assert "extra_special_tokens" not in values
    assert values["additional_special_tokens"] == tokenizer.extra_special_tokens
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")  # as transformers 5 writes it
    settings = ModelSettings()
    plain = causal_lm.load_tokenizer(tmp_path / "plain", settings)
    again = causal_lm.load_tokenizer(tmp_path / "model", settings)
    assert type(again) is type(plain)
    assert again.encode(TEXT) == plain.encode(TEXT) == tokenizer.encode(TEXT)
    assert again.all_special_tokens == plain.all_special_tokens
    assert again.extra_special_tokens == plain.extra_special_tokens
    assert again.chat_template == tokenizer.chat_template
    assert again.get_vocab() == plain.get_vocab()


def test_a_source_keeps_its_longest_text(tokenizer, tmp_path):
    causal_lm.save(create_family_model("llama"), tokenizer, tmp_path / "source")
    file = tmp_path / "source" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 2048}))
    model, read = causal_lm.load_model(tmp_path / "source", ModelSettings(device="cpu"))
    causal_lm.save(model, read, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert values["model_max_length"] == 2048


def read_card(folder):
    _, head, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_model_card(tokenizer, tmp_path):
    """A card names the base on the hub, also in later stages, and no path of this machine."""
    model = create_family_model("llama")
    model.config._name_or_path = model.name_or_path = "org/base-1B"
    causal_lm.save(model, tokenizer, tmp_path / "one")
    head, body = read_card(tmp_path / "one")
    assert head == {
        "library_name": "transformers",
        "base_model": "org/base-1B",
        "pipeline_tag": "text-generation",
        "tags": ["posttrain"],
    }
    # embeddings and head 2 * 64 * 32; 2 layers: 2 * 32 * (32 + 16) + 3 * 32 * 48 + 2 norms; a norm
    assert (
        "| parameters | 19,616 (float32) |" in body and "| longest sequence | 64 tokens |" in body
    )
    loaded, _ = causal_lm.load_model(tmp_path / "one", ModelSettings(device="cpu"))
    causal_lm.save(loaded, tokenizer, tmp_path / "two")
    assert (tmp_path / "two" / "README.md").read_text() == (
        tmp_path / "one" / "README.md"
    ).read_text()
    loaded.name_or_path = str(tmp_path / "gone")
    causal_lm.save(loaded, tokenizer, tmp_path / "three")
    head, body = read_card(tmp_path / "three")
    assert "base_model" not in head and str(tmp_path) not in body


def test_the_example_of_a_card_runs(tokenizer, tmp_path, capsys):
    model = create_family_model("llama")
    model.resize_token_embeddings(len(tokenizer))
    causal_lm.save(model, tokenizer, tmp_path)
    code = (tmp_path / "README.md").read_text().split("```")[1].removeprefix("python\n")
    exec(code.replace("FOLDER", str(tmp_path)), {})  # the card's own example
    assert "<|user|>Hello<|end|>" in capsys.readouterr().out


@pytest.fixture(scope="module")
def transformers4():
    """Return the folder with transformers 4, its hub client and its tokenizers."""
    folder = os.environ.get("POSTTRAIN_TRANSFORMERS4")
    if not folder:
        pytest.skip("POSTTRAIN_TRANSFORMERS4 names no folder (make transformers4-test)")
    return folder


def test_transformers_4_reads_every_family(transformers4, tokenizer, tmp_path, monkeypatch):
    """The program of the export proof, run with transformers 4, computes the log-probs of transformers 5."""
    families = [name for name in (*DENSE, *EXPERTS) if name not in NEWER_FAMILIES]
    models = {family: create_family_model(family) for family in families}
    for name, (family, rope, _) in FORMER_NAMES.items():
        with monkeypatch.context() as patch:
            models[f"rope {name}"] = create_model_with_rope(family, rope, patch)
    # up to the 8 tokens of longrope's short factors
    ids = [5, 9, 11, 7, 3, 4, 8, 60]
    requests, expected = [], []
    for name, model in models.items():
        causal_lm.save(model, tokenizer, tmp_path / name)
        sequence = {"ids": ids, "scored": list(range(1, len(ids))), "temperature": 1.0}
        options = {"dtype": "float32", "device": "cpu", "trust_remote_code": False}
        requests.append({"folder": str(tmp_path / name), "sequences": [sequence], **options})
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected.append([float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids))])
    done = subprocess.run(
        [sys.executable, "-P", export_verification_child.__file__, str(os.getpid())],
        input=json.dumps({"threads": 2, "models": requests}),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": transformers4, "HF_HUB_OFFLINE": "1"},
    )
    answers = json.loads(done.stdout.strip().rpartition("\n")[2])
    for name, answer, logprobs in zip(models, answers, expected, strict=True):
        assert "error" not in answer, (name, answer["error"])
        assert answer["transformers"].startswith("4.") and not answer["missing"], name
        assert answer["logprobs"][0] == pytest.approx(logprobs, abs=1e-4), name


# not in transformers 4.57
NEWER_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "nanochat", "lfm2_moe")


def test_transformers_4_reads_the_tokenizer(transformers4, tokenizer, tmp_path):
    causal_lm.save(create_family_model("llama"), tokenizer, tmp_path)
    program = (
        "import json, sys, transformers\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "chat = [{'role': 'user', 'content': 'abc'}]\n"
        "text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)\n"
        "print(json.dumps([transformers.__version__, tokenizer.encode(sys.argv[2]), text,\n"
        "                  tokenizer.model_max_length, tokenizer.additional_special_tokens]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path), TEXT],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": transformers4, "HF_HUB_OFFLINE": "1"},
    )
    version, ids, text, length, special = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert version.startswith("4.") and ids == tokenizer.encode(TEXT) and length == 64
    assert text == "<|user|>abc<|end|><|assistant|>" and special == tokenizer.extra_special_tokens


def test_llama_cpp_finds_what_it_looks_up(tokenizer, tmp_path):
    """The keys that convert_hf_to_gguf.py reads for a Llama; without them it writes its own defaults."""
    causal_lm.save(create_family_model("llama"), tokenizer, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"] and values["rope_theta"] == 10000.0
    names = ("max_position_embeddings", "hidden_size", "intermediate_size", "num_attention_heads")
    assert all(isinstance(values[name], int) for name in names)
    assert (Path(tmp_path) / "tokenizer.json").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
