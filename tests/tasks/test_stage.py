"""The contract of a stage: what its key depends on, what its content digest leaves out, what training is given."""

import dataclasses
import threading

import pytest

from rl_core.errors import SettingsError
from rl_core.settings import PreferenceSettings, SFTSettings
from rl_core.trainers import loop
from tasks import stage
from tasks.config import from_dict
from tasks.stage import StageContext, content_digest, input_digest, stage_key, stage_seed

PIPELINE = {"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}


def pipeline(**changes):
    return from_dict({**PIPELINE, **changes})


def key(name="sft", settings=SFTSettings(), made=None, digests=None):  # noqa: B008 frozen
    return stage_key(name, settings, made or pipeline(), digests or {"data": "a"})


def test_the_key_changes_with_everything_that_decides_the_result(monkeypatch):
    changed = {
        "stage": key("preference"),
        "settings": key(settings=dataclasses.replace(SFTSettings(), batch_size=7)),
        "environment": key(made=pipeline(environment={"name": "arithmetic", "options": {"max_number": 9}})),
        "model": key(made=pipeline(model={"preset": "nano"})),
        "content of an input": key(digests={"data": "b"}),
        "name of an input": key(digests={"model": "a"}),
        "seed": key(made=pipeline(seed=1)),
    }
    same = key()
    assert len({same, *changed.values()}) == 1 + len(changed), "each one counts"
    assert key(made=pipeline(name="other", output="elsewhere")) == same  # where it lies changes no number
    monkeypatch.setattr(stage, "code_version", lambda: "other")
    assert key() != same


def test_the_key_changes_with_the_content_of_the_environment_s_data(tmp_path):
    data = tmp_path / "problems.jsonl"
    made = pipeline()
    made = dataclasses.replace(
        made, environment=dataclasses.replace(made.environment, name="gsm8k", options={"path": str(data)})
    )
    absent = key(made=made)
    data.write_text("1")
    first = key(made=made)
    data.write_text("2")
    assert len({absent, first, key(made=made)}) == 3
    data.write_text("1")
    assert key(made=made) == first


def test_timings_are_no_content():
    def digest(**changes):
        files = {"model/w": "1", "summary.json": "2", "metrics.jsonl": "3", "metrics_history.json": "4",
                 "recent_rollouts.jsonl": "5", **changes}  # fmt: skip
        return content_digest({"files": {name: {"sha256": value} for name, value in files.items()}})

    timed = ("summary.json", "metrics.jsonl", "metrics_history.json", "recent_rollouts.jsonl")
    assert {digest(**{name: "x"}) for name in timed} == {digest()}
    assert digest(**{"model/w": "x"}) != digest() != digest(**{"trajectories_policy.jsonl": "x"})


def test_inputs_by_their_content(tmp_path):
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    assert input_digest(tmp_path / "a") == input_digest(str(tmp_path / "b"))
    assert input_digest("org/name") == "org/name"  # a hub name is as it is written
    with pytest.raises(SettingsError, match="does not exist"):
        input_digest(tmp_path / "c")
    assert stage_seed(0, "sft") != stage_seed(0, "policy") and 0 <= stage_seed(5, "sft") < 2**31


def test_training_is_given_all_that_it_needs(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(loop, "run_loop", lambda trainer, settings, **rest: given.update(rest) or "outcome")
    settings, tracker, stop = PreferenceSettings(keep_checkpoints=5), object(), threading.Event()
    context = StageContext(
        name="preference", folder=tmp_path, settings=settings, pipeline=pipeline(), inputs={}, tracker=tracker,
        session=None, seed=1, fingerprint={"stage key": "k", "threads": "1"}, stop=stop,
    )  # fmt: skip
    assert context.train(object(), 7, best_metric="eval/loss", larger_is_better=False) == "outcome"
    store = given.pop("checkpoints")
    assert (store.folder, store.keep) == (tmp_path / "checkpoints", 5)
    assert given == {
        "iterations": 7, "tracker": tracker, "best_metric": "eval/loss", "larger_is_better": False,
        "fingerprint": {"stage key": "k", "threads": "1"}, "stop_event": stop,
        "history": tmp_path / "metrics_history.json",
    }  # fmt: skip
