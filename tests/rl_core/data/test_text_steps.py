"""Steps of a text, and the tokens that complete them."""

import random

import pytest
from helpers import tokenizer_kinds

from rl_core.data.text_steps import TextStep, find_completing_tokens, split_into_steps
from rl_core.errors import DataError


def test_a_text_is_split_after_each_delimiter():
    assert split_into_steps("a\nbc\nd", "\n") == [("a", 2), ("bc", 5), ("d", 6)]
    assert split_into_steps("a\nbc\n", "\n") == [("a", 2), ("bc", 5)]
    assert split_into_steps("a; b", "; ") == [("a", 3), ("b", 4)]


def test_blank_lines_are_no_steps():
    assert split_into_steps("\n\na\n \n\nb\n\n", "\n") == [("a", 7), ("b", 10)]
    assert split_into_steps("", "\n") == [TextStep("", 0)]
    assert split_into_steps(" \n\n", "\n") == [TextStep("", 3)]
    with pytest.raises(DataError, match="delimiter"):
        split_into_steps("a", "")


def test_the_completing_token_is_the_first_that_reaches_the_end():
    pieces = ["ab", "c\n", "d", "", "\nef", "g"]  # one token completes a step and begins the next

    def decode(ids):
        return "".join(pieces[number] for number in ids)

    text = decode(range(6))
    ends = [step.end for step in split_into_steps(text, "\n")]
    assert ends == [4, 6, 9]
    assert find_completing_tokens(range(6), ends, decode) == [1, 4, 5]
    assert find_completing_tokens(range(6), [99], decode) == [5]
    with pytest.raises(DataError):
        find_completing_tokens([], [1], decode)


def test_random_texts_agree_with_a_search_from_the_left():
    dice = random.Random(0)
    for _ in range(200):
        pieces = ["".join(dice.choices("ab\n", k=dice.randint(0, 4))) for _ in range(12)]

        def decode(ids, pieces=pieces):
            return "".join(pieces[number] for number in ids)

        ends = [step.end for step in split_into_steps(decode(range(12)), "\n")]
        expected = [
            next((n for n in range(12) if len(decode(range(n + 1))) >= end), 11) for end in ends
        ]
        assert find_completing_tokens(range(12), ends, decode) == expected


@pytest.mark.parametrize("kind", ["train_sentencepiece", "train_byte_level"])
def test_steps_end_at_their_tokens_whatever_characters_they_hold(kind):
    # Until a character is complete, byte fallback shows each of its bytes as a mark, and those before it as well.
    tokenizer = getattr(tokenizer_kinds, kind)()
    dice = random.Random(1)
    for _ in range(50):
        written = "".join(
            dice.choices(["a", "b", "\U0001f600", "\u5b57", "\u00e9", "\n", " "], k=14)
        )
        ids = tokenizer.encode(written, add_special_tokens=False)
        text = tokenizer.decode(ids)
        ends = [step.end for step in split_into_steps(text, "\n")]
        expected = [
            next(n for n in range(len(ids)) if tokenizer.decode(ids[: n + 1])[:end] == text[:end])
            for end in ends
        ]
        assert find_completing_tokens(ids, ends, tokenizer.decode) == expected
