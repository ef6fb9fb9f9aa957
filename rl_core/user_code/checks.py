"""Checks of a user's functions: how they can be called, and the numbers that they return."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from rl_core.errors import SettingsError

# What a user's code may raise and must not end the run with: SystemExit and asyncio.CancelledError are no Exception.
USER_CODE_ERRORS = (Exception, SystemExit, asyncio.CancelledError)


def inspect_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's signature; None for one written in C that shows no parameters."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def check_signature(
    function: Callable[..., Any],
    label: str,
    arguments: str,
    num_positional: int,
    named: Mapping[str, Any] | None = None,
) -> None:
    """Check that a function can be called with these arguments.

    Args:
        label: its setting and name, such as "loss: 'mine.py:loss'", for the message.
        arguments: description of all arguments, for the message.
        named: keyword arguments.
    Raises: SettingsError.
    """
    signature = inspect_signature(function)
    if signature is None:
        return
    try:
        signature.bind(*[None] * num_positional, **(named or {}))
    except TypeError as error:
        raise SettingsError(
            f"{label} takes {signature} ({error}); it is called with {arguments}"
        ) from error


def is_value_list(value: Any) -> bool:
    """Return whether a user's function returned values in order: anything iterable but texts, mappings and sets.

    The keys of {0: 0.5, 1: 0.7} and the characters of "01" are numbers, too.
    """
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set)


def parse_finite(value: Any) -> float | None:
    """Parse the number that a user's function returned; None if it is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
