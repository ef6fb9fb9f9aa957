"""A stage that a test makes up: settings, a task and one entry of the registry are all that it takes."""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import tasks.config
from rl_core.settings import Settings, setting
from tasks import stage_registry
from tasks.config import PipelineSettings, StagesSettings, from_dict
from tasks.pipeline.stage import run_stage
from tasks.stage_registry import PipelineStage


@dataclass(frozen=True, kw_only=True)
class TwinSettings(Settings):
    """Settings of the made-up stage."""

    note: str = setting("a twin", doc="what the stage says")


def make_twin(pipeline_run, model, data):
    """Run the stage: its model is the one that it starts from."""
    inputs = {"model": model, "data": data}
    return run_stage(pipeline_run, "twin", _body, settings=pipeline_run.settings.stages.twin, inputs=inputs)


def _body(context):
    shutil.copytree(context.inputs["model"], context.folder / "model")
    return {"note": context.settings.note}


def settings_class(base, **fields):
    """`base` with fields more, as if they had been written into it."""
    named = [(name, kind, setting(default, doc=f"{name} of a test")) for name, (kind, default) in fields.items()]
    return dataclasses.make_dataclass(base.__name__, named, bases=(base,), frozen=True, kw_only=True)


@pytest.fixture
def made_up(monkeypatch):
    stages = settings_class(StagesSettings, twin=(TwinSettings | None, None))
    pipeline = settings_class(PipelineSettings, stages=(stages, None))
    monkeypatch.setattr(tasks.config, "PipelineSettings", pipeline)
    monkeypatch.setattr(stage_registry, "_STAGES", stage_registry._STAGES)
    stage = PipelineStage(
        name="twin", task=f"{__name__}:make_twin", takes=("model", "data"), needs=("data",), gives="policy"
    )
    stage_registry.register(stage, before="preference")


def settings_of(output: Path):
    return from_dict(
        {
            "name": "own", "output": str(output), "threads": 1,
            "model": {"preset": "nano", "vocab_size": 320, "context": 128},
            "tracking": {"system_metrics_seconds": 0.0},
            "stages": {
                "prepare_data": {"num_demonstrations": 40, "levels": ["easy"]},
                "sft": {"max_steps": 1, "batch_size": 4}, "twin": {"note": "an own stage"}, "policy": {},
            },
        }
    )  # fmt: skip


def test_an_own_stage_runs_by_its_name_and_its_model_has_a_parent(made_up, prefect_api, tmp_path):
    from flows.single_stage import run_stage as run_single_stage
    from tasks.tracking import Tracking

    result = run_single_stage(settings_of(tmp_path), "twin", quiet=True)
    assert list(result.results) == ["prepare_data", "sft", "twin"]  # what it needs, and nothing after it
    assert result.results["twin"].summary["note"] == "an own stage"
    tracking = Tracking(None, tmp_path, "own")
    versions = {version.tags["stage"]: version for version in tracking.versions("own")}
    assert list(versions) == ["sft", "twin"]
    assert versions["twin"].tags["parent_version"] == str(versions["sft"].version) == "1"
    run = next(row for row in tracking.list_runs() if row.name == "twin")
    assert run.tags["parent_model_version"] == "models:/own/1"
    again = run_single_stage(settings_of(tmp_path), "twin", quiet=True)
    assert all(stage.cached for stage in again.results.values())
