"""First lines of a run: its stages, and those already finished under the same settings."""

import dataclasses
from types import SimpleNamespace

from helpers.stage_doubles import PipelineRun

from flows.sweep.plan import SweepPlan
from flows.sweep.search import parse_set_options
from posttrain.cli.run_setup import format_run_banner, format_sweep_banner
from tasks.config import build_settings
from tasks.pipeline.changed_conditions import list_finished_stages
from tasks.pipeline.stage import run_stage
from tasks.pipeline.stage_key import StageKeys


def build_test_settings(tmp_path, **sft):
    stages = {"sft": sft, "policy": {"rewards": {"task": 1.0}}, "evaluate": {}}
    return build_settings(
        {
            "name": "t",
            "output": str(tmp_path),
            "environment": {"name": "arithmetic"},
            "stages": stages,
        }
    )


def finish_stages(tmp_path, *stages, model="org/name", **sft):
    """Run stages in sequence, each from the one before."""
    pipeline_run = PipelineRun(tmp_path / "t" / "stages")
    pipeline_run.settings = build_test_settings(tmp_path, **sft)
    for stage in stages:
        settings = getattr(pipeline_run.settings.stages, stage)
        model = run_stage(
            pipeline_run, stage, lambda context: {}, settings=settings, inputs={"model": model}
        )
        pipeline_run.results[stage] = model


def list_cached_lines(text):
    return [line for line in text.splitlines() if line.startswith("cached")]


def test_stages_that_are_finished_are_named_up_to_the_first_that_is_not(tmp_path):
    settings = build_test_settings(tmp_path)
    assert format_run_banner(settings).startswith(
        "t: sft -> policy -> evaluate\noutput "
    ) and not list_cached_lines(format_run_banner(settings))
    finish_stages(tmp_path, "sft")
    assert list_cached_lines(format_run_banner(settings)) == [
        "cached   sft, unless data files have changed"
    ]
    finish_stages(tmp_path, "evaluate")  # of another run, whose model may differ
    assert list_finished_stages(tmp_path / "t" / "stages", StageKeys(settings)) == ["sft"]
    finish_stages(tmp_path, "sft", "policy", "evaluate")
    assert list_cached_lines(format_run_banner(settings)) == [
        "cached   sft, policy, evaluate, unless data files have changed"
    ]
    assert list_cached_lines(format_run_banner(settings, stages=["sft"])) == [
        "cached   sft, unless data files have changed"
    ]
    assert format_run_banner(settings, stages=["sft"]).startswith("t: sft\n")
    assert list_cached_lines(format_run_banner(settings, fresh=True)) == []


def test_a_changed_setting_is_not_called_cached(tmp_path):
    finish_stages(tmp_path, "sft")
    assert (
        list_cached_lines(format_run_banner(build_test_settings(tmp_path, learning_rate=2e-3)))
        == []
    )
    finish_stages(tmp_path, "sft", learning_rate=2e-3)
    assert list_cached_lines(format_run_banner(build_test_settings(tmp_path))) == [
        "cached   sft, unless data files have changed"
    ]  # the older result


def test_a_stage_with_other_inputs_is_not_called_cached(tmp_path):
    """Train again: the policy's settings are unchanged, but it would start from another SFT model, or without one."""
    finish_stages(tmp_path, "sft", "policy", learning_rate=2e-3)
    finish_stages(tmp_path, "sft")
    assert list_cached_lines(format_run_banner(build_test_settings(tmp_path))) == [
        "cached   sft, unless data files have changed"
    ]
    settings = build_test_settings(tmp_path)
    stages = settings.stages.replace_stages({"sft": None})
    alone = StageKeys(dataclasses.replace(settings, stages=stages))
    assert list_finished_stages(tmp_path / "t" / "stages", alone) == []
    finish_stages(tmp_path, "policy")  # like a run of this stage alone from some model
    assert list_cached_lines(format_run_banner(settings)) == [
        "cached   sft, unless data files have changed"
    ]


def test_a_damaged_folder_is_left_to_the_run(tmp_path):
    finish_stages(tmp_path, "sft")
    for manifest in (tmp_path / "t" / "stages" / "sft").glob("*/manifest.json"):
        manifest.write_text("{")
    assert list_cached_lines(format_run_banner(build_test_settings(tmp_path))) == []


def test_the_banner_of_a_sweep_shows_what_varies_and_the_number_of_trials(tmp_path):
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
        f"output   {plan.locate_folder(base)}" in text
        and f"posttrain runs --output {tmp_path}" in text
    )
    assert all(
        len(line) < 80
        for line in text.splitlines()
        if not line.startswith(("output", "results", "web UI"))
    )


def test_pages_that_up_serves_are_named_by_their_addresses(tmp_path, monkeypatch):
    settings = build_test_settings(tmp_path)
    option = f"--output {tmp_path}"
    assert format_run_banner(settings).endswith(
        f"web UI   posttrain ui {option}\nresults  posttrain runs {option}"
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
        "web UI   http://127.0.0.1:7960, http://127.0.0.1:5110, http://127.0.0.1:4310",
        f"results  posttrain runs {option}",
    ]
    services.pop()
    assert "http://127.0.0.1:7960" not in format_run_banner(settings)
