"""Digests of the user's code: modules behind import paths with the user's modules that those import, and functions.

Source is read and never executed. It follows `import`, `from ... import`, relative imports, packages (including their
`__init__`), namespace packages, `from package import *` with a literal `__all__`, and `import_module("literal name")`.
It does not follow computed module names and files that the code opens (data that a reward function reads is not part
of a stage's key).

A module counts as the user's if its file lies outside the standard library, installed packages (site-packages) and this
project's packages, whose content is already in the key (tasks/pipeline/stage_key.py).
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from rl_core.errors import SettingsError
from rl_core.settings import Settings, iter_code_paths
from rl_core.storage.manifest import digest_bytes
from rl_core.user_code.load import is_file_path

_PROJECT_PACKAGES = ("rl_core", "tasks", "flows", "posttrain")
_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_IMPORT_CALLS = ("import_module", "importlib.import_module", "__import__")
_SUPPRESS_CALLS = ("suppress", "contextlib.suppress")
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
_TYPE_CHECKING = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


@dataclass(frozen=True)
class UserModule:
    """One module of the user's code."""

    file: Path
    content: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of its file."""
        return digest_bytes(self.content)

    def digest_functions(self) -> dict[str, str]:
        """Map each function and method ('Class.method') to a short digest, and '' to the digest of everything else.

        Digests are of the syntax tree, so comments and layout do not count; {} for an extension module.
        """
        try:
            tree = ast.parse(self.content) if self.file.suffix == ".py" else None
        except (SyntaxError, ValueError):
            tree = None
        if tree is None:
            return {}
        digests: dict[str, str] = {}
        others = [_digest_node(node) for node in tree.body if not isinstance(node, _DEFINITIONS)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                methods = [member for member in node.body if isinstance(member, _FUNCTIONS)]
                digests |= {
                    f"{node.name}.{method.name}": _digest_node(method) for method in methods
                }
                others += [_digest_node(member) for member in node.body if member not in methods]
                others += [_digest_node(part) for part in (*node.bases, *node.decorator_list)]
            elif isinstance(node, _FUNCTIONS):
                digests[node.name] = _digest_node(node)
        return digests | {"": digest_bytes("".join(others).encode())[:12]}


def _digest_node(node: ast.AST) -> str:
    return digest_bytes(ast.dump(node).encode())[:12]


def digest_user_code(required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, str]:
    """Compute the SHA-256 of the user's modules behind import paths, by module name; see `find_user_modules`."""
    return {name: module.digest for name, module in find_user_modules(required, optional).items()}


def digest_settings_code(
    settings: Settings, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, str]:
    """Digest the user's code that a run depends on, so that a resumed run notices an edited file.

    Args:
        functions: passed as objects, by setting; their source counts, and the modules they come from except the
            running script.
    """
    modules = [
        getattr(unwrap_partial(function)[0], "__module__", None) for function in functions.values()
    ]
    paths = [path for _, path in iter_code_paths(settings) if ":" in path]
    optional_paths = [f"{name}:" for name in modules if name and name != "__main__"]
    digests = digest_user_code(paths, optional_paths)
    return digests | {
        f"{name}()": digest_function(function, 16) for name, function in functions.items()
    }


def digest_function(function: Callable[..., Any], num_digits: int = 64) -> str:
    """Digest a function's source and the arguments bound by partials; without source, return its name."""
    inner, bound_arguments = unwrap_partial(function)
    try:
        return digest_bytes((inspect.getsource(inner) + bound_arguments).encode())[:num_digits]
    except (OSError, TypeError):  # written in C, a callable object, or typed at a prompt
        return getattr(inner, "__qualname__", type(inner).__qualname__) + bound_arguments


