"""Bytes of a tokenizer's tokens, and the alignment of two tokenisations of one text by them.

A span is a shortest run of tokens of either tokenizer that ends at the same byte of the text: "un|happy" and
"unh|appy" are one span, "un|happy" and "un|hap|py" are two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_core.data.chat import TextEncoder, find_fast_backend
from rl_core.errors import DataError, SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"  # SentencePiece's mark of a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INVALID = re.compile(
    "[\udc80-\udcff]"
)  # bytes that are no UTF-8, as `surrogateescape` decodes them
# Text before the one to encode, whose tokens are dropped: a tokenizer may put a space before the start of a text.
_SENTINELS = ("", "\n", "|", "1", "a", "\u00e9")
# Texts that a tokenizer must not change: else nothing that it writes has these bytes.
_PROBES = ("Ab cD\n 2 + 3 = 5.", " two  spaces", "a\tb")


class TokenBytes:
    """The bytes of each token of a byte-level BPE or SentencePiece tokenizer, and texts in its tokens.

    Control tokens (BOS, a role's header) have none: within a text they stand for their name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Read the vocabulary.

        Args:
            name: of the tokenizer, for errors.
        Raises: SettingsError for a tokenizer whose tokens have no bytes.
        """
        self.tokenizer = tokenizer
        self.name = name
        if find_fast_backend(tokenizer) is None:
            raise SettingsError(
                f"teacher: the tokenizer of {name} ({type(tokenizer).__name__}) has no tokenizers backend, so "
                "its tokens' bytes are unknown; use a teacher with the policy's vocabulary"
            )
        self._encoder = TextEncoder(tokenizer)
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_tokens}
        self.control_ids: dict[str, int] = {  # of the control tokens, by their text
            str(token): number
            for number, token in added.items()
            if token.special or str(token) in special
        }
        control = set(self.control_ids.values())
        read_token = _select_reader(tokenizer, name)
        self.bytes_by_id: dict[int, bytes] = {}
        for token, number in tokenizer.get_vocab().items():
            if number in control:
                continue
            value = token.encode() if number in added else read_token(token)
            if value is not None:
                self.bytes_by_id[number] = value
        # For bytes that are no UTF-8; a token that only stands for a byte comes before a character of that byte.
        self._ids_by_byte: dict[int, int] = {}
        for number, value in sorted(self.bytes_by_id.items(), reverse=True):
            if len(value) == 1 and number not in added:
                self._ids_by_byte[value[0]] = number

    def check_texts(self) -> None:
        """Raise SettingsError for a tokenizer that changes plain texts, as by lower case."""
        for probe in _PROBES:
            if self.encode_bytes(probe.encode()) is None:
                text = self.tokenizer.decode(self._encoder.encode_text(probe))
                raise SettingsError(
                    f"teacher: the tokenizer of {self.name} changes texts: {probe!r} becomes {text!r}, so the policy's "
                    "text has no exact tokens there; use a teacher with another tokenizer"
                )

    def read_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; those of its name for a control token.

        Raises: DataError for an id without a token.
        """
        value = self.bytes_by_id.get(token_id)
        if value is None:
            token = self.tokenizer.convert_ids_to_tokens(token_id)
            if token is None or token not in self.control_ids:
                raise DataError(f"{self.name}: token {token_id} ({token!r}) has no bytes")
            value = str(token).encode()
        return value

    def encode_bytes(self, text: bytes) -> list[int] | None:
        """Return tokens whose bytes are the text: those of the tokenizer, and a token for each byte that is no UTF-8.

        Returns: None if there are none, as the tokenizer changes the text or lacks a byte.
        """
        decoded = text.decode("utf-8", "surrogateescape")
        ids: list[int] = []
        place = 0
        for match in _INVALID.finditer(decoded):
            before = self._encode_valid_text(decoded[place : match.start()])
            number = self._ids_by_byte.get(ord(match.group()) - 0xDC00)
            if before is None or number is None:
                return None
            ids += [*before, number]
            place = match.end()
        rest = self._encode_valid_text(decoded[place:])
        return None if rest is None else [*ids, *rest]

    def _encode_valid_text(self, text: str) -> list[int] | None:
        if not text:
            return []
        expected = text.encode()
        for sentinel in _SENTINELS:
            ids = self._encoder.encode_text(sentinel + text, split_special_tokens=True)
            values = [self.bytes_by_id.get(number) for number in ids]
            length, count = len(expected), len(ids)
            while count and length > 0 and (value := values[count - 1]) is not None:
                length -= len(value)
                count -= 1
            tail = [value for value in values[count:] if value is not None]
            if length == 0 and b"".join(tail) == expected and (sentinel or not count):
                return ids[count:]
        return None


def _select_reader(tokenizer: PreTrainedTokenizerBase, name: str) -> Any:
    """Return the function from a token to its bytes, None for a token without; chosen by the tokenizer's decoder."""
    backend: Any = find_fast_backend(tokenizer)
    parts = list(_iter_parts(json.loads(backend.to_str()).get("decoder")))
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        alphabet = _build_byte_alphabet()
        return lambda token: (
            bytes(alphabet[letter] for letter in token)
            if all(letter in alphabet for letter in token)
            else None
        )
    replaces_spaces = any(
        part["type"] == "Metaspace"
        or (part["type"] == "Replace" and part.get("pattern") == {"String": _SPACE})
        for part in parts
    )
    if replaces_spaces and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        has_bytes = "ByteFallback" in kinds

        def read_token(token: str) -> bytes:
            match = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
            if match is not None:
                return bytes([int(match[1], 16)])
            return token.replace(_SPACE, " ").encode()

        return read_token
    raise SettingsError(
        f"teacher: the tokens of {name} are aligned by their bytes, which a tokenizer with the decoder "
        f"{'/'.join(sorted(kinds)) or 'none'} does not give; byte-level BPE and SentencePiece do. Use such a model, "
        "or a teacher with the policy's vocabulary"
    )


def _iter_parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _iter_parts(part)
        return
    yield decoder


def _build_byte_alphabet() -> dict[str, int]:
    """Build byte-level BPE's alphabet: printable bytes of Latin-1 are their letter, the others follow from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def align_token_spans(left: Sequence[bytes], right: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Number the spans of two tokenisations of one text.

    A token without bytes belongs to the span of the token after it; at the end of the text, to the last one.
    Args:
        left, right: the bytes of each token.
    Returns: for each token of either side the number of its span, ascending from 0. Spans are the shortest runs that
        end at the same byte.
    Raises: DataError if the bytes of both sides differ.
    """
    if b"".join(left) != b"".join(right):
        raise DataError("tokens: both sides must be the same text")
    ends = [_list_ends(tokens) for tokens in (left, right)]
    shared = sorted({*ends[0]} & {*ends[1]} - {0})
    numbers = {end: number for number, end in enumerate(shared)}
    spans: list[list[int]] = []
    for side in ends:
        current, numbered = len(shared) - 1, []
        for end in reversed(side):
            current = numbers.get(end, current)
            numbered.append(max(current, 0))
        spans.append(numbered[::-1])
    return spans[0], spans[1]


def _list_ends(tokens: Sequence[bytes]) -> list[int]:
    """Return the place in the text after each token; after the next token with bytes, for one without."""
    ends, place = [], 0
    for token in tokens:
        place += len(token)
        ends.append(place)
    for index in reversed(range(len(tokens) - 1)):
        if not tokens[index]:
            ends[index] = ends[index + 1]
    return ends


def pair_equal_tokens(left: TokenBytes, right: TokenBytes) -> list[tuple[int, int]]:
    """Pair the tokens that both vocabularies have, by their bytes or, for control tokens, by their text.

    Each token has at most one partner: among several of the same bytes, the one with the lowest id that is no byte
    token.
    """
    by_bytes = [_index_by_bytes(side) for side in (left, right)]
    pairs = [
        (number, by_bytes[1][value])
        for value, number in by_bytes[0].items()
        if value in by_bytes[1]
    ]
    pairs += [
        (number, right.control_ids[text])
        for text, number in left.control_ids.items()
        if text in right.control_ids
    ]
    return sorted(pairs)


def _index_by_bytes(side: TokenBytes) -> dict[bytes, int]:
    tokens = side.tokenizer.convert_ids_to_tokens(sorted(side.bytes_by_id))
    ranked = sorted(
        (bool(_BYTE_TOKEN.fullmatch(token)), number)
        for token, number in zip(tokens, sorted(side.bytes_by_id), strict=True)
    )
    index: dict[bytes, int] = {}
    for _, number in ranked:
        index.setdefault(side.bytes_by_id[number], number)
    return index
