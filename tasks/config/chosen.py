"""Settings that differ from their defaults: what was set for a run, among the hundreds of settings that it has."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from rl_core.settings import Settings
from tasks.config import resolve
from tasks.config.settings import PipelineSettings, StagesSettings

__all__ = ["chosen", "default_values"]


def chosen(settings: Settings) -> dict[str, Any]:
    """Settings that are not their defaults, as plain values nested as in a config; a stage of defaults alone is {}.

    A default that depends on the model counts as set where it is not the one of a preset. A block that is off by
    default (early_stop, lora, ...) is there with all that it holds.
    """
    return _differing(settings, None)


def _differing(settings: Settings, reference: Settings | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        default = _default(field) if reference is None else getattr(reference, field.name)
        is_same_kind = type(default) is type(value)
        if isinstance(value, Settings) and (is_same_kind or default is dataclasses.MISSING or _holds_stages(settings)):
            inner = _differing(value, default if is_same_kind else None)
            if inner or not is_same_kind:
                found[field.name] = inner
        elif value != default:
            found[field.name] = resolve(value)
    return found


def _holds_stages(settings: Settings) -> bool:
    return isinstance(settings, StagesSettings)


def default_values() -> dict[str, Any]:
    """Defaults of all settings, nested as in a config, as if it named every stage; what has no default is left out."""
    return _defaults(PipelineSettings)


def _defaults(cls: type[Settings]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = _default(field)
        kinds = [kind for kind in (hints[field.name], *typing.get_args(hints[field.name])) if _is_settings(kind)]
        is_stage = cls is StagesSettings and default is None
        if kinds and (is_stage or default is dataclasses.MISSING):
            found[field.name] = _defaults(kinds[0])
        elif default is not dataclasses.MISSING:
            found[field.name] = resolve(default)
    return found


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
