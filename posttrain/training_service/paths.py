"""Paths of saved weights, `tinker://<training run>/<kind>/<name>`, and their folders.

Places of a service's files below its folder.

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
_PREFIX = "tinker://"
# No separator, nothing hidden, no `..`, as long as folders may be named.
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,199}")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """Saved weights of a training run."""

    run: str
    kind: WeightsKind
    name: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.run}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """Kind and name, as addresses of the REST interface have them."""
        return f"{self.kind}/{self.name}"

    def resolve_folder(self, root: Path) -> Path:
        """Folder of the weights below the service's folder."""
        return root / "weights" / self.run / self.kind / self.name


def check_path_name(name: str, key: str = "path") -> str:
    """A name that a folder may have. Raises: ServiceError (user)."""
    if not _NAME_PATTERN.fullmatch(name):
        raise ServiceError(
            f"{key}: {name[:200]!r} cannot be a name; use letters, digits and . _ : = + @ -, at most 200, the first a "
            "letter, digit or _",
            "user",
        )
    return name


def is_tinker_path(name: str) -> bool:
    """True = a path of saved weights is meant, not the name of a model."""
    return name.startswith(_PREFIX)


def parse_tinker_path(path: str) -> TinkerPath:
    """Raises: ServiceError (user) for any text that is no path of saved weights."""
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != 3 or parts[1] not in CHECKPOINT_TYPES:
        raise ServiceError(
            f"path: {path[:200]!r} is not tinker://RUN/{'|'.join(CHECKPOINT_TYPES)}/NAME", "user"
        )
    run, kind, name = parts
    for kind_known in CHECKPOINT_TYPES:
        if kind == kind_known:
            return TinkerPath(check_path_name(run), kind_known, check_path_name(name))  # type: ignore[arg-type]
    raise AssertionError(kind)


SAMPLER_FOLDER_PART = "/samplers/"  # part of the path of weights that one sampler alone reads


@dataclass(frozen=True, slots=True)
class ServiceFolder:
    """Names of folders; makes none."""

    root: Path

    @property
    def lock_file(self) -> Path:
        """Lock of the worker."""
        return self.root / "worker.lock"

    @property
    def snapshots_root(self) -> Path:
        """States of all runs, a folder each."""
        return self.root / "snapshots"

    def resolve_snapshot_folder(self, model_id: str) -> Path:
        """States of a run."""
        return self.snapshots_root / check_path_name(model_id, "model_id")

    def resolve_weights_folder(self, path: str) -> Path:
        """Weights of a tinker:// path. Raises: ServiceError (user) for a text that is none."""
        return parse_tinker_path(path).resolve_folder(self.root)

    def resolve_sampler_folder(self, model_id: str, sampler_id: str) -> Path:
        """Weights that one sampler alone reads."""
        return (
            self._resolve_run_folder(model_id)
            / SAMPLER_FOLDER_PART.strip("/")
            / check_path_name(sampler_id, "sampling_session_id")
        )

    def resolve_published_folder(self, model_id: str, seq: int) -> Path:
        """Weights for in-flight samplers."""
        return self._resolve_run_folder(model_id) / "published" / f"{seq:010d}"

    def resolve_staging_folder(self, name: str) -> Path:
        """A model folder on its way to the registry."""
        return self.root / "staging" / check_path_name(name)

    def _resolve_run_folder(self, model_id: str) -> Path:
        return self.root / "weights" / check_path_name(model_id, "model_id")

    def to_relative_path(self, path: Path) -> str:
        """A path as the store keeps it: the folder may be moved."""
        return path.relative_to(self.root).as_posix()

    def to_absolute_path(self, path: str) -> Path:
        """Inverse of `relative`."""
        return self.root / path


def measure_folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    )
