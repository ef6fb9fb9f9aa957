"""Pipelines over rows of a file: problems reported before anything runs, and changes that need another stage."""

import json
from pathlib import Path

import pytest

from rl_core.settings import PolicySettings
from tasks.config import ConfigError, build_settings
from tasks.pipeline.stage_key import collect_stage_key

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "level": str(n % 2)} for n in range(30)]


def rewarded(trajectories, anwser):
    return [0.0] * len(trajectories)


def build_config(folder, rewards=None, stages=None, **options):
    place = Path(folder) / "q.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    stages = stages or {
        "prepare_data": {},
        "sft": {},
        "policy": {"rewards": rewards or {"task": 1.0}},
    }
    return {
        "name": "mine",
        "environment": {"name": "prompts", "options": {"path": str(place), **options}},
        "output": str(folder),
        "stages": stages,
    }


def read_problems(values):
    with pytest.raises(ConfigError) as error:
        build_settings(values)
    return str(error.value)


def test_a_file_with_a_verifier_is_a_pipeline(tmp_path):
    settings = build_settings(build_config(tmp_path, verifier="numeric"))
    assert settings.environment.options["verifier"] == "numeric"
    curriculum = [
        {"name": "a", "levels": {"0": 1.0}, "max_iterations": 1},
        {"name": "b", "levels": {"1": 1.0}},
    ]
    build_settings(
        build_config(
            tmp_path,
            verifier="exact",
            stages={"policy": {"curriculum": curriculum}, "prepare_data": {}, "sft": {}},
        )
    )
    curriculum[1]["levels"] = {"2": 1.0}
    wrong = build_config(
        tmp_path,
        verifier="exact",
        stages={"policy": {"curriculum": curriculum}, "prepare_data": {}, "sft": {}},
    )
    assert "environment 'prompts' has no level '2'" in read_problems(wrong)


def test_problems_are_reported_with_their_key(tmp_path):
    assert "stages.policy.rewards: prompts alone give no reward" in read_problems(
        build_config(tmp_path)
    )
    build_settings(build_config(tmp_path, rewards={"exact": 1.0}))
    named = {f"{__file__}:rewarded": 1.0}
    assert (
        "asks for the column 'anwser', but the rows have prompt, answer, level; did you mean 'answer'"
        in read_problems(build_config(tmp_path, rewards=named))
    )
    assert "environment.options.target: no row has a column 'gold'" in read_problems(
        build_config(tmp_path, verifier="exact", target="gold")
    )
    missing = build_config(tmp_path, verifier="exact")
    missing["environment"]["options"]["path"] = "owner/name"
    assert "also needs options.revision" in read_problems(missing)


def test_another_content_is_another_stage(tmp_path):
    settings = build_settings(
        build_config(tmp_path, verifier="exact", heldout=str(tmp_path / "q.jsonl"))
    )
    before = collect_stage_key("policy", PolicySettings(), settings, {}).key
    assert collect_stage_key("policy", PolicySettings(), settings, {}).key == before
    with (tmp_path / "q.jsonl").open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert collect_stage_key("policy", PolicySettings(), settings, {}).key != before
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.csv").write_text("prompt,answer\nx,1\ny,2\n")
    folder = build_config(tmp_path, verifier="exact")
    folder["environment"]["options"]["path"] = str(tmp_path / "many")
    settings = build_settings(folder)
    before = collect_stage_key("policy", PolicySettings(), settings, {}).key
    (tmp_path / "many" / "a.csv").write_text("prompt,answer\nx,1\ny,3\n")
    assert collect_stage_key("policy", PolicySettings(), settings, {}).key != before


def test_rows_that_a_verifier_cannot_use_are_problems(tmp_path):
    bad = {"prompt": "when?", "answer": "3:45", "level": "0"}
    for options, rewards in (({"verifier": "numeric"}, None), ({}, {"numeric": 1.0})):
        values = build_config(tmp_path, rewards=rewards, **options)
        build_settings(values)
        with Path(values["environment"]["options"]["path"]).open("a") as file:
            file.write(json.dumps(bad) + "\n")
        problems = read_problems(values)
        assert "q.jsonl:31: " in problems and "the target '3:45' is not one number" in problems
