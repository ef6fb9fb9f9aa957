"""Text encoder: a tokenizer's backend gives the token ids of its call."""

import pytest
from helpers.chat_templates import HERMES, family
from transformers import PreTrainedTokenizerFast

from rl_core.data.chat import TextEncoder, find_fast_backend

TEXTS = ["", "red <|im_start|>cell <think> blue", "scan\nrow  1 \u00e9\u4e2d", " <|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer():
    return family(HERMES, ["<think>"])


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_a_call(tokenizer, text):
    encoder = TextEncoder(tokenizer)
    assert encoder._is_fast
    assert encoder.encode_text(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoder.encode_text(text, add_special_tokens=True) == tokenizer(text)["input_ids"]
    spelled = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert encoder.encode_text(text, split_special_tokens=True) == spelled
    assert (
        encoder.encode_text(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    )  # no longer split


def test_what_another_call_left_behind_does_not_count(tokenizer):
    encoder, text = TextEncoder(tokenizer), TEXTS[1]
    expected = encoder.encode_text(text)
    tokenizer(text, padding="max_length", truncation=True, max_length=3)
    assert (
        tokenizer.backend_tokenizer.truncation is not None
        and tokenizer.backend_tokenizer.padding is not None
    )
    assert encoder.encode_text(text) == expected and len(expected) > 3


def test_a_tokenizer_with_a_custom_call_is_called(tokenizer):
    class Shouting(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            return super().__call__(text.upper(), **options)

    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    assert (
        find_fast_backend(shouting) is None
        and find_fast_backend(tokenizer) is tokenizer.backend_tokenizer
    )
    assert (
        TextEncoder(shouting).encode_text("red")
        == TextEncoder(tokenizer).encode_text("RED")
        != TextEncoder(tokenizer).encode_text("red")
    )
