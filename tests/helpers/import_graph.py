"""Imports of the project's packages, read from the sources: modules, edges between them, circles."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from helpers import ROOT

__all__ = [
    "find_circles",
    "get_room",
    "list_edges",
    "list_imported_rooms",
    "list_imports",
    "list_modules",
    "parse_module",
]


def list_modules(package: str) -> dict[str, Path]:
    """Return dotted name -> file of every module; a package has an entry, too."""
    files = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        files[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = (
            path
        )
    return files


@cache
def parse_module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_imports(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of every import in a file, also within functions and under TYPE_CHECKING.

    `from a.b import c` gives a.b and a.b.c: c may be a module.
    """
    imports = []
    for node in ast.walk(parse_module(path)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, (
                f"{path}:{node.lineno}: a relative import; write the full name"
            )
            imports.append((node.lineno, node.module))
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return imports


@cache
def list_edges(package: str) -> dict[str, set[str]]:
    """Return module -> modules of the same package that it imports."""
    known = list_modules(package)
    return {
        name: {other for _, other in list_imports(path)} & known.keys() - {name}
        for name, path in known.items()
    }


def get_room(module: str) -> str:
    """Return the second part of a dotted name; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def list_imported_rooms(package: str) -> dict[str, set[str]]:
    """Return room -> other rooms of the package that it imports."""
    rooms: dict[str, set[str]] = {}
    for module, others in list_edges(package).items():
        rooms.setdefault(get_room(module), set()).update(
            {get_room(other) for other in others} - {get_room(module)}
        )
    return rooms


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return groups of nodes that reach each other, each sorted."""
    reached = {node: _find_reached(graph, node) for node in graph}
    groups = {
        tuple(sorted(m for m in reached[n] if n in reached[m])) for n in graph if n in reached[n]
    }
    return [list(group) for group in sorted(groups)]


def _find_reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the nodes at the end of a path of at least one edge."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen
