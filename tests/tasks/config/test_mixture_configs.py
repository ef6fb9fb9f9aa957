"""Several environments in a configuration: what is refused before a stage begins, and what the settings become."""

import json
from types import SimpleNamespace

import pytest
from helpers.config_problems import list_problems

from rl_core.settings import EnvironmentSettings
from tasks.config import ConfigError, build_settings, dump_settings, load_settings
from tasks.config.cross_checks import find_waste
from tasks.config.displayed_settings import mask_secrets
from tasks.lifecycle.data_lineage import list_data_sources
from tasks.pipeline.run_options import select_settings_up_to
from tasks.pipeline.stage_key import collect_stage_key, digest_environment_files
from tasks.stages import policy as policy_stage

SUMS = {"name": "arithmetic", "label": "sums", "levels": {"easy": 1}}
GRID = {"name": "pixel_grid", "weight": 2.0}
PROCESS = {"process": {"function": "json:dumps"}}


def find_problems(*environments, stages=None, **values):
    environments = list(environments) or [SUMS, GRID]
    stages = stages or {"sft": {}, "policy": {}}
    return list_problems(environments=environments, stages=stages, **values)


def build(*environments, stages=None, **values):
    return build_settings(
        {
            "name": "x",
            "environments": list(environments) or [SUMS, GRID],
            "stages": stages or {"sft": {}, "policy": {}},
            **values,
        },
        check_files=False,
    )


def test_environments_become_one_environment_and_settings_survive_a_dump():
    settings = build()
    assert settings.environment.name == "mixture"
    entries = settings.environment.options["environments"]
    assert [entry["label"] or entry["name"] for entry in entries] == ["sums", "pixel_grid"]
    again = build_settings(json.loads(json.dumps(dump_settings(settings))), check_files=False)
    assert again == settings
    plain = build_settings({"name": "x", "stages": {"policy": {}}}, check_files=False)
    assert plain.environment == EnvironmentSettings() and plain.environments == ()


CASES = [
    (
        [SUMS, {**GRID, "label": "SUMS"}],
        "environments.1.label",
        "two environments are named 'SUMS'",
    ),
    ([{**SUMS, "label": "a/b"}, GRID], "environments.0.label", "'a/b' must be 1 to 40"),
    ([{**SUMS, "weight": -1}, GRID], "environments.0.weight", "at least 0"),
    (
        [{**SUMS, "weight": 0}, {**GRID, "weight": 0.0}],
        "environments.weight",
        "every environment has weight 0",
    ),
    ([{**SUMS, "levels": {"esy": 1}}], "environments.0.levels.esy", "did you mean 'easy'"),
    ([{**SUMS, "levels": {"easy": 0}}], "environments.0.levels.easy", "must be above 0"),
    ([GRID, {"name": "mase"}], "environments.1.name", "did you mean 'maze'"),
    ([{"name": "agent"}, GRID], "environments.0.name", "'agent' is not supported among several"),
    ([{"name": "mixture"}], "environments.0.name", "a mixture within a mixture"),
    ([{"options": {}}], "environments.0.name", ""),
    ([{**SUMS, "options": {"skil": {}}}], "environments.0.options.skil", "did you mean 'skill'"),
    ([{**SUMS, "max_turns": 0}], "environments.0.max_turns", "at least 1"),
    ([{**SUMS, "reward": {}}], "environments.0.reward", "rewards"),
    ([GRID, {**SUMS, "rewards": {"exakt": 1}}], "environments.1.rewards.exakt", "'sums': no such"),
    ([{**SUMS, "rewards": {"task": 0}}], "environments.0.rewards", "no reward has a weight"),
    ([{**SUMS, "rewards": {"learned": 1}}], "environments.0.rewards.learned", "a reward model"),
    (
        [{**SUMS, "reward_options": {"numeric": {"fnd": "tag"}}}],
        "environments.0.reward_options.numeric.fnd",
        "did you mean 'find'",
    ),
    ([{"name": "world.py:World"}], "environments.0.name", "no such file"),
    ([{"name": "world.py:Wörld"}], "environments.0.label", "'Wörld' must be 1 to 40"),
    (
        [{**SUMS, "rewards": {"score.py:grade": 1.0}}],
        "environments.0.rewards.score.py:grade",
        "no such file",
    ),
]


