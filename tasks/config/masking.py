"""Masking of secrets among an environment's options, wherever settings are stored or shown.

An option is taken for a secret by its name (`api_key`, `hf_token`, `judgePassword`), and texts alone are masked:
`max_tokens: 64` is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MASK", "is_secret", "masked", "masked_keys"]

MASK = "***"
_SECRETS = {"key", "apikey", "token", "password", "passwd", "passphrase", "secret", "credential", "auth"}


def masked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain settings of a pipeline (`resolve`) with every text of a secret option replaced by ***."""
    values = dict(settings)
    environment = values.get("environment")
    if isinstance(environment, Mapping) and isinstance(environment.get("options"), Mapping):
        values["environment"] = {**environment, "options": _mask(environment["options"], False)}
    return values


def masked_keys(value: Any, place: str = "") -> list[str]:
    """Dotted keys of plain settings at which a masked text stands."""
    if isinstance(value, Mapping):
        return [key for name, item in value.items() for key in masked_keys(item, f"{place}{name}.")]
    if isinstance(value, list | tuple):
        return [key for index, item in enumerate(value) for key in masked_keys(item, f"{place}{index}.")]
    return [place.rstrip(".")] if value == MASK else []


def _mask(value: Any, hidden: bool) -> Any:
    if isinstance(value, Mapping):
        return {name: _mask(item, hidden or is_secret(str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item, hidden) for item in value]
    return MASK if hidden and isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """True = an option of this name holds a secret."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return any(word.removesuffix("s") in _SECRETS or word in _SECRETS for word in re.split(r"[^a-z]+", words))
