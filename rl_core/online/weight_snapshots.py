"""Versioned snapshots of the served weights: atomic, verified, with a pointer to the live one.

    <folder>/LIVE                   name of the live snapshot
    <folder>/snapshot-00000020/     weights.safetensors, manifest.json (version, names of tied weights)

A snapshot holds only the trainable weights; readers need the model that they belong to.
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

CHAMPION_VERSION = 0  # version of the service's initial model
LIVE_POINTER_FILE = "LIVE"
WEIGHTS_FILE = "weights.safetensors"
_SNAPSHOT_NAME = re.compile(r"snapshot-(\d{8,18})")


class WeightSnapshots:
    """Snapshots in one folder. One process publishes and removes them; any number can read."""

    def __init__(self, folder: Path | str, cached: int = 2) -> None:
        """Configure the reader.

        Args:
            cached: number of versions whose weights stay in memory.
        """
        self.folder = Path(folder)
        self._cached = cached
        self._cache: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()

    def build_path(self, version: int) -> Path:
        """Return the folder of a version."""
        return self.folder / f"snapshot-{version:08d}"

    def list_versions(self) -> list[int]:
        """Return the versions in the folder, oldest first, valid or not."""
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
        """Publish a snapshot that is complete before it has its name; return the SHA-256 of its weights.

        An existing version, left by a publisher that was killed afterwards, must hold the same bits; a damaged one is
        renamed
        and created again.
        Raises: NonFiniteError naming a weight that is not finite; CheckpointError for a disk error, or if the version
            exists
            with other weights.
        """
        for name, tensor in weights.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"{name} is not finite; snapshot {version} is not published")
        unique, same = _deduplicate_tied_weights(weights)
        data = safetensors.torch.save(unique)
        digest = digest_bytes(data)
        make_folder(self.folder)
        clear_leftovers(self.folder)
        existing_digest = self._digest_weights(version)
        if existing_digest is not None and existing_digest != digest:
            raise CheckpointError(
                f"{self.build_path(version)}: its weights differ from those of the same update, now recomputed; it was "
                "created on another machine, with another number of threads or by another version. Continue in a new "
                "folder, or remove the old snapshots"
            )
        if existing_digest is None:
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
        """Make a version the live one. Raises: CorruptError if it is damaged or missing."""
        self._read_manifest(version)
        write_text_atomic(self.folder / LIVE_POINTER_FILE, self.build_path(version).name + "\n")
        inject_fault("online.pointed")

    def read_live_version(self) -> int | None:
        """Return the live version; None if none is set, or the pointer is not a snapshot name."""
        pointer = self.folder / LIVE_POINTER_FILE
        try:
            text = pointer.read_bytes()[:100].decode("utf-8", "replace").strip()
        except OSError:
            return None
        match = _SNAPSHOT_NAME.fullmatch(text)
        if match is None:
            logger.warning("%s: %r is not a snapshot name; ignored", pointer, text)
            return None
        return int(match[1])

    def load_weights(self, version: int) -> dict[str, torch.Tensor]:
        """Return the verified weights of a version on the CPU; callers must not change them. Raises: CorruptError."""
        if version in self._cache:
            self._cache.move_to_end(version)
            return self._cache[version]
        manifest = self._read_manifest(version)
        data = read_verified_file(self.build_path(version), WEIGHTS_FILE, manifest)
        try:
            weights = safetensors.torch.load(data)
            for name, stored_name in dict(manifest["same"]).items():
                weights[name] = weights[stored_name]
        except Exception as error:  # SafetensorError, KeyError, ValueError
            raise CorruptError(f"{self.build_path(version) / WEIGHTS_FILE}: {error}") from error
        self._cache[version] = weights
        while len(self._cache) > self._cached:
            self._cache.popitem(last=False)
        return weights

    def load_weights_if_valid(self, version: int) -> dict[str, torch.Tensor] | None:
        """Return the weights as `load_weights` does; None if the version is missing or, with a warning, damaged."""
        try:
            return self.load_weights(version)
        except CheckpointError as error:
            if version in self.list_versions():
                logger.warning("snapshot %d cannot be used: %s", version, error)
            return None

    def prune_snapshots(
        self, keep: int, referenced: Collection[int], newest: int | None = None
    ) -> list[int]:
        """Remove all but the newest `keep`, the live one and referenced ones; return the removed versions.

        Args:
            newest: later versions stay and do not count: a killed worker created them and will create them again. None
                = no
                later versions.
        """
        versions = [
            version for version in self.list_versions() if newest is None or version <= newest
        ]
        retained = {
            *versions[len(versions) - min(keep, len(versions)) :],
            *referenced,
            self.read_live_version(),
        }
        removed = []
        for version in versions:
            if version not in retained:
                try:
                    remove_folder(self.build_path(version))
                except CheckpointError as error:  # retried at the next pruning
                    logger.warning("an old snapshot could not be removed: %s", error)
                    continue
                self._cache.pop(version, None)
                removed.append(version)
        return removed

    def _read_manifest(self, version: int) -> dict[str, Any]:
        manifest = read_manifest(self.build_path(version))
        if manifest.get("kind") != "snapshot" or manifest.get("version") != version:
            raise CorruptError(f"{self.build_path(version)}: is not snapshot {version}")
        return manifest

    def _digest_weights(self, version: int) -> str | None:
        """Return the SHA-256 of a valid version's weights; None if it is missing or was damaged and renamed here."""
        path = self.build_path(version)
        if not path.exists():
            return None
        try:
            manifest = self._read_manifest(version)
            return digest_bytes(read_verified_file(path, WEIGHTS_FILE, manifest))
        except CorruptError as error:
            aside = move_aside(path, f".corrupt-{path.name}")
            logger.warning(
                "snapshot %d is damaged and was set aside as %s: %s", version, aside.name, error
            )
            return None


def digest_weights(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of weights as a snapshot stores them."""
    return digest_bytes(safetensors.torch.save(_deduplicate_tied_weights(weights)[0]))


def _deduplicate_tied_weights(
    weights: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the weights on the CPU with each tied one once; and other name -> name under which it is stored."""
    unique: dict[str, torch.Tensor] = {}
    first_names: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    for name in sorted(weights):
        tensor = weights[name]
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in first_names:
            same[name] = first_names[memory]
        else:
            first_names[memory] = name
            unique[name] = tensor.detach().to("cpu").contiguous()
    return unique, same
