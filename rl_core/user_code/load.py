"""Loading of the functions and classes that a user names, and where Python looks for their modules."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.errors import SettingsError, suggest_name
from rl_core.user_code.checks import USER_CODE_ERRORS

IMPORT_PATH_FORMS = "write package.module:name, or file.py:name"  # for messages

_PYTHON_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_IMPORT_PATH = re.compile(rf"({_PYTHON_NAME}|[^:\s]+\.py):{_PYTHON_NAME}")
# Looser than an import path: what it matches enters stage keys.
_POSSIBLE_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\s]+\.py):\S+")


def is_import_path(text: str) -> bool:
    """Return whether a text has the form of an import path, with Python names."""
    return _IMPORT_PATH.fullmatch(text) is not None


def is_file_path(module: str) -> bool:
    """Return whether the part before the colon is a file, not a module."""
    return module.endswith(".py")


def find_import_paths(value: Any) -> set[str]:
    """Find strings that look like import paths in JSON-like settings, including keys of mappings."""
    if isinstance(value, str):
        return {value} if _POSSIBLE_PATH.fullmatch(value) else set()
    if isinstance(value, dict):
        return {path for pair in value.items() for item in pair for path in find_import_paths(item)}
    if isinstance(value, list | tuple):
        return {path for item in value for path in find_import_paths(item)}
    return set()


def import_object(path: str, key: str, kind: str = "function") -> Any:
    """Import the object at an import path. A file is executed once per process.

    Args:
        key: the setting that contains the path, for messages.
        kind: what the object is, for messages.
    Raises: SettingsError if the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":")
    load_module = _run_file if is_file_path(module_name) else importlib.import_module
    try:
        module = load_module(module_name)
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}") from error
    except USER_CODE_ERRORS as error:  # a user's module may raise anything on import
        problem, hint, folder = f"{type(error).__name__}: {error}", "", Path.cwd()
        if isinstance(error, SystemExit):
            problem = f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
            hint = '; put what it does as a script below `if __name__ == "__main__":`'
        missing_module = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and missing_module.split(".")[0] == folder.name:
            # The command runs inside the package.
            hint = f"; modules are looked for in the current folder: run the command in {folder.parent}"
        raise SettingsError(
            f"{key}: module '{module_name}' cannot be imported ({problem}){hint}"
        ) from error
    value = getattr(module, name, None)
    if value is None:
        names = [
            attribute
            for attribute, member in vars(module).items()
            if callable(member) and not attribute.startswith("_")
        ]
        raise SettingsError(f"{key}: no {kind} '{name}' there; {suggest_name(name, names)}")
    return value


def import_function(
    path: str, key: str, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Import the function at an import path, or check the one that is passed.

    Args:
        path: its import path; the name of a passed function.
        key: the setting that contains the path, for messages.
        function: passed as an object; None = import it.
    Raises: SettingsError as `import_object`, and for a value that is not an import path or cannot be called.
    """
    if function is None and ":" not in path:
        raise SettingsError(f"{key}: '{path}' is not an import path; {IMPORT_PATH_FORMS}")
    value: Callable[..., Any] = import_object(path, key) if function is None else function
    if not callable(value):
        raise SettingsError(f"{key}: '{path}' is a {type(value).__name__}, expected a function")
    return value


def import_subclass(path: str, key: str, base: type[Any], base_name: str) -> type[Any]:
    """Import the class at an import path without calling it.

    Args:
        key: the setting that contains the path, for messages.
        base_name: where a user finds `base`, for messages.
    Raises: SettingsError as `import_object`, and for anything but a subclass of `base`.
    """
    value = import_object(path, key, "class")
    if not (isinstance(value, type) and issubclass(value, base)):
        raise SettingsError(f"{key}: '{path}' is not a subclass of {base_name}")
    return value


def _run_file(path: str) -> ModuleType:
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise SettingsError(
            f"no such file: {file}; paths are relative to the folder in which posttrain is run"
        )
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look it up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def append_working_directory() -> None:
    """Append the working directory to the import path, as with `python -m`.

    Last on the path, so that files there do not shadow installed packages.
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.append(folder)


def build_child_import_path() -> str:
    """Build the PYTHONPATH with which a child process finds the same modules; start the child with `python -P`.

    An editable installation is found by a hook that comes after all folders. The checkout therefore comes first here:
    otherwise a user's `tasks.py` in the current folder, which is on the path for user code, would shadow our package.
    """
    folders = [folder or os.getcwd() for folder in sys.path]
    checkout = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(folders if checkout in folders else [checkout, *folders])
