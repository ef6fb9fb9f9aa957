"""Floors and rooms: imports run downwards only, without circles; importing a module has no side effect."""

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.import_graph import (
    find_circles,
    get_room,
    list_edges,
    list_imported_rooms,
    list_imports,
    list_modules,
    parse_module,
)

PACKAGES = ("rl_core", "tasks", "flows", "posttrain")
OPTIONAL = (  # extras
    "gymnasium",
    "reasoning_gym",
    "verifiers",
    "ray",
    "llguidance",
    "lm_eval",
    "inspect_ai",
)
FORBIDDEN = ("prefect", "mlflow", "pydantic", "yaml", "tasks", "flows", "posttrain")

# Rooms of each floor, the lowest first: a room imports rooms of its level or below, never one above it.
LEVELS = {
    "rl_core": [
        {"settings", "metric_history", "timing", "time_limits", "tracking", "types", "errors"},
        {"out_of_memory", "machine_memory", "json_client", "distributed", "losses", "storage"},
        {"cpu", "user_code", "processes"},
        {"environments", "analysis", "data", "models", "capabilities", "trackers"},
        {"curriculum", "preferences", "references", "inference"},
        {"chat", "rewards", "rollouts"},
        {"evaluation", "probe", "readers", "rollout_workers"},
        {"training"},
        {"trainers", "thoughts", "networks"},
        {"api", "online", "resources", "service", "evaluators"},
        {""},  # names of the public API, imported at their first use
    ],
    "tasks": [
        {"mlflow_environment", "command_hints", "run_status", "shipped", "stage_registry"},
        {"config"},
        {"tracking"},
        {"lifecycle"},
        {"processes"},
        {"pipeline"},
        {"retention", "stages"},
        {""},
    ],
    "flows": [
        {"runtime", "parameters", "serving"},  # serving: former import path of one release
        {"post_training"},
        {"consolidate", "evaluate_champion", "retrain", "single_stage", "sweep"},
        {""},
    ],
    "posttrain": [
        {"install", "settings_files", "operations", "planning", "verification", "online"},
        {"web"},
        {"serving", "training_service"},
        {"monitor"},
        {"preferences"},
        {"cli"},
        {"", "__main__"},
    ],
}

TRAINERS = {
    "rl_core.trainers.sft",
    "rl_core.trainers.reward_model",
    "rl_core.trainers.preference",
    "rl_core.trainers.policy_gradient",
    "rl_core.thoughts",
    "rl_core.networks",
}


