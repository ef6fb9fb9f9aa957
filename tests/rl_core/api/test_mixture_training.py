"""Training on several environments: what may be passed, metrics by environment, resume with equal bits, evaluation."""

import contextlib
import dataclasses
from collections import Counter

import pytest
from helpers.library import Echo, EchoEpisode, have_equal_tensors, settings, small_policy, weights

import rl_core
from rl_core.errors import NothingLearned
from rl_core.tracking import MemoryTracker

PART = rl_core.MixturePart


class Even(Echo):
    """Right when the answer has an even number of characters."""

    name = "even"
    levels = ("only",)

    def episode(self, seed, level):
        return EvenEpisode(seed, level)


class EvenEpisode(EchoEpisode):
    def act(self, text):
        success = len(text) % 2 == 0
        return rl_core.Step(terminated=True, reward=float(success), success=success, answer=text)


class Killed(RuntimeError):
    pass


def build(environment, output=None, killed_at=None, tracker=None, **options):
    """Build a training; `killed_at`: iteration whose update never ends, after it played and scored."""
    values = {"prompts_per_iteration": 4, "iterations": 4, **options}
    training = rl_core.grpo(
        small_policy(),
        environment=environment,
        settings=settings(**values),
        output=output,
        tracker=tracker,
    )
    if killed_at is not None:
        update = training.trainer._update_policy

        def update_or_die(rng):
            if training.trainer.iteration == killed_at:
                raise Killed
            return update(rng)

        training.trainer._update_policy = update_or_die
    return training


def parts():
    return {
        "echo": PART(Echo(), weight=2.0, rewards={"task": 1.0, "length": 0.1}),
        "even": PART(Even()),
    }


def test_a_list_a_mapping_and_a_mixture_are_one():
    tracker = MemoryTracker()
    as_list = build([Echo(), Even()], iterations=2)
    as_mapping = build({"echo": Echo(), "even": Even()}, iterations=2)
    mixture = rl_core.MixtureEnvironment([Echo(), Even()])
    as_mixture = build(mixture, iterations=2, tracker=tracker)
    for training in (as_list, as_mapping, as_mixture):
        training.run()
    assert have_equal_tensors(weights(as_list), weights(as_mapping))
    assert have_equal_tensors(weights(as_list), weights(as_mixture))
    logged = {name for _, row in tracker.metrics for name in row}
    assert {
        "train/success_rate_by_environment/echo",
        "train/success_rate_by_environment/even",
        "train/rollout_share_by_environment/echo",
        "reward/mean_by_environment/even",
    } <= logged


def test_metrics_by_environment_are_those_of_its_rollouts(tmp_path):
    tracker = MemoryTracker()
    build(parts(), tmp_path, tracker=tracker, iterations=2).run()
    rows = list(rl_core.iter_rewards(tmp_path))
    for iteration in range(2):
        own = [row for row in rows if row["iteration"] == iteration]
        (metrics,) = [
            row for step, row in tracker.metrics if step == iteration + 1 and "reward/mean" in row
        ]
        for label in ("echo", "even"):
            mine = [row for row in own if row["level"].startswith(f"{label}/")]
            if not mine:
                assert f"train/success_rate_by_environment/{label}" not in metrics
                assert metrics[f"train/rollout_share_by_environment/{label}"] == 0
                continue
            successes = [float(row["success"]) for row in mine]
            rewards = [row["reward"] for row in mine]
            found = [
                metrics[f"train/success_rate_by_environment/{label}"],
                metrics[f"reward/mean_by_environment/{label}"],
                metrics[f"train/rollout_share_by_environment/{label}"],
            ]
            assert found == pytest.approx(
                [
                    sum(successes) / len(mine),
                    sum(rewards) / len(mine),
                    len(mine) / len(own),
                ]
            )
    # Each group has one environment, so advantages never compare two.
    groups = {(row["iteration"], row["level"], row["seed"]) for row in rows}
    assert Counter(level.partition("/")[0] for _, level, _ in groups).keys() == {"echo", "even"}
    assert {"weighted/length"} <= {name for row in rows for name in row["rewards"]}
    assert not any(
        "weighted/length" in row["rewards"] for row in rows if row["level"] == "even/only"
    )


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_run_that_is_killed_in_the_middle_resumes_to_the_same_bits(tmp_path, killed_at):
    options = {"reward_options": {"normalise": ("task",)}}
    full_log, log = MemoryTracker(), MemoryTracker()
    full = build(parts(), tmp_path / "full", tracker=full_log, **options)
    full.run()
    with pytest.raises(Killed):
        build(parts(), tmp_path / "killed", killed_at, **options).run()
    resumed = build(parts(), tmp_path / "killed", tracker=log, **options)
    outcome = resumed.run()
    assert outcome.resumed_iteration == killed_at
    assert have_equal_tensors(weights(resumed), weights(full))
    later = [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for step, row in full_log.metrics
        if step > killed_at
    ]
    assert later == [
        {name: value for name, value in row.items() if not name.startswith("perf/")}
        for step, row in log.metrics
    ]


