"""Imports of the project's packages, read from the sources: modules, edges between them, circles."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from helpers import ROOT

__all__ = ["circles", "edges", "imports_of", "modules", "parsed", "room_of", "rooms_imported"]


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file of every module; a package goes by its own name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = (
            path
        )
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also within functions and under TYPE_CHECKING.

    `from a.b import c` gives a.b and a.b.c: c may be a module.
    """
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, (
                f"{path}:{node.lineno}: a relative import; write the whole name"
            )
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@cache
def edges(package: str) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports."""
    known = modules(package)
    return {
        name: {other for _, other in imports_of(path)} & known.keys() - {name}
        for name, path in known.items()
    }


def room_of(module: str) -> str:
    """Second part of a dotted name; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def rooms_imported(package: str) -> dict[str, set[str]]:
    """Room -> other rooms of the package that it imports."""
    found: dict[str, set[str]] = {}
    for module, others in edges(package).items():
        found.setdefault(room_of(module), set()).update(
            {room_of(other) for other in others} - {room_of(module)}
        )
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, each sorted."""
    reached = {node: _reached(graph, node) for node in graph}
    groups = {
        tuple(sorted(m for m in reached[n] if n in reached[m])) for n in graph if n in reached[n]
    }
    return [list(group) for group in sorted(groups)]


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Nodes that a path of at least one edge leads to."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen
