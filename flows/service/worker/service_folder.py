"""Places of a service's files below its folder.

service.db                              the store, unless a setting names another
worker.lock                             held by the one worker
snapshots/RUN/                          newest states of a run, for replay
weights/RUN/weights/NAME                saved paths, with the optimizer
weights/RUN/sampler_weights/NAME        saved paths for samplers
weights/RUN/external_weights/NAME       Hugging Face or peft folders
weights/RUN/samplers/NAME               weights of one sampler: without a path, or of a path that has others now
weights/RUN/published/SEQ               weights that in-flight samplers have
staging/                                model folders on their way to the registry
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flows.service.wire.tinker_paths import check_name, parse_path

__all__ = ["OWN", "ServiceFolder", "folder_bytes"]

OWN = "/samplers/"  # part of the path of weights that one sampler alone reads


@dataclass(frozen=True, slots=True)
class ServiceFolder:
    """Names of folders; makes none."""

    root: Path

    @property
    def lock(self) -> Path:
        """Lock of the worker."""
        return self.root / "worker.lock"

    @property
    def all_snapshots(self) -> Path:
        """States of all runs, a folder each."""
        return self.root / "snapshots"

    def snapshots(self, model_id: str) -> Path:
        """States of a run."""
        return self.all_snapshots / check_name(model_id, "model_id")

    def weights(self, path: str) -> Path:
        """Weights of a tinker:// path. Raises: ServiceError (user) for a text that is none."""
        return parse_path(path).folder(self.root)

    def sampler(self, model_id: str, sampler_id: str) -> Path:
        """Weights that one sampler alone reads."""
        return self._of(model_id) / OWN.strip("/") / check_name(sampler_id, "sampling_session_id")

    def published(self, model_id: str, seq: int) -> Path:
        """Weights for in-flight samplers."""
        return self._of(model_id) / "published" / f"{seq:010d}"

    def staging(self, name: str) -> Path:
        """A model folder on its way to the registry."""
        return self.root / "staging" / check_name(name)

    def _of(self, model_id: str) -> Path:
        return self.root / "weights" / check_name(model_id, "model_id")

    def relative(self, path: Path) -> str:
        """A path as the store keeps it: the folder may be moved."""
        return path.relative_to(self.root).as_posix()

    def absolute(self, path: str) -> Path:
        """Inverse of `relative`."""
        return self.root / path


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names
    )  # fmt: skip
