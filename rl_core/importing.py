"""Code that a user names: 'package.module:name', or 'path/to/file.py:name' from the current folder."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.errors import SettingsError, nearest

__all__ = ["as_finite", "child_import_path", "import_function", "import_named", "is_file", "other_folder"]

_SUFFIX = ".py"


def is_file(module: str) -> bool:
    """True if the part before the colon is a file rather than a module."""
    return module.endswith(_SUFFIX)


def import_named(path: str, key: str) -> Any:
    """The object at a path; `key`: the setting that holds it, for messages.

    A file is run once per process. Raises: SettingsError where the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":")
    try:
        module = _run_file(module_name) if is_file(module_name) else importlib.import_module(module_name)
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}") from error
    except Exception as error:  # any error raised by a user's module on import
        raise SettingsError(
            f"{key}: module '{module_name}' cannot be imported ({type(error).__name__}: {error}){other_folder(error)}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise SettingsError(f"{key}: no function '{name}' there; {nearest(name, known)}")
    return found


def other_folder(error: Exception) -> str:
    """Hint for a module that would be found from the folder above this one, where a command was called within it."""
    here, missing = Path.cwd(), getattr(error, "name", None) or ""
    if not isinstance(error, ModuleNotFoundError) or missing.partition(".")[0] != here.name:
        return ""
    return f"; modules are looked for in the current folder: call the command in {here.parent}"


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The function at an import path; `key`: the setting that holds it, for messages.

    Raises: SettingsError as `import_named`, and for what is no import path or cannot be called.
    """
    if ":" not in path:
        raise SettingsError(f"{key}: '{path}' is no import path; write package.module:name, or file.py:name")
    found = import_named(path, key)
    if not callable(found):
        raise SettingsError(f"{key}: '{path}' is a {type(found).__name__}, expected a function")
    function: Callable[..., Any] = found
    return function


def as_finite(value: Any) -> float | None:
    """Number that a user's function gave; None where it is none, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def child_import_path() -> str:
    """PYTHONPATH with which a child process finds what this one does; the child is to be started with `python -P`.

    An editable installation is found by a hook that comes after all folders. The checkout therefore comes first here:
    a `tasks.py` of the user's in the current folder, which is on the path for their own code, would be taken for ours.
    """
    folders = [folder or os.getcwd() for folder in sys.path]
    ours = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(folders if ours in folders else [ours, *folders])


def _run_file(path: str) -> ModuleType:
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise SettingsError(f"no such file: {file}; a path is looked up from the folder that posttrain is called from")
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickles look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
