"""GGUF files: written, read back, refused."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.gguf_models import FAMILIES, TEXTS, build_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

import rl_core
from rl_core.errors import ModelError
from rl_core.models import gguf_export, gguf_files
from rl_core.models.gguf_export import write_gguf_file
from rl_core.models.named_models import list_named_models, resolve_local_model
from tasks.config import load_settings
from tasks.config.problems import ConfigError

gguf = pytest.importorskip("gguf")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrain" / "gguf"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_a_written_model_is_read_back(family, kind, tmp_path):
    model, tokenizer = build_model(family)
    file = tmp_path / "model.gguf"
    write_gguf_file(model, tokenizer, file, kind)
    proof = gguf_export.prove_gguf_file(file, model, tokenizer, TEXTS, kind)
    assert proof.num_tokens > 20 and proof.bytes == file.stat().st_size
    if kind == "f32":
        assert proof.largest_difference == 0.0
    else:
        assert 0 < proof.kl < 0.01 and proof.largest_difference > 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_tokenizer_and_weights_share_one_reader(tmp_path, monkeypatch):
    """A reader takes seconds for a real vocabulary, and transformers opens three."""
    model, tokenizer = build_model()
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "f32")
    gguf_files.read_gguf_header(tmp_path / "model.gguf")
    reader, build_map, opened = gguf.GGUFReader, gguf.get_tensor_name_map, []
    open_reader = reader.__init__

    def record(self, path, *rest):
        opened.append(path)
        open_reader(self, path, *rest)

    monkeypatch.setattr(reader, "__init__", record)
    read, _ = gguf_files.load_gguf_model(tmp_path / "model.gguf")
    assert opened == [tmp_path / "model.gguf"]
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)
    assert gguf.GGUFReader is reader and gguf.get_tensor_name_map is build_map
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError):
        gguf_files.load_gguf_model(tmp_path / "model.gguf")
    assert gguf.GGUFReader is reader


def test_a_proof_fails_for_other_weights(tmp_path):
    model, tokenizer = build_model()
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "f32")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:8] += 0.5
    with pytest.raises(ModelError, match=r"its distributions differ by a KL divergence of"):
        gguf_export.prove_gguf_file(tmp_path / "model.gguf", model, tokenizer, TEXTS, "f32")


def test_text_is_split_as_the_file_says(tmp_path, cache):
    """Two spaces before a digit are one token for GPT-2's rule, and another one where digits stand alone."""
    model, tokenizer = build_model()
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "f32")
    header = gguf_files.read_gguf_header(tmp_path / "model.gguf")
    assert header.pre_tokenizer == "smollm" and header.quantization == "F32"
    _, read = gguf_files.load_gguf_model(tmp_path / "model.gguf")
    text = "x  12345   6"
    pieces = [piece for piece, _ in read.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == ["x", "ĠĠ", "1", "2", "3", "4", "5", "ĠĠĠ", "6"]
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.model_max_length == 128


def test_an_unknown_way_to_split_text_is_a_warning(tmp_path, caplog, monkeypatch):
    model, tokenizer = build_model()
    monkeypatch.setattr(gguf_export, "_check_tokenizer", lambda tokenizer: "exotic")
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "f32")
    with caplog.at_level(logging.WARNING):
        gguf_files.load_gguf_model(tmp_path / "model.gguf")
    assert "'exotic' is not known here" in caplog.text


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_every_way_to_split_text_is_recognised(name, tmp_path):
    _, tokenizer = build_model()
    gguf_files._set_pre_tokenizer(tokenizer, name, tmp_path)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    assert gguf_files.find_pre_tokenizer(described) == name


def test_a_converted_file_is_a_model_folder(tmp_path, cache):
    model, tokenizer = build_model()
    file = tmp_path / "tiny.gguf"
    write_gguf_file(model, tokenizer, file, "f32")
    policy = rl_core.load_policy(file)
    assert policy.context == 128 and policy.renderer.eos_ids
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(policy.model.state_dict()[name], weight, rtol=0, atol=0)
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_local_model(tmp_path) == folder  # a folder that holds the file alone
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    write_gguf_file(build_model()[0], tokenizer, file, "f32")  # other weights, another folder
    assert resolve_local_model(file) != folder


