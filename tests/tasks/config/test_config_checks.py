"""Combinations of settings that cannot work: key and message of each; and neighbours that do work."""

import pytest
from helpers.config_problems import (
    build_stage,
    list_policy_problems,
    list_problems,
)

from tasks.config import build_settings
from tasks.config.cross_checks import find_waste


def test_a_missing_package_of_a_sink_is_named_before_anything_runs(monkeypatch):
    assert list_problems(stages={"sft": {}}, tracking={"sinks": ["prometheus:9464"]}) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None)
    reported = list_problems(stages={"sft": {}}, tracking={"sinks": ["dogstatsd", "prometheus"]})
    assert (
        reported["tracking.sinks.0"]
        == "dogstatsd needs the package datadog; install it, or posttrain[datadog]"
    )
    assert (
        reported["tracking.sinks.1"] == "prometheus needs the package prometheus-client; install it"
    )


def test_a_network_needs_its_package_and_settings_that_fit(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None)
    reported = list_problems(stages={"network": {}})
    assert (
        list(reported) == ["stages.network.environment"]
        and "python -m posttrain.install --extras gymnasium" in reported.popitem()[1]
    )
    reported = list_problems(stages={"network": {"replay": 2, "eval_every": 0, "patience": 3}})
    assert sorted(reported) == [
        "stages.network.patience",
        "stages.network.replay",
    ]  # what is broken is not made
    assert (
        reported["stages.network.replay"]
        == "steps of older policies need a correction; set advantages to vtrace"
    )


# What no machine has room for


def test_sizes_beyond_reason_are_refused_by_their_range():
    assert "at most 65536" in list_policy_problems(group_size=1_000_000_000)["group_size"]
    assert (
        "at most 1048576"
        in list_problems(model={"vocab_size": 1_000_000_000}, stages={"sft": {}})[
            "model.vocab_size"
        ]
    )
    assert "more than 64 bits" in list_policy_problems(iterations=10**400)["iterations"]
    reported = list_policy_problems(group_size=65_536, prompts_per_iteration=1024)["group_size"]
    assert "67,108,864 rollouts in one iteration, more than 1,048,576" in reported
    reported = list_problems(
        stages={"sft": {}, "distill": {"group_size": 65_536, "prompts_per_iteration": 1024}}
    )
    assert any("67,108,864 rollouts" in text for text in reported.values())


def test_memory_is_estimated_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("tasks.config.machine_checks.measure_machine_memory", lambda: 8 * 2**30)
    # 4096 bytes of an episode, and 76 of each of its 512 tokens: 43,008 x 256 x 1024 = 10.5 GiB
    many = {
        "group_size": 1024,
        "prompts_per_iteration": 256,
        "sampling": {"max_completion_tokens": 512},
    }
    reported = list_problems(model={"context": 1024}, stages={"sft": {}, "policy": many})
    assert list(reported) == ["stages.policy.group_size"]
    assert "256 x 1,024 rollouts of one iteration of up to 512 tokens take up to 10.5 GiB" in next(
        iter(reported.values())
    )
    assert "this machine has 8.0 GiB; lower this, or sampling.max_completion_tokens" in next(
        iter(reported.values())
    )
    many["group_size"] = 512
    assert list_problems(model={"context": 1024}, stages={"sft": {}, "policy": many}) == {}
    # 2**20 tokens x 256 x 16 bytes = 4 GiB; 65,536 slots x 2**20 tokens x 4 layers x 2 x 128 x 4 bytes = 256 TiB
    large = {"preset": "small", "vocab_size": 2**20, "context": 2**20}
    wide = {"sft": {}, "policy": {"sampling": {"slots": 65_536, "max_completion_tokens": 64}}}
    monkeypatch.setattr("tasks.config.machine_checks.measure_machine_memory", lambda: 2 * 2**30)
    reported = list_problems(model=large, stages=wide)
    assert sorted(reported) == ["model.context", "model.vocab_size"]
    assert (
        "4.0 GiB" in reported["model.vocab_size"] and "262,144.0 GiB" in reported["model.context"]
    )


@pytest.mark.parametrize("name", ["logs", "mlflow", "operations", "Prefect"])
def test_a_name_of_another_folder_of_the_output_is_reserved(name):
    reported = list_problems(name=name, stages={"sft": {}})
    assert reported["name"].startswith(f"'{name}' is reserved") and reported["name"].endswith(
        "choose another name"
    )
    assert list_problems(name=f"{name}2", stages={"sft": {}}) == {}


