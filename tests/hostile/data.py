"""Hostile data: rows of demonstrations and preferences, trajectories, metrics, rewards and token files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.case import (
    BASE,
    CONFIG,
    Case,
    Content,
    bound_socket,
    device,
    fifo,
    link,
    repeated,
    sparse,
)

__all__ = ["CASES"]

GOOD = (
    b'{"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}\n'
)
PAIR = b'{"prompt": "1 + 1", "chosen": "2", "rejected": "3"}\n'
_SFT = BASE.replace("num_demonstrations: 50, levels: [easy]", "demonstrations: {name}")
_DPO = BASE.replace("{num_demonstrations: 50, levels: [easy]}", "{preferences: {name}}").replace(
    "sft: {max_steps: 2}", "preference: {max_steps: 2}"
)


def rows(
    content: Content, says: str | tuple[str, ...], name: str, file: str = "data.jsonl"
) -> Case:
    """Build a case with demonstrations that `validate` refuses."""
    parts = (says,) if isinstance(says, str) else says
    files = {CONFIG: _SFT.replace("{name}", file), file: content}
    return Case(f"demonstrations: {name}", ("validate", CONFIG), (file, *parts), files)


def pairs(
    content: Content, says: str | tuple[str, ...], name: str, file: str = "pairs.jsonl"
) -> Case:
    """Build a case with preferences that `validate` refuses."""
    parts = (says,) if isinstance(says, str) else says
    files = {CONFIG: _DPO.replace("{name}", file), file: content}
    return Case(f"preferences: {name}", ("validate", CONFIG), (file, *parts), files)


def _message(field: str) -> bytes:
    return (
        GOOD
        + b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
        + field.encode()
        + b"}]}\n"
    )


def _deep(times: int) -> bytes:
    return GOOD + b'{"messages": ' + b"[" * times + b"]" * times + b"}\n"


def _parquet(make: Callable[[], Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow.parquet

        pyarrow.parquet.write_table(make(), path)

    return write


def _table(**columns: Any) -> Callable[[], Any]:
    def make() -> Any:
        import pyarrow

        return pyarrow.table(columns)

    return make


def _bad_utf8() -> Any:
    import pyarrow

    text = pyarrow.array([b"\xff\xfe", b"ok"], pyarrow.binary()).view(pyarrow.string())
    return pyarrow.table({"prompt": text, "completion": ["a", "b"]})


def _parquet_bytes() -> bytes:
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(_table(prompt=["a"] * 50, completion=["b"] * 50)(), file)
    return file.getvalue()


def _cut(share: float) -> Callable[[Path], None]:
    return lambda path: _write(path, _parquet_bytes()[: int(len(_parquet_bytes()) * share)])


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _lying_footer(path: Path) -> None:
    content = _parquet_bytes()
    path.write_bytes(content[:-8] + (2**31 - 1).to_bytes(4, "little") + b"PAR1")


def _flipped(path: Path) -> None:
    content = bytearray(_parquet_bytes())
    for place in range(len(content) - 200, len(content) - 8, 7):
        content[place] ^= 0xFF
    path.write_bytes(bytes(content))


_ROWS = [
    rows(b"\xff\xfe\x00", "UTF-16", "UTF-16 mark"),
    rows(GOOD + b'{"messages": "\xff"}\n', (":2:", "is not UTF-8"), "no UTF-8"),
    rows(GOOD + b'{"messages": "\xed\xa0\x80"}\n', (":2:", "is not UTF-8"), "surrogate in UTF-8"),
    rows(
        _message('"content": "\\ud800"'), (":2:", "half of a surrogate pair"), "escaped surrogate"
    ),
    rows(_message('"content": "x", "\\udfff": 1'), (":2:",), "surrogate in a key"),
    rows(_message('"content": NaN'), (":2:", "messages[1].content: nan"), "NaN"),
    rows(_message('"content": 1e999'), (":2:",), "1e999"),
    rows(_message('"content": -Infinity'), (":2:",), "infinity"),
    rows(_message('"content": ' + "9" * 5000), (":2:",), "integer of 5000 digits"),
    rows(_message('"content": ' + "9" * 1_000_000), (":2:",), "integer of 1e6 digits"),
    rows(_deep(500), (":2:",), "500 brackets"),
    rows(_deep(900), (":2:",), "900 brackets"),
    rows(_deep(100_000), (":2:", "nested too deeply"), "100000 brackets"),
    rows(
        GOOD + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
        (":2:", "nested too deeply"),
        "50000 braces",
    ),
    rows(GOOD + b"[" * 1_000_000, (":2:",), "a million open brackets"),
    rows(GOOD + b'{"messages": [], "messages": []}\n', (":2:", "appears twice"), "key twice"),
    rows(
        GOOD + b"{" + b",".join(b'"k%d": 1' % n for n in range(100_000)) + b', "k5": 2}\n',
        (":2:", "k5: appears twice"),
        "100000 keys, one twice",
    ),
    rows(
        repeated(b"", b'{"role": "user", "content": "x"},', 1_200_000, b""),
        (":1:",),
        "list of a million messages, cut",
    ),
    rows(repeated(GOOD, b"x", 100 * 2**20, b"\n"), (":2:", "longer than"), "line of 100 MiB"),
    rows(
        repeated(GOOD + b'{"messages": "', b"x", 100 * 2**20, b'"}\n'),
        (":2:", "longer than"),
        "text of 100 MiB",
    ),
    rows(sparse(20 * 2**30, GOOD * 99), (":100:", "longer than"), "20 GiB of zeros"),
    rows(sparse(20 * 2**30), "NUL bytes", "20 GiB of nothing but zeros"),
    rows(repeated(GOOD, b"\n", 3 * 2**20, b"{\n"), (":3145730:",), "3 million empty lines"),
    rows(repeated(GOOD, b"{}\n", 300_000, b""), (":2:", "and 993 more"), "300000 empty objects"),
    rows(b"", "is empty", "empty"),
    rows(b"\n\n \n", "holds no row", "blank"),
    rows(b"\xef\xbb\xbf\n", "holds no row", "a byte order mark alone"),
    rows(b"[]\n", "JSON array", "an array"),
    rows(b"[" + GOOD.strip() + b",\n" + GOOD.strip() + b"]", "JSON array", "an array of rows"),
    rows(b"{\n" + b'"messages": []\n}', "one JSON document", "a document over lines"),
    rows(b"null\n", (":1:", "must be an object"), "null"),
    rows(b"42\n", (":1:", "must be an object"), "a number"),
    rows(b'"text"\n', (":1:", "must be an object"), "a text"),
    rows(GOOD + b"[1, 2]\n", (":2:", "must be an object"), "a list"),
    rows(GOOD + b"{'messages': 1}\n", (":2:", "is not JSON"), "Python in the place of JSON"),
    rows(GOOD + GOOD.strip() + GOOD, (":2:", "is not JSON"), "two objects in a line"),
    rows(GOOD.strip()[:-3], (":1:", "is not JSON"), "cut off"),
    rows(GOOD + b"{}\n", (":2:", "messages: is missing"), "empty object"),
    rows(GOOD + b'{"messages": []}\n', (":2:", "is empty"), "no message"),
    rows(GOOD + b'{"messages": {}}\n', (":2:", "must be a list"), "messages an object"),
    rows(GOOD + b'{"messages": [1]}\n', (":2:", "messages[0]"), "message a number"),
    rows(GOOD + b'{"messages": [{"role": 1, "content": "x"}]}\n', (":2:", "role"), "role a number"),
    rows(
        GOOD + b'{"messages": [{"role": "root", "content": "x"}]}\n',
        (":2:", "role"),
        "unknown role",
    ),
    rows(
        GOOD + b'{"messages": [{"role": "user", "content": "x"}]}\n',
        (":2:", "assistant at the end"),
        "no answer",
    ),
    rows(_message('"content": {"a": 1}'), (":2:", "content"), "content an object"),
    rows(
        _message('"content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]'),
        (":2:", "content[0]"),
        "image",
    ),
    rows(_message('"content": " "'), (":2:", "is empty"), "blank content"),
    rows(_message('"content": "x", "weight": 0.5'), (":2:", "weight"), "weight of a half"),
    rows(_message('"content": "x", "weight": []'), (":2:", "weight"), "weight a list"),
    rows(
        _message('"content": "x", "function_call": {}'), (":2:", "function_call"), "function_call"
    ),
    rows(_message('"content": "x", "__class__": {}'), (":2:", "__class__"), "dunder field"),
    rows(
        _message('"tool_calls": "' + "[" * 100_000 + '"'),
        (":2:", "tool_calls"),
        "calls nested in a text",
    ),
    rows(
        _message('"tool_calls": "' + "[" * 5_000 + "]" * 5000 + '"'),
        (":2:", "tool_calls"),
        "calls deep in a text",
    ),
    rows(
        _message('"tool_calls": [{"function": {"name": 5}}]'),
        (":2:", "name"),
        "name of a call a number",
    ),
    rows(
        _message('"tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": NaN}"}}]'),
        (":2:", "arguments"),
        "NaN in arguments",
    ),
    rows(
        _message(
            '"tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}}]'
        ),
        (":2:", "arguments"),
        "surrogate in arguments",
    ),
    rows(
        _message('"tool_calls": [{"function": {"name": "f", "arguments": {"a": "\\ud800"}}}]'),
        (":2:", "arguments"),
        "surrogate in an argument",
    ),
    rows(
        _message(
            '"tool_calls": [{"function": {"name": "f", "arguments": "' + '{\\"a\\":' * 3000 + '"}}]'
        ),
        (":2:", "arguments"),
        "arguments nested",
    ),
    rows(
        GOOD.strip()[:-1] + b', "tools": "[' + b"[" * 5000 + b'"}\n',
        (":1:", "tools"),
        "tools nested in a text",
    ),
    rows(
        GOOD.strip()[:-1] + b', "tools": [{"a": 1}]}\n', (":1:", "tools"), "tool without function"
    ),
    rows(
        GOOD.strip()[:-1] + b', "tools": [{"function": {"name": "\\ud800"}}]}\n',
        (":1:", "tools"),
        "tool surrogate",
    ),
    rows(
        GOOD.strip()[:-1]
        + b', "tools": "[{\\"function\\": {\\"name\\": \\"f\\", \\"x\\": NaN}}]"}\n',
        (":1:", "tools"),
        "tool NaN",
    ),
    rows(GOOD.strip()[:-1] + b', "seed": 1.5}\n', (":1:", "seed"), "seed a fraction"),
    rows(GOOD.strip()[:-1] + b', "seed": true}\n', (":1:", "seed"), "seed true"),
    rows(
        GOOD.strip()[:-1] + b', "seed": ' + b"9" * 30 + b"}\n", (":1:", "seed"), "seed of 30 digits"
    ),
    rows(GOOD.strip()[:-1] + b', "level": ["a"]}\n', (":1:", "level"), "level a list"),
    rows(b'{"prompt": "\x00", "completion": "b"}\n', (":1:",), "a NUL byte"),
    rows(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", "LFS pointer"),
    rows(b"\x1f\x8b\x08" + b"\0" * 99, "gzip", "gzip"),
    rows(b"PK\x03\x04" + b"\0" * 99, "zip", "zip"),
    rows(b"BZh9" + b"\0" * 99, "bzip2", "bzip2"),
    rows(b"\x28\xb5\x2f\xfd" + b"\0" * 99, "zstd", "zstd"),
    rows(b"\x80\x04\x95\x1e\x00\x00\x00c__builtin__\nexec\n", (":1:",), "a pickle"),
    rows(b"<!DOCTYPE html><html>404</html>\n", (":1:", "is not JSON"), "a page"),
    rows(b"prompt,completion\na,b\n", (":1:", "is not JSON"), "CSV"),
    rows(lambda path: path.mkdir(), "is a folder without data files", "folder"),
    rows(fifo, "is not a regular file", "pipe"),
    rows(bound_socket, "is not a regular file", "socket"),
    rows(device("zero"), "is not a regular file", "/dev/zero"),
    rows(device("tty"), "data.jsonl", "/dev/tty"),
    rows(link("nowhere"), "is not a file", "broken link"),
    rows(link("data.jsonl"), "is not a file", "link to itself"),
    rows(link("/etc/passwd"), "is not JSON", "link to the password file"),
    rows(link("/proc/self/environ"), "data.jsonl", "link to the environment"),
]
_PARQUET = [
    rows(b"PAR1" + b"\0" * 50, "cannot be read as Parquet", "Parquet of zeros", "data.parquet"),
    rows(GOOD, "is not Parquet", "JSON by the name of Parquet", "data.parquet"),
    rows(_cut(0.5), "cannot be read as Parquet", "half of a Parquet file", "data.parquet"),
    rows(_cut(0.99), "cannot be read as Parquet", "Parquet cut off", "data.parquet"),
    rows(_lying_footer, "cannot be read as Parquet", "Parquet with a lying footer", "data.parquet"),
    rows(_flipped, "data.parquet", "Parquet with flipped bits", "data.parquet"),
    rows(_parquet(_bad_utf8), (":1:", "is not UTF-8"), "Parquet without UTF-8", "data.parquet"),
    rows(
        _parquet(_table(a=[1])), "none of the columns", "Parquet of other columns", "data.parquet"
    ),
    rows(
        _parquet(_table(prompt=[1], completion=[2])),
        (":1:", "must be text"),
        "Parquet of numbers",
        "data.parquet",
    ),
    rows(
        _parquet(_table(prompt=[], completion=[])),
        "holds no row",
        "Parquet without rows",
        "data.parquet",
    ),
    rows(
        _parquet(_table(prompt=["a"] * 9, completion=[None] * 9)),
        (":1:", "completion"),
        "nulls",
        "data.parquet",
    ),
]
_PAIRS = [
    pairs(
        PAIR + b'{"prompt": "a", "chosen": "b", "rejected": "b"}\n',
        (":2:", "equal to rejected"),
        "equal sides",
    ),
    pairs(
        PAIR + b'{"prompt": "a", "chosen": ["b"], "rejected": "c"}\n',
        (":2:", "chosen"),
        "chosen a list",
    ),
    pairs(
        PAIR + b'{"prompt": "a", "chosen": "b"}\n', (":2:", "rejected: is missing"), "no rejected"
    ),
    pairs(PAIR.strip()[:-1] + b', "margin": -1}\n', (":1:", "margin"), "negative margin"),
    pairs(PAIR.strip()[:-1] + b', "margin": "1"}\n', (":1:", "margin"), "margin a text"),
    pairs(PAIR.strip()[:-1] + b', "margin": 1e400}\n', (":1:", "margin"), "margin infinite"),
    pairs(
        PAIR.strip()[:-1] + b', "margin": ' + b"9" * 400 + b"}\n",
        (":1:", "margin"),
        "margin of 400 digits",
    ),
    pairs(
        b'{"prompt": "a", "completion": "b", "label": "yes"}\n', (":1:", "label"), "label a text"
    ),
    pairs(
        b'{"prompt": "a", "completion": "b", "label": true}\n', (":1:", "label"), "labels for DPO"
    ),
    pairs(
        b'{"prompt": "a\\ud800", "chosen": "b", "rejected": "c"}\n',
        (":1:", "surrogate"),
        "surrogate",
    ),
]

_TRAJECTORY: dict[str, Any] = {
    "environment": "e",
    "level": "easy",
    "kind": "k",
    "seed": 1,
    "prompt": "p",
    "target": "t",
    "turns": [{"action": "a", "num_tokens": 1}],
}


def _line(**changed: Any) -> bytes:
    return json.dumps({**_TRAJECTORY, **changed}).encode() + b"\n"


def played(content: Content, says: str | tuple[str, ...], name: str) -> Case:
    """Build a case with trajectories that `analyze` refuses."""
    parts = (says,) if isinstance(says, str) else says
    arguments = ("analyze", "t.jsonl", "--out", "outputs/report")
    return Case(f"trajectories: {name}", arguments, ("t.jsonl", *parts), {"t.jsonl": content})


_PLAYED = [
    played(b"", "holds no trajectories", "empty"),
    played(b"{}\n", (":1:", "is missing"), "empty object"),
    played(b"[]\n", "JSON array", "array"),
    played(b"7\n", (":1:",), "a number"),
    played(b'{"a": NaN}\n', (":1:", "not JSON"), "NaN"),
    played(b"[" * 100, "t.jsonl", "brackets"),
    played(b'{"a": ' + b"[" * 100_000, (":1:", "nested too deeply"), "deep"),
    played(b'{"a": "\xff"}\n', (":1:", "not UTF-8"), "no UTF-8"),
    played(_line(extra=1), (":1:", "extra"), "unknown field"),
    played(_line(seed=2**70), (":1:", "64 bits"), "large seed"),
    played(_line(seed=True), (":1:", "seed"), "seed true"),
    played(_line(turns=[5]), (":1:", "turns[0]"), "turn a number"),
    played(
        _line(turns=[{"action": "a", "num_tokens": 1, "tool_call": []}]),
        (":1:", "tool_call"),
        "call a list",
    ),
    played(_line(rewards={"a": "b"}), (":1:", "rewards"), "reward a text"),
    played(
        _line(reward=1).replace(b'"reward": 1', b'"reward": 1e999'),
        (":1:", "reward"),
        "reward infinite",
    ),
    played(
        repeated(b'{"a": "', b"x", 100 * 2**20, b'"}\n'), (":1:", "longer than"), "line of 100 MiB"
    ),
    played(sparse(20 * 2**30), (":1:",), "20 GiB of zeros"),
    played(_line()[:-9], (":1:", "cut off"), "cut off"),
    played(fifo, "t.jsonl", "pipe"),
    played(device("zero"), "t.jsonl", "/dev/zero"),
    played(link("t.jsonl"), "t.jsonl", "link to itself"),
    played(lambda path: path.mkdir(), "t.jsonl", "empty folder"),
]


def call(
    function: str, content: Content, says: str | tuple[str, ...], name: str, file: str
) -> Case:
    """Build a case with a file that a reader of the Python API refuses."""
    parts = (says,) if isinstance(says, str) else says
    return Case(
        f"{function}: {name}",
        ("call", f"hostile.calls:{function}", file),
        (file, *parts),
        {file: content},
    )


_RUNS = [
    Case(
        f"{' '.join(command[::2])}: rows that are refused",
        (*command, "--quiet"),
        ("data.jsonl:2:", "messages: is missing"),
        {CONFIG: _SFT.replace("{name}", "data.jsonl"), "data.jsonl": GOOD + b"{}\n" + GOOD * 1500},
    )
    for command in (("run", CONFIG), ("retrain", CONFIG), ("run", CONFIG, "--only", "sft"))
]
_LATE = Case(
    "run: a row that is refused behind the first thousand",
    ("run", CONFIG, "--quiet"),
    ("data.jsonl:1501:", "missing"),
    {CONFIG: _SFT.replace("{name}", "data.jsonl"), "data.jsonl": GOOD * 1500 + b"{}\n"},
)
_JOURNALS = [
    call(function, content, says, name, file)
    for function, file in (("read_metrics", "metrics.jsonl"), ("read_rewards", "rewards.jsonl"))
    for content, says, name in (
        (b'{"a": \xff}\n', ":1:", "no UTF-8"),
        (b"nonsense\n", ":1:", "no JSON"),
        (b"[1]\n", ":1:", "a list"),
        (b'{"a":' * 5000 + b"\n", ":1:", "deep"),
        (b'{"step": "x", "rewards": 5}\n', ":1:", "wrong types"),
        (b'{"step": ' + b"9" * 5000 + b"}\n", ":1:", "5000 digits"),
        (repeated(b'{"step": "', b"x", 100 * 2**20, b'"}\n'), ":1:", "line of 100 MiB"),
        (fifo, "no", "pipe"),
    )
]
_TOKENS = [
    call("read_tokens", content, says, name, "tokens.jsonl")
    for content, says, name in (
        (b"nonsense\n", ":1:", "no JSON"),
        (b"\xff\n", "tokens.jsonl", "no UTF-8"),
        (b"[]\n", ":1:", "a list"),
        (
            b'{"prompt": [1], "completion": [2], "runs": [1000000000000]}\n',
            ":1:",
            "run of 1e12 tokens",
        ),
        (b'{"prompt": [1], "completion": [2], "runs": [-5]}\n', ":1:", "negative run"),
        (b'{"prompt": "x", "completion": {}, "runs": [1]}\n', ":1:", "wrong types"),
        (b'{"prompt":' * 5000 + b"\n", ":1:", "deep"),
    )
]

CASES = [*_RUNS, _LATE, *_ROWS, *_PARQUET, *_PAIRS, *_PLAYED, *_JOURNALS, *_TOKENS]
