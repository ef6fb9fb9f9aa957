"""Versioned snapshots of the served weights: atomic, verified, with a pointer to the one that is live.

    <folder>/LIVE                   name of the live snapshot
    <folder>/snapshot-00000020/     weights.safetensors, manifest.json (version, names of tied weights)

A snapshot holds the trainable weights alone; whoever reads it has the model that they belong to.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

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
from rl_core.storage.manifest import digest_bytes, read_manifest, read_verified_file

logger = logging.getLogger(__name__)

CHAMPION_VERSION = 0  # version of the model that the service began with
LIVE_POINTER_FILE = "LIVE"
WEIGHTS_FILE = "weights.safetensors"
_SNAPSHOT_NAME = re.compile(r"snapshot-(\d{8,18})")


class WeightSnapshots:
    """Snapshots of one folder. One process publishes and prunes; any number read."""

    def __init__(self, folder: Path | str, cached: int = 2) -> None:
        """cached: versions whose weights stay in memory."""
        self.folder = Path(folder)
        self._cached = cached
        self._cache: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    def build_path(self, version: int) -> Path:
        """Folder of a version."""
        return self.folder / f"snapshot-{version:08d}"

    def list_versions(self) -> list[int]:
        """Versions that are there, the oldest first, valid or not."""
        if not self.folder.is_dir():
            return []
        matches = (
            _SNAPSHOT_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()
        )
        return sorted(int(match[1]) for match in matches if match)

    def publish_snapshot(
        self,
        version: int,
        weights: Mapping[str, torch.Tensor],
        facts: Mapping[str, Any] | None = None,
    ) -> str:
        """Make a snapshot that is complete before it has its name; returns the SHA-256 of its weights.

        A version that is there already, because its publisher was killed afterwards, has to hold the same bits; a
        damaged one is set aside and made again.
        Raises: NonFiniteError naming a weight that is not finite; CheckpointError where the disk refuses, or the
            version is there with other weights.
        """
        for name, tensor in weights.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{name} is not finite: snapshot {version} is not published")
        unique, same = _deduplicate_tied_weights(weights)
        data = safetensors.torch.save(unique)
        digest = digest_bytes(data)
        make_folder(self.folder)
        clear_leftovers(self.folder)
        found = self._digest_weights(version)
        if found is not None and found != digest:
            raise CheckpointError(
                f"{self.build_path(version)}: holds other weights than those of the same update, computed again; another "
                "machine, number of threads or version made it. Go on in a new folder, or remove the old snapshots"
            )
        if found is None:
            extra = {
                "kind": "snapshot",
                "version": version,
                "same": same,
                "facts": dict(facts or {}),
            }

            def write(folder: Path) -> dict[str, str]:
                write_folder_file(folder / WEIGHTS_FILE, data)
                return {WEIGHTS_FILE: digest}

            publish_folder(self.build_path(version), write, extra)
        inject_fault("online.snapshot")
        return digest

    def set_live_version(self, version: int) -> None:
        """Make a version the live one. Raises: CorruptError for one that is damaged or not there."""
        self._read_manifest(version)
        write_text_atomic(self.folder / LIVE_POINTER_FILE, self.build_path(version).name + "\n")
        inject_fault("online.pointed")

    def read_live_version(self) -> int | None:
        """The live version; None = none was named yet, or the pointer names nothing that could be a snapshot."""
        try:
            text = (
                (self.folder / LIVE_POINTER_FILE)
                .read_bytes()[:100]
                .decode("utf-8", "replace")
                .strip()
            )
        except OSError:
            return None
        match = _SNAPSHOT_NAME.fullmatch(text)
        if match is None:
            logger.warning(
                "%s: %r is no snapshot's name; ignored", self.folder / LIVE_POINTER_FILE, text
            )
        return int(match[1]) if match else None

    def load_weights(self, version: int) -> dict[str, torch.Tensor]:
        """Weights of a version on the CPU, verified; not to be changed. Raises: CorruptError."""
        if version in self._cache:
            self._cache.move_to_end(version)
            return self._cache[version]
        manifest = self._read_manifest(version)
        data = read_verified_file(self.build_path(version), WEIGHTS_FILE, manifest)
        try:
            found = safetensors.torch.load(data)
            found |= {name: found[first] for name, first in dict(manifest["same"]).items()}
        except Exception as error:  # the library's own errors, KeyError, ValueError
            raise CorruptError(f"{self.build_path(version) / WEIGHTS_FILE}: {error}") from error
        self._cache[version] = found
        while len(self._cache) > self._cached:
            self._cache.popitem(last=False)
        return found

    def load_weights_if_valid(self, version: int) -> dict[str, torch.Tensor] | None:
        """As `weights`; None with a warning where the version is gone or damaged."""
        try:
            return self.load_weights(version)
        except CheckpointError as error:
            if version in self.list_versions():
                logger.warning("snapshot %d cannot be used: %s", version, error)
            return None

    def prune_snapshots(
        self, keep: int, referenced: Collection[int], newest: int | None = None
    ) -> list[int]:
        """Remove all but the newest `keep`, the live one and those referred to; returns the versions removed.

        Args:
            newest: later versions are left alone and do not count: a worker that was killed made them, and makes them
                again. None = there are none.
        """
        versions = [
            version for version in self.list_versions() if newest is None or version <= newest
        ]
        kept = {
            *versions[len(versions) - min(keep, len(versions)) :],
            *referenced,
            self.read_live_version(),
        }
        removed = []
        for version in versions:
            if version not in kept:
                try:
                    remove_folder(self.build_path(version))
                except CheckpointError as error:  # it is tried again
                    logger.warning("an old snapshot stays: %s", error)
                    continue
                self._cache.pop(version, None)
                removed.append(version)
        return removed

    def _read_manifest(self, version: int) -> dict[str, Any]:
        manifest = read_manifest(self.build_path(version))
        if manifest.get("kind") != "snapshot" or manifest.get("version") != version:
            raise CorruptError(f"{self.build_path(version)}: is no snapshot {version}")
        return manifest

    def _digest_weights(self, version: int) -> str | None:
        """SHA-256 of the weights of a valid version; None = not there, or set aside just now."""
        path = self.build_path(version)
        if not path.exists():
            return None
        try:
            return digest_bytes(
                read_verified_file(path, WEIGHTS_FILE, self._read_manifest(version))
            )
        except CorruptError as error:
            aside = move_aside(path, f".corrupt-{path.name}")
            logger.warning(
                "snapshot %d is damaged and was set aside as %s: %s", version, aside.name, error
            )
            return None


def digest_weights(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of weights, as a snapshot of them has it."""
    return digest_bytes(safetensors.torch.save(_deduplicate_tied_weights(weights)[0]))


def _deduplicate_tied_weights(
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights with each tied one once, on the CPU; other name -> name under which it is stored."""
    unique: dict[str, torch.Tensor] = {}
    first: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    for name in sorted(weights):
        tensor = weights[name]
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in first:
            same[name] = first[memory]
        else:
            first[memory] = name
            unique[name] = tensor.detach().to("cpu").contiguous()
    return unique, same
