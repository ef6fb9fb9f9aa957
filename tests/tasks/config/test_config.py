"""load, from_dict, resolve and the digest; types, ranges and unknown keys with their messages."""

import dataclasses
import json
from pathlib import Path

import pytest

from rl_core.errors import SettingsError
from tasks.config import (
    STAGES,
    ConfigError,
    PipelineSettings,
    build_pipeline_model,
    build_settings,
    check_changed_settings,
    digest_settings,
    dump_settings,
    load_settings,
)

SMALL = "name: demo\nstages:\n  sft: {}\n"


def write_config(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def list_problems(folder: Path, text: str, *overrides: str) -> dict[str, str]:
    """List the problems by dotted key."""
    with pytest.raises(ConfigError) as caught:
        load_settings(write_config(folder, text), overrides)
    problems = {".".join(map(str, problem.key)): problem.text for problem in caught.value.problems}
    assert len(problems) == len(caught.value.problems)
    return problems


def test_defaults_and_types(tmp_path):
    settings = load_settings(
        write_config(
            tmp_path,
            SMALL + "  policy: {learning_rate: 1e-5, betas: [0, 0.9], kl_coef: 1}\nseed: 3\n",
        )
    )
    assert settings.seed == 3 and settings.output == "outputs"
    assert settings.stages.active == ("sft", "policy")
    policy = settings.stages.policy
    assert policy.learning_rate == 1e-5
    assert policy.betas == (0.0, 0.9) and isinstance(policy.betas[0], float)
    assert policy.kl_coef == 1.0 and isinstance(
        policy.kl_coef, float
    )  # a whole number where a number is asked for
    assert settings.stages.sft.epochs == 3.0
    assert settings.experiment == "demo" and settings.registered_model == "demo"


def test_stage_left_out_null_and_empty_block(tmp_path):
    settings = load_settings(
        write_config(tmp_path, "name: x\nstages:\n  sft: {}\n  policy: null\n  evaluate:\n")
    )
    assert settings.stages.active == ("sft",)


def test_timeouts(tmp_path):
    settings = load_settings(
        write_config(tmp_path, SMALL + "run: {timeout_seconds: 60, timeouts: {policy: 3600}}\n")
    )
    assert settings.run.find_timeout("policy") == 3600 and settings.run.find_timeout("sft") == 60
    assert settings.run.retries == 2


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("seed: true", "seed", "found true (true/false); expected a whole number"),
        ("seed: 1.5", "seed", "found 1.5 (number); expected a whole number"),
        ("seed: 2.0", "seed", "; write 2"),
        ("seed: '1'", "seed", "write it without quotes"),
        ("seed: -1", "seed", "found -1 (whole number); expected a whole number at least 0"),
        ("seed: 1_000", "seed", "without quotes, commas and underscores"),
        ("seed:", "seed", "found nothing (null)"),
        ("seed: [1]", "seed", "found a list of 1"),
        ("output: 3", "output", "expected text"),
        ("model: nano", "model", "expected a block of keys"),
        ("model: {preset: huge}", "model.preset", "expected one of nano, tiny, small"),
        ("model: {trust_remote_code: yes}", "model.trust_remote_code", "expected true or false"),
        ("model: {trust_remote_code: yes}", "model.trust_remote_code", "write true"),
        ("model: {presett: nano}", "model.presett", "unknown key; did you mean 'preset'?"),
        ("learning_rate: 1", "learning_rate", "it belongs to stages.sft, stages.distill, "),
        (
            "zzz: 1",
            "zzz",
            "unknown key; known: environment, environments, model, name, online, output",
        ),
        (
            "environment: {name: pixel_grid, options: 3}",
            "environment.options",
            "a block of `name: value`",
        ),
        ("tracking: {uri: ./mlruns}", "tracking.uri", "not a store that MLflow accepts"),
        (
            "tracking: {uri: 'postgresql://me:secret@host/db'}",
            "tracking.uri",
            "MLFLOW_TRACKING_URI",
        ),
        ("tracking: {registered_model: a/b}", "tracking.registered_model", "no path separators"),
        ("tracking: {system_metrics_seconds: -1}", "tracking.system_metrics_seconds", "at least 0"),
        (
            "model: {target_module: q_proj}",
            "model.target_module",
            "did you mean 'lora.target_modules'?",
        ),
        ("run: {timeouts: {polcy: 1}}", "run.timeouts.polcy", "did you mean 'policy'?"),
        ("run: {timeouts: {policy: 0}}", "run.timeouts.policy", "greater than 0"),
        ("run: {retries: -1}", "run.retries", "at least 0"),
        ("output: ''", "output", "must name a folder"),
        (
            "threads: 0",
            "threads",
            "found 0 (whole number); expected a whole number at least 1 and at most 1024, auto or",
        ),
        ("threads: atuo", "threads", "at most 1024, auto or null [CPU threads"),
        ("threads: 2.0", "threads", "; write 2"),
        ("threads: '2'", "threads", "write it without quotes"),
        ("threads: true", "threads", "found true (true/false)"),
    ],
)
def test_one_bad_line(tmp_path, line, key, expected):
    problems = list_problems(tmp_path, SMALL + line + "\n")
    assert list(problems) == [key]
    assert expected in problems[key]


