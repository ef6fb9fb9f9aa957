"""Stages whose outputs a stage is given, and of these the ones that no other of them was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.pipeline.result import StageResult

__all__ = ["closest", "inputs_among"]


def inputs_among(arguments: Any, results: Mapping[str, StageResult]) -> tuple[str, ...]:
    """Names of the results that are among the arguments, or whose folder a path among them lies in."""
    found = list(_leaves(arguments))
    paths = [leaf for leaf in found if isinstance(leaf, Path)]
    return tuple(
        name
        for name, result in results.items()
        if any(leaf is result for leaf in found) or any(path.is_relative_to(result.path) for path in paths)
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def closest(inputs: Iterable[str], made_from: Mapping[str, Iterable[str]]) -> list[str]:
    """Inputs that are not reached through another of them.

    Args:
        made_from: the inputs of each stage that has ended.
    """
    names = list(inputs)
    return [name for name in names if not any(name in _all_before(other, made_from) for other in names)]


def _all_before(name: str, made_from: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(made_from.get(name, ()))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += made_from.get(one, ())
    return found
