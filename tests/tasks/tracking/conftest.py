"""Sqlite store shared by all tests that need a real one: its first use creates the tables, which takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.tracking import Tracking


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="session")
def tracking(output: Path) -> Tracking:
    """Open a Tracking over the shared default store. Tests use separate run folders and model names."""
    return Tracking(f"sqlite:///{output / 'mlflow' / 'mlflow.db'}", output, "tests")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Create a nano policy and a nano reward model with their tokenizer, as Hugging Face folders."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<|end|>"]
    backend.train_from_iterator(
        ["what colour is the cell"],
        trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    shape = {
        "vocab_size": 280,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    torch.manual_seed(0)
    folders = {}
    for kind, model in (
        ("policy", LlamaForCausalLM(LlamaConfig(**shape))),
        ("reward_model", LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1))),
    ):
        folders[kind] = tmp_path_factory.mktemp(kind) / "model"
        model.save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
    return folders
