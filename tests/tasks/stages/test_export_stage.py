"""The stage `export`: proofs of a run's models, and the mark on a version that is refused."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from helpers.exports import in_this_process

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import BackendError, ExportMismatch, SettingsError
from rl_core.models import causal_lm
from rl_core.models.export_records import (
    EVALUATED_LOGPROBS_FILE,
    TRAINED_LOGPROBS_FILE,
    TRAINED_SCORES_FILE,
    TokenRecord,
    record_fixed_scores,
    record_trained_logprobs,
    score_records,
    write_records,
    write_scores,
)
from rl_core.models.heads import create_reward_model
from rl_core.settings import ExportSettings, ModelSettings
from rl_core.storage.manifest import digest_folder
from tasks.config import StagesSettings, build_settings
from tasks.lifecycle.promotion import promote_version
from tasks.pipeline.stage import StageContext
from tasks.pipeline.stage_result import StageResult
from tasks.stages import export


@pytest.fixture(scope="module")
def trained():
    tokenizer = train_tokenizer(["abc xyz"], 300)
    return causal_lm.create_model(
        ModelSettings(preset="nano", context=64, device="cpu"), tokenizer, 0
    ), tokenizer


@pytest.fixture
def stage(tmp_path, trained, monkeypatch):
    """The body on a policy that was trained, written and evaluated at temperature 0.7; `prove()` runs it."""
    monkeypatch.setattr(
        "rl_core.models.export_verification.score_in_fresh_process", in_this_process
    )
    model, tokenizer = trained
    causal_lm.save(model, tokenizer, tmp_path / "policy" / "model")
    write_records(tmp_path / "policy" / TRAINED_LOGPROBS_FILE, record_trained_logprobs(model))
    evaluated = score_records(model, [TokenRecord([1, 2, 3, 4], [2, 3], [], 0.7)])
    (tmp_path / "evaluate").mkdir()
    write_records(tmp_path / "evaluate" / EVALUATED_LOGPROBS_FILE, {"policy": evaluated})
    (tmp_path / "export").mkdir()
    tagged, logged = {}, {}
    tracking = SimpleNamespace(
        tag_version=lambda name, version, tags: tagged.update({(name, version): tags}),
        list_versions=lambda name: [
            SimpleNamespace(
                version=number,
                tags={"model_sha256": digest_folder(tmp_path / "policy" / "model"), **tags},
            )
            for (_, number), tags in tagged.items()
        ],
    )
    pipeline_run = SimpleNamespace(
        registered_model="m",
        tracking=tracking,
        parent="parent",
        models=SimpleNamespace(ensure_version=lambda result, tracker: 4),
    )
    tracker = SimpleNamespace(
        log_metrics=lambda metrics, step: logged.update(metrics),
        progress=lambda *a: None,
        log_artifact=lambda *a: None,
    )
    context = StageContext(
        name="export",
        folder=tmp_path / "export",
        settings=ExportSettings(),
        pipeline_run=pipeline_run,
        tracker=tracker,
        inputs={"evaluation": tmp_path / "evaluate"},
        seed=0,
        fingerprint={},
        stop=None,
        pipeline=build_settings({"name": "t", "model": {"device": "cpu"}, "stages": {"sft": {}}}),
    )
    result = StageResult("policy", str(tmp_path / "policy"), "d", "k", False, 1.0, "r", {})

    def prove(reward_model=None):
        return export._run_export_proof(context, {"policy": result}, reward_model)

    return SimpleNamespace(
        prove=prove, folder=tmp_path, tagged=tagged, logged=logged, run=pipeline_run
    )


def test_a_proof_names_the_folder_and_has_both_figures(stage):
    summary = stage.prove()
    facts = json.loads((stage.folder / "export" / "export.json").read_text())["models"]["policy"]
    assert facts["model_sha256"] == digest_folder(stage.folder / "policy" / "model")
    assert 0 <= facts["trained"]["max"] < 1e-4 and 0 <= facts["evaluated"]["max"] < 1e-4
    assert stage.logged["export/policy/evaluated_difference_max"] == facts["evaluated"]["max"]
    assert (
        summary["note"].startswith("loaded by transformers in a fresh process")
        and stage.tagged == {}
    )


def test_a_refused_model_marks_its_version(stage, trained):
    _, tokenizer = trained
    other = causal_lm.create_model(
        ModelSettings(preset="nano", context=64, device="cpu"), tokenizer, 1
    )
    causal_lm.save(other, tokenizer, stage.folder / "policy" / "model")
    with pytest.raises(
        ExportMismatch, match=r"differ from the trained model's by up to \d"
    ) as refused:
        stage.prove()
    assert stage.tagged == {("m", 4): {"export.refused": str(refused.value)}}
    assert not (stage.folder / "export" / "export.json").exists()

    def away(result, tracker):
        raise BackendError("the store is away")

    stage.run.models.ensure_version = away
    with pytest.raises(ExportMismatch, match="differ from the trained"):
        stage.prove()


def test_a_proof_lifts_the_refusal_of_exactly_its_model(stage):
    stage.tagged |= {
        ("m", 3): {"model_sha256": "another", "export.refused": "why"},
        ("m", 4): {"export.refused": "why"},
    }
    stage.prove()
    assert stage.tagged[("m", 3)] == {"model_sha256": "another", "export.refused": "why"}
    tags, digest = stage.tagged[("m", 4)], digest_folder(stage.folder / "policy" / "model")
    assert tags["export.refused"] == "" and tags["export.model_sha256"] == digest
    assert float(tags["export.trained_difference_max"]) < 1e-4, (
        "a version that no gate met has its figures, too"
    )

    def away(name):
        raise BackendError("the store is away")

    stage.run.tracking.versions = away
    assert "policy" in stage.prove()["models"]


def test_models_that_the_run_did_not_train_cannot_be_proven():
    with pytest.raises(
        SettingsError,
        match=r"stages\.export: this run trained none of the evaluated models \(mine\)",
    ):
        export.prove_models(None, None, {"mine": "folder"})


def test_an_evaluation_of_another_model_is_distinguished_from_training(stage):
    path = stage.folder / "evaluate" / EVALUATED_LOGPROBS_FILE
    rows = json.loads(path.read_text())
    rows["policy"][0]["logprobs"][0] += 0.01
    path.write_text(json.dumps(rows))
    with pytest.raises(
        ExportMismatch, match=r"differ from the evaluated model's by up to 0\.01 nats"
    ):
        stage.prove()


def test_a_model_without_any_record_is_not_proven(stage):
    (stage.folder / "policy" / TRAINED_LOGPROBS_FILE).unlink()
    (stage.folder / "evaluate" / EVALUATED_LOGPROBS_FILE).unlink()
    with pytest.raises(ExportMismatch, match="has no record of log-probs"):
        stage.prove()


def test_it_comes_with_promote_and_cannot_be_left_out():
    stages = {"sft": {}, "evaluate": {}, "promote": {}}
    settings = build_settings({"name": "t", "stages": {**stages, "export": None}}).stages
    assert (
        settings.active == ("sft", "evaluate", "export", "promote")
        and settings.export == ExportSettings()
    )
    bounded = build_settings({"name": "t", "stages": {**stages, "export": {"bound": 0.1}}}).stages
    assert bounded.export == ExportSettings(bound=0.1)
    assert StagesSettings().export is None
    assert (
        build_settings(
            {"name": "t", "stages": {"sft": {}, "evaluate": {}, "export": {}}}
        ).stages.active[-1]
        == "export"
    )
    with pytest.raises(SettingsError, match=r"needs the log-probs of stages\.evaluate"):
        build_settings({"name": "t", "stages": {"sft": {}, "export": {}}})


@pytest.fixture(scope="module")
def rewarding(trained, tmp_path_factory):
    """Folder of a stage that trained a reward model, and the model."""
    folder = tmp_path_factory.mktemp("reward_model")
    causal_lm.save(*trained, folder / "start")
    model, tokenizer = create_reward_model(folder / "start", ModelSettings(device="cpu"), seed=3)
    causal_lm.save(model, tokenizer, folder / "model")
    return folder, model


def test_a_reward_model_is_proven_by_its_scores(stage, rewarding):
    folder, model = rewarding
    write_scores(folder / TRAINED_SCORES_FILE, record_fixed_scores(model))
    summary = {"registered_model": "m-reward-model", "model_version": 7}
    proof_summary = stage.prove(
        StageResult("reward_model", str(folder), "d", "k", False, 1.0, "r", summary)
    )
    facts = proof_summary["models"]["reward_model"]
    assert (
        facts["model_sha256"] == digest_folder(folder / "model")
        and 0 <= facts["trained"]["max"] < 1e-4
    )
    assert (
        proof_summary["metrics"]["export/reward_model/trained_difference_max"]
        == facts["trained"]["max"]
    )
    tags = stage.tagged["m-reward-model", 7]
    assert (
        tags["export.model_sha256"] == facts["model_sha256"]
        and "export.trained_difference_max" in tags
    )


def test_a_reward_model_that_scores_otherwise_is_refused_and_marked(stage, rewarding):
    folder, model = rewarding
    write_scores(
        folder / TRAINED_SCORES_FILE,
        [dataclasses.replace(row, score=row.score + 0.01) for row in record_fixed_scores(model)],
    )
    summary = {"registered_model": "m-reward-model", "model_version": 7}
    with pytest.raises(
        ExportMismatch, match=r"scores differ from the trained model's by up to 0\.01"
    ):
        stage.prove(StageResult("reward_model", str(folder), "d", "k", False, 1.0, "r", summary))
    assert "by up to 0.01" in stage.tagged["m-reward-model", 7]["export.refused"]
    assert not (stage.folder / "export" / "export.json").exists()


def test_a_refused_version_is_not_promoted_by_hand(monkeypatch):
    version = SimpleNamespace(version=2, tags={"export.refused": "its log-probs differ by 2 nats"})
    registry = SimpleNamespace(
        find_champion=lambda name: None, fetch_version=lambda name, number: version
    )
    monkeypatch.setattr(
        "tasks.lifecycle.promotion.Tracking", lambda *a: SimpleNamespace(registry=registry)
    )
    settings = build_settings({"name": "t", "stages": {"sft": {}}})
    with pytest.raises(
        ExportMismatch, match="version 2 of t is not promoted: its log-probs differ by 2 nats"
    ):
        promote_version(settings, 2)


@pytest.mark.parametrize(
    ("tags", "proof", "is_taken"),
    [
        ({"model_sha256": "a", "export.model_sha256": "a"}, None, True),
        ({"model_sha256": "a", "export.model_sha256": "b"}, None, False),  # of another folder
        ({"model_sha256": "a"}, None, False),
        (
            {"model_sha256": "a"},
            {"models": {"policy": {"model_sha256": "a"}}},
            True,
        ),  # the store was down
        ({"model_sha256": "a"}, {"models": {"policy": {"model_sha256": "b"}}}, False),
        ({"model_sha256": "a"}, {"models": []}, False),
        ({"model_sha256": "a"}, [], False),
        ({}, {"models": {"policy": {"model_sha256": ""}}}, False),
        ({"export.model_sha256": "a"}, None, True),  # registered without a digest
    ],
)
def test_a_version_without_a_proof_of_its_folder_is_not_promoted_by_hand(
    monkeypatch, tmp_path, tags, proof, is_taken
):
    moved = []
    version = SimpleNamespace(version=2, tags=tags)
    registry = SimpleNamespace(
        find_champion=lambda name: None,
        fetch_version=lambda name, number: version,
        tag_version=lambda *a: None,
        set_champion=lambda name, number: moved.append((name, number)),
    )
    tracking = SimpleNamespace(registry=registry, record_alias_move=lambda *a: None)
    monkeypatch.setattr("tasks.lifecycle.promotion.Tracking", lambda *a: tracking)
    if proof is not None:
        place = tmp_path / "t" / "stages" / "export" / "key"
        place.mkdir(parents=True)
        (place / "export.json").write_text(json.dumps(proof))
    settings = build_settings({"name": "t", "output": str(tmp_path), "stages": {"sft": {}}})
    if is_taken:
        assert promote_version(settings, 2) == "version 2 of t is the champion now"
    else:
        with pytest.raises(
            ExportMismatch,
            match=r"version 2 of t is not promoted: there is no proof .*export: \{\}",
        ):
            promote_version(settings, 2)
    assert moved == ([("t", 2)] if is_taken else [])


def test_dropped_weights_are_named(stage):
    config = stage.folder / "policy" / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    with pytest.raises(ExportMismatch, match=r"first lm_head\.weight"):
        stage.prove()
