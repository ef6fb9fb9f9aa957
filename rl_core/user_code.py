"""Digests of the user's code that a stage runs: modules named by import path, and what of theirs those import.

Source is read, never executed. Followed are `import`, `from ... import`, relative imports, packages (their `__init__`
too), namespace packages, `from package import *` over a literal `__all__`, and `import_module("literal name")`. Not
followed: module names that are computed, and files that the code opens (data that a reward function reads is no part of
a stage's key).

A module counts as the user's when its file lies outside the standard library, installed packages (site-packages) and
this project's own packages, whose content is in the key already (tasks/pipeline/stage_code.py).
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.importing import is_file
from rl_core.storage.manifest import digest_bytes

__all__ = ["UserModule", "import_paths", "user_code_digests", "user_modules"]

_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:\s]+\.py):\S+")
_OWN = ("rl_core", "tasks", "flows")
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_IMPORT_CALLS = ("import_module", "importlib.import_module", "__import__")
_SUPPRESS_CALLS = ("suppress", "contextlib.suppress")
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


def import_paths(value: Any) -> set[str]:
    """Texts within plain settings, keys of mappings too, that read like 'package.module:name' or 'file.py:name'."""
    if isinstance(value, str):
        return {value} if _IMPORT_PATH.fullmatch(value) else set()
    if isinstance(value, dict):
        return {path for pair in value.items() for item in pair for path in import_paths(item)}
    if isinstance(value, list | tuple):
        return {path for item in value for path in import_paths(item)}
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

    def functions(self) -> dict[str, str]:
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
        rest = [_shape(node) for node in tree.body if not isinstance(node, _DEFINITIONS)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, _FUNCTIONS)]
                found |= {f"{node.name}.{part.name}": _shape(part) for part in methods}
                rest += [_shape(part) for part in node.body if part not in methods]
                rest += [_shape(part) for part in (*node.bases, *node.decorator_list)]
            elif isinstance(node, _FUNCTIONS):
                found[node.name] = _shape(node)
        return found | {"": digest_bytes("".join(rest).encode())[:12]}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def _shape(node: ast.AST) -> str:
    return digest_bytes(ast.dump(node).encode())[:12]


def user_code_digests(required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of each of the user's modules behind some import paths, by module name; arguments as `user_modules`."""
    return {name: module.digest for name, module in user_modules(required, optional).items()}


def user_modules(required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, UserModule]:
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
        for name in _with_parents(item.name):
            if name in foreign:
                break
            if name in seen:
                continue
            spec = _spec_of(name)
            if spec is None:
                if item.is_required:
                    raise SettingsError(
                        f"{item.where} needs the module '{name}', which cannot be found; put its folder on PYTHONPATH, "
                        "call posttrain from the folder that it lies in, or install it"
                    )
                break
            if not _is_users(name, spec):
                foreign.add(name)
                break
            seen.add(name)
            if spec.origin is not None and spec.has_location:  # a namespace package has no file of its own
                content = _read(name, Path(spec.origin))
                found[name] = UserModule(Path(spec.origin), content)
                wanted += _imports(content, name, spec)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Import:
    """A module that something imports."""

    name: str
    where: str  # for messages
    is_required: bool  # False: it may be an attribute, or the code goes on without it


def _with_parents(name: str) -> Iterator[str]:
    """'a', 'a.b', 'a.b.c' of 'a.b.c': what Python runs for it, in this order; a file alone."""
    parts = [name] if is_file(name) else name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _spec_of(name: str) -> ModuleSpec | None:
    """Location of a module, found as by Python but without running its packages; None = not found."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    if is_file(name):
        file = Path(name).expanduser().absolute()
        return spec_from_file_location(file.stem, file) if file.is_file() else None
    for part in _with_parents(name):
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(part, path))), None)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if spec is None and loaded:  # loaded by other means, as a script is
        spec = spec_from_file_location(name, loaded)
    return spec


def _is_users(name: str, spec: ModuleSpec) -> bool:
    if not is_file(name) and name.partition(".")[0] in _OWN:
        return False
    if not spec.has_location:  # built in, frozen, or a namespace package
        places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    else:
        places = [Path(str(spec.origin)).resolve()]
    return any(
        not set(place.parts) & set(_INSTALLED) and not any(place.is_relative_to(folder) for folder in _STDLIB)
        for place in places
    )


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"module '{name}': {path} cannot be read: {error.strerror or error}") from error


def _imports(content: bytes, name: str, spec: ModuleSpec) -> list[_Import]:
    """Imports of a module's source; [] for an extension module."""
    if not str(spec.origin).endswith(".py"):
        return []
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise SettingsError(f"module '{name}': {spec.origin} is no Python source: {error}") from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return [
        found for node, required in _statements(tree.body, True) for found in _imported(node, package, name, required)
    ]


def _statements(nodes: Iterable[ast.AST], required: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Import statements and calls among and below nodes; False = the module can be imported without it.

    That is so within functions, below `if`, and where a `try` or a `suppress` catches an ImportError. What only a type
    checker sees is left out.
    """
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            yield node, required
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _statements(node.orelse, False)
            continue
        optional = (
            isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.Try) and any(_catches_import_error(handler.type) for handler in node.handlers))
            or (isinstance(node, ast.With) and any(_suppresses_import_error(item) for item in node.items))
        )
        yield from _statements(ast.iter_child_nodes(node), required and not optional)


def _catches_import_error(caught: ast.expr | None) -> bool:
    """Test of what an `except` names; None = everything."""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or ast.unparse(kind) in _IMPORT_ERRORS for kind in kinds)


def _suppresses_import_error(item: ast.withitem) -> bool:
    """Test of a `with` item for `contextlib.suppress` of an ImportError."""
    call = item.context_expr
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in _SUPPRESS_CALLS
        and any(_catches_import_error(argument) for argument in call.args)
    )


def _imported(node: ast.AST, package: str, name: str, required: bool) -> Iterator[_Import]:
    """The modules that one statement names."""
    where = f"module '{name}' (line {getattr(node, 'lineno', 0)})"
    if isinstance(node, ast.Import):
        yield from (_Import(alias.name, where, required) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node.module or "", node.level, package, where)
        yield _Import(base, where, required)
        for alias in node.names:
            inside = _starred(base) if alias.name == "*" else [alias.name]
            yield from (_Import(f"{base}.{part}", where, False) for part in inside)  # a module, or an attribute
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORT_CALLS:
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            bare = argument.value.lstrip(".")
            level = len(argument.value) - len(bare)
            yield _Import(_absolute(bare, level, package, where), where, False)


def _absolute(module: str, level: int, package: str, where: str) -> str:
    """The full name of a relatively named module."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if level > len(parts):
        raise SettingsError(f"{where}: '{'.' * level}{module}' goes beyond the top-level package; import by full name")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _starred(name: str) -> list[str]:
    """Names in a package's literal `__all__`, which `import *` loads where they are modules."""
    spec = _spec_of(name)
    if spec is None or spec.submodule_search_locations is None or not str(spec.origin).endswith(".py"):
        return []
    if not _is_users(name, spec):
        return []
    for node in ast.parse(_read(name, Path(str(spec.origin)))).body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            elements = getattr(node.value, "elts", [])
            return [part.value for part in elements if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return []