# What each stage needs


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        ({"stages": {"evaluate": {}}}, "stages.evaluate", "has no policy to evaluate"),
        ({"stages": {"reward_model": {}}}, "stages.reward_model", "has no pairs to learn from"),
        (
            {"stages": {"prepare_data": {}, "reward_model": {}}},
            "stages.reward_model",
            "stages.prepare_data.preferences",
        ),
        ({"stages": {"preference": {}}}, "stages.preference", "has no pairs to learn from"),
        (
            {"stages": {"prepare_data": {}, "preference": {}}},
            "stages.preference",
            "stages.prepare_data.preferences",
        ),
        (
            {"stages": {"sft": {}, "distill": {}}},
            "stages.distill.teacher.model",
            "no teacher is named",
        ),
        (
            {"stages": {"sft": {}, "distill": {"teacher": {"url": "http://127.0.0.1:8000"}}}},
            "stages.distill.teacher.model",
            "the server's name for it",
        ),
        ({"stages": {"sft": {}, "analyze": {}}}, "stages.analyze", "add `evaluate: {}`"),
        ({"stages": {"sft": {}, "promote": {}}}, "stages.promote", "add `evaluate: {}`"),
        (
            {"model": {"path": "org/name"}, "stages": {"evaluate": {}, "promote": {}}},
            "stages.promote",
            "has no new model to promote",
        ),
        (
            {"model": {"path": "org/name"}, "stages": {"sft": {}}},
            "stages.sft",
            "add `prepare_data: {}`",
        ),
        (
            {"model": {"lora": {}}, "stages": {"sft": {}}},
            "model.lora",
            "set model.path, or remove lora",
        ),
        (
            {"model": {"trust_remote_code": True}, "stages": {"sft": {}}},
            "model.trust_remote_code",
            "has no remote code",
        ),
    ],
)
def test_stage_without_what_it_needs(values, key, expected):
    problems = list_problems(**values)
    assert list(problems) == [key]
    assert expected in problems[key]


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"path": "org/name"}, "stages": {"evaluate": {}, "analyze": {}}},
        {"model": {"path": "models:/demo@champion"}, "stages": {"reward_model": {}}},
        {"stages": {"prepare_data": {"preferences": "pairs.jsonl"}, "reward_model": {}}},
        {"stages": {"sft": {}, "reward_model": {}}},
        {
            "model": {"path": "org/name"},
            "stages": {"preference": {}, "evaluate": {}, "promote": {}},
        },
        {"stages": {"prepare_data": {"preferences": "pairs.jsonl"}, "preference": {}}},
        {"stages": {"sft": {}, "preference": {}, "policy": {}}},
        {"stages": {"sft": {}, "distill": {"teacher": {"model": "org/name"}}}},
        {"stages": {"sft": {}}},
        {"stages": {"policy": {}}},
        {"model": {"path": "org/name", "lora": {}}, "stages": {"prepare_data": {}, "sft": {}}},
        {"stages": {"sft": {}, "evaluate": {}, "promote": {}}},
    ],
)
def test_stages_that_have_what_they_need(values):
    assert list_problems(**values) == {}


def test_learned_reward_needs_the_reward_model_stage():
    assert (
        "add `reward_model: {}`" in list_policy_problems(rewards={"learned": 1})["rewards.learned"]
    )
    assert list_policy_problems(rewards={"task": 1, "learned": 0}) == {}
    evaluated = list_problems(
        stages={"sft": {}, "evaluate": {"rewards": {"learned": 1, "lenght": 1}}}
    )
    assert "scores only during policy training" in evaluated["stages.evaluate.rewards.learned"]
    assert "did you mean 'length'" in evaluated["stages.evaluate.rewards.lenght"]
    stages = {"sft": {}, "reward_model": {}, "policy": {"rewards": {"learned": 1}}}
    assert list_problems(stages=stages) == {}


