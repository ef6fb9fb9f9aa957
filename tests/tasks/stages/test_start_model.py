"""A pipeline that starts from a model measures it: a row everywhere, played once for all trainings."""

import json

import pytest
from crash.pipelines import write_inputs
from helpers.exports import in_this_process

from flows.runtime.run_summary import (
    build_result_rows,
    collect_parent_metrics,
    describe_run,
    format_headline,
    format_result_table,
)
from rl_core.data.tokenizer import train_tokenizer
from rl_core.evaluation import Evaluation, compare, summarize_trajectories
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from rl_core.types import Trajectory
from tasks.config import load_settings
from tasks.pipeline.changed_conditions import list_finished_stages
from tasks.pipeline.dag import run_dag, wrap_stage_call
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage_key import StageKeys
from tasks.pipeline.stage_result import format_gain
from tasks.stages import analyze, evaluate

WITHOUT = [f"stages.{stage}=null" for stage in ("distill", "preference", "reward_model", "policy")]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    tokenizer = train_tokenizer(
        [f"{a} + {b} = ? answer {a + b}" for a in range(9) for b in range(9)], 300
    )
    settings = ModelSettings(preset="nano", context=192, device="cpu")
    causal_lm.save(causal_lm.create_model(settings, tokenizer, 0), tokenizer, folder / "model")
    path = write_inputs(folder)
    values = json.loads(path.read_text())
    values["model"] = {"path": str(folder / "model")}
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module", autouse=True)
def _verify_exports_in_this_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.models.export_verification.score_in_fresh_process", in_this_process)
        yield


def run(config, *overrides, options=None):
    """Run the pipeline; return the run and the names of the models that were played."""
    played = []

    def play(context, name, *arguments):
        played.append(name)
        return play_model(context, name, *arguments)

    def write_report(*arguments, seed, **options):
        assert (
            seed == 0
        )  # of the pipeline, as the evaluation's: the same difference has one interval
        return analyze_models(*arguments, seed=seed, **options)

    play_model, analyze_models = evaluate._play_model, analyze.analyze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analyze, "analyze", write_report)
        patch.setattr(evaluate, "_play_model", play)
        with PipelineRun(load_settings(config, [*WITHOUT, *overrides]), options) as pipeline_run:
            run_dag(pipeline_run, {}, wrap_stage_call)
            rows = build_result_rows(pipeline_run)
            metrics = collect_parent_metrics(pipeline_run)
            text = describe_run(pipeline_run, rows)
    return pipeline_run, played, rows, metrics, text


@pytest.fixture(scope="module")
def first(config):
    return run(config)


def test_the_start_model_has_a_row_and_the_trained_one_its_paired_gain(config, first):
    pipeline_run, played, rows, metrics, text = first
    assert played == ["base", "sft"]
    stages = [row["stage"] for row in rows]
    assert stages == ["prepare_data", "base", "sft", "evaluate", "analyze", "export", "promote"]
    base, sft = rows[1], rows[2]
    model = pipeline_run.settings.model.path
    assert base["note"] == f"the start model, {model}" and 0 <= base["low"] <= base["success"]
    stored = json.loads((pipeline_run.results["evaluate"].path / "evaluation.json").read_text())
    assert list(stored) == ["base", "sft"]
    paired = compare(Evaluation.from_json(stored["sft"]), Evaluation.from_json(stored["base"]))
    assert sft["gain_over_base"] == paired.success.difference
    assert metrics["success_rate/base"] == base["success"]
    assert metrics["gain_over_base/sft"] == paired.success.difference
    assert metrics["gain_over_base/sft_low"] <= metrics["gain_over_base/sft_high"]
    table = format_result_table(rows, "", {}, 200)
    assert "gain over base" in table and "points [" in table and "the start model" in table
    assert "| gain over base |" in text
    assert format_headline(rows).startswith("sft ") and "over base; base " in format_headline(rows)


def test_analysis_gate_and_report_compare_with_the_start_model(config, first, capsys):
    pipeline_run, *_ = first
    results = pipeline_run.results
    rows = results["analyze"].summary["rows"]
    assert {row["model"] for row in rows} == {"base", "sft"}
    assert "points [" in results["promote"].summary["reason"]
    assert "over base" in results["promote"].summary["reason"]
    assert "promotion/gain_over_base" in results["promote"].summary["metrics"]
    review = (results["promote"].path / "review.md").read_text()
    assert "### Compared with the start model" in review
    assert list(results["export"].summary["models"]) == ["sft"]  # only what the run trained


@pytest.mark.slow
def test_another_training_does_not_play_the_start_model_again(config, first):
    short = ["stages.promote=null", "stages.analyze=null"]
    again, played, *_ = run(config, *short, "stages.sft.max_steps=2")
    assert played == ["sft"] and not again.results["evaluate"].cached
    models = again.results["evaluate"].summary["models"]
    assert models["base"] == first[0].results["evaluate"].summary["models"]["base"]
    assert run(config, *short)[1] == []
    other_episodes = ["stages.evaluate.episodes=5", *short]
    assert run(config, *other_episodes)[1] == ["base", "sft"]


def test_the_gain_is_paired_by_episode():
    """Of four episodes the start model solves the second, the trained one the first three."""

    def store(outcomes):
        return summarize_trajectories(
            [
                Trajectory("e", "easy", "k", seed, "?", "t", success=bool(won), reward=won / 2)
                for seed, won in enumerate(outcomes)
            ]
        ).to_json()

    stored = {"base": store([0, 1, 0, 0]), "sft": store([1, 1, 1, 0])}
    gain = evaluate._compare_with_start(stored, "sft", {"knows_success": True}, 0)
    assert gain["gain_over_base"] == 0.5
    assert 0.0 <= gain["gain_over_base_low"] < 0.5 < gain["gain_over_base_high"] <= 1.0
    assert format_gain({**gain, "gain_over_base_low": 0.0, "gain_over_base_high": 1.0}) == (
        "+50.0 points [+0.0, +100.0]"
    )
    rewarded = evaluate._compare_with_start(stored, "sft", {"knows_success": False}, 0)
    assert rewarded["gain_over_base"] == 0.25


def test_the_list_of_finished_stages_does_not_count_the_start_model_alone(config, tmp_path):
    overrides = [*WITHOUT, f"output={tmp_path}"]
    options = ["stages.analyze=null", "stages.promote=null"]
    settings = load_settings(config, [*overrides, *options])

    def stop(context, name, *arguments):
        if name == "sft":
            raise RuntimeError("killed")
        return play_model(context, name, *arguments)

    play_model = evaluate._play_model
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(evaluate, "_play_model", stop)
        with PipelineRun(settings) as pipeline_run:
            run_dag(pipeline_run, {}, wrap_stage_call)
    folder = pipeline_run.stages_folder
    assert list_finished_stages(folder, StageKeys(settings)) == ["prepare_data", "sft"]
    decisions = (folder / "evaluate" / "decisions.jsonl").read_text()
    assert decisions.count('"first"') == 2 and '"changed"' not in decisions


def test_from_scratch_nothing_is_added(config, tmp_path):
    overrides = [f"output={tmp_path}", "model.path=null", "model.preset=nano"]
    overrides += ["model.vocab_size=300", "model.context=192"]
    overrides += ["stages.analyze=null", "stages.promote=null"]
    _, played, rows, metrics, _ = run(config, *overrides)
    assert played == ["sft"]
    assert [row["stage"] for row in rows] == ["prepare_data", "sft", "evaluate"]
    assert "success_rate/base" not in metrics and not any("gain" in name for name in metrics)
    assert "gain over base" not in format_result_table(rows, "", {}, 200)
