"""First lines of a run: its stages, and those that are finished already under the same settings."""

from helpers.stage_doubles import PipelineRun

from flows.cli.opening import opening
from tasks.config import from_dict
from tasks.pipeline.drift import finished_now
from tasks.pipeline.stage import run_stage


def settings_of(tmp_path, **sft):
    stages = {"sft": sft, "policy": {"rewards": {"task": 1.0}}, "evaluate": {}}
    return from_dict({"name": "t", "output": str(tmp_path), "environment": {"name": "arithmetic"}, "stages": stages})


def finish(tmp_path, stage, **sft):
    pipeline_run = PipelineRun(tmp_path / "t" / "stages")
    pipeline_run.settings = settings_of(tmp_path, **sft)
    settings = getattr(pipeline_run.settings.stages, stage)
    run_stage(pipeline_run, stage, lambda context: {}, settings=settings, inputs={"model": "org/name"})


def cached(text):
    return [line for line in text.splitlines() if line.startswith("cached")]


def test_stages_that_are_finished_are_named_up_to_the_first_that_is_not(tmp_path):
    settings = settings_of(tmp_path)
    assert opening(settings).startswith("t: sft -> policy -> evaluate\nfiles ") and not cached(opening(settings))
    finish(tmp_path, "sft")
    assert cached(opening(settings)) == ["cached   sft, unless data files have changed"]
    finish(tmp_path, "evaluate")  # of another run: its model may be a new one
    assert finished_now(tmp_path / "t" / "stages", settings) == ["sft"]
    finish(tmp_path, "policy")
    assert cached(opening(settings)) == ["cached   sft, policy, evaluate, unless data files have changed"]
    assert cached(opening(settings, stages=["sft"])) == ["cached   sft, unless data files have changed"]
    assert opening(settings, stages=["sft"]).startswith("t: sft\n")
    assert cached(opening(settings, fresh=True)) == []


def test_a_changed_setting_is_not_called_cached(tmp_path):
    finish(tmp_path, "sft")
    assert cached(opening(settings_of(tmp_path, learning_rate=2e-3))) == []
    finish(tmp_path, "sft", learning_rate=2e-3)
    assert cached(opening(settings_of(tmp_path))) == ["cached   sft, unless data files have changed"]  # the older one


def test_a_damaged_folder_is_left_to_the_run(tmp_path):
    finish(tmp_path, "sft")
    for manifest in (tmp_path / "t" / "stages" / "sft").glob("*/manifest.json"):
        manifest.write_text("{")
    assert cached(opening(settings_of(tmp_path))) == []
