"""Mutation of inputs: bytes changed, pieces of the formats put in, parts repeated, nested, and mixed with others."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["MAX_BYTES", "PIECES", "mutate"]

MAX_BYTES = 20_000
PIECES: tuple[bytes, ...] = tuple(
    piece.encode("utf-8", "surrogatepass")
    for piece in (
        *(
            "{",
            "}",
            "[",
            "]",
            '"',
            "'",
            ":",
            ",",
            "\n",
            "\r",
            "\t",
            " ",
            "- ",
            "? ",
            "|",
            ">",
            "#",
            "---\n",
            "...\n",
        ),
        *(
            "&a ",
            "*a",
            "<<: *a",
            "!!python/name:os.system ",
            "!x ",
            "%TAG ! x\n",
            "~",
            "null",
            "true",
            "yes",
            ".nan",
        ),
        *(
            ".inf",
            "NaN",
            "-Infinity",
            "1e999",
            "-1e-999",
            "0x1f",
            "0o7",
            "1_000",
            "9" * 400,
            "9" * 5000,
            "-0",
            "1.5",
        ),
        *(
            "\\ud800",
            "\\udfff",
            "\\u0000",
            "\\x1b",
            "\ud800",
            "\0",
            "\x1b[31m",
            "\u2028",
            "\u202e",
            "\ufeff",
            "\x85",
        ),
        *(
            '"messages": ',
            '"role": ',
            '"content": ',
            '"tool_calls": ',
            '"function": ',
            '"arguments": ',
            '"name": ',
        ),
        *(
            '"weight": ',
            '"train": ',
            '"reasoning_content": ',
            '"tools": ',
            '"prompt": ',
            '"chosen": ',
            '"rejected": ',
        ),
        *(
            '"margin": ',
            '"label": ',
            '"seed": ',
            '"level": ',
            '"crc": ',
            '"step": ',
            '"metrics": ',
            '"rewards": ',
        ),
        *(
            '"assistant"',
            '"user"',
            '"system"',
            '"tool"',
            '"developer"',
            '"turns": ',
            '"action": ',
            '"runs": ',
        ),
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "<think>",
            "</think>",
            "<answer>",
        ),
        *(
            "</answer>",
            "answer ",
            "#### ",
            "calculator ",
            "zoom ",
            "<|im_start|>",
            "<|im_end|>",
            "**9**9",
            "(" * 40,
        ),
        *(
            "{{ ",
            " }}",
            "{% ",
            " %}",
            "{% for m in messages %}",
            "{% endfor %}",
            "{% if ",
            "{% endif %}",
            "m['role']",
        ),
        *(
            "m['content']",
            "add_generation_prompt",
            "raise_exception('x')",
            "| tojson",
            "| trim",
            "namespace(x=1)",
        ),
        *(
            "name: ",
            "stages:\n",
            "  sft: ",
            "  policy: ",
            "model: ",
            "environment: ",
            "threads: ",
            "max_steps: ",
        ),
        *(
            "[" * 300,
            "]" * 300,
            '{"a":' * 300,
            "}" * 300,
            "  " * 40,
            "é" * 20,
            "\U0001f600",
            "../",
            "/etc/passwd",
        ),
    )
)


def mutate(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Return a changed input; `others`: inputs to take parts from."""
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        data = _CHANGES[chance.randrange(len(_CHANGES))](data, chance, others)[:MAX_BYTES]
    return data


def _cut(data: bytes, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + chance.choice((1, 2, 4, 8, 16, 64)))


def _insert(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    position = chance.randrange(len(data) + 1)
    return data[:position] + chance.choice(PIECES) + data[position:]


def _replace(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _cut(data, chance)
    return data[:start] + chance.choice(PIECES) + data[end:]


def _delete(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _cut(data, chance)
    return data[:start] + data[end:]


def _flip(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    if not data:
        return chance.randbytes(4)
    position = chance.randrange(len(data))
    return (
        data[:position]
        + bytes([data[position] ^ (1 << chance.randrange(8))])
        + data[position + 1 :]
    )


def _repeat(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    start, end = _cut(data, chance)
    return data[:end] + data[start:end] * chance.choice((1, 2, 10, 200)) + data[end:]


def _splice(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    if not others:
        return data
    other = others[chance.randrange(len(others))]
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _change_lines(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    first, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[first], lines[other] = lines[other], lines[first]
    return b"\n".join(lines)


def _change_value(data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Replace the value after a colon by another."""
    places = [index for index, byte in enumerate(data) if byte == ord(":")]
    if not places:
        return _insert(data, chance, others)
    start = chance.choice(places) + 1
    ends = [end for end in (data.find(mark, start) for mark in (b",", b"}", b"\n")) if end >= 0]
    return data[:start] + b" " + chance.choice(PIECES) + data[min(ends, default=len(data)) :]


_CHANGES = (_insert, _replace, _delete, _flip, _repeat, _splice, _change_lines, _change_value)
