"""The stage gguf: the promoted model as a file, cached, repeated after a failure, refused before anything runs."""

from __future__ import annotations

import json

import pytest
from crash.pipelines import write_inputs
from helpers.exports import in_this_process
from helpers.gguf_models import build_model

from flows.runtime.pipeline_figure import _list_arrows
from rl_core.errors import ModelError
from rl_core.models import gguf_export
from rl_core.models.gguf_files import load_gguf_model
from rl_core.storage.manifest import digest_file
from tasks.config import build_settings, load_settings
from tasks.config.problems import ConfigError
from tasks.pipeline.dag import run_dag, wrap_stage_call
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.tracking import Tracking

pytest.importorskip("gguf")

WITHOUT = [
    f"stages.{stage}=null"
    for stage in ("distill", "preference", "reward_model", "policy", "analyze")
]


@pytest.fixture(scope="module", autouse=True)
def _verify_exports_in_this_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_core.models.export_verification.score_in_fresh_process", in_this_process)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("gguf"))


def run(config, *overrides):
    with PipelineRun(load_settings(config, [*WITHOUT, *overrides])) as pipeline_run:
        run_dag(pipeline_run, {}, wrap_stage_call)
    return pipeline_run


def test_the_promoted_model_is_written_once(config, monkeypatch):
    results = run(config, "stages.gguf={type: f32}").results
    assert list(results)[-2:] == ["promote", "gguf"]
    assert results["promote"].summary["decision"] == "promoted"
    stage = results["gguf"]
    file = stage.path / "small-f32.gguf"
    assert (stage.path / "Modelfile").read_text().startswith("FROM ./small-f32.gguf\nTEMPLATE")
    model, _ = load_gguf_model(file)
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(results["sft"].model)
    for name, weight in trained.state_dict().items():
        assert (weight == model.state_dict()[name]).all(), name
    metrics = stage.summary["metrics"]
    assert metrics["gguf/kl"] < 1e-6 and metrics["gguf/megabytes"] == file.stat().st_size / 1e6
    output = config.parent / "work" / "outputs"
    tracking = Tracking(None, output, "small")
    tags = tracking.find_champion("small").tags
    assert tags["gguf.sha256"] == digest_file(file) and tags["gguf.type"] == "f32"
    (row,) = [row for row in tracking.list_runs() if row.run_id == stage.run_id]
    assert row.tags["gguf.file"] == "small-f32.gguf"
    artifacts = tracking.store.client.list_artifacts(stage.run_id)
    assert {"Modelfile", "small-f32.gguf"} <= {artifact.path for artifact in artifacts}

    monkeypatch.setattr(gguf_export, "write_gguf_file", None)  # a second run writes nothing
    repeated = run(config, "stages.gguf={type: f32}").results["gguf"]
    assert repeated.cached and repeated.path == stage.path


def test_a_failed_proof_leaves_no_file_and_is_repeated(config, monkeypatch):
    def refuse(*arguments):
        raise ModelError("small-bf16.gguf: read back, its distributions differ")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_export, "prove_gguf_file", refuse)
        with pytest.raises(ModelError, match="distributions differ"):
            run(config, "stages.gguf={type: bf16}")
    stages = config.parent / "work" / "outputs" / "small" / "stages"
    assert not list(stages.rglob("small-bf16.gguf"))
    results = run(config, "stages.gguf={type: bf16}").results
    assert results["sft"].cached and not results["gguf"].cached
    assert (results["gguf"].path / "small-bf16.gguf").is_file()


@pytest.mark.slow
def test_a_model_that_is_not_promoted_is_not_written(config):
    results = run(config, "seed=1", "stages.gguf={}", "stages.promote.min_gain=0.99").results
    assert results["promote"].summary["decision"] == "rejected"
    assert results["gguf"].summary == {"note": "not written: the new model is rejected"}
    stages = config.parent / "work" / "outputs" / "small" / "stages"
    assert not list(stages.rglob("*q8_0.gguf"))


def test_without_promotion_the_newest_model_is_written(config):
    results = run(config, "stages.promote=null", "stages.evaluate=null", "stages.gguf={}").results
    assert results["gguf"].summary["gguf.file"] == "small-q8_0.gguf"
    assert 0 < results["gguf"].summary["metrics"]["gguf/kl"] < 0.01


def build_with_model(folder, stages):
    values = {"name": "t", "environment": {"name": "arithmetic"}, "stages": stages}
    return build_settings({**values, "model": {"path": str(folder)}})


def test_what_cannot_be_written_is_refused_before_the_training(tmp_path):
    def write_config(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))

    policy = {"policy": {"algorithm": "grpo"}, "gguf": {}}
    write_config(model_type="gemma3_text")
    with pytest.raises(ConfigError) as refused:
        build_with_model(tmp_path, policy)
    line = "stages.gguf: a model of type gemma3_text is not written as GGUF (llama, mistral, qwen2, qwen3 are); use"
    assert line in str(refused.value)
    write_config(model_type="llama", rope_parameters={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"stages\.gguf: rotary scaling 'yarn' is not written"):
        build_with_model(tmp_path, policy)
    write_config(model_type="llama")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(ConfigError, match=r"stages\.gguf: the tokenizer is no byte-level BPE"):
        build_with_model(tmp_path, policy)
    build_model()[1].save_pretrained(tmp_path)
    assert build_with_model(tmp_path, policy).stages.gguf.type == "q8_0"
    with pytest.raises(ConfigError, match=r"stages\.gguf: has no new model to write"):
        build_with_model(tmp_path, {"evaluate": {}, "gguf": {}})


def test_the_figure_shows_it_behind_the_promotion():
    assert ("promote", "gguf") in _list_arrows(["sft", "evaluate", "export", "promote", "gguf"])
    assert ("sft", "gguf") in _list_arrows(["sft", "gguf"])
