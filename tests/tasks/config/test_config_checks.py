"""Combinations of settings that cannot work: key and message of each; and neighbours that do work."""

import pytest

from rl_core.curriculum.watched_metrics import ROLLOUT_METRICS
from rl_core.errors import SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.rollout_metrics import compute_rollout_metrics
from rl_core.settings import ExitCondition
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn
from tasks.config import ConfigError, build_settings
from tasks.config.cross_checks import find_waste


def problems_of(**values) -> dict[str, str]:
    """Problems by dotted key, of a pipeline named x with these values."""
    try:
        build_settings({"name": "x", **values}, check_files=False)
    except ConfigError as error:
        return {".".join(map(str, problem.key)): problem.text for problem in error.problems}
    return {}


def policy_problems(**policy) -> dict[str, str]:
    found = problems_of(stages={"sft": {}, "policy": policy})
    assert all(key.startswith("stages.policy.") for key in found)
    return {key.removeprefix("stages.policy."): text for key, text in found.items()}


def stage(name="a", levels=("easy",), **more):
    return {"name": name, "levels": dict.fromkeys(levels, 1), **more}


def condition(**more):
    return {"metric": "success_rate", "window": 2, "threshold": 0.8, **more}


def test_a_missing_package_of_a_sink_is_named_before_anything_runs(monkeypatch):
    assert problems_of(stages={"sft": {}}, tracking={"sinks": ["prometheus:9464"]}) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None)
    found = problems_of(stages={"sft": {}}, tracking={"sinks": ["dogstatsd", "prometheus"]})
    assert (
        found["tracking.sinks.0"]
        == "dogstatsd needs the package datadog; install it, or posttrain[datadog]"
    )
    assert found["tracking.sinks.1"] == "prometheus needs the package prometheus-client; install it"


def test_a_network_needs_its_package_and_settings_that_fit(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None)
    found = problems_of(stages={"network": {}})
    assert (
        list(found) == ["stages.network.environment"]
        and "pip install 'posttrain[gymnasium]'" in found.popitem()[1]
    )
    found = problems_of(stages={"network": {"replay": 2, "eval_every": 0, "patience": 3}})
    assert sorted(found) == [
        "stages.network.patience",
        "stages.network.replay",
    ]  # what is broken is not made
    assert (
        found["stages.network.replay"]
        == "steps of older policies need a correction; set advantages to vtrace"
    )


# What no machine has room for


def test_sizes_beyond_reason_are_refused_by_their_range():
    assert "at most 65536" in policy_problems(group_size=1_000_000_000)["group_size"]
    assert (
        "at most 1048576"
        in problems_of(model={"vocab_size": 1_000_000_000}, stages={"sft": {}})["model.vocab_size"]
    )
    assert "more than 64 bits" in policy_problems(iterations=10**400)["iterations"]
    found = policy_problems(group_size=65_536, prompts_per_iteration=1024)["group_size"]
    assert "67,108,864 rollouts in one iteration, more than 1,048,576" in found
    found = problems_of(
        stages={"sft": {}, "distill": {"group_size": 65_536, "prompts_per_iteration": 1024}}
    )
    assert any("67,108,864 rollouts" in text for text in found.values())