@pytest.mark.parametrize(
    ("policy", "wasted"),
    [
        ({}, True),  # task alone
        ({"rewards": {"task": 1, "learned": 0}}, True),
        ({"rewards": {"task": 1, "learned": 0.1}}, False),
        (
            {
                "rewards": {"task": 1, "learned": 0},
                "curriculum": [build_stage(rewards={"learned": 1})],
            },
            False,
        ),
        (
            {
                "rewards": {"task": 1, "learned": 1},
                "curriculum": [build_stage(rewards={"learned": 0})],
            },
            True,
        ),
        (None, False),  # the reward model is what the pipeline is for
    ],
)
def test_a_reward_model_that_no_reward_uses_is_named(policy, wasted):
    stages = {"sft": {}, "reward_model": {}} | ({} if policy is None else {"policy": policy})
    reported = find_waste(build_settings({"name": "x", "stages": stages}, check_files=False))
    assert [problem.key for problem in reported] == [("stages", "reward_model")] * wasted
    assert all(
        "set stages.policy.rewards.learned to a weight" in problem.text for problem in reported
    )
    without = {name: value for name, value in stages.items() if name != "reward_model"}
    if (
        policy is not None
        and not policy.get("rewards", {}).get("learned")
        and "curriculum" not in policy
    ):
        assert find_waste(build_settings({"name": "x", "stages": without}, check_files=False)) == []


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        ({"stages": {"policy": {}}}, True),
        ({"stages": {"policy": {}}, "environment": {"name": "pixel_grid"}}, True),
        ({"stages": {"sft": {}, "prepare_data": {}, "evaluate": {}}}, True),
        ({"stages": {"sft": {}, "prepare_data": {"demonstrations": "a.jsonl"}}}, False),
        ({"stages": {"policy": {}}, "environment": {"name": "arithmetic"}}, False),
        ({"stages": {"policy": {}}, "model": {"preset": "tiny"}}, False),
    ],
)
def test_a_pretrained_model_in_the_environment_of_the_demo_is_named(values, is_named):
    values = {"name": "x", "model": {"path": "org/model"}} | values
    reported = find_waste(build_settings(values, check_files=False))
    assert [problem.key for problem in reported] == [("environment",)] * is_named
    assert all("org/model plays pixel_grid" in problem.text for problem in reported)
    assert not any("is not set" in problem.text for problem in reported)  # it may be


def test_an_alert_on_an_online_metric_that_does_not_exist_is_refused():
    known = ("online/paused", "online/drift/kl_level", "online/refused/kl", "online/gate_p_value")
    alerts = {**dict.fromkeys(known, "> 0.5"), "online/pause": "> 0.5", "online/drift/x": "> 1"}
    reported = list_problems(stages={"sft": {}}, tracking={"alerts": alerts})
    assert set(reported) == {"tracking.alerts.online/pause", "tracking.alerts.online/drift/x"}
    assert "did you mean 'online/paused'?" in reported["tracking.alerts.online/pause"]


def test_an_alert_on_a_metric_that_nothing_logs_is_a_warning():
    known = (
        "policy/ref_kl",
        "reward/alarm",
        "online/paused",
        "eval/success_rate_by_level/hard",
        "tool/share/look",
    )
    alerts = {**dict.fromkeys(known, "> 0.5"), "policy/reff_kl": "> 0.5"}
    values = {"name": "x", "stages": {"sft": {}}, "tracking": {"alerts": alerts}}
    (reported,) = find_waste(build_settings(values, check_files=False))
    assert reported.key == ("tracking", "alerts", "policy/reff_kl")
    assert reported.text == "no stage logs a metric of this name; did you mean 'policy/ref_kl'?"


def test_weights_of_a_curriculum_stage():
    def problems(rewards, weights):
        return list_policy_problems(
            rewards=rewards, curriculum=[{"name": "one", "levels": {"easy": 1}, "rewards": weights}]
        )

    assert problems({"task": 1, "length": 0}, {"length": 0.5}) == {}
    assert "nothing to learn" in problems({"task": 1}, {"task": 0})["rewards"]
    assert (
        "add `reward_model: {}`"
        in problems({"task": 1, "learned": 0}, {"learned": 1})["rewards.learned"]
    )
    assert (
        problems({"task": 0, "length": 0}, {"task": 1}) == {}
    )  # a weight in every stage is enough
    reported = problems({"task": 1, "length": 0}, {"lenght": 1})
    assert "did you mean 'length'" in reported["curriculum.0.rewards.lenght"]


