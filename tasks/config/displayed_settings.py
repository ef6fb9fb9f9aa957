"""Settings as they are stored and shown: without secrets, and reduced to those that differ from their defaults.

An environment's option counts as a secret by its name (`api_key`, `hf_token`, `judgePassword`). Only text is masked:
`max_tokens: 64` is not a secret.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from rl_core.settings import Settings
from tasks.config import dump_settings
from tasks.config.problems import KeyLocations
from tasks.config.settings import PipelineSettings, StagesSettings
from tasks.config.yaml_loader import apply_overrides

MASK = "***"
_SECRET_WORDS = {
    "key",
    "apikey",
    "token",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "auth",
}


def mask_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every text of a secret option by *** in the plain settings of a pipeline (`dump_settings`)."""
    values = dict(settings)
    environment = values.get("environment")
    if isinstance(environment, Mapping) and isinstance(environment.get("options"), Mapping):
        values["environment"] = {
            **environment,
            "options": _mask_texts(environment["options"], False),
        }
    if isinstance(values.get("environments"), list | tuple):
        values["environments"] = [
            {**entry, "options": _mask_texts(entry["options"], False)}
            if isinstance(entry, Mapping) and isinstance(entry.get("options"), Mapping)
            else entry
            for entry in values["environments"]
        ]
    return values


def list_secret_overrides(overrides: Iterable[str]) -> list[str]:
    """List the dotted keys of `--set` overrides whose text is a secret by the name of its option."""
    values: dict[str, Any] = {}
    apply_overrides(
        values, overrides, KeyLocations("--set")
    )  # its problems are those of the settings
    return list_masked_keys(mask_secrets(values))


def list_masked_keys(value: Any, prefix: str = "") -> list[str]:
    """List the dotted keys of plain settings whose text is masked."""
    if isinstance(value, Mapping):
        return [
            key
            for name, item in value.items()
            for key in list_masked_keys(item, f"{prefix}{name}.")
        ]
    if isinstance(value, list | tuple):
        return [
            key
            for index, item in enumerate(value)
            for key in list_masked_keys(item, f"{prefix}{index}.")
        ]
    return [prefix.rstrip(".")] if value == MASK else []


def _mask_texts(value: Any, hidden: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _mask_texts(item, hidden or is_secret_option(str(name)))
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mask_texts(item, hidden) for item in value]
    return MASK if hidden and isinstance(value, str) else value


def is_secret_option(name: str) -> bool:
    """Return whether an option of this name holds a secret."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return any(
        word.removesuffix("s") in _SECRET_WORDS or word in _SECRET_WORDS
        for word in re.split(r"[^a-z]+", words)
    )


def non_default_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as plain values nested as in a config.

    A stage with only defaults is {}. A default that depends on the model counts as set if it is not that of a preset. A
    block that is off by default (early_stop, lora, ...) is included completely.
    """
    return _collect_differing(settings, None)


def _collect_differing(settings: Settings, reference: Settings | None) -> dict[str, Any]:
    differing: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        default = (
            _read_field_default(field) if reference is None else getattr(reference, field.name)
        )
        is_same_kind = type(default) is type(value)
        if isinstance(value, Settings) and (
            is_same_kind or default is dataclasses.MISSING or _has_stages(settings)
        ):
            inner = _collect_differing(value, default if is_same_kind else None)
            if inner or not is_same_kind:
                differing[field.name] = inner
        elif value != default:
            differing[field.name] = dump_settings(value)
    return differing


def _has_stages(settings: Settings) -> bool:
    return isinstance(settings, StagesSettings)


def collect_default_values() -> dict[str, Any]:
    """Collect the defaults of all settings, nested as in a config with every stage; leave out settings without one."""
    return _collect_defaults(PipelineSettings)


def _collect_defaults(cls: type[Settings]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = _read_field_default(field)
        kinds = [
            kind
            for kind in (hints[field.name], *typing.get_args(hints[field.name]))
            if _is_settings_class(kind)
        ]
        is_stage = cls is StagesSettings and default is None
        if kinds and (is_stage or default is dataclasses.MISSING):
            defaults[field.name] = _collect_defaults(kinds[0])
        elif default is not dataclasses.MISSING:
            defaults[field.name] = dump_settings(default)
    return defaults


def _is_settings_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def _read_field_default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