def test_memory_is_estimated_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("tasks.config.machine_checks.measure_machine_memory", lambda: 8 * 2**30)
    # 4096 bytes of an episode, and 76 of each of its 512 tokens: 43,008 x 256 x 1024 = 10.5 GiB
    many = {
        "group_size": 1024,
        "prompts_per_iteration": 256,
        "sampling": {"max_completion_tokens": 512},
    }
    found = problems_of(model={"context": 1024}, stages={"sft": {}, "policy": many})
    assert list(found) == ["stages.policy.group_size"]
    assert "256 x 1,024 rollouts of one iteration of up to 512 tokens take up to 10.5 GiB" in next(
        iter(found.values())
    )
    assert "this machine has 8.0 GiB; lower this, or sampling.max_completion_tokens" in next(
        iter(found.values())
    )
    many["group_size"] = 512
    assert problems_of(model={"context": 1024}, stages={"sft": {}, "policy": many}) == {}
    # 2**20 tokens x 256 x 16 bytes = 4 GiB; 65,536 slots x 2**20 tokens x 4 layers x 2 x 128 x 4 bytes = 256 TiB
    large = {"preset": "small", "vocab_size": 2**20, "context": 2**20}
    wide = {"sft": {}, "policy": {"sampling": {"slots": 65_536, "max_completion_tokens": 64}}}
    monkeypatch.setattr("tasks.config.machine_checks.measure_machine_memory", lambda: 2 * 2**30)
    found = problems_of(model=large, stages=wide)
    assert sorted(found) == ["model.context", "model.vocab_size"]
    assert "4.0 GiB" in found["model.vocab_size"] and "262,144.0 GiB" in found["model.context"]


@pytest.mark.parametrize("name", ["logs", "mlflow", "operations", "Prefect"])
def test_a_name_of_another_folder_of_the_output_is_reserved(name):
    found = problems_of(name=name, stages={"sft": {}})
    assert found["name"].startswith(f"'{name}' is reserved") and found["name"].endswith(
        "choose another name"
    )
    assert problems_of(name=f"{name}2", stages={"sft": {}}) == {}


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
    problems = problems_of(**values)
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
    assert problems_of(**values) == {}


def test_learned_reward_needs_the_reward_model_stage():
    assert "add `reward_model: {}`" in policy_problems(rewards={"learned": 1})["rewards.learned"]
    assert policy_problems(rewards={"task": 1, "learned": 0}) == {}
    evaluated = problems_of(
        stages={"sft": {}, "evaluate": {"rewards": {"learned": 1, "lenght": 1}}}
    )
    assert "scores only during policy training" in evaluated["stages.evaluate.rewards.learned"]
    assert "did you mean 'length'" in evaluated["stages.evaluate.rewards.lenght"]
    stages = {"sft": {}, "reward_model": {}, "policy": {"rewards": {"learned": 1}}}
    assert problems_of(stages=stages) == {}


@pytest.mark.parametrize(
    ("policy", "wasted"),
    [
        ({}, True),  # task alone
        ({"rewards": {"task": 1, "learned": 0}}, True),
        ({"rewards": {"task": 1, "learned": 0.1}}, False),
        (
            {"rewards": {"task": 1, "learned": 0}, "curriculum": [stage(rewards={"learned": 1})]},
            False,
        ),
        (
            {"rewards": {"task": 1, "learned": 1}, "curriculum": [stage(rewards={"learned": 0})]},
            True,
        ),
        (None, False),  # the reward model is what the pipeline is for
    ],
)
def test_a_reward_model_that_no_reward_uses_is_named(policy, wasted):
    stages = {"sft": {}, "reward_model": {}} | ({} if policy is None else {"policy": policy})
    found = find_waste(build_settings({"name": "x", "stages": stages}, check_files=False))
    assert [problem.key for problem in found] == [("stages", "reward_model")] * wasted
    assert all("set stages.policy.rewards.learned to a weight" in problem.text for problem in found)
    without = {name: value for name, value in stages.items() if name != "reward_model"}
    if (
        policy is not None
        and not policy.get("rewards", {}).get("learned")
        and "curriculum" not in policy
    ):
        assert find_waste(build_settings({"name": "x", "stages": without}, check_files=False)) == []


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
    (found,) = find_waste(build_settings(values, check_files=False))
    assert found.key == ("tracking", "alerts", "policy/reff_kl")
    assert found.text == "no stage logs a metric of this name; did you mean 'policy/ref_kl'?"


