"""Functions of the user's in the Python API: the arguments `loss` and `advantages`, and the digest of their code."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rl_core.errors import SettingsError
from rl_core.settings import PolicySettings, Settings, code_paths
from rl_core.storage.manifest import digest_bytes
from rl_core.user_code import user_code_digests

__all__ = ["FunctionSource", "code_digests", "function_name", "source_digest", "with_functions"]

FunctionSource: TypeAlias = "Callable[..., Any] | str"  # a function, or its import path


def with_functions(
    settings: PolicySettings, **given: FunctionSource | None
) -> tuple[PolicySettings, dict[str, Callable[..., Any]]]:
    """The settings with what was handed in, by the name of its setting, and those that are functions.

    Raises: SettingsError where a setting is given twice, or holds neither a function nor a text.
    """
    changes: dict[str, Any] = {}
    functions: dict[str, Callable[..., Any]] = {}
    for field, value in given.items():
        if value is None:
            continue
        if getattr(settings, field) is not None:
            raise SettingsError(f"{field}: given twice, here and in settings.{field}; leave one of them out")
        if not callable(value) and not isinstance(value, str):
            raise SettingsError(f"{field}: {value!r} is neither a function nor an import path")
        changes[field] = value if isinstance(value, str) else function_name(value, field)
        if not isinstance(value, str):
            functions[field] = value
    return dataclasses.replace(settings, **changes) if changes else settings, functions


def code_digests(settings: Settings, functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Digests of the user's code that a run rests on, so that a resumed one notices an edited file.

    Of functions handed in their own source, and the modules that they are from (but for the script that runs).
    """
    modules = [getattr(_inner(function), "__module__", None) for function in functions.values()]
    paths = [path for _, path in code_paths(settings) if ":" in path]
    found = user_code_digests(paths, [f"{name}:" for name in modules if name and name != "__main__"])
    return found | {f"{name}()": source_digest(function) for name, function in functions.items()}


def function_name(function: Callable[..., Any], unnamed: str) -> str:
    """A name for metrics and messages: the function's own; `unnamed` for a lambda."""
    inner = _inner(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    return unnamed if name == "<lambda>" else name


def source_digest(function: Callable[..., Any]) -> str:
    """Digest of a function's source, and of what a partial gives it; its name where there is no source."""
    inner, bound = _inner(function), ""
    while isinstance(function, functools.partial):
        bound += f" {function.args} {sorted(function.keywords.items())}"
        function = function.func
    try:
        return digest_bytes((inspect.getsource(inner) + bound).encode())[:16]
    except (OSError, TypeError):  # a callable object, or typed at a prompt
        return getattr(inner, "__qualname__", type(inner).__qualname__) + bound


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function within partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