def test_reward_options():
    assert (
        "did you mean 'coherence'?"
        in list_policy_problems(rewards={"coherance": 1})["rewards.coherance"]
    )
    every = dict.fromkeys(("task", "curiosity", "coherence", "tool_use", "format", "length"), 0.5)
    assert (
        list_policy_problems(rewards=every, reward_options={"normalise": ["length"], "clip": 3})
        == {}
    )
    for options, key, text in (
        ({"normalise": ["length"]}, "normalise", "'length' is not a component"),
        ({"format": {"pattern": "("}}, "format.pattern", "not a regular expression"),
        ({"coherence": {"low": 0.9, "high": 0.1}}, "coherence.low", "must be below high"),
        ({"length": {"free": 9, "limit": 9}}, "length.free", "must be below limit"),
    ):
        assert text in list_policy_problems(reward_options=options)[f"reward_options.{key}"]


def test_rewards():
    assert "did you mean 'task'?" in list_policy_problems(rewards={"taks": 1})["rewards.taks"]
    assert "nothing to learn" in list_policy_problems(rewards={"task": 0})["rewards"]
    assert "nothing to learn" in list_policy_problems(rewards={})["rewards"]
    missing = list_policy_problems(rewards={"no.such_module:f": 1})
    assert "module 'no.such_module' cannot be imported" in missing["rewards.no.such_module:f"]
    assert list_policy_problems(rewards={"task": 1, "tool_use": 0.1, "math:fsum": 1}) == {}


# Sampling and loops


def test_a_sampling_length_counts_only_where_a_stage_samples():
    """Learn from the pairs of a file: no rollout is sampled, so no room for a completion is needed."""
    for name in ("reward_model", "preference"):
        stages = {"prepare_data": {"preferences": "pairs.jsonl"}, name: {}}
        assert list_problems(model={"context": 48}, stages=stages) == {}
        sampled = list_problems(model={"context": 48}, stages={"sft": {}, name: {}})
        assert "64 leaves no room" in sampled[f"stages.{name}.sampling.max_completion_tokens"]


def test_completion_longer_than_the_context():
    assert list_policy_problems(sampling={"max_completion_tokens": 255}) == {}
    text = list_policy_problems(sampling={"max_completion_tokens": 256})[
        "sampling.max_completion_tokens"
    ]
    assert text.startswith("256 leaves no room for a prompt: model.context is 256")
    stages = {"sft": {}, "evaluate": {"sampling": {"max_completion_tokens": 60}}}
    assert list_problems(model={"context": 61}, stages=stages) == {}
    assert list(list_problems(model={"context": 60}, stages=stages)) == [
        "stages.evaluate.sampling.max_completion_tokens"
    ]


def test_context_of_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    stages = {"policy": {"sampling": {"max_completion_tokens": 100}}}
    text = list_problems(model={"path": str(tmp_path)}, stages=stages)[
        "stages.policy.sampling.max_completion_tokens"
    ]
    assert f"the context of {tmp_path} is 100" in text
    assert (
        list_problems(model={"path": "org/name"}, stages=stages) == {}
    )  # not known without a download


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}],
    ids=str,
)
def test_another_distribution_than_the_trained_one(sampling):
    ((name, value),) = sampling.items()
    for stage_name in ("policy", "thoughts"):
        text = list_problems(stages={"sft": {}, stage_name: {"sampling": sampling}})[
            f"stages.{stage_name}.sampling.{name}"
        ]
        assert text.startswith(
            f"{value} samples from a different distribution than the one that is trained"
        )
    # the losses of these stages do not depend on the sampler
    for stage_name in ("preference", "reward_model", "evaluate"):
        assert list_problems(stages={"sft": {}, stage_name: {"sampling": sampling}}) == {}


def test_tiny_temperatures():
    problem = list_policy_problems(sampling={"temperature": 1e-300})["sampling.temperature"]
    assert "1e-300 is too small to divide logits by" in problem
    assert list_policy_problems(sampling={"temperature": 1e-6}) == {}


def test_stop_texts():
    assert list_policy_problems(sampling={"stop": ["</answer>"]}) == {}
    assert (
        "contains an empty text"
        in list_policy_problems(sampling={"stop": ["x", ""]})["sampling.stop"]
    )
    problems = list_problems(stages={"sft": {}, "thoughts": {"sampling": {"stop": ["x"]}}})
    assert "ends by the end-of-turn token" in problems["stages.thoughts.sampling.stop"]


