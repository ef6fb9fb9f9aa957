"""The stage `policy` by itself, with every shipped component; its record of rewards, and what it says of them."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from helpers.policy_stage import PARTS, context_of, save_base

from rl_core.api.recipes import policy_gradient as recipes
from rl_core.metric_history import MetricHistory
from rl_core.models import causal_lm, heads
from rl_core.references import pool
from rl_core.rewards.contribution import RewardContribution
from rl_core.settings import LoraSettings, ModelSettings
from tasks.pipeline.stage_folder import REWARD_RECORD, keep_checkpoints
from tasks.processes.launch import run_in_workers
from tasks.stages import policy


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


def read_rewards(folder):
    return [json.loads(line) for line in (folder / REWARD_RECORD).read_text().splitlines()]


def test_every_part_of_every_rollout_is_on_disk(base, tmp_path):
    context = context_of(base, tmp_path / "stage")
    summary = policy._run_policy_training(context)
    rows = read_rewards(context.folder)
    assert [row["iteration"] for row in rows] == [0] * 6 + [1] * 6
    for row in rows:
        assert set(row["rewards"]) == {*PARTS, *(f"weighted/{name}" for name in PARTS)}
        assert all(
            abs(value) <= 0.5
            for name, value in row["rewards"].items()
            if name.startswith("weighted/")
        )
    curiosity = [value for _, value in context.tracker.series("reward/curiosity")]
    assert len(curiosity) == 2 == len(context.tracker.series("reward/alarm"))
    assert summary["metrics"]["reward/curiosity"] == pytest.approx(sum(curiosity) / 2)
    assert "perf/step_seconds" not in summary["metrics"]
    assert context.tracker.dicts == {"curriculum.json": {"history": []}}


@pytest.fixture(scope="module")
def reward_model(base, tmp_path_factory):
    """Write a finished reward model stage: untrained, but its scores differ."""
    folder = tmp_path_factory.mktemp("reward_model")
    causal_lm.save(
        *heads.create_reward_model(base, ModelSettings(device="cpu"), seed=3), folder / "model"
    )
    return folder


def test_the_result_says_what_the_reward_model_added(base, reward_model, tmp_path):
    context = context_of(
        base, tmp_path / "stage", rewards={"task": 1.0, "learned": 0.5}, reward_options={}
    )
    context.inputs["reward_model"] = reward_model
    summary = policy._run_policy_training(context)
    groups = [read_rewards(context.folder)[start : start + 2] for start in range(0, 12, 2)]
    learned = [[row["rewards"]["weighted/learned"] for row in group] for group in groups]
    assert all(one != other for one, other in learned)
    same = sum(one["rewards"]["task"] == other["rewards"]["task"] for one, other in groups) / 6
    assert summary["metrics"]["reward/learned/alone"] == pytest.approx(same)
    shares = [summary["metrics"][f"reward/{name}/share"] for name in ("task", "learned")]
    assert sum(shares) == pytest.approx(1.0) and shares[1] > 0
    logged = {
        name: context.tracker.series(f"reward/{name}/share")[-1][1] for name in ("task", "learned")
    }
    assert list(logged.values()) == shares
    text = f"reward differences within a prompt: task {shares[0]:.0%}, learned {shares[1]:.0%}; reward model: "
    assert summary["rewards"].startswith(f"{text}the only difference in {same:.0%} of the prompts")
    assert summary["note"].endswith(f"; {summary['rewards']}")
    assert context.tracker.tags["rewards"] == summary["rewards"]


def test_the_rewards_in_words():
    task, learned = (
        RewardContribution(0.75, 0.5, 1.0, 1.0),
        RewardContribution(0.25, 0.125, 0.9, 0.5),
    )
    shares = "reward differences within a prompt: task 75%, learned 25%; reward model: "
    ranks = "ranks 90% of success-failure pairs correctly, correlation with success +0.50"
    both = {"task": task, "learned": learned}
    alone = "the only difference in 12% of the prompts"
    assert policy._describe_rewards(both, by_prompt=True) == f"{shares}{alone}, {ranks}"
    assert policy._describe_rewards(both, by_prompt=False) == (
        f"{shares}{alone}, {ranks}".replace("a prompt", "an iteration").replace(
            "prompts", "iterations"
        )
    )
    assert (
        policy._describe_rewards({"learned": learned}, by_prompt=True) == f"reward model: {ranks}"
    )
    assert policy._describe_rewards({"task": task}, by_prompt=True) == ""
    nothing = RewardContribution(None, 0.0, None, None)
    assert policy._describe_rewards({"task": nothing, "learned": nothing}, by_prompt=True) == (
        "reward model: the only difference in 0% of the prompts"
    )
    assert (
        policy._describe_rewards({"learned": nothing}, by_prompt=True)
        == "reward model: nothing to compare"
    )


def test_recent_means_leave_out_what_is_reported_no_more():
    history = MetricHistory()
    for step in range(1, 13):
        early = {"train/success_rate_by_level/hard": 1.0} if step < 3 else {}
        history.record_values({"reward/mean": float(step), **early}, step)
    history.record_values({"eval/success_rate": 0.5}, 12)
    assert policy.compute_recent_metrics(history) == {"reward/mean": sum(range(3, 13)) / 10}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_leave_what_one_leaves(base, tmp_path):
    more = {
        "algorithm": "ppo",
        "kl_coef": 0.1,
        "learning_rate": 1e-3,
        "eval_every": 1,
        "eval_episodes": 4,
        "curriculum": [
            {"name": "a", "levels": {"easy": 1}, "max_iterations": 1},
            {"name": "b", "levels": {"easy": 1}},
        ],
    }
    alone = context_of(base, tmp_path / "alone", **more)
    together = context_of(
        base, tmp_path / "together", **more, launch={"kind": "torchrun", "processes": 2}
    )
    expected, actual = (
        policy._run_policy_training(alone),
        run_in_workers(together, policy._run_policy_training),
    )
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5)
    assert {k: v for k, v in actual.items() if k != "metrics"} == {
        k: v for k, v in expected.items() if k != "metrics"
    }
    assert together.tracker.tags["launch"] == "torchrun: 1 x 2 processes"
    assert together.tracker.dicts == alone.tracker.dicts
    assert together.tracker.dicts["curriculum.json"]["history"][0]["to"] == "b"
    mine, theirs = read_rewards(alone.folder), read_rewards(together.folder)
    assert [row["success"] for row in theirs] == [row["success"] for row in mine]
    assert [row["reward"] for row in theirs] == pytest.approx(
        [row["reward"] for row in mine], abs=1e-5
    )
    weights = [
        causal_lm.load_model(folder / "model", ModelSettings(device="cpu"))[0].state_dict()
        for folder in (alone.folder, together.folder)
    ]
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).abs().max() < 1e-5, name
    start = causal_lm.load_model(base, ModelSettings(device="cpu"))[0].state_dict()
    assert any(not tensor.equal(start[name]) for name, tensor in weights[0].items())


def test_an_interrupted_stage_keeps_checkpoints_and_record(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "model").mkdir()
    for name in (REWARD_RECORD, "curriculum.json"):
        (tmp_path / name).write_text("")
    keep_checkpoints(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", REWARD_RECORD]


def test_the_reference_is_a_frozen_copy_or_the_policy_without_adapters(base, tmp_path, monkeypatch):
    """Without LoRA the reference is a copy from the cache, with LoRA there is no second model."""
    handed, asked = [], []
    models = pool.get_frozen_models()

    def get(path, model, **options):
        asked.append((path, model.lora, options))
        return type(models).load_model(models, path, model, **options)

    class Enough(Exception):
        pass

    def recipe(loaded, reference, *rest, **options):
        handed.append((loaded.model, reference))
        raise Enough

    monkeypatch.setattr(pool, "get_frozen_models", lambda: SimpleNamespace(load_model=get))
    monkeypatch.setattr(recipes, "build_policy_gradient_recipe", recipe)
    whole = context_of(base, tmp_path / "whole", kl_coef=0.1)
    lora = dataclasses.replace(whole.pipeline.model, lora=LoraSettings(rank=2))
    adapted = context_of(base, tmp_path / "adapted", kl_coef=0.1)
    adapted.pipeline = dataclasses.replace(adapted.pipeline, model=lora)
    for context in (whole, adapted):
        with pytest.raises(Enough):
            policy._run_policy_training(context)
    assert asked == [(base, None, {"precision": "full"})]
    assert handed[0][1] is not handed[0][0] and handed[1][1] is handed[1][0]
