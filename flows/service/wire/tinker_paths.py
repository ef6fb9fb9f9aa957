"""Paths of saved weights, `tinker://<training run>/<kind>/<name>`, and their folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_core.errors import ServiceError

__all__ = ["CHECKPOINT_TYPES", "TinkerPath", "WeightsKind", "check_name", "is_path", "parse_path"]

WeightsKind = Literal["weights", "sampler_weights", "external_weights"]
CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_PREFIX = "tinker://"
# No separator, nothing hidden, no `..`, as long as folders may be named.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:=+@-]{0,199}")


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

    def folder(self, root: Path) -> Path:
        """Folder of the weights below the service's folder."""
        return root / "weights" / self.run / self.kind / self.name


def check_name(name: str, what: str = "path") -> str:
    """A name that a folder may have. Raises: ServiceError (user)."""
    if not _NAME.fullmatch(name):
        raise ServiceError(
            f"{what}: {name[:200]!r} cannot be a name; use letters, digits and . _ : = + @ -, at most 200, the first a "
            "letter, digit or _",
            "user",
        )
    return name


def is_path(name: str) -> bool:
    """True = a path of saved weights is meant, not the name of a model."""
    return name.startswith(_PREFIX)


def parse_path(path: str) -> TinkerPath:
    """Raises: ServiceError (user) for any text that is no path of saved weights."""
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != 3 or parts[1] not in CHECKPOINT_TYPES:
        raise ServiceError(f"path: {path[:200]!r} is not tinker://RUN/{'|'.join(CHECKPOINT_TYPES)}/NAME", "user")
    run, kind, name = parts
    for kind_known in CHECKPOINT_TYPES:
        if kind == kind_known:
            return TinkerPath(check_name(run), kind_known, check_name(name))  # type: ignore[arg-type]
    raise AssertionError(kind)
