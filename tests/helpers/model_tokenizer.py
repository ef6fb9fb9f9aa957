"""A word-level tokenizer for models made in tests."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_tokenizer(size: int = 300, **special: str) -> PreTrainedTokenizerFast:
    vocab = {f"t{i}": i for i in range(size)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="t2"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{"pad_token": "t0", "eos_token": "t1", "unk_token": "t2", **special},
    )
