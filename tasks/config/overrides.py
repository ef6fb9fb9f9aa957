"""Overrides from the command line: `--set stages.policy.learning_rate=3e-4`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl_core.errors import SettingsError
from tasks.config.problems import Key, KeyLocations, Problem, dotted
from tasks.config.yaml_loader import parse_value

__all__ = ["apply_overrides"]

MAX_KEYS = 32  # in one another; settings are read recursively


def apply_overrides(data: dict[str, Any], overrides: Iterable[str], places: KeyLocations) -> list[Problem]:
    """Set each "key.path=value" in `data`, in order, and note in `places` where the key now comes from.

    The value is YAML (3e-4, null, [easy, hard], {task: 1}). Blocks on the way that are missing or null are made; items
    of a list are named by their index from 0. Returns what could not be set; key and type checks come later.
    """
    problems = []
    for override in overrides:
        source = f"--set {override}"
        name, equals, text = override.partition("=")
        path = name.strip().split(".")
        if not equals or not all(path):
            problems.append(Problem((), "must be key.path=value, as in stages.policy.learning_rate=3e-4", source))
            continue
        if len(path) > MAX_KEYS:
            text = f"names {len(path)} keys, one in the other; that is too deep"
            problems.append(Problem(tuple(path[:3]), text, "--set"))
            continue
        try:
            made = _set(data, path, parse_value(text))
        except SettingsError as error:
            problems.append(Problem(tuple(path), str(error), source))
            continue
        for key in made:
            places.lines = {known: line for known, line in places.lines.items() if known[: len(key)] != key}
            places.overrides = {known: item for known, item in places.overrides.items() if known[: len(key)] != key}
        places.overrides.update(dict.fromkeys(made, source))
    return problems


def _set(data: dict[str, Any], path: list[str], value: Any) -> list[Key]:
    """Put the value at the path; returns the keys that were made or replaced, list indices as numbers."""
    block: Any = data
    made: list[Key] = []
    key: Key = ()
    for position, part in enumerate(path):
        last = position == len(path) - 1
        here = dotted(key) or "the file"
        if isinstance(block, list):
            if not (part.isascii() and part.isdigit() and len(part) < 9):
                raise SettingsError(f"{here} is a list: name an item by its index from 0, not '{part}'")
            index = int(part)
            if index >= len(block):
                raise SettingsError(f"{here} has {len(block)} items, so {max(len(block) - 1, 0)} is the largest index")
            part_key: str | int = index
        elif isinstance(block, dict):
            block.setdefault(part, None)
            part_key = part
        else:
            raise SettingsError(f"{here} holds a single value, so nothing can be set inside it")
        key = (*key, part_key)
        if last or block[part_key] is None:
            block[part_key] = value if last else {}
            made.append(key)
        block = block[part_key]
    return made
