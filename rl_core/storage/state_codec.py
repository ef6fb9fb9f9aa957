"""Nested state as JSON with references to tensors; decoding gives back equal values, types included.

Values that JSON has no word for become {"$": kind, ...}: tuple, dict (with keys that are not text), float (nan, inf),
bytes, ndarray, tensor. Tied tensors (one memory, one shape) are stored once.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rl_core.errors import CheckpointError

__all__ = ["StateDecoder", "StateEncoder"]

_KIND = "$"


class StateEncoder:
    """Encodes values and collects their tensors, in parts and in shards of at most `shard_bytes` (or one tensor)."""

    def __init__(self, shard_bytes: int) -> None:
        self.shard_bytes = shard_bytes
        self._shards: dict[str, dict[str, torch.Tensor]] = {}
        self._sizes: dict[str, int] = {}
        self._current: dict[str, str] = {}  # part -> its open shard
        self._seen: dict[tuple[Any, ...], dict[str, str]] = {}

    def shards(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """(file name, tensors by name), in the order of encoding."""
        yield from self._shards.items()

    def tensors(self, part: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(path in the state, tensor) of every tensor of a part."""
        for name, tensors in self._shards.items():
            if name.rpartition("-")[0] == part:
                yield from tensors.items()

    def encode(self, value: Any, path: str, part: str) -> Any:
        """JSON-able form of `value`; `path` is its place, for messages and tensor names.

        Raises: CheckpointError for a type that would not come back as it is.
        """
        if value is None or isinstance(value, bool | str):
            return value if value is None or isinstance(value, bool) else str(value)
        if isinstance(value, float) and type(value) is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if type(value) is int:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, part)
        if isinstance(value, np.ndarray | np.generic):
            return _array(value, path)
        if isinstance(value, bytes):
            return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{path}.{index}", part) for index, item in enumerate(value)]
            return items if type(value) is list else {_KIND: "tuple", "items": items}
        if isinstance(value, Mapping):
            return self._mapping(value, path, part)
        raise CheckpointError(
            f"{path}: a {type(value).__name__} cannot be saved; use numbers, text, lists, dicts, tensors"
        )

    def _mapping(self, value: Mapping[Any, Any], path: str, part: str) -> Any:
        if all(type(key) is str and key != _KIND for key in value):
            return {key: self.encode(item, f"{path}.{key}", part) for key, item in value.items()}
        pairs = [
            [self.encode(key, f"{path} key", part), self.encode(item, f"{path}.{key}", part)]
            for key, item in value.items()
        ]
        return {_KIND: "dict", "items": pairs}

    def _tensor(self, tensor: torch.Tensor, path: str, part: str) -> dict[str, str]:
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
        if tensor.numel() and (part, memory) in self._seen:
            return self._seen[part, memory]
        size = tensor.numel() * tensor.element_size()
        shard = self._current.get(part)
        if shard is None or (self._sizes[shard] and self._sizes[shard] + size > self.shard_bytes):
            number = sum(1 for name in self._shards if name.rpartition("-")[0] == part)
            shard = self._current[part] = f"{part}-{number}.safetensors"
            self._shards[shard], self._sizes[shard] = {}, 0
        name = path
        while name in self._shards[shard]:  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "'"
        self._shards[shard][name] = tensor
        self._sizes[shard] += size
        reference = {_KIND: "tensor", "file": shard, "name": name}
        self._seen[part, memory] = reference
        return reference


def _array(value: np.ndarray | np.generic, path: str) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise CheckpointError(f"{path}: an array of Python objects cannot be saved")
    return {
        _KIND: "scalar" if isinstance(value, np.generic) else "ndarray",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(array.tobytes()).decode(),
    }


class StateDecoder:
    """Inverse of `StateEncoder.encode`, given the tensors by file and name."""

    def __init__(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.files = files

    def decode(self, value: Any) -> Any:
        """The value that was encoded. Raises KeyError, TypeError or ValueError for input that no StateEncoder wrote."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _KIND not in value:
            return {key: self.decode(item) for key, item in value.items()}
        kind = value[_KIND]
        if kind == "tensor":
            return self.files[value["file"]][value["name"]]
        if kind == "tuple":
            return tuple(self.decode(item) for item in value["items"])
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in value["items"]}
        if kind == "float":
            return float(value["value"])
        if kind == "bytes":
            return base64.b64decode(value["data"], validate=True)
        if kind in ("ndarray", "scalar"):
            data = base64.b64decode(value["data"], validate=True)
            array = np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
            return array[()] if kind == "scalar" else array
        raise ValueError(f"unknown kind {kind!r}")
