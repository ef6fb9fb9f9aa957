"""Code that a user names: 'package.module:name', or 'path/to/file.py:name' from the current folder.

Digests of the user's code that a stage runs: modules named by import path, and what of theirs those import.

Source is read, never executed. Followed are `import`, `from ... import`, relative imports, packages (their `__init__`
too), namespace packages, `from package import *` over a literal `__all__`, and `import_module("literal name")`. Not
followed: module names that are computed, and files that the code opens (data that a reward function reads is no part of
a stage's key).

A module counts as the user's when its file lies outside the standard library, installed packages (site-packages) and
this project's own packages, whose content is in the key already (tasks/pipeline/stage_key.py).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.errors import SettingsError, suggest_name
from rl_core.storage.manifest import digest_bytes

_SUFFIX = ".py"


def is_file_path(module: str) -> bool:
    """True if the part before the colon is a file rather than a module."""
    return module.endswith(_SUFFIX)


def import_object(path: str, key: str) -> Any:
    """The object at a path; `key`: the setting that holds it, for messages.

    A file is run once per process. Raises: SettingsError where the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":")
    try:
        module = (
            _run_file(module_name)
            if is_file_path(module_name)
            else importlib.import_module(module_name)
        )
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}") from error
    except Exception as error:  # any error raised by a user's module on import
        raise SettingsError(
            f"{key}: module '{module_name}' cannot be imported ({type(error).__name__}: {error}){suggest_parent_folder(error)}"
        ) from error
    found = getattr(module, name, None)
    if found is None:
        known = [
            each
            for each, value in vars(module).items()
            if callable(value) and not each.startswith("_")
        ]
        raise SettingsError(f"{key}: no function '{name}' there; {suggest_name(name, known)}")
    return found


def suggest_parent_folder(error: Exception) -> str:
    """Hint for a module that would be found from the folder above this one, where a command was called within it."""
    here, missing = Path.cwd(), getattr(error, "name", None) or ""
    if not isinstance(error, ModuleNotFoundError) or missing.partition(".")[0] != here.name:
        return ""
    return f"; modules are looked for in the current folder: call the command in {here.parent}"


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The function at an import path; `key`: the setting that holds it, for messages.

    Raises: SettingsError as `import_object`, and for what is no import path or cannot be called.
    """
    if ":" not in path:
        raise SettingsError(
            f"{key}: '{path}' is no import path; write package.module:name, or file.py:name"
        )
    found = import_object(path, key)
    if not callable(found):
        raise SettingsError(f"{key}: '{path}' is a {type(found).__name__}, expected a function")
    function: Callable[..., Any] = found
    return function


def parse_finite(value: Any) -> float | None:
    """Number that a user's function gave; None where it is none, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def build_child_import_path() -> str:
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
        raise SettingsError(
            f"no such file: {file}; a path is looked up from the folder that posttrain is called from"
        )
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


_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\s]+\.py):\S+")
_PROJECT_PACKAGES = ("rl_core", "tasks", "flows", "posttrain")
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_IMPORT_CALLS = ("import_module", "importlib.import_module", "__import__")
_SUPPRESS_CALLS = ("suppress", "contextlib.suppress")
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


def find_import_paths(value: Any) -> set[str]:
    """Texts within plain settings, keys of mappings too, that read like 'package.module:name' or 'file.py:name'."""
    if isinstance(value, str):
        return {value} if _IMPORT_PATH.fullmatch(value) else set()
    if isinstance(value, dict):
        return {path for pair in value.items() for item in pair for path in find_import_paths(item)}
    if isinstance(value, list | tuple):
        return {path for item in value for path in find_import_paths(item)}
    return set()


@dataclass(frozen=True)
class UserModule:
    """One of the user's modules."""

    file: Path
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of its file."""
        return digest_bytes(self.content)

    def digest_functions(self) -> dict[str, str]:
        """Short digest of each function and method by name ('Class.method'), and of everything else as ''.

        By syntax tree, so that comments and layout do not count; {} for an extension module.
        """
        try:
            tree = ast.parse(self.content) if self.file.suffix == ".py" else None
        except (SyntaxError, ValueError):
            tree = None
        if tree is None:
            return {}
        found: dict[str, str] = {}
        rest = [_digest_node(node) for node in tree.body if not isinstance(node, _DEFINITIONS)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, _FUNCTIONS)]
                found |= {f"{node.name}.{part.name}": _digest_node(part) for part in methods}
                rest += [_digest_node(part) for part in node.body if part not in methods]
                rest += [_digest_node(part) for part in (*node.bases, *node.decorator_list)]
            elif isinstance(node, _FUNCTIONS):
                found[node.name] = _digest_node(node)
        return found | {"": digest_bytes("".join(rest).encode())[:12]}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def _digest_node(node: ast.AST) -> str:
    return digest_bytes(ast.dump(node).encode())[:12]


def digest_user_code(required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of each of the user's modules behind some import paths, by module name; arguments as `find_user_modules`."""
    return {name: module.digest for name, module in find_user_modules(required, optional).items()}


