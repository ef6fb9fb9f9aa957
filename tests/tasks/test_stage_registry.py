"""The registry of stages, and that nothing else keeps a list of them."""

import ast
import dataclasses
import inspect

import pytest
from helpers import ROOT

from flows.runtime.pipeline_figure import _compute_box_positions, _list_arrows
from posttrain.cli.main import build_parser
from tasks import stage_registry
from tasks.config import STAGES, StagesSettings
from tasks.stage_registry import PipelineStage, register_stage


@pytest.fixture
def registry(monkeypatch):
    """Restore the registry after each test."""
    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)
    return stage_registry


def build_stage(**changed):
    return PipelineStage(
        **{
            "name": "polish",
            "task": "json:dumps",
            "takes": ("model",),
            "gives": "policy",
            **changed,
        }
    )


def test_the_settings_have_a_field_for_each_stage_in_the_same_order():
    fields = [field.name for field in dataclasses.fields(StagesSettings)]
    assert (tuple(fields[:-1]), fields[-1]) == (stage_registry.list_stage_names(), "custom")
    assert stage_registry.list_stage_names() == STAGES


def test_kinds_of_stages():
    assert stage_registry.list_policy_stages() == (
        "sft",
        "distill",
        "preference",
        "policy",
        "thoughts",
    )
    assert stage_registry.list_training_stages() == (
        "sft",
        "distill",
        "preference",
        "reward_model",
        "policy",
        "thoughts",
        "network",
    )
    assert stage_registry.list_result_stages() == (
        "evaluate",
        "suites",
        "analyze",
        "export",
        "promote",
        "gguf",
    )
    assert stage_registry.find_stage("reward_model").trained_kind == "reward_model"
    assert stage_registry.find_stage("prepare_data").trained_kind is None
    assert (
        stage_registry.find_stage("network").trained_kind == "network"
        and stage_registry.find_stage("network").takes == ()
    )


@pytest.mark.parametrize("stage", stage_registry.list_stages(), ids=lambda stage: stage.name)
def test_every_task_exists_and_takes_what_it_is_handed(stage):
    from tasks.pipeline.dag import _StageOutputs

    task = stage_registry.import_stage_task(stage)
    inspect.signature(task).bind("session", *stage.takes)
    properties = {field.name for field in dataclasses.fields(_StageOutputs)} | set(
        vars(_StageOutputs)
    )
    assert set(stage.needs) <= set(stage.takes) <= properties


def test_a_stage_takes_its_place_everywhere(registry):
    register_stage(build_stage(), before="reward_model")
    assert registry.list_policy_stages() == (
        "sft",
        "distill",
        "preference",
        "polish",
        "policy",
        "thoughts",
    )
    assert (
        registry.list_stage_names().index("polish")
        == registry.list_stage_names().index("reward_model") - 1
    )
    assert build_parser().parse_args(["run", "x.yaml", "--only", "polish"]).only == "polish"
    assert (
        build_parser().parse_args(["check", "profile", "x.yaml", "--stage", "polish"]).stage
        == "polish"
    )
    arrows = {">".join(pair) for pair in _list_arrows(["sft", "polish", "reward_model", "policy"])}
    assert arrows == {"sft>polish", "polish>reward_model", "polish>policy", "reward_model>policy"}
    register_stage(build_stage(name="report", gives=None))
    assert registry.list_stage_names()[-1] == "report" and "report" in registry.list_result_stages()
    assert _compute_box_positions(["sft", "report"]) == {"sft": (0.0, 1.0), "report": (2.0, 0.5)}


def test_a_wrong_entry_is_refused(registry):
    with pytest.raises(ValueError, match="'sft' is registered already"):
        register_stage(build_stage(name="sft"))
    with pytest.raises(ValueError, match="needs data, which it does not take"):
        register_stage(build_stage(needs=("data",)))
    with pytest.raises(
        ValueError, match="no stage 'nowhere' is registered; known: prepare_data, sft"
    ):
        register_stage(build_stage(), before="nowhere")
    assert "polish" not in registry.list_stage_names()


def list_policy_literals(path):
    """List lines of literals that name two or more policy stages side by side."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        named = {part.value for part in parts if isinstance(part, ast.Constant)} & set(
            stage_registry.list_policy_stages()
        )
        if len(named) > 1:
            yield node.lineno


def test_no_other_module_keeps_a_list_of_stages():
    modules = [
        path
        for package in ("posttrain", "flows", "tasks")
        for path in (ROOT / package).rglob("*.py")
    ]
    assert len(modules) > 50
    assert [f"{path}:{line}" for path in modules for line in list_policy_literals(path)] == []
