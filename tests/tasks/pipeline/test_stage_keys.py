"""Keys of a pipeline's stages, collected once; content of the user that may change is digested again."""

import dataclasses
import json
from collections import Counter

import pytest

from tasks.config import build_settings
from tasks.pipeline import stage_key
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.stage_key import StageKeys, collect_stage_key

INPUTS = {"model": "org/name", "data": "0123"}


def build_test_settings(**blocks):
    values = {"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}
    return build_settings({**values, **blocks}, check_files=False)


@pytest.fixture
def collected(monkeypatch):
    """Count the keys that are collected, by stage."""
    counts, real = Counter(), stage_key.collect_stage_key

    def collect(name, *arguments):
        counts[name] += 1
        return real(name, *arguments)

    monkeypatch.setattr(stage_key, "collect_stage_key", collect)
    return counts


def test_a_key_is_collected_once_and_equals_the_one_computed_with_its_inputs(collected):
    settings = build_test_settings()
    keys = StageKeys(settings)
    assert (
        keys.collect_key("sft").key == keys.collect_started_key("sft", settings.stages.sft, {}).key
    )
    for inputs in (INPUTS, {**INPUTS, "data": "4567"}, {}):
        key = keys.collect_started_key("sft", settings.stages.sft, inputs)
        assert key.parts["inputs"] == inputs
        assert list(key.parts) == list(keys.collect_key("sft").parts)
        assert collected == {"sft": 1}
        assert key.key == collect_stage_key("sft", settings.stages.sft, settings, inputs).key


def test_other_settings_of_the_stage_have_their_own_key(collected):
    settings = build_test_settings()
    keys = StageKeys(settings)
    other = dataclasses.replace(settings.stages.sft, epochs=7.0)
    key = keys.collect_started_key("sft", other, INPUTS).key
    assert key != keys.collect_started_key("sft", settings.stages.sft, INPUTS).key
    assert key == collect_stage_key("sft", other, settings, INPUTS).key


@pytest.mark.parametrize("kind", ["data", "template", "code"])
def test_what_the_user_changes_before_a_stage_starts_counts(tmp_path, monkeypatch, collected, kind):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / {"data": "rows.jsonl", "template": "chat.jinja", "code": "mine.py"}[kind]
    before_text, after_text = "score = None\n", "score = 1\n"
    if kind == "data":
        rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(40)]
        before_text, after_text = "\n".join(rows[:39]), "\n".join(rows)
    file.write_text(before_text)
    blocks = {
        "data": {
            "environment": {
                "name": "prompts",
                "options": {"path": str(file), "verifier": "numeric"},
            }
        },
        "template": {"model": {"chat_template": str(file)}},
        "code": {"stages": {"sft": {}, "policy": {"rewards": {"mine.py:score": 1.0}}}},
    }[kind]
    values = {"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}
    settings = build_settings({**values, **blocks}, check_files=False, import_code=False)
    stage = "policy" if kind == "code" else "sft"
    stage_settings = getattr(settings.stages, stage)
    keys = StageKeys(settings)
    before = keys.collect_key(stage).key
    assert keys.collect_key(stage).key == before and collected == {stage: 1}
    file.write_text(after_text)
    after = keys.collect_started_key(stage, stage_settings, {}).key
    assert after != before
    assert after == collect_stage_key(stage, stage_settings, settings, {}).key


def test_a_run_takes_the_keys_of_its_own_settings_alone(tmp_path):
    settings = build_test_settings(output=str(tmp_path))
    keys = StageKeys(settings)
    assert PipelineRun(settings, keys=keys).stage_keys is keys
    other = dataclasses.replace(settings, seed=5)
    assert PipelineRun(other, keys=keys).stage_keys.pipeline is other
