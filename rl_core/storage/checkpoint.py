"""The only code that writes or reads a checkpoint.

    <folder>/.lock                  flock of the one writer
    <folder>/LATEST                 name of the newest acknowledged version
    <folder>/checkpoint-00000012/   state.json, <part>-<n>.safetensors, manifest.json
    <folder>/.corrupt-<name>-<n>    set aside by a reader

`state.json` holds the nested state; each tensor in it is a reference into a safetensors file. No pickle anywhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import safetensors.torch
import torch

from rl_core.errors import CheckpointError, CorruptError, NonFiniteError
from rl_core.storage.faults import fault
from rl_core.storage.folder_removal import clear_leftovers, remove_folder, set_aside
from rl_core.storage.folders import publish_folder, put_bytes
from rl_core.storage.locks import FolderLock
from rl_core.storage.manifest import digest_bytes, read_manifest, read_verified
from rl_core.storage.single_files import make_folder, write_text_atomic
from rl_core.storage.state_codec import StateDecoder, StateEncoder

__all__ = ["CheckpointStore", "NewestCheckpoint"]

logger = logging.getLogger(__name__)

POINTER = "LATEST"
STATE = "state.json"
FINITE_PARTS = ("model", "best_model")  # a checkpoint of broken weights must never become the newest one
SHARD_BYTES = 1 << 30  # a safetensors file is built in memory before it is written
_PART = re.compile(r"[a-z_]+")
_ASIDE = ".corrupt-"
_NAME = re.compile(r"checkpoint-(\d{8,18})")


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a folder, at a glance."""

    version: int
    iteration: int | None  # of the training loop; None = the state does not say
    time: float  # when it was written, in seconds since 1970