def test_greedy_rollouts_teach_nothing():
    assert (
        "0 is greedy" in list_policy_problems(sampling={"temperature": 0})["sampling.temperature"]
    )
    for name in ("thoughts", "preference", "reward_model"):
        problems = list_problems(stages={"sft": {}, name: {"sampling": {"temperature": 0}}})
        assert "0 is greedy" in problems[f"stages.{name}.sampling.temperature"]
    stages = {"sft": {}, "evaluate": {"sampling": {"temperature": 0}}}
    assert list_problems(stages=stages) == {}
    stages["evaluate"]["samples"] = 4
    assert "are identical" in list_problems(stages=stages)["stages.evaluate.samples"]


@pytest.mark.parametrize("field", ["patience", "plateau_patience"])
@pytest.mark.parametrize("name", ["sft", "preference", "reward_model", "policy"])
def test_patience_without_evaluations(name, field):
    stages = {"sft": {}, name: {field: 3}}
    assert "set eval_every" in list_problems(stages=stages)[f"stages.{name}.{field}"]
    stages[name]["eval_every"] = 1
    assert list_problems(stages=stages) == {}


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo"])
def test_group_of_one(algorithm):
    assert (
        "without a baseline"
        in list_policy_problems(algorithm=algorithm, group_size=1)["group_size"]
    )
    assert list_policy_problems(algorithm=algorithm, group_size=2) == {}


def test_more_minibatches_than_rollouts():
    assert (
        "more than the rollouts"
        in list_policy_problems(prompts_per_iteration=2, group_size=2, minibatches=5)["minibatches"]
    )


# Environment and levels


def test_unknown_environment_and_option():
    text = list_problems(environment={"name": "pixel_gird"}, stages={"sft": {}})["environment.name"]
    assert "did you mean 'pixel_grid'?" in text
    values = {"name": "pixel_grid", "options": {"look_csot": 1}}
    text = list_problems(environment=values, stages={"sft": {}})["environment.options.look_csot"]
    assert "did you mean 'look_cost'?" in text
    assert (
        "cannot be imported"
        in list_problems(environment={"name": "no.such:Thing"}, stages={"sft": {}})[
            "environment.name"
        ]
    )


def test_environment_that_raises(tmp_path, monkeypatch):
    (tmp_path / "broken_environment.py").write_text(
        "from rl_core.environments import Environment\n"
        "class Broken(Environment):\n"
        "    levels = ('only',)\n"
        "    tools = None\n"
        "    def episode(self, seed, level): ...\n"
        "    def __init__(self, data=None): raise KeyError('weights')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = list_problems(environment={"name": "broken_environment:Broken"}, stages={"sft": {}})
    assert problems == {"environment": "'broken_environment:Broken' raised KeyError: 'weights'"}


def test_levels_that_the_environment_has_not_got():
    stages = {
        "prepare_data": {"levels": ["easy", "hrd"]},
        "sft": {},
        "policy": {"curriculum": [build_stage("a", ["easy", "mediun"])]},
        "evaluate": {"levels": ["hard", "impossible"]},
    }
    problems = list_problems(stages=stages)
    assert "no level 'hrd'; did you mean 'hard'?" in problems["stages.prepare_data.levels.1"]
    assert "did you mean 'medium'?" in problems["stages.policy.curriculum.0.levels.mediun"]
    assert "known: easy, hard, medium" in problems["stages.evaluate.levels.1"]
    assert len(problems) == 3


def test_level_named_twice():
    problems = list_problems(stages={"sft": {}, "evaluate": {"levels": ["easy", "hard", "easy"]}})
    assert problems == {"stages.evaluate.levels": "level 'easy' is named twice; name it once"}


def test_levels_of_gsm8k_are_checked_without_its_file():
    environment = {"name": "gsm8k", "options": {"path": "nowhere.jsonl"}}
    problems = list_problems(
        environment=environment, stages={"sft": {}, "evaluate": {"levels": ["shrot"]}}
    )
    assert list(problems) == ["stages.evaluate.levels.0"]
    assert "options.path" not in str(problems)
    assert (
        "needs a JSONL file"
        in list_problems(environment={"name": "gsm8k"}, stages={"sft": {}})[
            "environment.options.path"
        ]
    )