@pytest.mark.parametrize(
    ("block", "key", "expected"),
    [
        (
            "{learning_rate: 2}",
            "learning_rate",
            "found 2 (whole number); expected a number greater than 0 and at most 1",
        ),
        ("{learning_rate: 0}", "learning_rate", "greater than 0"),
        ("{learning_rate: 3e-4x}", "learning_rate", "found '3e-4x' (text); expected a number"),
        ("{learning_rate: '3e-4'}", "learning_rate", "without quotes"),
        ("{iterations: 1e3}", "iterations", "; write 1000"),
        ("{betas: [0.9]}", "betas.1", "is missing"),
        ("{betas: [0.9, 0.9, 0.9]}", "betas", "a list of exactly 2, each a number"),
        ("{betas: [0.9, 1.0]}", "betas.1", "less than 1"),
        ("{curriculum: easy}", "curriculum", "expected a list"),
        ("{curriculum: [{levels: {easy: 1}}]}", "curriculum.0.name", "is missing; add it"),
        (
            "{curriculum: [{name: a, levels: {easy: true}}]}",
            "curriculum.0.levels.easy",
            "expected a number",
        ),
        ("{curriculum: [{name: a, levels: {easy: 0}}]}", "curriculum.0.levels", "weight above 0"),
        (
            "{curriculum: [{name: a, levels: {easy: 1}, min_iterations: 9, max_iterations: 3}]}",
            "curriculum.0.max_iterations",
            "3 is below min_iterations 9",
        ),
        ("{early_stop: {comparison: '=>'}}", "early_stop.comparison", "one of >=, >, <=, <"),
        ("{rewards: {task: .nan}}", "rewards.task", "finite"),
        ("{group_size: 1}", "group_size", "1 leaves grpo without a baseline"),
        ("{temprature: 1}", "temprature", "did you mean 'sampling.temperature'?"),
        ("{samplng: {}}", "samplng", "did you mean 'sampling'?"),
        ("{sampling: {max_turn: 1}}", "sampling.max_turn", "did you mean 'max_turns'?"),
    ],
)
def test_one_bad_line_in_policy(tmp_path, block, key, expected):
    problems = list_problems(tmp_path, f"{SMALL}  policy: {block}\n")
    assert list(problems) == [f"stages.policy.{key}"]
    assert expected in problems[f"stages.policy.{key}"]


@pytest.mark.parametrize(
    "name", ["a/b", "..", "a\\b", ".x", "a b", "", "é", "x" * 65, "a..b", "-x", "a\nb"]
)
def test_names_that_are_no_single_folder(tmp_path, name):
    problems = list_problems(tmp_path, f"name: {json.dumps(name)}\nstages: {{sft: {{}}}}\n")
    assert list(problems) == ["name"]


def test_missing_name_and_stages(tmp_path):
    assert set(list_problems(tmp_path, "seed: 1\n")) == {"name", "stages"}
    missing = list_problems(tmp_path, "stages: {policy: {group_size: 1}}\n")
    assert set(missing) == {"name", "stages.policy.group_size"}  # a missing name hides nothing
    assert "there is none" in list_problems(tmp_path, "name: x\nstages: {}\n")["stages"]


