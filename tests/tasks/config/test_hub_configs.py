"""Pipelines on environments of the hubs: what is checked before anything runs, without a server."""

import json

import pytest

from flows.parameters import PROTECTED_KEYS
from rl_core.settings import PolicySettings
from tasks.config import ConfigError, build_settings
from tasks.pipeline.stage_key import collect_stage_key

ROW = {"responses_create_params": {"input": "x"}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{**ROW, "number": number} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "server.py").write_text("print('hello')\n")
    return tmp_path


OPTIONS = {
    "openenv": {"command": "python server.py {port}"},
    "nemo_gym": {"url": "http://127.0.0.1:1", "path": "rows.jsonl"},
    "harbor": {"url": "http://127.0.0.1:1", "tasks": [{"path": f"/t/{n}"} for n in range(20)]},
}


def build(name, stages=None, **options):
    return {
        "name": "mine",
        "environment": {"name": name, "options": {**OPTIONS[name], **options}},
        "output": "outputs",
        "stages": stages or {"policy": {}},
        "model": {"preset": "nano"},
    }


def read_problems(values, **options):
    with pytest.raises(ConfigError) as error:
        build_settings(values, **options)
    return str(error.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_hub_is_accepted_without_its_server(name):
    settings = build_settings(build(name))
    assert collect_stage_key("policy", PolicySettings(), settings, {}).key


@pytest.mark.parametrize(
    ("name", "options", "key", "words"),
    [
        ("openenv", {"command": "python server.py"}, "options.command", "{port}"),
        ("openenv", {"sessions": 3}, "options.sessions", "did you mean 'max_sessions'"),
        ("nemo_gym", {"path": "other.jsonl"}, "options.path", "other.jsonl"),
        ("nemo_gym", {"url": "x"}, "options.url", "http://"),
        ("harbor", {"tasks": "other.jsonl"}, "options.tasks", "other.jsonl"),
        (
            "harbor",
            {"tasks": [{"prompt": "x"}, {"prompt": "y"}]},
            "options.tasks",
            "a path or a name",
        ),
    ],
)
def test_options(name, options, key, words):
    problems = read_problems(build(name, **options))
    assert f"environment.{key}" in problems and words in problems
    assert problems.count(f"environment.{key}: ") == 1


def test_what_agents_cannot_be_combined_with_is_refused_for_harbor():
    problems = read_problems(build("harbor", {"sft": {}, "thoughts": {}}))
    assert "stages.thoughts" in problems and "environment 'harbor'" in problems


@pytest.mark.parametrize(("name", "file"), [("openenv", "server.py"), ("nemo_gym", "rows.jsonl")])
def test_the_stage_key_covers_the_server_s_script_and_the_rows(folder, name, file):
    def compute_key():
        settings = build_settings(build(name))
        return collect_stage_key("policy", PolicySettings(), settings, {}).key

    before = compute_key()
    assert before == compute_key()
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace("hello", "bye").replace('"x"', '"y"'))
    assert compute_key() != before


def test_a_deployment_s_run_may_not_change_servers_and_programs():
    for option in ("command", "cwd", "env", "url", "opponent", "others", "tasks", "path"):
        assert f"environment.options.{option}" in PROTECTED_KEYS
