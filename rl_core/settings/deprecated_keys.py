"""Former names of settings, which work until 0.3: the only table of them, for YAML, Python and recorded settings."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rl_core.errors import SettingsError

Value = TypeVar("Value")
_PACKAGES = ("rl_core", "tasks")


@dataclass(frozen=True, slots=True)
class DeprecatedKey:
    """A former name of a setting."""

    name: str
    new_names: tuple[str, ...]  # that take its value; dotted = in a block
    unit: str = ""  # setting by which the value is divided; "" = the value stays
    default: float | None = (
        None  # former one, where the unit has its former name and this setting is absent
    )

    def describe_change(self, prefix: str = "") -> str:
        """Describe the change in a sentence; `prefix` is put before each name."""
        new_names = " and ".join(f"{prefix}{name}" for name in self.new_names)
        share = f", as a share of {prefix}{self.unit}" if self.unit else ""
        return f"{prefix}{self.name} is now {new_names}{share}; the old name works until 0.3"


# By settings class; those of `tasks` are here too, so that there is one table.
DEPRECATED_KEYS: dict[str, tuple[DeprecatedKey, ...]] = {
    "OnlineUpdateSettings": (
        DeprecatedKey("kl_target", ("update_kl_target",)),  # before kl_tolerance, which needs it
        DeprecatedKey("kl_tolerance", ("kl_band.width",), unit="update_kl_target", default=0.01),
        DeprecatedKey("kl_factor", ("kl_band.increase", "kl_band.decrease")),
        DeprecatedKey("kl_coef_min", ("kl_band.minimum",)),
        DeprecatedKey("kl_coef_max", ("kl_band.maximum",)),
        DeprecatedKey("kl_limit", ("kl_max",)),
    ),
    "NetworkSettings": (
        DeprecatedKey("kl_target", ("desired_kl",)),
        DeprecatedKey("kl_factor", ("learning_rate_factor",)),
    ),
    "ReferenceSettings": (DeprecatedKey("own_process_gib", ("separate_process_gib",)),),
    "StagesSettings": (DeprecatedKey("own", ("custom",)),),
}


def list_deprecated_keys(cls: type) -> tuple[DeprecatedKey, ...]:
    """List the former names of a settings class and its bases; none for other packages' classes of these names."""
    classes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in _PACKAGES]
    return tuple(key for base in classes for key in DEPRECATED_KEYS.get(base.__name__, ()))


def rename_deprecated_keys(
    cls: type, values: Mapping[str, Any], overriding: Collection[str] = ()
) -> tuple[dict[str, Any], list[DeprecatedKey]]:
    """Replace the former names in the values of one settings class; blocks are mappings.

    Args:
        overriding: dotted names, former and present ones, whose values replace those of other names.
    Returns: the values under their names of today; the former names that occurred.
    Raises: SettingsError naming both if a setting occurs under both names.
    """
    renamed = dict(values)
    used: list[DeprecatedKey] = []
    for key in list_deprecated_keys(cls):
        is_unit_renamed = any(key.unit in other.new_names for other in used)
        if key.name not in renamed and not (
            is_unit_renamed and key.default is not None and not _has_name(renamed, key.new_names[0])
        ):
            continue
        is_set = key.name in renamed
        value = renamed.pop(key.name, key.default)
        if key.unit:
            unit = renamed.get(key.unit, getattr(cls, key.unit))  # the class has the default
            if _is_positive_number(value) and _is_positive_number(unit):
                value = _round_digits(value / unit)
        for new_name in key.new_names:
            _set_new_name(renamed, key.name, new_name, value, overriding)
        if is_set:
            used.append(key)
    return renamed, used


def _has_name(values: Mapping[str, Any], name: str) -> bool:
    block_name, _, inner_name = name.rpartition(".")
    block = values.get(block_name, {}) if block_name else values
    return not isinstance(block, Mapping) or inner_name in block


def _is_positive_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and math.isfinite(value)


def _round_digits(value: float) -> float:
    return float(f"{value:.15g}")  # 0.4, not 0.39999999999999997


def _set_new_name(
    values: dict[str, Any], old_name: str, new_name: str, value: Any, overriding: Collection[str]
) -> None:
    block_name, _, name = new_name.rpartition(".")
    block = values
    if block_name:
        inner = values.get(block_name, {})
        if not isinstance(inner, Mapping):  # built already, so that all of it is set
            if old_name in overriding:
                inner = {field.name: getattr(inner, field.name) for field in fields(inner)}
            else:
                new_name, inner = block_name, {name: inner}
        block = values[block_name] = dict(inner)
    if name in block:
        is_overriding = old_name in overriding
        if is_overriding == (new_name in overriding):
            raise SettingsError(
                f"{old_name}: is the former name of {new_name}, which is set too; remove {old_name}"
            )
        earlier, later = (block[name], value) if is_overriding else (value, block[name])
        value = _merge_blocks(earlier, later)
    block[name] = value


def _merge_blocks(earlier: Any, later: Any) -> Any:
    if not (isinstance(earlier, Mapping) and isinstance(later, Mapping)):
        return later
    merged = {name: _merge_blocks(earlier[name], later[name]) for name in earlier if name in later}
    return {**earlier, **later, **merged}


def read_deprecated_value(settings: Any, name: str) -> Any:
    """Read a setting by its former name, with a warning. Raises: AttributeError if there is none of that name."""
    for key in list_deprecated_keys(type(settings)):
        if key.name == name:
            warnings.warn(key.describe_change(), FutureWarning, stacklevel=3)
            value = settings
            for part in key.new_names[0].split("."):
                value = getattr(value, part)
            return _round_digits(value * getattr(settings, key.unit)) if key.unit else value
    raise AttributeError(f"{type(settings).__name__!r} object has no attribute {name!r}")


def restore_former_names(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all plain values of a settings class under their former names, as earlier versions digested them."""
    former = dict(values)
    for key in list_deprecated_keys(cls):
        parts = []
        for new_name in key.new_names:
            block_name, _, name = new_name.rpartition(".")
            parts.append((values[block_name] if block_name else values)[name])
            former.pop(block_name or name, None)
        value = parts[0] if parts.count(parts[0]) == len(parts) else parts
        if key.unit:  # 12 digits are those that the user wrote, before the division
            value = float(f"{value * values[key.unit]:.12g}")
        former[key.name] = value
    return former


def rename_recorded_keys(
    recorded: Mapping[str, Value], current: Collection[str]
) -> dict[str, Value]:
    """Rename dotted keys of settings that an earlier version recorded, so that they compare with `current` ones.

    Only a setting that changed its name alone is renamed.
    """
    renamed = dict(recorded)
    for path in recorded.keys() - set(current):
        block, dot, name = path.rpartition(".")
        for key in itertools.chain.from_iterable(DEPRECATED_KEYS.values()):
            new_path = f"{block}{dot}{key.new_names[0]}"
            is_same_value = len(key.new_names) == 1 and not key.unit
            is_missing = new_path in current and new_path not in recorded
            if key.name == name and is_same_value and is_missing:
                renamed[new_path] = renamed.pop(path)
                break
    return renamed
