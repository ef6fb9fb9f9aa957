"""First lines of a run: its stages, and those that are finished already under the same settings."""

import dataclasses
from types import SimpleNamespace

from helpers.stage_doubles import PipelineRun

from flows.sweep.plan import SweepPlan
from flows.sweep.search import parse_set_options
from posttrain.cli.run_setup import format_run_banner, format_sweep_banner
from tasks.config import build_settings
from tasks.pipeline.changed_conditions import list_finished_stages
from tasks.pipeline.stage import run_stage


def settings_of(tmp_path, **sft):
    stages = {"sft": sft, "policy": {"rewards": {"task": 1.0}}, "evaluate": {}}
    return build_settings(
        {
            "name": "t",
            "output": str(tmp_path),
            "environment": {"name": "arithmetic"},
            "stages": stages,
        }
    )


def finish(tmp_path, *stages, model="org/name", **sft):
    """Run stages one after the other, each from the one before."""
    pipeline_run = PipelineRun(tmp_path / "t" / "stages")
    pipeline_run.settings = settings_of(tmp_path, **sft)
    for stage in stages:
        settings = getattr(pipeline_run.settings.stages, stage)
        model = run_stage(
            pipeline_run, stage, lambda context: {}, settings=settings, inputs={"model": model}
        )
        pipeline_run.results[stage] = model


def cached(text):
    return [line for line in text.splitlines() if line.startswith("cached")]


def test_stages_that_are_finished_are_named_up_to_the_first_that_is_not(tmp_path):
    settings = settings_of(tmp_path)
    assert format_run_banner(settings).startswith(
        "t: sft -> policy -> evaluate\nfiles "
    ) and not cached(format_run_banner(settings))
    finish(tmp_path, "sft")
    assert cached(format_run_banner(settings)) == ["cached   sft, unless data files have changed"]
    finish(tmp_path, "evaluate")  # of another run: its model may be a new one
    assert list_finished_stages(tmp_path / "t" / "stages", settings) == ["sft"]
    finish(tmp_path, "sft", "policy", "evaluate")
    assert cached(format_run_banner(settings)) == [
        "cached   sft, policy, evaluate, unless data files have changed"
    ]
    assert cached(format_run_banner(settings, stages=["sft"])) == [
        "cached   sft, unless data files have changed"
    ]
    assert format_run_banner(settings, stages=["sft"]).startswith("t: sft\n")
    assert cached(format_run_banner(settings, fresh=True)) == []


def test_a_changed_setting_is_not_called_cached(tmp_path):
    finish(tmp_path, "sft")
    assert cached(format_run_banner(settings_of(tmp_path, learning_rate=2e-3))) == []
    finish(tmp_path, "sft", learning_rate=2e-3)
    assert cached(format_run_banner(settings_of(tmp_path))) == [
        "cached   sft, unless data files have changed"
    ]  # the older one


def test_a_stage_that_was_made_from_others_is_not_called_cached(tmp_path):
    """The policy's own settings are the same; the run trains it anew from the other SFT, or without one."""
    finish(tmp_path, "sft", "policy", learning_rate=2e-3)
    finish(tmp_path, "sft")
    assert cached(format_run_banner(settings_of(tmp_path))) == [
        "cached   sft, unless data files have changed"
    ]
    settings = settings_of(tmp_path)
    alone = settings.stages.replace_stages({"sft": None})
    assert (
        list_finished_stages(tmp_path / "t" / "stages", dataclasses.replace(settings, stages=alone))
        == []
    )
    finish(tmp_path, "policy")  # as a run of this stage alone, from a given model
    assert cached(format_run_banner(settings)) == ["cached   sft, unless data files have changed"]


def test_a_damaged_folder_is_left_to_the_run(tmp_path):
    finish(tmp_path, "sft")
    for manifest in (tmp_path / "t" / "stages" / "sft").glob("*/manifest.json"):
        manifest.write_text("{")
    assert cached(format_run_banner(settings_of(tmp_path))) == []


def test_a_sweep_says_what_varies_and_how_many_trials_there_are(tmp_path):
    overrides, dimensions = parse_set_options(
        [
            "stages.policy.group_size=4,8",
            "stages.policy.learning_rate=1e-4..1e-2:5:log",
            f"output={tmp_path}",
        ]
    )
    plan = SweepPlan(
        config="configs/demo.yaml",
        overrides=tuple(overrides),
        dimensions=tuple(dimensions),
        seeds=3,
    )
    base = plan.load_base_settings()
    text = format_sweep_banner(plan, base)
    assert (
        text.startswith("demo: sweep over stages.policy.group_size (2),")
        and "10 configurations x 3 seeds" in text
    )
    assert (
        f"files    {plan.locate_folder(base)}" in text
        and f"posttrain runs --output {tmp_path}" in text
    )
    assert all(
        len(line) < 80
        for line in text.splitlines()
        if not line.startswith(("files", "results", "live"))
    )


def test_pages_that_up_serves_are_named_by_their_addresses(tmp_path, monkeypatch):
    settings = settings_of(tmp_path)
    where = f"--output {tmp_path}"
    assert format_run_banner(settings).endswith(
        f"results  posttrain runs {where}, posttrain ui {where}"
    )
    urls = {
        "mlflow": "http://127.0.0.1:5110",
        "prefect": "http://127.0.0.1:4310",
        "monitor": "http://127.0.0.1:7960",
    }
    services = [SimpleNamespace(name=name, url=url) for name, url in urls.items()]
    monkeypatch.setattr(
        "posttrain.operations.connection.find_running_servers",
        lambda output: SimpleNamespace(services=services),
    )
    assert format_run_banner(settings).splitlines()[-2:] == [
        "live     http://127.0.0.1:7960",
        f"results  posttrain runs {where}, http://127.0.0.1:5110, http://127.0.0.1:4310",
    ]
    services.pop()
    assert "http://127.0.0.1:7960" not in format_run_banner(settings)