def test_the_config_takes_a_file_and_knows_its_context(tmp_path, cache):
    model, tokenizer = build_model()
    write_gguf_file(model, tokenizer, tmp_path / "tiny.gguf", "q8_0")
    (tmp_path / "run.yaml").write_text(
        f"name: tiny\noutput: {tmp_path}/out\nmodel: {{path: tiny.gguf}}\n"
        "environment: {name: arithmetic}\nstages: {policy: {algorithm: grpo}}\n"
    )
    settings = load_settings(tmp_path / "run.yaml")
    assert settings.model.path == str(tmp_path / "tiny.gguf")
    assert settings.stages.policy.sampling.max_completion_tokens == 64  # half of the context
    assert not cache.exists()  # nothing is converted for it


def write_damaged(tmp_path, how):
    file = tmp_path / "model.gguf"
    model, tokenizer = build_model()
    write_gguf_file(model, tokenizer, file, "f32")
    data = file.read_bytes()
    if how == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "text":
        file.write_text("not a model")
    elif how == "no weights":  # cut behind the header
        file.write_bytes(data[: gguf.GGUFReader(file).tensors[0].data_offset + 64])
    elif how == "magic":
        file.write_bytes(b"GGML" + data[4:])
    elif how == "version":
        file.write_bytes(data[:4] + (9).to_bytes(4, "little") + data[8:])
    elif how == "count":
        file.write_bytes(data[:8] + (2**60).to_bytes(8, "little") + data[16:])
    elif how in ("mmproj", "no tokenizer", "text as number", "mamba"):
        writer = gguf.GGUFWriter(file, "clip" if how == "mmproj" else "mamba")
        if how == "mamba":
            writer.add_token_list(["a", "b"])
        if how == "text as number":
            writer.add_token_list(["a", "b"])
            writer.add_key_value("tokenizer.ggml.pre", b"\xff\xfe", gguf.GGUFValueType.STRING)
        writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif how == "split":
        file.rename(tmp_path / "model-00001-of-00003.gguf")
    elif how == "two":
        (tmp_path / "other.gguf").write_bytes(data)


@pytest.mark.parametrize(
    "how, message",
    [
        ("cut", "is not a whole GGUF file"),
        ("empty", "is not a whole GGUF file"),
        ("text", "is not a whole GGUF file"),
        ("no weights", "is not a whole GGUF file"),
        ("magic", "is not a whole GGUF file"),
        ("version", "is not a whole GGUF file"),
        ("count", "is not a whole GGUF file"),
        ("text as number", "is not a whole GGUF file"),
        ("mmproj", "holds the image or audio encoder of a model (mmproj, clip)"),
        ("no tokenizer", "(mamba) holds no tokenizer"),
        ("split", "is part 1 of 3 of a model; join them"),
        ("two", "holds 2 GGUF files (model.gguf, other.gguf); name one of them"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(how, message, tmp_path, cache):
    folder = tmp_path / "model"
    folder.mkdir()
    write_damaged(folder, how)
    with pytest.raises(ModelError) as caught:
        rl_core.load_policy(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "run.yaml").write_text(
        f"name: tiny\noutput: {tmp_path}/out\nmodel: {{path: {folder}}}\n"
        "environment: {name: arithmetic}\nstages: {policy: {algorithm: grpo}}\n"
    )
    with pytest.raises(ConfigError, match=r"model\.path") as refused:
        load_settings(tmp_path / "run.yaml")
    assert message in str(refused.value)


def test_an_architecture_that_is_not_read_is_refused_by_name(tmp_path, cache):
    write_damaged(tmp_path, "mamba")
    with pytest.raises(ModelError) as caught:
        rl_core.load_policy(tmp_path / "model.gguf")
    assert "'mamba'" in str(caught.value) or "(mamba) cannot be read" in str(caught.value)
    assert "\n" not in str(caught.value) and not list(cache.glob("*/config.json"))


@pytest.mark.parametrize("seed", range(3))
def test_changed_bytes_are_an_error_or_a_header(seed, tmp_path):
    """40 files with one to four other bytes in the header, where counts, lengths and types are."""
    write_gguf_file(*build_model(), tmp_path / "model.gguf", "q8_0")
    data, draw = (tmp_path / "model.gguf").read_bytes(), random.Random(seed)
    outcomes = Counter()
    for index in range(40):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(600)] = draw.randrange(256)
        file = tmp_path / f"{index}.gguf"
        file.write_bytes(changed)
        try:
            gguf_files.read_gguf_header(file)
            outcomes["header"] += 1
        except ModelError as error:
            assert "\n" not in str(error)
            outcomes["error"] += 1
    assert outcomes["error"] >= 3 and outcomes["header"] >= 3


def test_a_second_reader_finds_the_settings(tmp_path):
    """The package gguf reads the metadata that llama.cpp looks up, and every weight by its name there."""
    model, tokenizer = build_model("qwen3")
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "bf16")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "qwen3",
        "qwen3.context_length": 128,
        "qwen3.embedding_length": 64,
        "qwen3.block_count": 2,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 32,
        "qwen3.rope.dimension_count": 32,
        "qwen3.vocab_size": 400,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    assert {name: values[name] for name in expected} == expected
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(model.state_dict()) - 1  # the head is the embedding
    assert tensors["blk.1.attn_q_norm.weight"].tensor_type.name == "F32"
    stored = tensors["blk.0.ffn_down.weight"]
    weight = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert np.array_equal(values, weight.bfloat16().float().numpy())


def test_ollama_gets_the_chat_template_in_its_language(tmp_path):
    _, tokenizer = build_model()
    tokenizer.chat_template = (
        "{% if messages[0].role != 'system' %}<s>system\nDefault<e>\n{% endif %}{% for m in messages %}"
        "<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<e>"]})
    modelfile = gguf_export.write_ollama_modelfile(tmp_path / "model.gguf", tokenizer)
    assert modelfile.read_text() == (
        'FROM ./model.gguf\nTEMPLATE """{{ if .System }}<s>system\n{{ .System }}<e>\n{{ else }}<s>system\nDefault<e>\n'
        '{{ end }}{{ range .Messages }}{{ if eq .Role "user" }}<s>user\n{{ .Content }}<e>\n'
        '{{ else if eq .Role "assistant" }}<s>assistant\n{{ .Content }}<e>\n{{ end }}{{ end }}<s>assistant\n"""\n'
        'PARAMETER stop "<e>"\n'
    )
    # a template that numbers its turns has no such form
    tokenizer.chat_template = (
        "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}"
    )
    assert gguf_export.build_ollama_template(tokenizer) is None
    lines = gguf_export.write_ollama_modelfile(tmp_path / "model.gguf", tokenizer).read_text()
    assert lines.startswith("FROM ./model.gguf\n# This model's chat template has no equal")
    tokenizer.chat_template = None
    file = gguf_export.write_ollama_modelfile(tmp_path / "model.gguf", tokenizer)
    assert file.read_text() == "FROM ./model.gguf\n"