@pytest.mark.parametrize(("environments", "key", "text"), CASES)
def test_environments_that_cannot_be_used_are_refused_at_their_key(environments, key, text):
    problems = find_problems(*environments)
    assert list(problems) == [key] and text in problems[key]


def test_rewards_of_one_environment_can_be_watched():
    sums = {**SUMS, "rewards": {"task": 1, "length": 0.1}}

    def find(metric, *environments):
        stages = {"sft": {}, "policy": {"early_stop": {"metric": metric}}}
        tracking = {"alerts": {metric: "> 1.0"}}
        return list(find_problems(*environments, stages=stages, tracking=tracking))

    for metric in ("reward/length", "reward/weighted/length"):
        assert find(metric, sums, GRID) == []
        assert find(metric) == ["stages.policy.early_stop.metric"]


@pytest.mark.parametrize(
    ("entry", "policy", "text"),
    [
        (
            {"reward_options": {"normalise": ["task"]}},
            {"turn_credit": {}},
            "environment 'sums': turn_credit: reward_options.normalise",
        ),
        (
            {"reward_options": {"clip": 1.0}},
            {"turn_credit": {}},
            "turn_credit: reward_options.clip",
        ),
        ({"reward_options": {"clip": 1.0}}, {}, ""),
        (
            {"rewards": {"task": 1, "process": 0.5}, "reward_options": PROCESS},
            {},
            "reward_options.process.credit: is the same for all environments",
        ),
        (
            {"rewards": {"task": 1, "process": 0.5}, "reward_options": PROCESS},
            {"rewards": {"task": 1, "process": 0}, "reward_options": PROCESS},
            "",
        ),
    ],
)
def test_rewards_of_an_environment_that_credit_would_misread_are_refused(entry, policy, text):
    problems = find_problems({**SUMS, **entry}, GRID, stages={"sft": {}, "policy": policy})
    assert list(problems) == (["environments"] if text else [])
    assert text in problems.get("environments", "")


@pytest.mark.parametrize(
    ("stages", "key", "text"),
    [
        (
            {"policy": {"curriculum": [{"name": "a", "levels": {"sum": 1}}]}},
            "stages.policy.curriculum.0.levels.sum",
            "environments 'sums', 'pixel_grid' have no level 'sum'; did you mean 'sums'",
        ),
        (
            {"policy": {"curriculum": [{"name": "a", "levels": {"sums": 1, "sums/easy": 1}}]}},
            "stages.policy.curriculum.0.levels",
            "'sums/easy' is named twice",
        ),
        (
            {"evaluate": {"levels": ["pixel_grid", "pixel_grid/easy"]}},
            "stages.evaluate.levels",
            "'pixel_grid/easy' is named twice",
        ),
        (
            {"policy": {"early_stop": {"metric": "train/success_rate_by_environment/sum"}}},
            "stages.policy.early_stop.metric",
            "did you mean 'sums'",
        ),
        (
            {"policy": {"early_stop": {"metric": "train/success_rate_by_environment/sums"}}},
            None,
            "",
        ),
        (
            {"policy": {}, "evaluate": {}, "promote": {"max_environment_loss": 0.1}},
            None,
            "",
        ),
    ],
)
def test_stages_name_environments_and_their_levels(stages, key, text):
    problems = find_problems(stages={"sft": {}, **stages})
    assert list(problems) == ([] if key is None else [key])
    assert key is None or text in problems[key]


def test_what_needs_several_environments_is_refused_with_one():
    one = list_problems(
        stages={"sft": {}, "policy": {}, "evaluate": {}, "promote": {"max_environment_loss": 0.1}}
    )
    assert "list them under environments" in one["stages.promote.max_environment_loss"]
    watched = {"early_stop": {"metric": "train/success_rate_by_environment/pixel_grid"}}
    problems = list_problems(stages={"sft": {}, "policy": watched})
    assert "there is one environment" in problems["stages.policy.early_stop.metric"]


def test_an_environment_beside_environments_is_refused():
    problems = find_problems(environment={"name": "maze"})
    assert "set one of the two" in problems["environments"]


