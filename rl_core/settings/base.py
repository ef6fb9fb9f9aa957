"""Base class of settings with range checks, and the field declaration `setting`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings.defaults import ModelDefault

__all__ = ["Settings", "setting"]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
) -> Any:
    """Dataclass field with documentation and an allowed range; a `ModelDefault` is a default by kind of model."""
    limits = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    if isinstance(default, ModelDefault):
        metadata["by_model"] = default
        doc = f"{doc}; left out: {default.words()}"
        default = default.placeholder()
    metadata["doc"] = doc
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata, kw_only=True)
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


_CHECKS = {
    "gt": (lambda value, limit: value > limit, "greater than"),
    "ge": (lambda value, limit: value >= limit, "at least"),
    "lt": (lambda value, limit: value < limit, "less than"),
    "le": (lambda value, limit: value <= limit, "at most"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every settings class; validates each field's declared range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                if not math.isfinite(number):
                    raise SettingsError(f"{field.name}: {number} is not a finite number")
                for name, limit in field.metadata.items():
                    if name in _CHECKS and not _CHECKS[name][0](number, limit):
                        raise SettingsError(f"{field.name}: {number} must be {_CHECKS[name][1]} {limit}")
        self.check()

    def check(self) -> None:
        """Hook: raise SettingsError for invalid combinations of settings."""
