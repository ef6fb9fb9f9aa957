"""Models of a pipeline run: permanent names, parents, tags of versions."""

from types import SimpleNamespace

import pytest

from rl_core.errors import BackendError
from rl_core.storage.manifest import digest_folder
from tasks.config import build_settings
from tasks.pipeline.run_tracking import ModelVersions
from tasks.pipeline.stage_result import StageResult


class Registry:
    """A registry with one version, 3 of m; everything else is a path."""

    def __init__(self, digest=""):
        self.digest = digest

    def find_version(self, reference):
        return SimpleNamespace(reference="models:/m/3")

    def download_version(self, version, cache):
        return cache / "m-3"

    def resolve_model(self, path, cache):
        return path

    def list_versions(self, name):
        return [SimpleNamespace(version=3, tags={"model_sha256": self.digest})]


class Tracker:
    def __init__(self, version=7):
        self.logged, self.version = [], version

    def log_model(self, folder, kind, name, *, metrics, tags, description, parent):
        self.logged.append((kind, name, metrics, tags, description))
        self.parent = parent
        return self.version


def make_result(stage, folder="f", **summary):
    return StageResult(stage, str(folder), "d", "k", False, 1.0, "r", summary)


def build_models(folder, results=None, registry=None, **settings):
    pipeline = build_settings(
        {
            "name": "m",
            "environment": {"name": "arithmetic"},
            "stages": {"prepare_data": {}, "sft": {}},
            **settings,
        },
        check_files=False,
    )
    return ModelVersions(
        pipeline, registry or Registry(), folder, results or {}, {"retraining": "now"}
    )


@pytest.mark.parametrize(
    ("stage", "parent"),
    [
        ("sft", "preset tiny"),
        ("preference", "models:/m/1"),
        ("reward_model", "models:/m/2"),  # the newest policy
        ("policy", "models:/m/2"),  # a reward model is no parent of a policy
        ("thoughts", "models:/m/2"),
        ("evaluate", None),  # trains nothing
    ],
)
def test_the_parent_is_the_policy_trained_before(tmp_path, stage, parent):
    results = {
        "sft": make_result("sft", model_version=1),
        "preference": make_result("preference", model_version=2),
        "reward_model": make_result("reward_model", model_version=9),
    }
    models = build_models(tmp_path, results, model={"preset": "tiny"})
    assert models.build_parent_tags(stage) == ({"parent_model_version": parent} if parent else {})


def test_an_alias_is_recorded_as_its_version(tmp_path):
    models = build_models(tmp_path, model={"path": "models:/m@champion"})
    assert models.resolve_base() == tmp_path / "m-3"
    assert models.build_parent_tags("sft") == {"parent_model_version": "models:/m/3"}
    assert build_models(tmp_path).resolve_base() is None  # a preset
    assert models.resolve_model("org/name") == ("org/name", "org/name")


def test_a_version_has_metrics_tags_and_description(tmp_path):
    (tmp_path / "w").write_text("w")
    tracker, models = (
        Tracker(),
        build_models(tmp_path, {"sft": make_result("sft", model_version=1)}),
    )
    summary = {"note": "good", "metrics": {"eval/loss": 0.5, "count": 3}}
    assert models.register_model(tracker, tmp_path, "policy", summary) == {
        "registered_model": "m",
        "model_version": 7,
    }
    kind, name, metrics, tags, description = tracker.logged[0]
    assert (kind, name, metrics) == ("policy", "m", {"eval/loss": 0.5})
    assert description == "policy from version 1: good"
    assert tags["parent_version"] == "1" and tags["model_sha256"] == digest_folder(tmp_path)
    assert tags["retraining"] == "now" and tags["stage"] == "policy"
    models.register_model(tracker, tmp_path, "reward_model", {})
    assert tracker.logged[1][:2] == ("reward_model", "m-reward-model")


def test_models_are_identified_by_content_while_the_store_is_down(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_text("w")
    offline_tracker, content = Tracker(version=None), ("m", digest_folder(tmp_path / "model"))
    models = build_models(tmp_path, {"sft": make_result("sft", tmp_path)})
    assert models.register_model(offline_tracker, tmp_path, "policy", {"note": "good"}) == {
        "registered_model": "m"
    }
    assert (
        offline_tracker.parent == content and "parent_version" not in offline_tracker.logged[0][3]
    )
    assert offline_tracker.logged[0][4] == "policy from version {parent}: good"
    assert models.build_parent_tags("policy") == {"parent_model_version": content}
    with pytest.raises(BackendError, match="the tracking store is down"):
        models.ensure_version(make_result("sft", tmp_path), offline_tracker)


def test_journals_are_delivered_before_a_model_is_registered_again(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_text("w")
    registry, tracker = Registry(), Tracker()
    models = build_models(tmp_path, registry=registry)
    models._deliver = lambda: setattr(registry, "digest", digest_folder(tmp_path / "model"))
    assert (
        models.ensure_version(make_result("sft", tmp_path), tracker) == 3 and tracker.logged == []
    )


def test_a_model_is_registered_once(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w").write_text("w")
    tracker, trained = Tracker(), make_result("sft", tmp_path)
    models = build_models(tmp_path, registry=Registry(digest_folder(tmp_path / "model")))
    assert models.ensure_version(trained, tracker) == 3 and tracker.logged == []
    assert build_models(tmp_path).ensure_version(trained, tracker) == 7 and len(tracker.logged) == 1