def list_loaded_modules(*programs: str) -> list[set[str]]:
    """Return top-level modules in sys.modules of a fresh interpreter after each of these programs, in turn."""
    show = "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
    done = subprocess.run(
        [sys.executable, "-c", show.join([*programs, ""])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


def format_place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


# ------------------------------------------------------------------------------------------------------------- floors


def test_rl_core_imports_without_prefect_mlflow_pydantic_yaml():
    names = sorted(list_modules("rl_core"))
    assert len(names) > 30  # the walk covers the package
    allowed = "import torch, transformers, peft\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM"
    # transformers itself reads YAML, so what it loads alone is no doing of ours.
    before, after = list_loaded_modules(
        allowed, f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    )
    assert "rl_core" in after - before
    assert (after - before) & set(FORBIDDEN) == set()
    assert {"prefect", "mlflow", "tasks", "flows"} & after == set()
    (light,) = list_loaded_modules("import rl_core, rl_core.types")
    assert "rl_core" in light and {"prefect", "mlflow", "pydantic", "yaml"} & light == set()


def test_optional_packages_are_imported_inside_functions_alone():
    wrong = [
        format_place(path, node.lineno)
        for path in list_modules("rl_core").values()
        for node in parse_module(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        if name.split(".")[0] in OPTIONAL
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_downwards(package):
    banned = {
        "rl_core": set(FORBIDDEN),
        "tasks": {"flows", "posttrain"},
        "flows": {"mlflow", "posttrain"},
        "posttrain": {"mlflow"},
    }[package]
    wrong = [
        f"{format_place(path, line)} imports {name}"
        for path in list_modules(package).values()
        for line, name in list_imports(path)
        if name.split(".")[0] in banned
    ]
    assert wrong == []


def test_only_the_tracking_package_imports_mlflow():
    wrong = [
        format_place(path, line)
        for package in ("tasks", "flows", "posttrain")
        for path in list_modules(package).values()
        for line, name in list_imports(path)
        if name.split(".")[0] == "mlflow" and path.parent.name != "tracking"
    ]
    assert wrong == []


# -------------------------------------------------------------------------------------------------------------- rooms


def test_cycles_are_detected():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert find_circles(graph) == [["b", "c"], ["d", "e"]]
    assert find_circles({"a": {"b"}, "b": set()}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_one_place_in_the_order(package):
    listed = [room for level in LEVELS[package] for room in level]
    assert len(listed) == len(set(listed))
    assert {get_room(module) for module in list_modules(package)} - set(
        listed
    ) == set()  # a new room gets its place above


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_imports_one_above_it(package):
    level_of = {room: level for level, rooms in enumerate(LEVELS[package]) for room in rooms}
    graph = list_edges(package)
    empty = {package} - {
        module for module, others in graph.items() if others
    }  # `from tasks import x` takes x alone
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others - empty)
        if level_of[get_room(other)] > level_of[get_room(module)]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles_between_rooms(package):
    assert find_circles(list_imported_rooms(package)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circles_between_modules(package):
    assert find_circles(list_edges(package)) == []


def test_no_trainer_imports_another():
    """Check that what trainers share imports none of them; a trainer is a module or a room."""

    def trainer_of(module: str) -> str:
        return next(
            (
                trainer
                for trainer in TRAINERS
                if module == trainer or module.startswith(f"{trainer}.")
            ),
            "",
        )

    known = {trainer_of(module) for module in list_modules("rl_core")}
    assert known >= TRAINERS
    wrong = [
        f"{module} imports {other}"
        for module, others in list_edges("rl_core").items()
        if module.startswith(("rl_core.trainers.", "rl_core.thoughts", "rl_core.networks"))
        for other in sorted(others)
        if trainer_of(other) not in ("", trainer_of(module))
    ]
    assert wrong == []


# ------------------------------------------------------------------------------------------------------- side effects

# Other packages' imports come first: what they change is theirs. MLflow is imported late, by the tracking store.
_IMPORT_ALL = """
import importlib, json, logging, os, signal, sys, threading, warnings
outer, inner = json.loads(sys.argv[1])
import mlflow  # where prefect or transformers find it, they change the environment for it
for name, attributes in outer:
    try:
        module = importlib.import_module(name)
        for attribute in attributes:
            getattr(module, attribute, None)  # prefect and transformers load what they export when it is asked for
    except ImportError as error:
        assert name.split(".")[0] == "gradio", error  # an extra
def state():
    handlers = {
        name: ([repr(handler) for handler in logger.handlers], logger.level, logger.propagate)
        for name in ("", "rl_core", "tasks", "flows", "posttrain", "prefect", "mlflow")
        for logger in [logging.getLogger(name)]
    }
    return {
        "environment": dict(os.environ),
        "signals": {s.name: repr(signal.getsignal(s)) for s in signal.Signals if s.name not in ("SIGKILL", "SIGSTOP")},
        "logging": handlers,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.stdout), repr(sys.stderr)],
        "torch threads": importlib.import_module("torch").get_num_threads(),
    }
for name in inner:
    before = state()
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert (error.name or "").startswith("gradio"), error
    after = state()
    after["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it when it is used
    before["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)
    for what in before:
        if before[what] != after[what]:
            print(f"{name} changes {what}: {before[what]} -> {after[what]}")
"""


def list_foreign_imports(package: str) -> dict[str, set[str]]:
    """Return modules of other projects that a package imports during its import, and the names it takes."""
    names_by_module: dict[str, set[str]] = defaultdict(set)
    for path in list_modules(package).values():
        for node in parse_module(path).body:
            if isinstance(node, ast.Import):
                names_by_module.update(
                    {alias.name: names_by_module[alias.name] for alias in node.names}
                )
            elif isinstance(node, ast.ImportFrom) and node.module:
                names_by_module[node.module] |= {alias.name for alias in node.names}
    known = {*PACKAGES, *sys.stdlib_module_names}
    return {
        name: taken for name, taken in names_by_module.items() if name.split(".")[0] not in known
    }


def test_importing_a_module_has_no_side_effect(tmp_path):
    """Import all floors in one process, the lowest first, other packages before them."""
    names_by_module: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for name, taken in list_foreign_imports(package).items():
            names_by_module[name] |= taken
    our_modules = [name for package in PACKAGES for name in sorted(list_modules(package))]
    arguments = json.dumps(
        [sorted((name, sorted(taken)) for name, taken in names_by_module.items()), our_modules]
    )
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""


# -------------------------------------------------------------------------------------------------------------- names


def test_no_class_name_occurs_twice():
    places = defaultdict(list)
    for package in PACKAGES:
        for path in list_modules(package).values():
            for node in ast.walk(parse_module(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(format_place(path, node.lineno))
    assert len(places) > 100
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_module_of_a_flow_hides_one_of_python():
    """Check module names: a Prefect worker loads a flow as a script, with its folder first on the path:
    `flows/profile.py` broke torch.
    """
    names = {path.stem if path.suffix else path.name for path in (ROOT / "flows").iterdir()}
    assert "post_training" in names and names & set(sys.stdlib_module_names) == set()
