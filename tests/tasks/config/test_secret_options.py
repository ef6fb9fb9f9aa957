"""Secrets among an environment's options: masked where settings are stored, whole where they are used."""

import json
from types import SimpleNamespace

import pytest

from flows.parameters import build_settings_parameter, read_settings
from flows.runtime.run_request import RunRequest, use_request
from posttrain.cli import recorded_settings
from rl_core.errors import SettingsError
from tasks.config import PipelineSettings, build_settings, dump_settings
from tasks.config.displayed_settings import list_masked_keys, mask_secrets
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.run_tracking import PipelineTracker
from tasks.tracking import Tracking

SECRETS = {
    "api_key": "one-1",
    "hf_token": "two-2",
    "judgePassword": "three-3",
    "API-Keys": ["four-4", {"x": "five-5"}],
    "client": {"secret": "six-6"},
    "CREDENTIALS": {"user": "seven-7"},
}
PUBLIC = {
    "max_tokens": 64,
    "tokenizer": "bytes",
    "keyboard": "qwerty",
    "author": "me",
    "tokens": 3,
    "path": "rows",
    "key": None,
}


@pytest.fixture
def settings(tmp_path) -> PipelineSettings:
    values = {"name": "secretive", "output": str(tmp_path), "stages": {"sft": {}}}
    values["environment"] = {"name": "my_tasks:Env", "options": {**SECRETS, **PUBLIC}}
    return build_settings(values, check_files=False, import_code=False)


def test_texts_of_secret_options_are_masked_and_nothing_else(settings):
    whole = dump_settings(settings)
    hidden = mask_secrets(whole)
    assert hidden["environment"]["options"] == {
        "api_key": "***",
        "hf_token": "***",
        "judgePassword": "***",
        "API-Keys": ["***", {"x": "***"}],
        "client": {"secret": "***"},
        "CREDENTIALS": {"user": "***"},
        **PUBLIC,
    }
    assert {**hidden, "environment": None} == {
        **whole,
        "environment": None,
    } and whole == dump_settings(settings)
    assert list_masked_keys(hidden)[:2] == [
        "environment.options.api_key",
        "environment.options.hf_token",
    ]
    assert len(list_masked_keys(hidden)) == 7 and list_masked_keys(whole) == []


def test_no_secret_is_written_by_a_run(settings, tmp_path):
    tracker = PipelineTracker(
        Tracking(None, tmp_path),
        settings,
        RunOptions(),
        home=tmp_path / "t",
        started="2026-11-22 10:00:00",
        resumed=False,
        on_progress=lambda *_: None,
    )
    tracker.log_settings(1)
    tracker.close("FINISHED")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"qwerty" in written and b"***" in written
    values = ["one-1", "two-2", "three-3", "four-4", "five-5", "six-6", "seven-7"]
    assert [value for value in values if value.encode() in written] == []


def test_a_flow_called_here_gets_them_though_its_parameter_has_none(settings, monkeypatch):
    got = []
    monkeypatch.setattr("flows.parameters.build_settings", lambda values, **_: got.append(values))
    stored = build_settings_parameter(settings)
    assert "one-1" not in json.dumps(stored)
    with use_request(RunRequest(settings=settings)):
        assert read_settings(stored) is settings and got == []  # the command has checked them
        read_settings({**stored, "seed": 5})
    read_settings(stored)
    assert got == [{**dump_settings(settings), "seed": 5}, stored]


def test_a_run_whose_secrets_were_not_stored_is_not_resumed_without_them(settings, tmp_path):
    record = SimpleNamespace(name="secretive", settings=mask_secrets(dump_settings(settings)))
    with pytest.raises(
        SettingsError, match=r"environment\.options\.api_key, .*posttrain run CONFIG"
    ):
        recorded_settings.load_recorded_settings(record, tmp_path)
