"""Import paths of the user's code that settings hold, found through the fields that are declared with `is_code`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.settings.base import Settings

__all__ = ["code_paths"]

Key = tuple[str | int, ...]


def code_paths(settings: Settings, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Import paths within settings, each with its key.

    A text and the items of a list are import paths; of a mapping (rewards and their weights) the names with a colon.
    """
    for field in dataclasses.fields(settings):
        value, here = getattr(settings, field.name), (*key, field.name)
        if field.metadata.get("code"):
            yield from _named(value, here)
        else:
            yield from _within(value, here)


def _named(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        yield from (((*key, name), name) for name in value if ":" in name)
    elif isinstance(value, tuple):
        yield from (((*key, index), path) for index, path in enumerate(value))


def _within(value: Any, key: Key) -> Iterator[tuple[Key, str]]:
    if isinstance(value, Settings):
        yield from code_paths(value, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _within(item, (*key, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _within(item, (*key, index))
