"""Paths of saved weights, `tinker://<training run>/<kind>/<name>`, and the folder layout of a service.

service.db                              store, unless a setting names another
worker.lock                             lock held by the single worker
snapshots/RUN/                          newest states of a run, for replay
weights/RUN/weights/NAME                saved paths, with the optimizer
weights/RUN/sampler_weights/NAME        saved paths for samplers
weights/RUN/external_weights/NAME       Hugging Face or peft folders
weights/RUN/samplers/NAME               private weights of one sampler: saved without a path, or a path rewritten since
weights/RUN/published/SEQ               weights of in-flight samplers
staging/                                model folders on their way to the registry
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_core.errors import ServiceError

WeightsKind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
SAMPLER_FOLDER_PART = "/samplers/"  # part of the path of weights that belong to a single sampler
_PREFIX = "tinker://"
# No separators, no hidden names, no `..`; at most 200 characters.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,199}")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """Location of a training run's saved weights."""

    run: str
    kind: WeightsKind
    name: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.run}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """Kind and name, as used in REST addresses."""
        return f"{self.kind}/{self.name}"

    def resolve_folder(self, root: Path) -> Path:
        """Return the folder of the weights below the service's folder."""
        return root / "weights" / self.run / self.kind / self.name


def check_path_name(name: str, key: str = "path") -> str:
    """Return the name if a folder may have it. Raises: ServiceError (user)."""
    if not _NAME_PATTERN.fullmatch(name):
        raise ServiceError(
            f"{key}: {name[:200]!r} cannot be a name; use letters, digits and . _ : = + @ -, at most 200, the first a "
            "letter, digit or _",
            "user",
        )
    return name


def is_tinker_path(name: str) -> bool:
    """Return whether the text is a path of saved weights and not the name of a model."""
    return name.startswith(_PREFIX)


def parse_tinker_path(path: str) -> TinkerPath:
    """Parse a path of saved weights. Raises: ServiceError (user) for any other text."""
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != 3 or parts[1] not in CHECKPOINT_TYPES:
        raise ServiceError(
            f"path: {path[:200]!r} is not tinker://RUN/{'|'.join(CHECKPOINT_TYPES)}/NAME", "user"
        )
    run, kind, name = parts
    return TinkerPath(check_path_name(run), kind, check_path_name(name))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ServiceFolder:
    """Folder names of one service. Creates no folders."""

    root: Path

    @property
    def lock_file(self) -> Path:
        """Lock file of the worker."""
        return self.root / "worker.lock"

    @property
    def snapshots_root(self) -> Path:
        """Folder with one subfolder of snapshots per run."""
        return self.root / "snapshots"

    def resolve_snapshot_folder(self, model_id: str) -> Path:
        """Return the snapshot folder of a run."""
        return self.snapshots_root / check_path_name(model_id, "model_id")

    def resolve_weights_folder(self, path: str) -> Path:
        """Return the folder of a tinker:// path. Raises: ServiceError (user) for an invalid path."""
        return parse_tinker_path(path).resolve_folder(self.root)

    def resolve_sampler_folder(self, model_id: str, sampler_id: str) -> Path:
        """Return the folder of weights that belong to a single sampler."""
        name = check_path_name(sampler_id, "sampling_session_id")
        return self._resolve_run_folder(model_id) / SAMPLER_FOLDER_PART.strip("/") / name

    def resolve_published_folder(self, model_id: str, seq: int) -> Path:
        """Return the folder of weights for in-flight samplers."""
        return self._resolve_run_folder(model_id) / "published" / f"{seq:010d}"

    def resolve_staging_folder(self, name: str) -> Path:
        """Return the folder of a model on its way to the registry."""
        return self.root / "staging" / check_path_name(name)

    def _resolve_run_folder(self, model_id: str) -> Path:
        return self.root / "weights" / check_path_name(model_id, "model_id")

    def to_relative_path(self, path: Path) -> str:
        """Return a path relative to the service's folder, as the store keeps it: the folder can be moved."""
        return path.relative_to(self.root).as_posix()

    def to_absolute_path(self, path: str) -> Path:
        """Return the absolute form of a path written by `to_relative_path`."""
        return self.root / path


def measure_folder_bytes(folder: Path) -> int:
    """Return the total size of all files below a folder, in bytes."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for parent, _, names in os.walk(folder)
        for name in names
    )