def test_all_problems_are_reported_in_the_order_of_the_file(tmp_path):
    text = "name: a/b\nstages:\n  policy:\n    group_size: 1\n    group_siz: 3\n    rewards: {tsk: 1}\nsede: 4\n"
    path = write_config(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, ["stages.sft.epochs=-1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 problems:"
    starts = [
        f"{path}:1: name: ",
        f"{path}:4: stages.policy.group_size: ",
        f"{path}:5: stages.policy.group_siz: unknown key; did you mean 'group_size'?",
        f"{path}:6: stages.policy.rewards.tsk: no such component; did you mean 'task'?",
        f"{path}:7: sede: unknown key; did you mean 'seed'?",
        "--set stages.sft.epochs=-1: stages.sft.epochs: found -1 (whole number); expected a number greater than 0",
    ]
    for line, start in zip(lines[1:], starts, strict=True):
        assert line.startswith(start), line


def test_one_bad_value_is_reported_once(tmp_path):
    assert set(list_problems(tmp_path, SMALL + "  policy: {kl_coef: .inf}\n")) == {
        "stages.policy.kl_coef"
    }
    # The loader has refused it; that the 0 in its place is out of range is no second problem.
    assert set(list_problems(tmp_path, SMALL + "  policy: {learning_rate: .nan}\n")) == {
        "stages.policy.learning_rate"
    }
    text = SMALL + "  policy: {curriculum: [{name: 1, levels: {easy: 1}}]}\n"
    assert set(list_problems(tmp_path, text)) == {"stages.policy.curriculum.0.name"}


def test_long_and_strange_values_are_shortened_and_escaped(tmp_path):
    text = list_problems(tmp_path, SMALL + f'seed: "\\e[31m{"x" * 500}"\n')["seed"]
    assert "\x1b" not in text and len(text) < 250


def test_resolve_is_the_inverse_of_from_dict(tmp_path):
    first = "{name: a, levels: {easy: 1}, exit_conditions: [{window: 3}]}"
    policy = f"{{curriculum: [{first}, {{name: b, levels: {{hard: 2}}}}]}}"
    settings = load_settings(
        write_config(tmp_path, f"{SMALL}  policy: {policy}\nmodel: {{vocab_size: 400}}\n")
    )
    values = dump_settings(settings)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["stages"]["policy"]["curriculum"][0]["exit_conditions"][0]["window"] == 3
    assert build_settings(values) == settings
    assert build_settings(build_pipeline_model().model_validate(values)) == settings


def test_from_dict_reports_without_a_file():
    with pytest.raises(
        ConfigError, match=r"settings: stages\.policy\.group_siz: unknown key"
    ) as caught:
        build_settings({"name": "x", "stages": {"policy": {"group_siz": 3}}})
    assert isinstance(caught.value, SettingsError)
    with pytest.raises(ConfigError, match="found a list of 0"):
        build_settings([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.lora\.alpha.*finite"):
        build_settings(
            {"name": "x", "stages": {"sft": {}}, "model": {"lora": {"alpha": float("nan")}}}
        )


def test_from_dict_leaves_its_argument_alone():
    values = {"name": "x", "stages": {"policy": {"bad": 1}}}
    with pytest.raises(ConfigError):
        build_settings(values)
    assert values == {"name": "x", "stages": {"policy": {"bad": 1}}}


def test_digest(tmp_path):
    settings = load_settings(write_config(tmp_path, SMALL))
    digest = digest_settings(settings)
    assert len(digest) == 16 and int(digest, 16) >= 0
    assert digest_settings(build_settings(dump_settings(settings))) == digest
    plain = dump_settings(settings)
    plain["stages"]["own"] = plain["stages"].pop("custom")  # a digest names settings as before
    assert digest_settings(plain) == digest
    assert (
        digest_settings(
            load_settings(write_config(tmp_path, "stages:\n  sft: {epochs: 3}\nname: demo\n"))
        )
        == digest
    )
    assert digest_settings(dataclasses.replace(settings, seed=1)) != digest
    assert digest_settings({"b": 1, "a": (2, Path("x"))}) == digest_settings(
        {"a": [2, "x"], "b": 1}
    )
    # SHA-256 of '{"a":1}', worked out with sha256sum
    assert digest_settings({"a": 1}) == "015abd7f5cc57a2d"


def test_schema_has_every_field_with_its_meaning_and_range():
    schema = build_pipeline_model().model_json_schema()  # of the form in the Prefect UI
    json.dumps(schema, allow_nan=False)
    policy = schema["$defs"]["PolicySettings"]
    assert policy["additionalProperties"] is False
    assert policy["properties"]["learning_rate"] == {
        "anyOf": [{"exclusiveMinimum": 0, "maximum": 1, "type": "number"}, {"type": "null"}],
        "default": None,  # a form that filled it in would set it, whatever the model
        "description": "peak learning rate; unset: 1e-6, with LoRA 1e-5, presets 3e-4",
        "title": "Learning rate",
    }
    assert policy["properties"]["sampling"]["default"]["max_completion_tokens"] is None
    assert policy["properties"]["betas"]["prefixItems"][0] == {
        "minimum": 0,
        "exclusiveMaximum": 1,
        "type": "number",
    }
    assert schema["properties"]["environment"]["default"] == {"name": "pixel_grid", "options": {}}
    assert schema["required"] == ["name", "stages"]
    assert set(schema["$defs"]["StagesSettings"]["properties"]) == {*STAGES, "custom"}
    for name, block in schema["$defs"].items():
        for field, entry in block.get("properties", {}).items():
            assert entry.get("description"), f"{name}.{field} has no meaning"


def test_a_number_or_a_word_or_null(tmp_path):
    for text, value in (("4", 4), ("auto", "auto"), ("null", None)):
        settings = load_settings(write_config(tmp_path, SMALL), [f"threads={text}"])
        assert settings.threads == value and dump_settings(settings)["threads"] == value
        assert build_settings(dump_settings(settings), check_files=False) == settings
    entry = build_pipeline_model().model_json_schema()["properties"]["threads"]
    assert entry["anyOf"] == [
        {"minimum": 1, "maximum": 1024, "type": "integer"},
        {"const": "auto", "type": "string"},
        {"type": "null"},
    ]
    for wrong, message in (
        ("atuo", "did you mean 'auto'"),
        ("2", "leave out the quotes"),
        (0, "must be at least 1"),
    ):
        with pytest.raises(SettingsError, match=f"threads: .*{message}"):
            dataclasses.replace(settings, threads=wrong)


def test_dataclass_checks_alone_too():
    with pytest.raises(SettingsError, match="name: 'a/b'"):
        PipelineSettings(name="a/b", stages=load_stages())
    with pytest.raises(SettingsError, match="seed: -1 must be at least 0"):
        PipelineSettings(name="a", seed=-1, stages=load_stages())


def test_settings_that_were_checked_are_not_checked_again_unless_they_changed():
    values = {"name": "x", "stages": {"sft": {}, "policy": {}}}
    settings = build_settings(values)
    assert check_changed_settings(settings) is settings
    assert check_changed_settings(settings, check_servers=False) is settings
    changed = dataclasses.replace(settings, seed=5)
    checked = check_changed_settings(changed)
    assert checked == changed and checked is not changed
    assert check_changed_settings(checked) is checked
    wrong = dataclasses.replace(
        settings, model=dataclasses.replace(settings.model, path="none/at/all")
    )
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_changed_settings(wrong)


@pytest.mark.parametrize("left_out", ["check_files", "import_code", "check_servers"])
def test_a_partial_check_is_completed(left_out):
    partial = build_settings({"name": "x", "stages": {"sft": {}}}, **{left_out: False})
    assert check_changed_settings(partial) is not partial
    is_complete = left_out == "check_servers"
    assert (check_changed_settings(partial, check_servers=False) is partial) == is_complete


def load_stages():
    return build_settings({"name": "x", "stages": {"sft": {}}}).stages
