"""Base class of settings with range checks, and the field declaration `setting`."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from dataclasses import dataclass
from typing import Any, Self

from rl_core.errors import SettingsError, nearest
from rl_core.settings.defaults import ModelDefault
from rl_core.settings.peer_names import peer_hint
from rl_core.settings.values import comparison_hint, fits, words

__all__ = ["Settings", "setting"]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    is_code: bool = False,
) -> Any:
    """Dataclass field with documentation and an allowed range; a `ModelDefault` is a default by kind of model.

    `is_code`: holds import paths (see `code_paths`).
    """
    limits = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    if isinstance(default, ModelDefault):
        metadata["by_model"] = default
        doc = f"{doc}; left out: {default.words()}"
        default = default.stand_in()
    metadata["doc"] = doc
    if is_code:
        metadata["code"] = True
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata, kw_only=True)
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


# Stage of the settings that a user of the library makes by hand; for hints alone.
_STAGES = {
    "PolicySettings": "policy",
    "SFTSettings": "sft",
    "PreferenceSettings": "preference",
    "RewardModelSettings": "reward_model",
    "DistillationSettings": "distill",
}

_CHECKS = {
    "gt": (lambda value, limit: value > limit, "greater than"),
    "ge": (lambda value, limit: value >= limit, "at least"),
    "lt": (lambda value, limit: value < limit, "less than"),
    "le": (lambda value, limit: value <= limit, "at most"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every settings class: checks names, types and declared ranges.

    Raises: SettingsError naming the field.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """A new object, once every name is known."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                stage = _STAGES.get(cls.__name__)
                hint = peer_hint(name, stage, inside=f"stages.{stage}.") or nearest(name, known)
                raise SettingsError(f"{name}: {cls.__name__} has no such setting; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _hints(cls)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not fits(value, hints[field.name]):
                raise SettingsError(
                    f"{field.name}: {value!r} is not {words(hints[field.name])}{_remedy(value, hints[field.name])}"
                )
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                if isinstance(number, int) and not -(2**63) <= number < 2**63:
                    raise SettingsError(f"{field.name}: a whole number of more than 64 bits")
                if not math.isfinite(number):
                    raise SettingsError(f"{field.name}: {number} is not a finite number")
                for name, limit in field.metadata.items():
                    if name in _CHECKS and not _CHECKS[name][0](number, limit):
                        raise SettingsError(f"{field.name}: {number} must be {_CHECKS[name][1]} {limit}")
        self.check()

    def check(self) -> None:
        """Hook: raise SettingsError for invalid combinations of settings."""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Resolved type of every field; once for each class."""
    return typing.get_type_hints(cls)


def _remedy(value: Any, hint: Any) -> str:
    """Correction of a common slip, for messages; "" for others."""
    choices = [hint, *typing.get_args(hint)]
    named = [
        name for choice in choices if typing.get_origin(choice) is typing.Literal for name in typing.get_args(choice)
    ]
    is_number = isinstance(value, str) and value.strip().lstrip("+-")[:1].isdigit()
    if isinstance(value, str) and named and not is_number:
        return comparison_hint(value, named) or f"; {nearest(value, map(str, named))}"
    if isinstance(value, str) and {int, float} & set(choices):
        return "; it is text, leave out the quotes"
    blocks = [choice for choice in choices if dataclasses.is_dataclass(choice) and isinstance(choice, type)]
    return f"; write {blocks[0].__name__}(...)" if isinstance(value, dict) and blocks else ""
