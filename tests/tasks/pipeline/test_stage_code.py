"""The code that a stage's key depends on: everything that its body reaches by imports, and no other algorithm."""

import ast
import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.import_graph import list_modules, parse_module

from tasks import stage_registry
from tasks.config import build_settings
from tasks.pipeline import stage_key as stage_code
from tasks.pipeline.stage_key import (
    collect_stage_key,
    find_imported_names,
    is_frame_module,
    list_stage_sources,
)

ALL = list_modules("rl_core") | list_modules("tasks")
TRAINERS = {
    "sft": "rl_core/trainers/sft.py",
    "preference": "rl_core/losses/preference.py",
    "policy": "rl_core/losses/policy.py",
    "thoughts": "rl_core/thoughts/trainer.py",
}


def find_type_checking_nodes(tree):
    """Return the IDs of import statements that only a type checker sees."""
    tests = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in tests
    ]
    return {id(node) for block in blocks for part in block.body for node in ast.walk(part)}


def iter_imports(tree):
    """Yield the modules of the project that a source imports, read completely."""
    left_out = find_type_checking_nodes(tree)
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_statements_located_by_their_first_word_equal_those_of_the_syntax_tree():
    missed = {
        name: wrong
        for name, path in ALL.items()
        if (
            wrong := (set(iter_imports(parse_module(path))) & ALL.keys())
            - find_imported_names(path.read_text())
        )
    }
    assert len(ALL) > 200 and missed == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from rl_core import types as t, errors", {"rl_core", "rl_core.types", "rl_core.errors"}),
        (
            "def f():\n    from rl_core.losses.policy import (\n        a,  # one\n        b,\n    )\n",
            {"rl_core.losses.policy", "rl_core.losses.policy.a", "rl_core.losses.policy.b"},
        ),
        ("import rl_core.types, json as j", {"rl_core.types", "json"}),
        ("import torch; x = 1", {"torch"}),
        ('"""Text.\n\nfrom here on nothing\nimport ants are small\n"""', set()),
        (
            "if TYPE_CHECKING:\n    from rl_core.a import (\n        b,\n    )\n\nimport rl_core.c",
            {"rl_core.c"},
        ),
        ("SHIPPED = {'maze': 'rl_core.environments.maze:Maze'}", {"rl_core.environments.maze"}),
        ("import_module('tasks.stages.sft')", {"tasks.stages.sft"}),
    ],
)
def test_what_is_read(text, expected):
    assert find_imported_names(text) == expected


@pytest.mark.parametrize("stage", TRAINERS)
def test_a_stage_contains_only_its_algorithm(stage):
    sources = set(list_stage_sources(stage))
    others = {path for name, path in TRAINERS.items() if name != stage}
    if stage == "thoughts":
        others -= {"rl_core/losses/policy.py"}
    assert TRAINERS[stage] in sources and not sources & others
    assert {
        f"tasks/stages/{stage}.py",
        "rl_core/training/loop.py",
        "tasks/pipeline/stage_key.py",
    } <= sources
    assert {
        "rl_core/models/causal_lm.py",
        "rl_core/api/__init__.py",
        "rl_core/__init__.py",
    } <= sources


def test_started_compiled_and_named_files_count():
    sources = set(list_stage_sources("policy"))
    assert {
        "rl_core/cpu/layer_kernels.py",
        "rl_core/cpu/decode_ops.c",
        "rl_core/cpu/vectors.h",
    } <= sources
    assert {"rl_core/environments/maze.py", "rl_core/environments/math_child.py"} <= sources


def test_an_edit_runs_the_stages_that_reach_it_and_no_other(monkeypatch):
    pipeline = build_settings({"name": "x", "stages": {"sft": {}, "policy": {}}}, check_files=False)

    def keys():
        return {
            name: collect_stage_key(name, getattr(pipeline.stages, name), pipeline, {}).key
            for name in ("sft", "policy")
        }

    before, content = keys(), stage_code._read_source
    edited = {"rl_core/losses/policy.py"}
    monkeypatch.setattr(
        stage_code, "_read_source", lambda path: content(path) + b"#" * (path in edited)
    )
    stage_code._digest_sources.cache_clear()
    after = keys()
    assert (after["sft"] == before["sft"], after["policy"] == before["policy"]) == (True, False)
    edited.add("rl_core/training/loop.py")
    stage_code._digest_sources.cache_clear()
    assert keys()["sft"] != before["sft"]
    monkeypatch.undo()
    stage_code._digest_sources.cache_clear()