def test_weights_of_a_curriculum_stage():
    def problems(rewards, weights):
        return policy_problems(
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
    found = problems({"task": 1, "length": 0}, {"lenght": 1})
    assert "did you mean 'length'" in found["curriculum.0.rewards.lenght"]


def test_reward_options():
    assert (
        "did you mean 'coherence'?"
        in policy_problems(rewards={"coherance": 1})["rewards.coherance"]
    )
    every = dict.fromkeys(("task", "curiosity", "coherence", "tool_use", "format", "length"), 0.5)
    assert policy_problems(rewards=every, reward_options={"normalise": ["length"], "clip": 3}) == {}
    for options, key, text in (
        ({"normalise": ["length"]}, "normalise", "'length' is not a component"),
        ({"format": {"pattern": "("}}, "format.pattern", "not a regular expression"),
        ({"coherence": {"low": 0.9, "high": 0.1}}, "coherence.low", "must be below high"),
        ({"length": {"free": 9, "limit": 9}}, "length.free", "must be below limit"),
    ):
        assert text in policy_problems(reward_options=options)[f"reward_options.{key}"]


def test_rewards():
    assert "did you mean 'task'?" in policy_problems(rewards={"taks": 1})["rewards.taks"]
    assert "nothing to learn" in policy_problems(rewards={"task": 0})["rewards"]
    assert "nothing to learn" in policy_problems(rewards={})["rewards"]
    missing = policy_problems(rewards={"no.such_module:f": 1})
    assert "module 'no.such_module' cannot be imported" in missing["rewards.no.such_module:f"]
    assert policy_problems(rewards={"task": 1, "tool_use": 0.1, "math:fsum": 1}) == {}


# Sampling and loops


def test_completion_longer_than_the_context():
    assert policy_problems(sampling={"max_completion_tokens": 255}) == {}
    text = policy_problems(sampling={"max_completion_tokens": 256})[
        "sampling.max_completion_tokens"
    ]
    assert text.startswith("256 leaves no room for a prompt: model.context is 256")
    stages = {"sft": {}, "evaluate": {"sampling": {"max_completion_tokens": 60}}}
    assert problems_of(model={"context": 61}, stages=stages) == {}
    assert list(problems_of(model={"context": 60}, stages=stages)) == [
        "stages.evaluate.sampling.max_completion_tokens"
    ]


def test_context_of_a_model_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    stages = {"policy": {"sampling": {"max_completion_tokens": 100}}}
    text = problems_of(model={"path": str(tmp_path)}, stages=stages)[
        "stages.policy.sampling.max_completion_tokens"
    ]
    assert f"the context of {tmp_path} is 100" in text
    assert (
        problems_of(model={"path": "org/name"}, stages=stages) == {}
    )  # not known without a download


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}],
    ids=str,
)
def test_another_distribution_than_the_trained_one(sampling):
    ((name, value),) = sampling.items()
    for stage in ("policy", "thoughts"):
        text = problems_of(stages={"sft": {}, stage: {"sampling": sampling}})[
            f"stages.{stage}.sampling.{name}"
        ]
        assert text.startswith(
            f"{value} samples from a different distribution than the one that is trained"
        )
    for stage in (
        "preference",
        "reward_model",
        "evaluate",
    ):  # whose losses do not look at the sampler
        assert problems_of(stages={"sft": {}, stage: {"sampling": sampling}}) == {}


def test_stop_texts():
    assert policy_problems(sampling={"stop": ["</answer>"]}) == {}
    assert (
        "contains an empty text" in policy_problems(sampling={"stop": ["x", ""]})["sampling.stop"]
    )
    problems = problems_of(stages={"sft": {}, "thoughts": {"sampling": {"stop": ["x"]}}})
    assert "ends by the end-of-turn token" in problems["stages.thoughts.sampling.stop"]


def test_greedy_rollouts_teach_nothing():
    assert "0 is greedy" in policy_problems(sampling={"temperature": 0})["sampling.temperature"]
    for name in ("thoughts", "preference", "reward_model"):
        problems = problems_of(stages={"sft": {}, name: {"sampling": {"temperature": 0}}})
        assert "0 is greedy" in problems[f"stages.{name}.sampling.temperature"]
    stages = {"sft": {}, "evaluate": {"sampling": {"temperature": 0}}}
    assert problems_of(stages=stages) == {}
    stages["evaluate"]["samples"] = 4
    assert "are identical" in problems_of(stages=stages)["stages.evaluate.samples"]


