"""Checkpoints: versions of a run's nested state in one folder. The only code that writes or reads a checkpoint.

    <folder>/.lock                  flock of the single writer
    <folder>/LATEST                 name of the newest acknowledged version
    <folder>/checkpoint-00000012/   state.json, <part>-<n>.safetensors, manifest.json
    <folder>/.corrupt-<name>-<n>    a damaged version, renamed by a reader

`state.json` holds the nested state as JSON; each tensor in it is a reference into a safetensors file. Nothing is
pickled. Values that JSON cannot express become {"$": kind, ...}: tuple, dict (with keys that are not strings), float
(nan, inf), bytes, ndarray, tensor. Decoding restores equal values of the same types. Tied tensors (same memory, same
shape) are stored once.

Also here: the state of an optimizer's moments and of the global random generators (python, numpy, torch).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from rl_core.errors import CheckpointError, CorruptError, NonFiniteError
from rl_core.storage.atomic_files import make_folder, write_text_atomic
from rl_core.storage.faults import inject_fault
from rl_core.storage.folders import (
    clear_leftovers,
    move_aside,
    publish_folder,
    remove_folder,
    write_folder_file,
)
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_bytes, read_manifest, read_verified_file

logger = logging.getLogger(__name__)

POINTER_FILE = "LATEST"
STATE_FILE = "state.json"
# Parts that must be finite: a checkpoint of broken weights must never become the newest one.
FINITE_PARTS = ("model", "best_model")
SHARD_BYTES = 1 << 28  # safetensors builds a file in memory, twice, before writing it
_KIND = "$"
_PART_NAME = re.compile(r"[a-z_]+")
_CORRUPT_PREFIX = ".corrupt-"
_VERSION_NAME = re.compile(r"checkpoint-(\d{8,18})")


class StateEncoder:
    """Encoder of nested values. Collects their tensors by part, in shards of at most `shard_bytes` (or one tensor)."""

    def __init__(self, shard_bytes: int) -> None:
        self.shard_bytes = shard_bytes
        self._shards: dict[str, dict[str, torch.Tensor]] = {}
        self._sizes: dict[str, int] = {}
        self._open_shards: dict[str, str] = {}  # by part
        self._references: dict[tuple[Any, ...], dict[str, str]] = {}

    def iter_shards(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (file name, tensors by name) in the order of encoding."""
        yield from self._shards.items()

    def iter_tensors(self, part: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (path in the state, tensor) for every tensor of a part."""
        for name, tensors in self._shards.items():
            if name.rpartition("-")[0] == part:
                yield from tensors.items()

    def encode_value(self, value: Any, path: str, part: str) -> Any:
        """Return `value` in a form that JSON can express.

        Args:
            path: location in the state, for messages and tensor names.
        Raises: CheckpointError for a type that decoding could not restore.
        """
        if value is None or isinstance(value, bool | str):
            return str(value) if isinstance(value, str) else value
        if isinstance(value, float) and type(value) is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if type(value) is int:
            return value
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path, part)
        if isinstance(value, np.ndarray | np.generic):
            return _encode_array(value, path)
        if isinstance(value, bytes):
            return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
        if type(value) in (list, tuple):
            items = [
                self.encode_value(item, f"{path}.{index}", part) for index, item in enumerate(value)
            ]
            return items if type(value) is list else {_KIND: "tuple", "items": items}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path, part)
        raise CheckpointError(
            f"{path}: a {type(value).__name__} cannot be saved; use numbers, text, lists, dicts, tensors"
        )

    def _encode_mapping(self, value: Mapping[Any, Any], path: str, part: str) -> Any:
        if all(type(key) is str and key != _KIND for key in value):
            return {
                key: self.encode_value(item, f"{path}.{key}", part) for key, item in value.items()
            }
        pairs = [
            [
                self.encode_value(key, f"{path} key", part),
                self.encode_value(item, f"{path}.{key}", part),
            ]
            for key, item in value.items()
        ]
        return {_KIND: "dict", "items": pairs}

    def _encode_tensor(self, tensor: torch.Tensor, path: str, part: str) -> dict[str, str]:
        shape = tuple(tensor.shape)
        memory = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), str(tensor.device))
        if tensor.numel() and (part, memory) in self._references:
            return self._references[part, memory]
        size = tensor.numel() * tensor.element_size()
        shard = self._open_shards.get(part)
        if shard is None or (self._sizes[shard] and self._sizes[shard] + size > self.shard_bytes):
            number = sum(1 for name in self._shards if name.rpartition("-")[0] == part)
            shard = self._open_shards[part] = f"{part}-{number}.safetensors"
            self._shards[shard], self._sizes[shard] = {}, 0
        name = path
        while name in self._shards[shard]:  # {"a.b": ...} and {"a": {"b": ...}} have equal paths
            name += "'"
        self._shards[shard][name] = tensor
        self._sizes[shard] += size
        reference = {_KIND: "tensor", "file": shard, "name": name}
        self._references[part, memory] = reference
        return reference


def _encode_array(value: np.ndarray | np.generic, path: str) -> dict[str, Any]:
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
    """Inverse of `StateEncoder`, built from the tensors by file and name."""

    def __init__(self, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.files = files

    def decode_value(self, value: Any) -> Any:
        """Return the value that was encoded.

        Raises: KeyError, TypeError or ValueError for input that `StateEncoder` cannot have written.
        """
        if isinstance(value, list):
            return [self.decode_value(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _KIND not in value:
            return {key: self.decode_value(item) for key, item in value.items()}
        kind = value[_KIND]
        if kind == "tensor":
            return self.files[value["file"]][value["name"]]
        if kind == "tuple":
            return tuple(self.decode_value(item) for item in value["items"])
        if kind == "dict":
            return {self.decode_value(key): self.decode_value(item) for key, item in value["items"]}
        if kind == "float":
            return float(value["value"])
        if kind == "bytes":
            return base64.b64decode(value["data"], validate=True)
        if kind in ("ndarray", "scalar"):
            data = base64.b64decode(value["data"], validate=True)
            array = (
                np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
            )
            return array[()] if kind == "scalar" else array
        raise ValueError(f"unknown kind {kind!r}")


class NewestCheckpoint(NamedTuple):
    """Summary of the newest checkpoint in a folder."""

    version: int
    iteration: int | None  # of the training loop; None if the state does not record it
    time: float  # time of writing, seconds since 1970


class CheckpointStore:
    """Versions of one run's state in one folder. Loading skips damaged versions and takes the newest valid one.

    With `keep` 1 there is nothing to fall back to if the disk damages the newest version; a crash while saving leaves
    the previous one.

    As a context manager, holds the folder's lock and clears what dead processes left behind. `save_version` and
    `load_latest` take the lock themselves if it is not held.
    """

    def __init__(self, folder: Path | str, keep: int = 2) -> None:
        if keep < 1:
            raise CheckpointError(f"keep: {keep} must be at least 1")
        self.folder = Path(folder)
        self.keep = keep
        self._lock: FolderLock | None = None
        self._depth = 0

    def __enter__(self) -> CheckpointStore:
        if self._depth == 0:
            make_folder(self.folder)
            self._lock = FolderLock(self.folder).__enter__()
            removed = clear_leftovers(self.folder, locked=True)
            if removed:
                names = ", ".join(removed)
                logger.info("%s: removed files left by a dead process: %s", self.folder, names)
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._lock is not None:
            self._lock.__exit__(kind, error, traceback)
            self._lock = None

    def list_versions(self) -> list[int]:
        """Return the version numbers in the folder, oldest first, valid or not."""
        if not self.folder.is_dir():
            return []
        matches = (
            _VERSION_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()
        )
        return sorted(int(match[1]) for match in matches if match)

    def _next_version(self) -> int:
        """Return a number above all that were ever used here, including damaged versions, so that none is reused."""
        names = (path.name for path in self.folder.iterdir())
        matches = (_VERSION_NAME.match(name.removeprefix(_CORRUPT_PREFIX)) for name in names)
        return max((int(match[1]) for match in matches if match), default=0) + 1

    def resolve_version_folder(self, version: int) -> Path:
        """Return the folder of a version."""
        return self.folder / f"checkpoint-{version:08d}"

    def describe_newest(self) -> NewestCheckpoint | None:
        """Describe the newest version from its state file; None without one. Tensors are neither read nor verified."""
        for version in reversed(self.list_versions()):
            path = self.resolve_version_folder(version) / STATE_FILE
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime
                try:
                    iteration = int(json.loads(path.read_bytes())["loop"]["iteration"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    iteration = None
                return NewestCheckpoint(version, iteration, written)
        return None

    def measure_newest(self) -> int:
        """Return the bytes of the newest version; 0 without one."""
        versions = self.list_versions()
        if not versions:
            return 0
        return sum(
            path.stat().st_size for path in self.resolve_version_folder(versions[-1]).iterdir()
        )

    def save_version(self, state: Mapping[str, Any]) -> int:
        """Publish a state as the next version, point LATEST to it, remove old versions, and return the version.

        Args:
            state: nested dicts, lists, tuples, None, bool, int, float, str, bytes, tensors and numpy arrays. Tensors
                below top-level key `x` go to files `x-<n>.safetensors`.
        Raises: NonFiniteError naming the first non-finite tensor below `model` or `best_model`, before anything is
            written; CheckpointError for a value that cannot be stored, or a disk error (the previous version stays).
        """
        with self:
            for key in state:
                if not _PART_NAME.fullmatch(key):
                    raise CheckpointError(
                        f"state: '{key}' becomes part of file names; use only a-z and _"
                    )
            encoder = StateEncoder(SHARD_BYTES)
            encoded = {
                key: encoder.encode_value(value, key, part=key) for key, value in state.items()
            }
            _refuse_nonfinite(encoder)
            existing = self.list_versions()
            version = self._next_version()
            fingerprint = json.dumps(encoded.get("fingerprint"), sort_keys=True)
            extra = {
                "kind": "checkpoint",
                "version": version,
                "parent": existing[-1] if existing else None,
                "settings_digest": digest_bytes(fingerprint.encode()),
            }
            text = json.dumps(encoded, allow_nan=False).encode()

            def write(folder: Path) -> dict[str, str]:
                digests = {}
                for name, tensors in encoder.iter_shards():
                    cpu_tensors = {key: _copy_to_cpu(tensor) for key, tensor in tensors.items()}
                    data = safetensors.torch.save(cpu_tensors)
                    digests[name] = digest_bytes(data)
                    write_folder_file(folder / name, data)
                    del data, cpu_tensors  # before the next file is built in memory
                    inject_fault("publish.file")
                digests[STATE_FILE] = digest_bytes(text)
                write_folder_file(folder / STATE_FILE, text)
                inject_fault("publish.file")
                return digests

            inject_fault("checkpoint.encoded")
            final = self.resolve_version_folder(version)
            publish_folder(final, write, extra)
            write_text_atomic(
                self.folder / POINTER_FILE, final.name + "\n", point="pointer.written"
            )
            inject_fault("pointer.done")
            self._prune_versions(existing[: max(0, len(existing) + 1 - self.keep)])
            return version

    def _prune_versions(self, versions: list[int]) -> None:
        """Remove versions. A disk error only logs a warning, because the new version is already published."""
        for version in versions:
            try:
                remove_folder(self.resolve_version_folder(version))
            except CheckpointError as error:
                logger.warning("an old checkpoint could not be removed: %s", error)

    def load_latest(self) -> dict[str, Any] | None:
        """Return the newest valid state with tensors on the CPU, or None if there is none.

        A version that differs from its manifest is renamed with a warning, and the previous one is tried. A pointer to
        any other version is corrected.
        """
        if not self.folder.is_dir():
            return None
        with self:
            for version in reversed(self.list_versions()):
                try:
                    state = self._read_version(version)
                except CorruptError as error:
                    self._archive_corrupt_version(version, error)
                    continue
                inject_fault("checkpoint.loaded")
                self._repair_pointer(version)
                return state
            self._repair_pointer(None)
            return None

    def load_version(self, version: int) -> dict[str, Any]:
        """Return the verified state of one version and change nothing. Raises: CorruptError."""
        return self._read_version(version)

    def _read_version(self, version: int) -> dict[str, Any]:
        folder = self.resolve_version_folder(version)
        manifest = read_manifest(folder)
        if manifest.get("version") != version or manifest.get("kind") != "checkpoint":
            raise CorruptError(
                f"{folder}: its manifest belongs to {manifest.get('kind')} {manifest.get('version')}"
            )
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in manifest["files"]:
            if name != STATE_FILE:
                data = read_verified_file(folder, name, manifest)
                tensors[name] = _parse_tensors(folder / name, data)
        text = read_verified_file(folder, STATE_FILE, manifest)
        try:
            decoder = StateDecoder(tensors)
            return {key: decoder.decode_value(value) for key, value in json.loads(text).items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(
                f"{folder / STATE_FILE}: not a state: {type(error).__name__} {error}"
            ) from error

    def _archive_corrupt_version(self, version: int, error: CorruptError) -> None:
        path = self.resolve_version_folder(version)
        aside = move_aside(path, f"{_CORRUPT_PREFIX}{path.name}")
        inject_fault("checkpoint.aside")
        logger.warning(
            "checkpoint %d is damaged and was set aside as %s: %s", version, aside.name, error
        )

    def _repair_pointer(self, version: int | None) -> None:
        """Point LATEST to a version, or remove it for None. Its old content is compared, never used as a path."""
        pointer = self.folder / POINTER_FILE
        try:
            text = pointer.read_bytes()[:100].decode("utf-8", "replace").strip()
        except OSError:
            text = None
        expected = None if version is None else self.resolve_version_folder(version).name
        if text == expected:
            return
        if text is not None and not _VERSION_NAME.fullmatch(text):
            logger.warning("%s: %r is not a checkpoint name; ignored", pointer, text)
        if expected is None:
            pointer.unlink(missing_ok=True)
        else:
            write_text_atomic(pointer, expected + "\n")


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _refuse_nonfinite(encoder: StateEncoder) -> None:
    for part in FINITE_PARTS:
        for name, tensor in encoder.iter_tensors(part):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(
                    f"{name} is not finite; not saved, the previous checkpoint stays the newest"
                )


def _parse_tensors(path: Path, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    # The library raises SafetensorError, KeyError, ValueError and RuntimeError.
    except Exception as error:
        raise CorruptError(f"{path}: not a safetensors file: {error}") from error


def extract_moments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the moments of an optimizer as {"state": {parameter number: its moments}}.

    Settings such as the learning rate are left out: a resumed run takes them from its settings.
    """
    return {"state": optimizer.state_dict()["state"]}


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load moments into an optimizer; inverse of `extract_moments`. Learning rate, decay and the like stay unchanged.

    Raises: CheckpointError if the parameters differ, because torch's fused kernels would read out of bounds.
    """
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in state["state"].items():
        if not isinstance(number, int) or not 0 <= number < len(parameters):
            raise CheckpointError(
                f"optimizer: moments of parameter {number}, but {len(parameters)} are trained"
            )
        shape = parameters[number].shape
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != shape:
                raise CheckpointError(
                    f"optimizer: {name} of parameter {number} has shape {tuple(value.shape)}, not {tuple(shape)}"
                )
    optimizer.load_state_dict({"state": dict(state["state"]), "param_groups": groups})


def collect_rng_state() -> dict[str, Any]:
    """Return the state of the global generators of python, numpy, torch and each CUDA device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators; inverse of `collect_rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(device_state, device)
