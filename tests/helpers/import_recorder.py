"""Edges of the imports that a process runs, whether the module was loaded before or not: importer -> imported.

python -m helpers.import_recorder OUT.json ARGUMENTS...     posttrain ARGUMENTS, its edges into OUT.json
"""

from __future__ import annotations

import builtins
import importlib
import json
import sys
from pathlib import Path

__all__ = ["record"]

LOADER = "rl_core.user_code.load"  # imports for its callers: they name the modules


def record(edges: dict[str, set[str]], packages: tuple[str, ...]) -> None:
    """Record every import statement and call of `import_module` in these packages from now on."""
    original_import, by_name = builtins.__import__, importlib.import_module

    def note(importer: str, names: list[str]) -> None:
        if importer.partition(".")[0] in packages:
            known = {
                name for name in names if name.partition(".")[0] in packages and name in sys.modules
            }
            edges.setdefault(importer, set()).update(known - {importer})

    def statement(name, globals=None, locals=None, fromlist=(), level=0):
        module = original_import(name, globals, locals, fromlist, level)
        note(
            (globals or {}).get("__name__", ""),
            [name, *(f"{name}.{part}" for part in fromlist or ())],
        )
        return module

    def call(name, package=None):
        module = by_name(name, package)
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == LOADER:
            frame = frame.f_back
        note(frame.f_globals.get("__name__", ""), [name])
        return module

    builtins.__import__, importlib.import_module = statement, call


def main() -> int:
    out, *arguments = sys.argv[1:]
    edges: dict[str, set[str]] = {}
    record(edges, ("rl_core", "tasks"))
    from posttrain.cli.main import main as posttrain

    code = posttrain(arguments)
    Path(out).write_text(json.dumps({name: sorted(imported) for name, imported in edges.items()}))
    return code


if __name__ == "__main__":
    sys.exit(main())