def test_a_curriculum_does_not_train_on_an_environment_that_is_only_evaluated():
    stages = {"sft": {}, "policy": {"curriculum": [{"name": "a", "levels": {"sums": 1}}]}}
    problems = find_problems({**SUMS, "weight": 0}, GRID, stages=stages)
    assert "only evaluated" in problems["stages.policy.curriculum.0.levels.sums"]
    assert find_problems({**SUMS, "weight": 0}, GRID) == {}


def write_rows(path):
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_with_files(folder):
    """Build settings with two data files, named relative to the config file."""
    for name in ("first", "second"):
        write_rows(folder / f"{name}.jsonl")
    config = folder / "config.yaml"
    config.write_text(
        "name: x\nenvironments:\n"
        "  - {name: prompts, label: first, options: {path: first.jsonl, verifier: numeric}}\n"
        "  - {name: prompts, label: second, options: {path: second.jsonl}, rewards: {exact: 1.0}}\n"
        f"output: {folder}/out\n"
        "stages: {prepare_data: {}, policy: {}}\n"
    )
    return config


def test_files_of_every_environment_are_found_digested_and_watched(tmp_path):
    settings = load_settings(build_with_files(tmp_path))
    paths = [entry["options"]["path"] for entry in settings.environment.options["environments"]]
    assert paths == [str(tmp_path / "first.jsonl"), str(tmp_path / "second.jsonl")]
    assert set(list_data_sources(settings)) >= {"environments.0", "environments.1"}
    before = digest_environment_files(settings)
    assert set(before) == {"environments.0.path", "environments.1.path"}
    key = collect_stage_key("policy", settings.stages.policy, settings, {}).key
    (tmp_path / "second.jsonl").write_text('{"prompt": "x", "answer": "y"}\n' * 30)
    after = digest_environment_files(settings)
    assert before["environments.0.path"] == after["environments.0.path"]
    assert before["environments.1.path"] != after["environments.1.path"]
    assert collect_stage_key("policy", settings.stages.policy, settings, {}).key != key


def test_a_missing_file_and_prompts_without_a_reward_are_refused(tmp_path):
    config = build_with_files(tmp_path)
    (tmp_path / "second.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"environments\.1\.options\.path: .* is not a file"):
        load_settings(config)
    write_rows(tmp_path / "second.jsonl")
    with pytest.raises(
        ConfigError, match=r"environments\.1\.rewards: prompts alone give no reward"
    ):
        load_settings(config, ["environments.1.rewards={}"])
    with pytest.raises(
        ConfigError, match=r"environments\.1\.rewards\.exact: .*'second'.*'solution'"
    ):
        load_settings(config, ["environments.1.reward_options={exact: {column: solution}}"])


def test_the_weight_of_an_environment_changes_the_key_of_the_stage():
    def compute_key(settings):
        return collect_stage_key("policy", settings.stages.policy, settings, {}).key

    key = compute_key(build())
    assert compute_key(build(SUMS, {**GRID, "weight": 3.0})) != key
    assert compute_key(build()) == key


def test_secrets_of_an_environment_are_masked():
    settings = build({**SUMS}, {**GRID, "options": {"skill": {"easy": 0.5}}})
    plain = dump_settings(settings)
    plain["environments"][0]["options"] = {"api_key": "s3cret"}
    plain["environment"]["options"]["environments"][0]["options"] = {"api_key": "s3cret"}
    assert "s3cret" not in json.dumps(mask_secrets(plain))


def test_a_reward_model_that_one_environment_alone_uses_reaches_the_policy(monkeypatch):
    stages = {"sft": {}, "reward_model": {}, "policy": {}}
    settings = build({**SUMS, "rewards": {"task": 1.0, "learned": 0.1}}, GRID, stages=stages)
    assert settings.uses_reward_model and find_waste(settings) == []
    assert select_settings_up_to(settings, "policy").stages.reward_model is not None

    taken = {}
    monkeypatch.setattr(policy_stage, "run_stage", lambda *args, inputs: taken.update(inputs))
    run = SimpleNamespace(settings=settings)
    policy_stage.optimise_policy(run, "model", None, "reward model's result")
    assert taken["reward_model"] == "reward model's result"

    without = build(stages=stages)
    assert not without.uses_reward_model
    assert [problem.key for problem in find_waste(without)] == [("stages", "reward_model")]
