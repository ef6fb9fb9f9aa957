"""The floors of the house: imports run downwards only, and rl_core stays free of the orchestration's libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

OPTIONAL = ("gymnasium", "reasoning_gym", "verifiers")  # extras: one environment each
FORBIDDEN = ("prefect", "mlflow", "pydantic", "yaml", "tasks", "flows")

# rl_core's rooms, lowest first; a room imports rooms of its own level or below, never one above it.
LEVELS = [
    {
        "errors",
        "types",
        "settings",
        "tracking",
        "faults",
        "folders",
        "locks",
        "state_codec",
        "metrics",
        "timing",
        "native",
    },
    {"losses", "checkpoint", "distributed"},
    {"data", "models", "environments", "analysis"},
    {"rewards", "curriculum", "rollouts"},
    {"evaluation", "probe"},
    {"trainers"},
]


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
    return found


def modules_loaded_by(program: str) -> set[str]:
    """Top-level modules in sys.modules of a fresh interpreter after `program`."""
    program += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_rl_core_imports_without_prefect_mlflow_pydantic_yaml():
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules_of("rl_core")]
    names = sorted({name.removesuffix(".__init__") for name in names})
    assert len(names) > 30  # the walk found the package
    allowed = "import torch, transformers, peft\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM"
    # transformers itself reads YAML, so what it loads alone is no doing of ours.
    before = modules_loaded_by(allowed)
    after = modules_loaded_by(allowed + f"\nimport importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert "rl_core" in after
    assert (after - before) & set(FORBIDDEN) == set()
    assert {"prefect", "mlflow", "tasks", "flows"} & after == set()
    assert {"prefect", "mlflow", "pydantic", "yaml"} & modules_loaded_by("import rl_core, rl_core.types") == set()


def test_optional_packages_are_imported_inside_functions_alone():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules_of("rl_core")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in OPTIONAL
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["rl_core", "tasks", "flows"])
def test_imports_run_downwards(package):
    banned = {"rl_core": set(FORBIDDEN), "tasks": {"flows"}, "flows": {"mlflow"}}[package]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules_of(package)
        for line, name in imports_of(path)
        if name.split(".")[0] in banned
    ]
    assert wrong == []


def test_only_the_tracking_package_imports_mlflow():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("tasks", "flows")
        for path in modules_of(package)
        for line, name in imports_of(path)
        if name.split(".")[0] == "mlflow" and path.parent.name != "tracking"
    ]
    assert wrong == []


def test_no_room_of_rl_core_imports_one_above_it():
    level_of = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
    rooms = {path.stem if path.is_file() else path.name for path in (ROOT / "rl_core").iterdir()} - {
        "__init__",
        "__pycache__",
    }
    assert rooms == set(level_of)  # a new room gets its place here
    wrong = []
    for path in modules_of("rl_core"):
        room = path.relative_to(ROOT / "rl_core").parts[0].removesuffix(".py")
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "rl_core" and len(parts) > 1 and level_of[parts[1]] > level_of.get(room, 99):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def test_no_trainer_imports_another():
    shared = {"loop", "update", "resume", "signals", "optimizers", "micro_batches", "memory", "together", "throughput"}
    shared |= {"rollout_metrics", "policy_update", "policy_objective", "experience", "credit", "replay", "snapshots"}
    trainers = {path.stem for path in (ROOT / "rl_core/trainers").glob("*.py")} - shared - {"__init__"}
    wrong = [
        f"{path.name}:{line} imports {name}"
        for path in (ROOT / "rl_core/trainers").glob("*.py")
        for line, name in imports_of(path)
        if name.startswith("rl_core.trainers.") and name.split(".")[2] in trainers - {path.stem}
    ]
    assert wrong == []


def test_no_module_of_a_flow_hides_one_of_python():
    """A Prefect worker loads a flow as a script, with its folder first on the path: `flows/profile.py` broke torch."""
    names = {path.stem if path.suffix else path.name for path in (ROOT / "flows").iterdir()}
    assert "post_training" in names and names & set(sys.stdlib_module_names) == set()