def test_what_is_not_written_is_refused_by_name(tmp_path):
    _, tokenizer = build_model()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match=r"a model of type gpt2 is not written as GGUF"):
        write_gguf_file(gpt2, tokenizer, tmp_path / "model.gguf", "f32")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    stretched, _ = build_model(rope_parameters=rope)
    with pytest.raises(ModelError, match=r"rotary scaling 'linear' is not written"):
        write_gguf_file(stretched, tokenizer, tmp_path / "model.gguf", "f32")
    biased, _ = build_model(mlp_bias=True)
    model, other = build_model()
    other.backend_tokenizer.pre_tokenizer = None
    with pytest.raises(ModelError, match=r"no byte-level BPE of a kind that is written"):
        write_gguf_file(model, other, tmp_path / "model.gguf", "f32")
    assert list(tmp_path.iterdir()) == []
    write_gguf_file(biased, tokenizer, tmp_path / "model.gguf", "f32")
    with pytest.raises(
        ModelError, match=r"a KL divergence of"
    ):  # transformers' reader drops these biases
        gguf_export.prove_gguf_file(tmp_path / "model.gguf", biased, tokenizer, TEXTS, "f32")


def test_rows_that_q8_0_cannot_hold_stay_in_float32(tmp_path):
    model, tokenizer = build_model(hidden_size=40, num_attention_heads=4, head_dim=10)
    write_gguf_file(model, tokenizer, tmp_path / "model.gguf", "q8_0")
    types = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert types["blk.0.ffn_down.weight"] == "Q8_0" and types["blk.0.attn_q.weight"] == "F32"


def test_halves_of_a_head_become_pairs():
    """Rows 0 and 2 of a head of four rotate together: they become rows 0 and 1."""
    rows = np.arange(8)[:, None]
    assert gguf_export._interleave_halves(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_named_models_are_complete():
    for model in list_named_models().values():
        assert len(model.sha256) == 64 and model.file.endswith(".gguf")
        assert model.config["max_position_embeddings"] > 0
        json.dumps(model.config)


def test_a_missing_file_is_no_hub_name(tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"name: tiny\noutput: {tmp_path}/out\nmodel: {{path: missing.gguf}}\n"
        "environment: {name: arithmetic}\nstages: {policy: {algorithm: grpo}}\n"
    )
    with pytest.raises(ConfigError, match=r"'missing\.gguf' is neither a model folder"):
        load_settings(tmp_path / "run.yaml")