def find_user_modules(
    required: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, UserModule]:
    """The user's modules behind some import paths ('package.module:name'), by module name.

    Args:
        required: have to be found.
        optional: texts that may name something else; passed over where no such module is found.
    Raises: SettingsError for a module that cannot be found or read.
    """
    importlib.invalidate_caches()  # a file may have been written since a folder was last looked through
    wanted = [_Import(path.partition(":")[0], f"'{path}'", True) for path in required]
    wanted += [_Import(path.partition(":")[0], f"'{path}'", False) for path in optional]
    seen: set[str] = set()
    foreign: set[str] = set()  # of others: what lies within them is not looked for
    found: dict[str, UserModule] = {}
    while wanted:
        item = wanted.pop()
        for name in _iter_parent_names(item.name):
            if name in foreign:
                break
            if name in seen:
                continue
            spec = _find_spec(name)
            if spec is None:
                if item.is_required:
                    raise SettingsError(
                        f"{item.where} needs the module '{name}', which cannot be found; put its folder on PYTHONPATH, "
                        "call posttrain from the folder that it lies in, or install it"
                    )
                break
            if not _is_user_module(name, spec):
                foreign.add(name)
                break
            seen.add(name)
            if (
                spec.origin is not None and spec.has_location
            ):  # a namespace package has no file of its own
                content = _read_source(name, Path(spec.origin))
                found[name] = UserModule(Path(spec.origin), content)
                wanted += _parse_imports(content, name, spec)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Import:
    """A module that something imports."""

    name: str
    where: str  # for messages
    is_required: bool  # False: it may be an attribute, or the code goes on without it


def _iter_parent_names(name: str) -> Iterator[str]:
    """'a', 'a.b', 'a.b.c' of 'a.b.c': what Python runs for it, in this order; a file alone."""
    parts = [name] if is_file_path(name) else name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _find_spec(name: str) -> ModuleSpec | None:
    """Location of a module, found as by Python but without running its packages; None = not found."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    if is_file_path(name):
        file = Path(name).expanduser().absolute()
        return spec_from_file_location(file.stem, file) if file.is_file() else None
    for part in _iter_parent_names(name):
        spec = next(
            (found for finder in sys.meta_path if (found := finder.find_spec(part, path))), None
        )
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if spec is None and loaded:  # loaded by other means, as a script is
        spec = spec_from_file_location(name, loaded)
    return spec


def _is_user_module(name: str, spec: ModuleSpec) -> bool:
    if not is_file_path(name) and name.partition(".")[0] in _PROJECT_PACKAGES:
        return False
    if not spec.has_location:  # built in, frozen, or a namespace package
        places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    else:
        places = [Path(str(spec.origin)).resolve()]
    return any(
        not set(place.parts) & set(_INSTALLED)
        and not any(place.is_relative_to(folder) for folder in _STDLIB)
        for place in places
    )


def _read_source(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"module '{name}': {path} cannot be read: {error.strerror or error}"
        ) from error


def _parse_imports(content: bytes, name: str, spec: ModuleSpec) -> list[_Import]:
    """Imports of a module's source; [] for an extension module."""
    if not str(spec.origin).endswith(".py"):
        return []
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise SettingsError(
            f"module '{name}': {spec.origin} is no Python source: {error}"
        ) from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return [
        found
        for node, required in _iter_import_statements(tree.body, True)
        for found in _iter_imported_modules(node, package, name, required)
    ]


def _iter_import_statements(
    nodes: Iterable[ast.AST], required: bool
) -> Iterator[tuple[ast.AST, bool]]:
    """Import statements and calls among and below nodes; False = the module can be imported without it.

    That is so within functions, below `if`, and where a `try` or a `suppress` catches an ImportError. What only a type
    checker sees is left out.
    """
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            yield node, required
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            yield from _iter_import_statements(node.orelse, False)
            continue
        optional = (
            isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (
                isinstance(node, ast.Try)
                and any(_can_catch_import_error(handler.type) for handler in node.handlers)
            )
            or (
                isinstance(node, ast.With)
                and any(_is_import_error_suppressed(item) for item in node.items)
            )
        )
        yield from _iter_import_statements(ast.iter_child_nodes(node), required and not optional)


def _can_catch_import_error(caught: ast.expr | None) -> bool:
    """Test of what an `except` names; None = everything."""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or ast.unparse(kind) in _IMPORT_ERRORS for kind in kinds)


def _is_import_error_suppressed(item: ast.withitem) -> bool:
    """Test of a `with` item for `contextlib.suppress` of an ImportError."""
    call = item.context_expr
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in _SUPPRESS_CALLS
        and any(_can_catch_import_error(argument) for argument in call.args)
    )


def _iter_imported_modules(
    node: ast.AST, package: str, name: str, required: bool
) -> Iterator[_Import]:
    """The modules that one statement names."""
    where = f"module '{name}' (line {getattr(node, 'lineno', 0)})"
    if isinstance(node, ast.Import):
        yield from (_Import(alias.name, where, required) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _resolve_relative_name(node.module or "", node.level, package, where)
        yield _Import(base, where, required)
        for alias in node.names:
            inside = _list_starred_names(base) if alias.name == "*" else [alias.name]
            yield from (
                _Import(f"{base}.{part}", where, False) for part in inside
            )  # a module, or an attribute
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORT_CALLS:
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            bare = argument.value.lstrip(".")
            level = len(argument.value) - len(bare)
            yield _Import(_resolve_relative_name(bare, level, package, where), where, False)


def _resolve_relative_name(module: str, level: int, package: str, where: str) -> str:
    """The full name of a relatively named module."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if level > len(parts):
        raise SettingsError(
            f"{where}: '{'.' * level}{module}' goes beyond the top-level package; import by full name"
        )
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _list_starred_names(name: str) -> list[str]:
    """Names in a package's literal `__all__`, which `import *` loads where they are modules."""
    spec = _find_spec(name)
    if (
        spec is None
        or spec.submodule_search_locations is None
        or not str(spec.origin).endswith(".py")
    ):
        return []
    if not _is_user_module(name, spec):
        return []
    for node in ast.parse(_read_source(name, Path(str(spec.origin)))).body:
        if isinstance(node, ast.Assign) and any(
            ast.unparse(target) == "__all__" for target in node.targets
        ):
            elements = getattr(node.value, "elts", [])
            return [
                part.value
                for part in elements
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
    return []