@pytest.mark.parametrize("name", ["sft", "preference", "reward_model", "policy"])
def test_patience_without_evaluations(name):
    stages = {"sft": {}, name: {"patience": 3}}
    assert "set eval_every" in problems_of(stages=stages)[f"stages.{name}.patience"]
    stages[name]["eval_every"] = 1
    assert problems_of(stages=stages) == {}


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo"])
def test_group_of_one(algorithm):
    assert "without a baseline" in policy_problems(algorithm=algorithm, group_size=1)["group_size"]
    assert policy_problems(algorithm=algorithm, group_size=2) == {}


def test_more_minibatches_than_rollouts():
    assert (
        "more than the rollouts"
        in policy_problems(prompts_per_iteration=2, group_size=2, minibatches=5)["minibatches"]
    )


# Environment and levels


def test_unknown_environment_and_option():
    text = problems_of(environment={"name": "pixel_gird"}, stages={"sft": {}})["environment.name"]
    assert "did you mean 'pixel_grid'?" in text
    values = {"name": "pixel_grid", "options": {"look_csot": 1}}
    text = problems_of(environment=values, stages={"sft": {}})["environment.options.look_csot"]
    assert "did you mean 'look_cost'?" in text
    assert (
        "cannot be imported"
        in problems_of(environment={"name": "no.such:Thing"}, stages={"sft": {}})[
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
    problems = problems_of(environment={"name": "broken_environment:Broken"}, stages={"sft": {}})
    assert problems == {"environment": "'broken_environment:Broken' raised KeyError: 'weights'"}


def test_levels_that_the_environment_has_not_got():
    stages = {
        "prepare_data": {"levels": ["easy", "hrd"]},
        "sft": {},
        "policy": {"curriculum": [stage("a", ["easy", "mediun"])]},
        "evaluate": {"levels": ["hard", "impossible"]},
    }
    problems = problems_of(stages=stages)
    assert "no level 'hrd'; did you mean 'hard'?" in problems["stages.prepare_data.levels.1"]
    assert "did you mean 'medium'?" in problems["stages.policy.curriculum.0.levels.mediun"]
    assert "known: easy, hard, medium" in problems["stages.evaluate.levels.1"]
    assert len(problems) == 3


def test_level_named_twice():
    problems = problems_of(stages={"sft": {}, "evaluate": {"levels": ["easy", "hard", "easy"]}})
    assert problems == {"stages.evaluate.levels": "level 'easy' is named twice; name it once"}


def test_levels_of_gsm8k_are_checked_without_its_file():
    environment = {"name": "gsm8k", "options": {"path": "nowhere.jsonl"}}
    problems = problems_of(
        environment=environment, stages={"sft": {}, "evaluate": {"levels": ["shrot"]}}
    )
    assert list(problems) == ["stages.evaluate.levels.0"]
    assert "options.path" not in str(problems)
    assert (
        "needs a JSONL file"
        in problems_of(environment={"name": "gsm8k"}, stages={"sft": {}})[
            "environment.options.path"
        ]
    )


# Curriculum


@pytest.mark.parametrize(
    ("comparison", "threshold", "possible"),
    [
        (">=", 1.0, True),
        (">=", 1.2, False),
        (">", 1.0, False),
        (">", 0.99, True),
        ("<=", 0.0, True),
        ("<=", -0.1, False),
        ("<", 0.0, False),
        ("<", 0.01, True),
    ],
)
def test_threshold_that_can_never_be_met(comparison, threshold, possible):
    exits = [condition(comparison=comparison, threshold=threshold)]
    problems = policy_problems(curriculum=[stage("a", exit_conditions=exits), stage("b")])
    if possible:
        assert problems == {}
    else:
        text = problems["curriculum.0.exit_conditions.0.threshold"]
        assert (
            f"success_rate {comparison} {threshold:g} can never hold: success_rate ranges from 0 to 1"
            in text
        )
    early = policy_problems(early_stop=condition(comparison=comparison, threshold=threshold))
    assert list(early) == ([] if possible else ["early_stop.threshold"])


def test_metrics_by_full_name():
    for metric in (
        "train/success_rate",
        "reward/task",
        "reward/mean",
        "success_rate_by_level/easy",
        "turns",
    ):
        metric = f"train/{metric}" if metric.startswith("success_rate_by") else metric
        exits = [condition(metric=metric, threshold=0.5)]
        assert policy_problems(curriculum=[stage("a", exit_conditions=exits), stage("b")]) == {}, (
            metric
        )
    for metric, near in (
        ("sucess_rate", "success_rate"),
        ("reward/maen", "reward/mean"),
        ("reward/taks", "reward/task"),
    ):
        exits = [condition(metric=metric)]
        text = policy_problems(curriculum=[stage("a", exit_conditions=exits), stage("b")])
        assert f"did you mean '{near}'?" in text["curriculum.0.exit_conditions.0.metric"]
    assert (
        "no such metric" in policy_problems(early_stop=condition(metric="zzz"))["early_stop.metric"]
    )
    for old in ("policy/kl", "kl"):  # of one update here, to the reference in TRL
        said = policy_problems(early_stop=condition(metric=old))["early_stop.metric"]
        assert "policy/update_kl" in said and "policy/ref_kl" in said
    low = policy_problems(early_stop=condition(metric="policy/mean_logprob", threshold=0.5))
    assert "can never hold" in low["early_stop.threshold"]


def test_known_metrics_are_those_that_an_iteration_has():
    trajectory = Trajectory(
        "pixel_grid", "easy", "colour", 0, "p", "t", turns=[Turn("answer x")], num_action_tokens=2
    )
    trajectory.rewards = {"task": 1.0}
    rollout = Rollout([1], [2, 3], [True, True], [-1.0, -1.0], trajectory)
    groups = [RolloutGroup([rollout])]
    emitted = set(RewardOrchestrator({"task": 1.0}).score(groups)) | set(
        compute_rollout_metrics(groups)
    )
    assert set(ROLLOUT_METRICS) <= emitted
    named_by_settings = {"reward/task", "reward/weighted/task", "train/success_rate_by_level/easy"}
    assert emitted - set(ROLLOUT_METRICS) == named_by_settings | {"reward/task/answered"}


def test_any_logged_metric_may_be_watched_and_others_say_what_they_need():
    def said(metric, **policy):
        return policy_problems(early_stop=condition(metric=metric, threshold=0.1), **policy).get(
            "early_stop.metric", ""
        )

    assert (
        said("policy/entropy") == said("policy/update_kl") == said("train/right_action_rate") == ""
    )
    assert "never logged with these settings; it needs eval_every above 0" in said(
        "eval/success_rate"
    )
    assert said("eval/success_rate", eval_every=2) == ""
    assert (
        "it needs kl_coef above 0" in said("policy/ref_kl")
        and said("policy/ref_kl", kl_coef=0.1) == ""
    )
    assert "it needs a critic" in said("value/loss") and said("value/loss", algorithm="ppo") == ""
    weighted = {"rewards": {"task": 1.0, "tool_use": 0.1, "mine.py:score": 0.5}}
    for metric in (
        "reward/tool_use/misused_turns",
        "reward/mine.py.score/parts",
        "reward/masked_rate",
    ):
        assert said(metric, **weighted) == "" and said(metric) != "", metric
    assert "has no tool 'zom'; did you mean 'zoom'?" in said("tool/share/zom")
    for metric in (
        "tool/share/zoom",
        "reward/alarm",
        "reward/correlation/total",
        "train/failed_rate",
    ):
        assert said(metric) == "", metric
    assert (
        said("eval/success_rate_by_level/easy", eval_every=2)
        == ""
        != said("eval/success_rate_by_level/easy")
    )
    assert "measured by a clock" in said("perf/rollout_seconds")
    text = said("success_rate_ma100")
    assert "write metric: success_rate and window: 100" in text
    late = policy_problems(
        early_stop=condition(metric="eval/success_rate", window=30), eval_every=20
    )
    assert "30 evaluations never fit into" in late["early_stop.window"]


def test_comparisons_by_name_are_said_in_signs():
    for word, sign in (("greater", ">"), ("at least", ">="), ("less_than", "<"), ("LTE", "<=")):
        text = policy_problems(early_stop={"metric": "success_rate", "comparison": word})[
            "early_stop.comparison"
        ]
        assert text.endswith(f"'{word}' is written '{sign}'")
    with pytest.raises(SettingsError, match="'greater' is written '>'"):
        ExitCondition(comparison="greater")


def test_stage_without_a_way_out():
    problems = policy_problems(curriculum=[stage("a"), stage("b", ["hard"])])
    assert problems == {
        "curriculum.0": "stage 'a' never ends, so 'b' is never reached; add exit_conditions or max_iterations"
    }
    assert policy_problems(curriculum=[stage("a", max_iterations=3), stage("b")]) == {}


def test_stage_names():
    problems = policy_problems(curriculum=[stage("a", max_iterations=3), stage("a")])
    assert problems == {"curriculum": "2 stages are named 'a'; give each a different name"}
    assert "cannot be named '(end)'" in policy_problems(curriculum=[stage("(end)")])["curriculum"]


def test_window_longer_than_its_stage():
    exits = [condition(window=10)]
    problems = policy_problems(
        curriculum=[stage("a", exit_conditions=exits, max_iterations=9), stage("b")]
    )
    assert "never fit into the 9" in problems["curriculum.0.exit_conditions.0.window"]
    assert (
        policy_problems(
            curriculum=[stage("a", exit_conditions=exits, max_iterations=10), stage("b")]
        )
        == {}
    )
    assert (
        "into the 5"
        in policy_problems(iterations=5, early_stop=condition(window=6))["early_stop.window"]
    )


def test_last_stage_out_of_reach():
    stages = [
        stage("a", exit_conditions=[condition(window=4), condition(window=6)]),  # at least 6
        stage(
            "b",
            exit_conditions=[condition(window=3), condition(window=5)],
            require="any",
            min_iterations=4,
        ),  # 4
        stage("c"),
    ]
    assert "take at least 10" in policy_problems(iterations=10, curriculum=stages)["iterations"]
    assert policy_problems(iterations=11, curriculum=stages) == {}


def test_nothing_is_reported_that_rests_on_a_broken_value():
    # The context is mistyped: whether a completion fits it cannot be said.
    problems = problems_of(
        model={"context": "long"}, stages={"policy": {"sampling": {"max_completion_tokens": 500}}}
    )
    assert list(problems) == ["model.context"]
    # The unknown key comes first: mended, it may be what the block lacks.
    problems = problems_of(stages={"evaluate": {"episods": 3}})
    assert list(problems) == ["stages.evaluate.episods"]


def test_slopes_that_can_never_be_met():
    # Two values in [0, 1] differ by 1 at most; of three, (v3 - v1) / 2 is at most .5; of four, (0, 0, 1, 1) gives .4.
    for window, threshold, possible in (
        (2, 1.0, True),
        (2, 1.01, False),
        (3, 0.5, True),
        (3, 0.51, False),
        (4, 0.41, False),
    ):
        exits = [condition(statistic="slope", window=window, comparison=">=", threshold=threshold)]
        problems = policy_problems(curriculum=[stage("a", exit_conditions=exits), stage("b")])
        assert (problems == {}) is possible, (window, threshold)
    assert problems["curriculum.0.exit_conditions.0.threshold"] == (
        "the slope of success_rate >= 0.41 can never hold: the slope of success_rate ranges from -0.4 to 0.4; "
        "choose a threshold inside"
    )
    flat = condition(statistic="slope", comparison="<=", threshold=0.001)
    assert policy_problems(curriculum=[stage("a", exit_conditions=[flat]), stage("b")]) == {}
    one = policy_problems(
        curriculum=[stage("a", exit_conditions=[{**flat, "window": 1}]), stage("b")]
    )
    assert one["curriculum.0.exit_conditions.0.window"] == "1 point has no slope; use at least 2"


def test_patience_counts_for_what_can_be_reached():
    exits = [condition(window=4, patience=3)]  # holds in the 6th iteration at the earliest
    problems = policy_problems(
        curriculum=[stage("a", exit_conditions=exits, max_iterations=5), stage("b")]
    )
    text = problems["curriculum.0.exit_conditions.0.window"]
    assert text.startswith("4 iterations with a patience of 3 never fit into the 5")
    assert (
        policy_problems(
            curriculum=[stage("a", exit_conditions=exits, max_iterations=6), stage("b")]
        )
        == {}
    )
    stages = [stage("a", exit_conditions=exits), stage("b")]
    assert "take at least 6" in policy_problems(iterations=6, curriculum=stages)["iterations"]
    assert policy_problems(iterations=7, curriculum=stages) == {}


def test_what_a_stage_overrides():
    override = {"task": 0.5, "tool_use": 0.1}
    problems = policy_problems(curriculum=[stage("a", rewards=override)])
    assert list(problems) == ["curriculum.0.rewards.tool_use"]
    assert (
        "a component that only later stages use with weight 0"
        in problems["curriculum.0.rewards.tool_use"]
    )
    assert (
        policy_problems(
            rewards={"task": 1.0, "tool_use": 0}, curriculum=[stage("a", rewards=override)]
        )
        == {}
    )
    assert (
        "stage 'a': group_size: 1 leaves grpo"
        in policy_problems(curriculum=[stage("a", group_size=1)])["curriculum"]
    )
    assert (
        "greater than 0"
        in policy_problems(curriculum=[stage("a", temperature=0)])["curriculum.0.temperature"]
    )


@pytest.mark.parametrize(
    ("rollback", "key", "expected"),
    [
        ({"metric": "sucess_rate"}, "metric", "did you mean 'success_rate'?"),
        (
            {"margin": 1.0, "window": 5},
            "margin",
            "success_rate can never fall by more than 1: it ranges from 0 to 1",
        ),
        (
            {"margin": 1.0, "metric": "loop_rate", "better": "lower", "window": 5},
            "margin",
            "can never rise by more",
        ),
        (
            {"window": 6, "patience": 5},
            "window",
            "within the 10 iterations of its stage: a window of 6 and a patience",
        ),
        ({"window": 7, "patience": 5, "level": "before"}, "window", "take at least 11"),
        (
            {"to": "previous", "window": 5},
            "to",
            "there is no stage before the first one; use entry",
        ),
        ({"learning_rate_factor": 2, "window": 5}, "learning_rate_factor", "at most 1"),
    ],
)
def test_a_rollback_that_never_happens(rollback, key, expected):
    problems = policy_problems(curriculum=[stage("a", rollback=rollback)], iterations=10)
    assert list(problems) == [f"curriculum.0.rollback.{key}"]
    assert expected in problems[f"curriculum.0.rollback.{key}"]


def test_rollbacks_that_may_happen():
    for rollback in (
        {"window": 5},
        {"window": 6, "level": "before"},
        {"window": 5, "metric": "reward/mean", "margin": 9},
    ):
        assert policy_problems(iterations=10, curriculum=[stage("a", rollback=rollback)]) == {}
        assert policy_problems(iterations=10, rollback=rollback) == {}
    one = policy_problems(rollback={"to": "previous"})
    assert "there is only one curriculum stage" in one["rollback.to"]
    two = [stage("a", max_iterations=20), stage("b", rollback={"to": "previous"})]
    assert policy_problems(rollback={"to": "previous"}, curriculum=two) == {}
