"""The trained tokenizer: lossless, deterministic, and unchanged by saving and loading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rl_core.data.tokenizer import END_TOKEN, PAD_TOKEN, train_tokenizer
from rl_core.errors import DataError

TEXTS = [
    f"the cell in row {n} column {n + 7} is {colour}"
    for n in range(40)
    for colour in ("red", "blue", "green")
]
TOKENIZER = train_tokenizer(TEXTS, 280)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_decoded_unchanged(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_merges_are_learned_and_digits_stay_single() -> None:
    assert len(TOKENIZER) == 280
    assert "Ġcell" in TOKENIZER.tokenize("the cell in row")
    years = train_tokenizer(["2024 2024"] * 50, 300)
    assert years.tokenize("in 2024")[-4:] == ["2", "0", "2", "4"]


def test_special_tokens_have_fixed_places() -> None:
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    assert TOKENIZER.convert_tokens_to_ids([PAD_TOKEN, END_TOKEN, *roles]) == [0, 1, 2, 3, 4, 5]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    assert TOKENIZER("a<|end|>")["input_ids"][-1] == 1


def test_template_and_tokens_survive_saving(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert set(loaded.all_special_tokens) == set(TOKENIZER.all_special_tokens)
    messages = [
        {"role": "user", "content": "row 12 is  red ."},
        {"role": "assistant", "content": "ok"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>row 12 is  red .<|end|><|assistant|>ok<|end|>"
    ids = loaded(text)["input_ids"]
    assert ids == TOKENIZER(text)["input_ids"]
    assert loaded.decode(ids) == text


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizer() -> None:
    code = (
        "from rl_core.data.tokenizer import train_tokenizer; from tests.rl_core.data.test_tokenizer import TEXTS;"
        "print(train_tokenizer(TEXTS, 280).backend_tokenizer.to_str())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.strip() == train_tokenizer(TEXTS, 280).backend_tokenizer.to_str()


def test_vocabulary_ends_where_the_texts_do() -> None:
    assert len(train_tokenizer(["aa"], 5000)) == 263  # 256 bytes, 6 special tokens, the one pair


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="at least 262"):
        train_tokenizer(TEXTS, 261)
