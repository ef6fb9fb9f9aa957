"""Names in what is written to the disk or sent: keys of records, columns, tensors, file names."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
import yaml

from tasks import stage_registry

IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]+")  # other keys are data: a token, a level, a file
HEXADECIMAL = re.compile(r"[0-9a-f]{12,}")
# Parts of file names that differ between two runs: digests, times, numbers.
VARYING = re.compile(
    r"(?<![a-z])(?=[a-f]*\d)[0-9a-f]{8,}(?![a-z])|(?<![a-z])m-[0-9a-f]{8,}|\d[\d_-]*"
)
LINES = (".jsonl", ".log")
# Keys that name what a run has, not what a record is made of: stages, levels, questions.
DATA = (*stage_registry.list_stage_names(), "champion", "easy", "sum", "product")
# Ends of paths that are not looked into: settings and tags, which have lists, and tokens.
OPAQUE = ("settings", "config", "tags", "logprobs.top_logprobs")


def list_fields(value: Any, place: str = "", *, keep_names: bool = False) -> Iterator[str]:
    """Yield the path of every key in a value, as `a.b[].c`.

    Args:
        keep_names: keep names of weights, with `N` for numbers; other keys are `*`.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = str(key)
            if keep_names:
                name = re.sub(r"\d+", "N", name)
            elif not IDENTIFIER.fullmatch(name) or HEXADECIMAL.fullmatch(name) or name in DATA:
                name = "*"
            path = f"{place}.{name}" if place else name
            yield path
            if not f".{path}".endswith(tuple(f".{end}" for end in OPAQUE)):
                yield from list_fields(inner, path, keep_names=keep_names)
    elif isinstance(value, list | tuple) and not isinstance(value, np.ndarray | torch.Tensor):
        for inner in value:
            yield from list_fields(inner, f"{place}[]", keep_names=keep_names)


def list_record_fields(record: Any, place: str) -> Iterator[str]:
    """Yield the paths of one record of a file, with its operation where a journal holds several."""
    operation = record.get("op") if isinstance(record, Mapping) else None
    if operation is None and isinstance(record, Mapping) and "segment-" in place:
        operation = record.get("kind")
    for path in list_fields(record):
        yield f"{place}{f' {operation}' if operation else ''}: {path}"


def generalize_file_name(path: Path, root: Path) -> str:
    """Return a file's place below a folder with `N` for what differs between runs."""
    return generalize_name(path.relative_to(root).as_posix())


def generalize_name(name: str) -> str:
    """Return a name with `N` for digests, times and numbers, which differ between runs."""
    return VARYING.sub("N", name)


def list_files(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, those of a tracking store's artifacts left out."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and "artifacts" not in path.relative_to(root).parts:
            yield path


def describe_folder(root: Path, label: str) -> tuple[set[str], set[str]]:
    """Return the file names below a folder, and the fields of what can be read.

    Fields of files that every stage writes are those of all stages together.
    """
    names, fields = set(), set()
    for path in list_files(root):
        name = f"{label}: {generalize_file_name(path, root)}"
        names.add(name)
        shared = re.sub(r"stages/\w+/", "stages/*/", name)
        shared = re.sub(r"(trajectories|tokens)_\w+\.jsonl", r"\1_*.jsonl", shared)
        fields |= set(describe_file(path, shared))
    return names, fields


def describe_file(path: Path, name: str) -> Iterator[str]:
    """Yield the fields of a file's records; nothing for a format without names."""
    if path.suffix == ".json":
        if path.name not in (
            "tokenizer.json",
            "tokenizer_config.json",
            "config.json",
            "generation_config.json",
        ):
            yield from list_record_fields(json.loads(path.read_text()), name)
    elif path.suffix in LINES:
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield from list_record_fields(json.loads(line), name)
    elif path.suffix in (".yaml", ".yml"):
        yield from list_record_fields(yaml.safe_load(path.read_text()), name)
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            for column in next(csv.reader(file), []):
                yield f"{name}: {re.sub(r'[0-9]+', 'N', column)}"
    elif path.suffix == ".arrow":
        with pyarrow.OSFile(str(path)) as file:
            yield from (f"{name}: {column}" for column in pyarrow.ipc.open_file(file).schema.names)
    elif path.suffix == ".safetensors" and path.parent.name != "model":
        yield from (f"{name}: {tensor}" for tensor in sorted(set(list_tensors(path))))


def list_tensors(path: Path) -> Iterator[str]:
    """Yield the names of a safetensors file's tensors and metadata, with `N` for numbers."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    for name, about in json.loads(content[8 : 8 + size]).items():
        if name == "__metadata__":
            yield from (f"{name}.{key}" for key in about)
        else:
            yield re.sub(r"\d+", "N", name)


def query_names(database: Path, question: str) -> list[tuple[Any, ...]]:
    """Return the rows that a SQLite file answers a question with."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute(question).fetchall()