def unwrap_partial(function: Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    """Return the function inside nested partials, and the arguments that they bind as a text."""
    bound_arguments = ""
    while isinstance(function, functools.partial):
        bound_arguments += f" {function.args} {sorted(function.keywords.items())}"
        function = function.func
    return function, bound_arguments


def find_user_modules(
    required: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, UserModule]:
    """Find the user's modules behind import paths ('package.module:name'), by module name.

    Args:
        required: import paths whose modules must be found.
        optional: strings that may mean something else; ignored if no such module is found.
    Raises: SettingsError for a module that cannot be found or read.
    """
    importlib.invalidate_caches()  # a file may have been written since a folder was last listed
    pending = [_Import(path.partition(":")[0], f"'{path}'", True) for path in required]
    pending += [_Import(path.partition(":")[0], f"'{path}'", False) for path in optional]
    seen: set[str] = set()
    foreign: set[str] = set()  # packages of others, which are not searched
    modules: dict[str, UserModule] = {}
    while pending:
        imported = pending.pop()
        for name in _iter_parent_names(imported.name):
            if name in foreign:
                break
            if name in seen:
                continue
            spec = _find_spec(name)
            if spec is None:
                if imported.is_required:
                    raise SettingsError(
                        f"{imported.where} needs the module '{name}', which cannot be found; put its folder on "
                        "PYTHONPATH, run posttrain in the folder that contains it, or install it"
                    )
                break
            if not _is_user_module(name, spec):
                foreign.add(name)
                break
            seen.add(name)
            if spec.origin is not None and spec.has_location:  # a namespace package has no file
                content = _read_source(name, Path(spec.origin))
                modules[name] = UserModule(Path(spec.origin), content)
                pending += _parse_imports(content, name, spec)
    return dict(sorted(modules.items()))


@dataclass(frozen=True, slots=True)
class _Import:
    """A module that something imports."""

    name: str
    where: str  # for messages
    is_required: bool  # False: it may be an attribute, or the code also works without it


def _iter_parent_names(name: str) -> Iterator[str]:
    """Yield 'a', 'a.b', 'a.b.c' for 'a.b.c', in the order in which Python imports them; a file path unchanged."""
    parts = [name] if is_file_path(name) else name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the location of a module as Python does, but without executing its packages; None = not found."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    if is_file_path(name):
        file = Path(name).expanduser().absolute()
        return spec_from_file_location(file.stem, file) if file.is_file() else None
    for parent in _iter_parent_names(name):
        specs = (finder.find_spec(parent, path) for finder in sys.meta_path)
        spec = next((candidate for candidate in specs if candidate), None)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
    loaded_file = getattr(sys.modules.get(name), "__file__", None)
    if spec is None and loaded_file:  # loaded by other means, such as a script
        spec = spec_from_file_location(name, loaded_file)
    return spec


def _is_user_module(name: str, spec: ModuleSpec) -> bool:
    if not is_file_path(name) and name.partition(".")[0] in _PROJECT_PACKAGES:
        return False
    if not spec.has_location:  # built in, frozen, or a namespace package
        paths = [Path(path).resolve() for path in spec.submodule_search_locations or ()]
    else:
        paths = [Path(str(spec.origin)).resolve()]
    return any(
        not set(path.parts) & set(_INSTALLED)
        and not any(path.is_relative_to(folder) for folder in _STDLIB)
        for path in paths
    )


def _read_source(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"module '{name}': {path} cannot be read: {error.strerror or error}"
        ) from error


def _parse_imports(content: bytes, name: str, spec: ModuleSpec) -> list[_Import]:
    """Parse the imports of a module's source; [] for an extension module."""
    if not str(spec.origin).endswith(".py"):
        return []
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise SettingsError(
            f"module '{name}': {spec.origin} is not Python source: {error}"
        ) from error
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    return [
        imported
        for node, required in _iter_import_statements(tree.body, True)
        for imported in _iter_imported_modules(node, package, name, required)
    ]


def _iter_import_statements(
    nodes: Iterable[ast.AST], required: bool
) -> Iterator[tuple[ast.AST, bool]]:
    """Yield import statements and calls in and below nodes; False = the module can be imported without it.

    False inside functions, below `if`, and where a `try` or a `suppress` catches an ImportError. Imports only for type
    checkers are left out.
    """
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            yield node, required
        if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPE_CHECKING:
            yield from _iter_import_statements(node.orelse, False)
            continue
        optional = isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Try):
            optional = any(_can_catch_import_error(handler.type) for handler in node.handlers)
        elif isinstance(node, ast.With):
            optional = any(_is_import_error_suppressed(item) for item in node.items)
        yield from _iter_import_statements(ast.iter_child_nodes(node), required and not optional)


def _can_catch_import_error(caught: ast.expr | None) -> bool:
    """Return whether an `except` clause catches ImportError; None = it catches everything."""
    types = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        exception_type is None or ast.unparse(exception_type) in _IMPORT_ERRORS
        for exception_type in types
    )


def _is_import_error_suppressed(item: ast.withitem) -> bool:
    """Return whether a `with` item is a `contextlib.suppress` of ImportError."""
    call = item.context_expr
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in _SUPPRESS_CALLS
        and any(_can_catch_import_error(argument) for argument in call.args)
    )


def _iter_imported_modules(
    node: ast.AST, package: str, name: str, required: bool
) -> Iterator[_Import]:
    """Yield the modules that one statement names."""
    where = f"module '{name}' (line {getattr(node, 'lineno', 0)})"
    if isinstance(node, ast.Import):
        yield from (_Import(alias.name, where, required) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _resolve_relative_name(node.module or "", node.level, package, where)
        yield _Import(base, where, required)
        for alias in node.names:
            names = _list_starred_names(base) if alias.name == "*" else [alias.name]
            # Each may be a module or an attribute.
            yield from (_Import(f"{base}.{imported}", where, False) for imported in names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _IMPORT_CALLS:
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            module = argument.value.lstrip(".")
            level = len(argument.value) - len(module)
            yield _Import(_resolve_relative_name(module, level, package, where), where, False)


def _resolve_relative_name(module: str, level: int, package: str, where: str) -> str:
    """Return the full name of a relatively named module."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if level > len(parts):
        raise SettingsError(
            f"{where}: '{'.' * level}{module}' is above the top-level package; import by full name"
        )
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def _list_starred_names(name: str) -> list[str]:
    """List the names in a package's literal `__all__`, which `import *` loads if they are modules."""
    spec = _find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return []
    if not str(spec.origin).endswith(".py") or not _is_user_module(name, spec):
        return []
    for node in ast.parse(_read_source(name, Path(str(spec.origin)))).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, targets):
            return [
                element.value
                for element in getattr(node.value, "elts", [])
                if isinstance(element, ast.Constant) and isinstance(element.value, str)
            ]
    return []