def test_what_the_user_s_modules_import_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reader.py").write_text(
        "def measure(trajectory):\n    from rl_core.thoughts import episodes\n"
    )
    values = {
        "name": "x",
        "stages": {"sft": {}, "evaluate": {}, "analyze": {"measures": ["reader.py:measure"]}},
    }
    pipeline = build_settings(values, check_files=False)
    stage_key = collect_stage_key("analyze", pipeline.stages.analyze, pipeline, {})
    gain = "rl_core/thoughts/episodes.py"
    assert gain in stage_key.sources and gain not in list_stage_sources("analyze")
    assert set(stage_key.sources) > set(list_stage_sources("analyze"))


def test_a_task_of_another_package_has_the_whole_project(monkeypatch):
    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)
    stage_registry.register_stage(
        stage_registry.PipelineStage(name="odd", task="json:dumps", takes=())
    )
    assert (
        list_stage_sources("odd")
        == list_stage_sources("nowhere")
        == stage_code.list_project_sources()
    )
    assert stage_code.digest_stage_code("odd") == stage_code.compute_code_version()


def test_the_closure_is_not_everything():
    num_sources = len(stage_code.list_project_sources())
    for stage in stage_registry.list_stage_names():
        assert 30 < len(list_stage_sources(stage)) < 0.9 * num_sources, stage


SMALL = """
name: small
output: {output}
threads: 1
environment: {{name: arithmetic}}
model: {{preset: nano, vocab_size: 320, context: 128}}
tracking: {{traces: 0, system_metrics_seconds: 0}}
stages:
  prepare_data: {{num_demonstrations: 60, levels: [easy], preferences: {pairs}}}
  sft: {{max_steps: 2, batch_size: 4, warmup_steps: 1}}
  preference: {{max_steps: 1, batch_size: 4, warmup_steps: 0}}
  reward_model: {{max_steps: 1, batch_size: 4, warmup_steps: 0}}
  policy:
    {{iterations: 1, prompts_per_iteration: 2, group_size: 2, warmup_steps: 0, rewards: {{task: 1.0, learned: 0.1}},
      kl_coef: 0.1, sampling: {{max_completion_tokens: 6}}}}
  evaluate: {{episodes: 4, levels: [easy], sampling: {{max_completion_tokens: 6}}}}
  analyze: {{bootstrap_samples: 100, side_by_side: 1}}
  promote: {{min_success: 0.0, min_episodes: 2, bootstrap_samples: 100}}
"""


@pytest.mark.slow
def test_the_sources_contain_every_module_that_a_run_imports(tmp_path):
    """Run a complete pipeline in a fresh process, record its import edges, and follow them from each stage's module."""
    out, config, pairs = tmp_path / "edges.json", tmp_path / "small.yaml", tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": "no"} for n in range(40)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(SMALL.format(output=tmp_path / "out", pairs=pairs))
    program = [
        sys.executable,
        "-m",
        "helpers.import_recorder",
        str(out),
        "run",
        str(config),
        "--quiet",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    subprocess.run(program, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    edges = json.loads(out.read_text())
    seen = 0
    for stage in stage_registry.list_stages():
        start = stage.task.partition(":")[0]
        # the promotion imports `suites`, and nothing here runs it
        if start not in edges or stage.name == "suites":
            continue
        seen += 1
        reached, pending = set(), [start]
        while pending:
            module = pending.pop()
            if module not in reached:
                reached.add(module)
                pending += [] if is_frame_module(module) else edges.get(module, [])
        sources = set(list_stage_sources(stage.name))
        missing = {name for name in reached if str(ALL[name].relative_to(ROOT)) not in sources}
        assert missing == set(), stage.name
        assert len(reached) > 30
    assert seen >= 8  # all except distill and thoughts
