"""Bytes of tokens, texts in another tokenizer's tokens, and spans of two tokenisations of one text."""

import functools
import itertools
import unicodedata

import pytest
from helpers.tokenizer_kinds import train_byte_level, train_sentencepiece, train_word_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from rl_core.data.token_bytes import TokenBytes, align_token_spans, pair_equal_tokens
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, SettingsError

KINDS = {
    "bytes": lambda: train_tokenizer(["abc"], 262),
    "pairs": lambda: train_tokenizer(["hello lower lowest unhappy the abacus"] * 3, 330),
    "digits": lambda: train_byte_level(320, digits=3),
    "composing": lambda: train_byte_level(320, normalizers.NFC()),
    "sentencepiece": train_sentencepiece,
    "without prefix": lambda: train_sentencepiece(prepend="never"),
    "first prefix": lambda: train_sentencepiece(prepend="first"),
    "legacy": lambda: train_sentencepiece(is_legacy=True),
}
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from("ab 12\n\U0001f600\u00e9"))
)
PARTS = st.one_of(
    st.sampled_from(
        [
            "hello",
            " lower",
            "unhappy",
            "123",
            "\u00e9\U0001f468\u200d\U0001f469",
            "</s>",
            "<|user|>",
        ]
    ),
    st.text(max_size=4).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
)


@functools.cache
def read_kind(kind):
    tokenizer = KINDS[kind]()
    TokenBytes(tokenizer, kind).check_texts()
    if kind == "digits":
        tokenizer.add_tokens(["<tool>", "llo w"])
    return TokenBytes(tokenizer, kind)


def check_spans(left, right):
    """Check that the spans are a partition of both sides into the shortest runs of equal bytes."""
    spans = align_token_spans(left, right)
    for numbers, tokens in zip(spans, (left, right), strict=True):
        assert len(numbers) == len(tokens)
        assert all(b - a in (0, 1) for a, b in itertools.pairwise(numbers))
        assert not numbers or numbers[0] == 0
    assert {*spans[0]} == {*spans[1]}
    for span in {*spans[0]}:
        runs = [
            [token for token, number in zip(tokens, numbers, strict=True) if number == span]
            for tokens, numbers in zip((left, right), spans, strict=True)
        ]
        assert b"".join(runs[0]) == b"".join(runs[1])
        inner = [{len(b"".join(run[:n])) for n in range(1, len(run))} for run in runs]
        assert not inner[0] & inner[1]
    return spans


@settings(max_examples=60, deadline=None)
@given(
    st.lists(PARTS, max_size=6).map("".join),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(sorted(KINDS)),
)
def test_texts_keep_their_bytes_and_spans_partition_both_sides(text, left, right):
    text = unicodedata.normalize("NFC", text)
    sides = [read_kind(kind) for kind in (left, right)]
    encoded = [side.encode_bytes(text.encode()) for side in sides]
    assert None not in encoded
    tokens = [
        [side.read_bytes(token) for token in ids] for side, ids in zip(sides, encoded, strict=True)
    ]
    assert b"".join(tokens[0]) == b"".join(tokens[1]) == text.encode()
    spans = check_spans(*tokens)
    if left == right:
        assert spans[0] == spans[1] == [*range(len(encoded[0]))]
    if left in ("bytes", "pairs", "digits"):  # nothing is put before a text
        ids = sides[0].tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        assert encoded[0] == ids


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=6), st.data())
def test_any_two_cuts_of_any_bytes_are_aligned(left, data):
    whole = b"".join(left)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)))))
    edges = [0, *(cut for cut in cuts if cut < len(whole)), len(whole)]
    right = [whole[a:b] for a, b in itertools.pairwise(edges) if b > a]
    check_spans(left, right)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bytes_that_are_no_text_are_single_tokens(kind):
    side = read_kind(kind)
    cut = "a\u00e9b\U0001f600".encode()[:-2]  # as the token limit cuts a character
    for text in (cut, b"\xff hello\xe2\x82", bytes(range(128, 256))):
        ids = side.encode_bytes(text)
        assert b"".join(side.read_bytes(token) for token in ids) == text


def test_spans_by_hand():
    assert align_token_spans([b"un", b"happy"], [b"unh", b"appy"]) == ([0, 0], [0, 0])
    assert align_token_spans([b"un", b"happy"], [b"un", b"hap", b"py"]) == ([0, 1], [0, 1, 1])
    # three bytes of a character on one side, and a whole one on the other
    euro = "\u20ac".encode()
    assert align_token_spans([b"a", euro[:1], euro[1:], b"b"], [b"a" + euro, b"b"]) == (
        [0, 0, 0, 1],
        [0, 1],
    )
    assert align_token_spans([], []) == ([], [])
    assert align_token_spans([b"a", b"", b"b"], [b"a", b"b", b""]) == ([0, 1, 1], [0, 1, 1])
    with pytest.raises(DataError, match="must be the same text"):
        align_token_spans([b"a"], [b"b"])


def test_a_space_that_the_tokenizer_puts_before_a_text_is_left_out():
    for kind in ("sentencepiece", "first prefix", "legacy"):
        side = read_kind(kind)
        assert side.tokenizer.convert_ids_to_tokens(side.tokenizer.encode("hello"))[0].startswith(
            "\u2581"
        )
        for text in ("hello", " hello", "  hello"):
            ids = side.encode_bytes(text.encode())
            assert b"".join(side.read_bytes(token) for token in ids) == text.encode(), kind


def test_a_text_that_the_tokenizer_changes_has_no_tokens():
    side = read_kind("composing")
    assert side.encode_bytes("caf\u00e9".encode()) is not None
    assert side.encode_bytes("cafe\u0301".encode()) is None


def test_control_tokens_in_a_text_are_plain_text():
    side = read_kind("digits")
    ids = side.encode_bytes(b"a</s>b <tool>")
    assert side.tokenizer.eos_token_id not in ids
    assert side.tokenizer.convert_tokens_to_ids("<tool>") in ids  # an added token that is text
    assert side.read_bytes(side.tokenizer.eos_token_id) == b"</s>"
    with pytest.raises(DataError, match="token 99999"):
        side.read_bytes(99_999)


def test_tokenizers_without_exact_bytes_are_refused():
    with pytest.raises(SettingsError, match="the decoder WordPiece does not give"):
        TokenBytes(train_word_pieces(), "theirs")
    lower = train_byte_level(300, normalizers.Lowercase())
    with pytest.raises(SettingsError, match=r"theirs changes texts: 'Ab cD.* becomes 'ab cd"):
        TokenBytes(lower, "theirs").check_texts()
    slow = type("Slow", (), {})()
    with pytest.raises(SettingsError, match=r"theirs \(Slow\) has no tokenizers backend"):
        TokenBytes(slow, "theirs")


def test_equal_tokens_are_paired_by_bytes():
    left, right = read_kind("pairs"), read_kind("legacy")
    pairs = dict(pair_equal_tokens(left, right))
    assert len({*pairs.values()}) == len(pairs)
    for ours, theirs in pairs.items():
        assert left.read_bytes(ours) == right.read_bytes(theirs)
    token = left.tokenizer.convert_tokens_to_ids
    # the letter, not the byte token of the same byte
    assert pairs[token("a")] == right.tokenizer.convert_tokens_to_ids("a")
    assert pairs[token("\u0120")] == right.tokenizer.convert_tokens_to_ids("\u2581")
    assert pairs[token("<|user|>")] == right.tokenizer.convert_tokens_to_ids("<|user|>")
    same = pair_equal_tokens(left, left)
    assert same == [(n, n) for n in range(len(left.tokenizer))]
