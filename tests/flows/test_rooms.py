"""Rooms of flows: their order, no circles, and imports without side effects."""

import ast
import subprocess
import sys

import pytest
from helpers import ROOT

# Lowest first; a room imports rooms of its own level or below. The root holds the flows themselves.
LEVELS = [{"runtime", "parameters"}, {"root", "operations", "monitor"}, {"cli"}]
FLOWS = ("post_training", "single_stage", "retrain", "evaluate_champion")
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "flows").rglob("*.py"))
}


def imported(module: str) -> set[str]:
    """Modules of flows that a module imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return (found & MODULES.keys()) - {module, "flows"}


def room_of(module: str) -> str:
    part = module.split(".")[1] if "." in module else "root"
    return "root" if part in FLOWS else part


def test_every_module_has_a_room():
    rooms = {room_of(module) for module in MODULES}
    assert rooms == set(LEVEL_OF)


def test_no_room_imports_one_above_it():
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in sorted(imported(module))
        if LEVEL_OF[room_of(other)] > LEVEL_OF[room_of(module)]
    ]
    assert wrong == []


def test_no_circles():
    remaining = {module: imported(module) for module in MODULES}
    while free := [module for module, needs in remaining.items() if not needs & remaining.keys()]:
        for module in free:
            del remaining[module]
    assert remaining == {}


@pytest.mark.parametrize("module", [f"flows.{name}" for name in FLOWS] + ["flows.cli.main", "flows.monitor.page"])
def test_an_import_changes_nothing(module):
    if module == "flows.monitor.page":
        pytest.importorskip("gradio")
    program = (
        "import os, signal, prefect, mlflow, transformers\n"  # what these change is theirs
        "signals = [s for s in (signal.SIGTERM, signal.SIGINT)]\n"
        "before = dict(os.environ), [signal.getsignal(s) for s in signals], os.getcwd()\n"
        f"import {module}\n"
        "after = dict(os.environ), [signal.getsignal(s) for s in signals], os.getcwd()\n"
        "for values in (before, after):\n    values[0].pop('TORCHINDUCTOR_CACHE_DIR', None)\n"  # set by torch
        "assert before == after, (set(before[0].items()) ^ set(after[0].items()), before[1:], after[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