def test_a_resume_with_another_weight_is_refused(tmp_path):
    build(parts(), tmp_path, iterations=1).run()
    changed = parts() | {"even": PART(Even(), weight=3.0)}
    with pytest.raises(rl_core.ResumeRefused, match="environment"):
        build(changed, tmp_path, iterations=2).run()


def test_a_curriculum_names_environments_and_watches_one(tmp_path):
    stages = (
        rl_core.CurriculumStage(
            name="first",
            levels={"even": 1.0},
            exit_conditions=(
                rl_core.ExitCondition(
                    metric="train/success_rate_by_environment/even",
                    window=1,
                    comparison=">=",
                    threshold=0.0,
                ),
            ),
        ),
        rl_core.CurriculumStage(name="second", levels={"echo": 1.0, "even/only": 1.0}),
    )
    training = build(parts(), tmp_path, curriculum=stages)
    with contextlib.suppress(
        NothingLearned
    ):  # an untrained model may earn nothing in four iterations
        training.run()
    rows = list(rl_core.iter_rewards(tmp_path))
    assert {row["level"] for row in rows if row["iteration"] == 0} == {"even/only"}
    assert {row["level"] for row in rows if row["iteration"] > 0} > {"even/only"}
    wrong = dataclasses.replace(
        stages[0],
        exit_conditions=(
            rl_core.ExitCondition(metric="train/success_rate_by_environment/evn", window=1),
        ),
    )
    with pytest.raises(rl_core.SettingsError, match="did you mean 'even'"):
        build(parts(), curriculum=(wrong, stages[1]))
    with pytest.raises(rl_core.SettingsError, match="there is one environment"):
        alone = [
            dataclasses.replace(stage, levels={level: 1.0})
            for stage, level in ((wrong, "low"), (stages[1], "high"))
        ]
        build(Echo(), curriculum=tuple(alone))


def test_an_evaluation_has_every_environment():
    result = rl_core.evaluate(
        small_policy(),
        parts(),
        settings={"episodes": 12, "sampling": {"max_completion_tokens": 4}},
    )
    assert result.environments == ("echo", "even")
    by_label = {
        label: [e for e in result.episodes if e.level.startswith(f"{label}/")]
        for label in result.environments
    }
    assert {label: len(episodes) for label, episodes in by_label.items()} == dict.fromkeys(
        ("echo", "even"), 6
    )
    metrics = result.metrics()
    for label, episodes in by_label.items():
        assert metrics[f"eval/success_rate_by_environment/{label}"] == pytest.approx(
            sum(e.successes for e in episodes) / len(episodes)
        )
        assert metrics[f"eval/reward_mean_by_environment/{label}"] == pytest.approx(
            sum(e.reward for e in episodes) / len(episodes)
        )
    again = type(result).from_json(result.to_json())
    assert again.by_environment == result.by_environment
    single = rl_core.evaluate(
        small_policy(), Echo(), settings={"episodes": 4, "sampling": {"max_completion_tokens": 4}}
    )
    assert single.environments == ()
    assert not any("by_environment" in name for name in single.metrics())


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ([], "environment: is empty"),
        ([Echo, Even()], "environment: 0.environment: .* is not an rl_core.Environment"),
        ([Echo(), Echo()], "environment: 1.label: two environments are named 'echo'"),
        ({"a": Echo(), "b": 3}, "environment: 1.environment: 3 is not"),
        (
            {"a": Echo(), "b": PART(Echo(), rewards={"exakt": 1.0})},
            "environment 'b': rewards.exakt: no such component",
        ),
        (
            {"a": Echo(), "b": PART(rl_core.Prompts([{"prompt": "x"}]))},
            "reward: prompts have no reward",
        ),
    ],
)
def test_mixtures_that_cannot_be_trained_are_refused(environment, message):
    with pytest.raises(rl_core.SettingsError, match=message):
        build(environment)
