"""Version of the code that a stage's numbers rest on: a digest of what its body reaches by imports.

Followed from the stage's module, and from the user's modules that it runs, are all imports of this project's modules:
within functions too, and texts that name a module ("rl_core.environments.maze:Maze", "math_child.py"), by which modules
are imported late or run as programs. C sources count where a module of their folder is reached. What only a type
checker sees does not.

The frame of every stage (settings, keys, folders, tracking) is not followed: it imports all there is to check a
configuration, and computes nothing. Those of its modules that stages import are part of their code themselves.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from rl_core.storage.manifest import digest_bytes
from tasks.stage_registry import entry, names

__all__ = ["code_version", "file_digest", "imported", "is_frame", "project_sources", "stage_code", "stage_sources"]

FRAME = (
    "tasks.config", "tasks.mlflow_environment", "tasks.pipeline", "tasks.processes", "tasks.retention", "tasks.shipped",
    "tasks.stage_registry", "tasks.tracking",
)  # fmt: skip
ALWAYS = ("tasks.pipeline.key", "tasks.pipeline.stage", "tasks.pipeline.stage_worker")  # seeds, threads, hand-over
LAZY = ("rl_core",)  # its texts name all of the public API, for whoever imports the package itself

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("rl_core", "tasks")
_SOURCES = (".py", ".c", ".h")
_STATEMENT = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]*(?:\([^)]*\)|[^\n(]*)|import[ \t]+[\w., \t]+)", re.M
)
_TYPES_ALONE = re.compile(r"^([ \t]*)if (?:typing\.)?TYPE_CHECKING:\n(?:\1[ \t]+[^\n]*\n|[ \t]*\n)*", re.M)
_NAMED = re.compile(r"""["']((?:rl_core|tasks)(?:\.\w+)+)[:"']""")
_FILE = re.compile(r"""["'](\w+)\.py["']""")


@functools.cache
def code_version() -> str:
    """Short SHA-256 of the whole source of rl_core and tasks, by which a run is recognised."""
    return _digest(project_sources())


def stage_code(stage: str, user_sources: Iterable[bytes] = ()) -> str:
    """Short SHA-256 of the sources of `stage_sources`, where they are and what they hold."""
    return _digest(stage_sources(stage, user_sources))


def stage_sources(stage: str, user_sources: Iterable[bytes] = ()) -> tuple[str, ...]:
    """Files that a stage's numbers rest on, by their path in the project, sorted.

    Args:
        user_sources: content of the user's modules that the stage runs.
    Returns: all sources of the project for a stage whose task is none of its modules.
    """
    task = entry(stage).task if stage in names() else ""
    own = stage in names() and entry(stage).own is not None
    module = "tasks.stages.own_stage" if own else task.partition(":")[0]
    if module not in _modules():
        return project_sources()
    of_user = {name for content in user_sources for name in imported(content.decode("utf-8", "replace"))}
    return _reached(module, frozenset(of_user & _modules().keys()))


@functools.cache
def project_sources() -> tuple[str, ...]:
    """All sources of rl_core and tasks, by their path in the project, sorted."""
    return tuple(
        sorted(
            str(path.relative_to(_ROOT))
            for package in _PACKAGES
            for ending in _SOURCES
            for path in (_ROOT / package).rglob(f"*{ending}")
        )
    )


def imported(text: str) -> set[str]:
    """Dotted names that a source imports or names in a text, `a.b` and `a.b.c` of `from a.b import c`.

    Statements are found by their first word, for speed, and read as Python; what is none (a line of a docstring) is
    passed over.
    """
    text = _TYPES_ALONE.sub("", text)
    found = set(_NAMED.findall(text))
    for statement in _STATEMENT.findall(text):
        try:
            nodes = ast.parse(textwrap.dedent(statement).strip()).body
        except SyntaxError:
            continue
        for node in nodes:
            found.update(_names(node))
    return found


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _modules() -> dict[str, str]:
    """Dotted name -> path in the project of every module; a package goes by its own name."""
    python = [path for path in project_sources() if path.endswith(".py")]
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in python}


@functools.cache
def _edges(module: str) -> frozenset[str]:
    """Modules of the project that a module imports, names or starts, those not followed included."""
    known = _modules()
    text = _content(known[module]).decode()
    found = imported(text)
    if module in LAZY:
        found -= set(_NAMED.findall(text))
    folder = known[module].rpartition("/")[0].replace("/", ".")
    found |= {f"{folder}.{name}" for name in _FILE.findall(text)}
    return frozenset(found & known.keys() - {module})


@functools.cache
def _reached(start: str, more: frozenset[str]) -> tuple[str, ...]:
    known, seen = _modules(), set[str]()
    waiting = [start, *more, *ALWAYS]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if module not in (start, *more) and is_frame(module):
            continue
        parts = module.split(".")
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]  # Python runs the packages around it
        waiting += _edges(module)
    folders = {known[module].rpartition("/")[0] for module in seen}
    other = [path for path in project_sources() if not path.endswith(".py") and path.rpartition("/")[0] in folders]
    return tuple(sorted([*(known[module] for module in seen), *other]))


def is_frame(module: str) -> bool:
    """True = a module that is part of a stage's code where it imports it, but whose own imports are not."""
    return any(module == name or module.startswith(f"{name}.") for name in FRAME)


@functools.cache
def _content(path: str) -> bytes:
    return (_ROOT / path).read_bytes()


@functools.cache
def file_digest(path: str) -> str:
    """Short SHA-256 of a source file, by its path in the project."""
    return digest_bytes(_content(path))[:8]


@functools.cache
def _digest(paths: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + b"\0" + _content(path) + b"\0")
    return digest.hexdigest()[:12]