class CheckpointStore:
    """Versions of one run's state in one folder; the newest valid one is loaded, damaged ones are passed over.

    A context manager that holds the folder's lock and clears what dead processes left. `save` and `load_latest` take
    the lock for themselves where it is not held.
    """

    def __init__(self, folder: Path | str, keep: int = 2) -> None:
        if keep < 2:
            raise CheckpointError(f"keep: {keep} must be at least 2, one to fall back to")
        self.folder = Path(folder)
        self.keep = keep
        self._lock: FolderLock | None = None
        self._depth = 0

    def __enter__(self) -> CheckpointStore:
        if self._depth == 0:
            make_folder(self.folder)
            self._lock = FolderLock(self.folder).__enter__()
            if removed := clear_leftovers(self.folder, locked=True):
                logger.info("%s: removed what a dead process left: %s", self.folder, ", ".join(removed))
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._lock is not None:
            self._lock.__exit__(kind, error, traceback)
            self._lock = None

    def versions(self) -> list[int]:
        """Version numbers in the folder, oldest first, valid or not."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def _next_version(self) -> int:
        """A number above every one that was ever seen here, set aside or not: a reader never meets it again."""
        names = (path.name for path in self.folder.iterdir())
        matches = (_NAME.match(name.removeprefix(_ASIDE)) for name in names)
        return max((int(match[1]) for match in matches if match), default=0) + 1

    def path(self, version: int) -> Path:
        """Folder of a version."""
        return self.folder / f"checkpoint-{version:08d}"

    def newest(self) -> NewestCheckpoint | None:
        """The newest version as its state says, its tensors neither read nor verified; None = there is none."""
        for version in reversed(self.versions()):
            path = self.path(version) / STATE
            with contextlib.suppress(OSError):
                written = path.stat().st_mtime
                try:
                    iteration = int(json.loads(path.read_bytes())["loop"]["iteration"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    iteration = None
                return NewestCheckpoint(version, iteration, written)
        return None

    def save(self, state: Mapping[str, Any]) -> int:
        """Publish a state as the next version, point LATEST to it, and prune; returns the version.

        Args:
            state: nested dicts, lists, tuples, None, bool, int, float, str, bytes, tensors and numpy arrays. Tensors
                below top-level key `x` go to files `x-<n>.safetensors`.
        Raises: NonFiniteError naming the first non-finite tensor below `model` or `best_model`, with nothing written;
            CheckpointError for a value that cannot be stored, or if the disk refuses (the previous version stays).
        """
        with self:
            if wrong := next((key for key in state if not _PART.fullmatch(key)), None):
                raise CheckpointError(f"state: '{wrong}' names files, so it may hold a-z and _ only")
            encoder = StateEncoder(SHARD_BYTES)
            encoded = {key: encoder.encode(value, key, part=key) for key, value in state.items()}
            _refuse_nonfinite(encoder)
            existing = self.versions()
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
                for name, tensors in encoder.shards():
                    data = safetensors.torch.save({key: _on_cpu(tensor) for key, tensor in tensors.items()})
                    digests[name] = digest_bytes(data)
                    put_bytes(folder / name, data)
                    fault("publish.file")
                digests[STATE] = digest_bytes(text)
                put_bytes(folder / STATE, text)
                fault("publish.file")
                return digests

            fault("checkpoint.encoded")
            final = self.path(version)
            publish_folder(final, write, extra)
            write_text_atomic(self.folder / POINTER, final.name + "\n", point="pointer.written")
            fault("pointer.done")
            self._prune(existing[: max(0, len(existing) + 1 - self.keep)])
            return version

    def _prune(self, versions: list[int]) -> None:
        """Remove versions. A disk that refuses is no reason to stop: the new one is published already."""
        for version in versions:
            try:
                remove_folder(self.path(version))
            except CheckpointError as error:
                logger.warning("an old checkpoint stays: %s", error)

    def load_latest(self) -> dict[str, Any] | None:
        """The newest valid state, tensors on the CPU; None when there is none.

        Versions that differ from their manifest are set aside with a warning and the one before is tried; a pointer
        that does not name the version found is put right.
        """
        if not self.folder.is_dir():
            return None
        with self:
            found: int | None = None
            state = None
            for version in reversed(self.versions()):
                try:
                    state = self._read(version)
                except CorruptError as error:
                    self._set_aside(version, error)
                else:
                    found = version
                    break
            if found is not None:
                fault("checkpoint.loaded")
            self._repair_pointer(found)
            return state

    def load(self, version: int) -> dict[str, Any]:
        """One version, verified, without touching anything. Raises CorruptError."""
        return self._read(version)

    def _read(self, version: int) -> dict[str, Any]:
        folder = self.path(version)
        manifest = read_manifest(folder)
        if manifest.get("version") != version or manifest.get("kind") != "checkpoint":
            raise CorruptError(f"{folder}: its manifest belongs to {manifest.get('kind')} {manifest.get('version')}")
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in manifest["files"]:
            if name != STATE:
                tensors[name] = _parse(folder / name, read_verified(folder, name, manifest))
        text = read_verified(folder, STATE, manifest)
        try:
            decoder = StateDecoder(tensors)
            return {key: decoder.decode(value) for key, value in json.loads(text).items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{folder / STATE}: not a state: {type(error).__name__} {error}") from error

    def _set_aside(self, version: int, error: CorruptError) -> None:
        path = self.path(version)
        aside = set_aside(path, f"{_ASIDE}{path.name}")
        fault("checkpoint.aside")
        logger.warning("checkpoint %d is damaged and was set aside as %s: %s", version, aside.name, error)

    def _repair_pointer(self, found: int | None) -> None:
        """Point LATEST to the version found. Its content is only compared, never used as a path."""
        pointer = self.folder / POINTER
        try:
            text = pointer.read_bytes()[:100].decode("utf-8", "replace").strip()
        except OSError:
            text = None
        right = None if found is None else self.path(found).name
        if text == right:
            return
        if text is not None and not _NAME.fullmatch(text):
            logger.warning("%s: %r is no checkpoint's name; ignored", pointer, text)
        if right is None:
            pointer.unlink(missing_ok=True)
        else:
            write_text_atomic(pointer, right + "\n")


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _refuse_nonfinite(encoder: StateEncoder) -> None:
    for part in FINITE_PARTS:
        for name, tensor in encoder.tensors(part):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{name} is not finite: not saved, the previous checkpoint stays the newest")


def _parse(path: Path, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # the library raises its own errors, KeyError, ValueError and RuntimeError
        raise CorruptError(f"{path}: not a safetensors file: {error}") from error
