"""Cached values of reward functions declared pure: the same bits, computed once."""

import dataclasses
import math

import pytest
import torch
from helpers.reward_rollouts import group, rollout, say

from rl_core.errors import RewardError, SettingsError
from rl_core.rewards import cached_function
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import PolicySettings, RewardSettings


def build_batch(number, rows=False):
    """Build twelve rollouts, most of them shared with other batches; what varies from policy to policy differs."""
    rollouts = []
    for n in range(12):
        played = rollout([say(f"answer {(n * n + number) % 7}")], seed=n % 3, answer=str(n % 2))
        played.trajectory = dataclasses.replace(
            played.trajectory,
            policy_version=number,
            sample=n,
            mean_logprob=-0.1 * number,
            temperature=1.0 + number,
            row={"weight": n % 2} if rows else {},
        )
        rollouts.append(played)
    return [group(*rollouts[:6]), group(*rollouts[6:])]


def score_batches(function, numbers, cache=(), state=None, rows=False, **options):
    """Return totals, metrics and calls over some batches, and the orchestrator."""
    calls = []

    def count_calls(trajectories, **columns):
        calls.append(len(trajectories))
        return function(trajectories, **columns)

    count_calls.__wrapped__ = function  # so that the signature is the function's
    options = RewardSettings(cache=cache, max_failed_share=1.0, **options)
    orchestrator = RewardOrchestrator(
        {"counted": 0.7}, options=options, functions={"counted": count_calls}
    )
    if state is not None:
        orchestrator.load_state_dict(state)
    totals, metrics = [], []
    for number in numbers:
        groups = build_batch(number, rows)
        metrics.append(orchestrator.score(groups))
        played = [each for group in groups for each in group.rollouts]
        totals.append([(each.reward.hex(), each.is_masked) for each in played])
    return totals, metrics, calls, orchestrator


def score_purely(trajectories):
    return [
        math.sin(len(t.completion) * (t.seed + 1) + hash(t.turns[0].action[-1]) % 1)
        for t in trajectories
    ]


def score_by_row(trajectories, weight):
    return [
        float(w) + int(t.turns[0].action[-1]) for t, w in zip(trajectories, weight, strict=True)
    ]


def fail_on_four(trajectories):
    if any(t.turns[0].action.endswith("4") for t in trajectories):
        raise ValueError("cannot read a four")
    return score_purely(trajectories)


@pytest.mark.parametrize(
    ("function", "rows"),
    [(score_purely, False), (score_by_row, True), (fail_on_four, False)],
    ids=["pure", "columns", "failing"],
)
def test_the_values_are_the_same_bits_with_and_without(function, rows):
    without = score_batches(function, range(5), rows=rows)
    cached = score_batches(function, range(5), ("counted",), rows=rows)
    assert cached[0] == without[0]
    expected = [
        {name: value for name, value in row.items() if name != "reward/counted/cached"}
        for row in cached[1]
    ]
    assert expected == without[1]
    if function is score_purely:
        assert without[2] == [12] * 5
        # each batch has 12 questions of (3 seeds) x (texts); the new values, and one cached value
        assert sum(cached[2]) < 45 and all(count >= 1 for count in cached[2])
        assert cached[1][0]["reward/counted/cached"] == pytest.approx(1 - cached[2][0] / 12)


def test_a_repeated_batch_recomputes_a_single_value():
    """Check by hand: the same batch again needs no value and recomputes only the first one."""
    _, metrics, calls, orchestrator = score_batches(score_purely, [0, 0, 0], ("counted",))
    distinct = len(
        {
            (t.seed, t.turns[0].action, t.answer)
            for group in build_batch(0)
            for t in (each.trajectory for each in group.rollouts)
        }
    )
    assert calls == [distinct, 1, 1] and len(orchestrator.components["counted"].cache) == distinct
    assert [row["reward/counted/cached"] for row in metrics] == pytest.approx(
        [1 - distinct / 12, 11 / 12, 11 / 12]
    )


def test_values_survive_in_the_checkpoint_and_another_code_does_not_use_them(monkeypatch):
    uninterrupted = score_batches(score_purely, range(4), ("counted",))
    half = score_batches(score_purely, range(2), ("counted",))
    state = half[3].state_dict()
    assert state["components"]["counted"]["cache"]["values"].dtype == torch.float64
    rest = score_batches(score_purely, range(2, 4), ("counted",), state)
    assert (half[0] + rest[0], half[1] + rest[1], half[2] + rest[2]) == uninterrupted[:3], (
        "resumed, bit for bit"
    )
    monkeypatch.setattr(cached_function, "_digest_code", lambda name, function: "edited")
    edited = score_batches(score_purely, range(2, 4), ("counted",), state)
    assert edited[0] == rest[0] and edited[2][0] > rest[2][0]
    score_batches(
        score_purely,
        [0],
        ("counted",),
        RewardOrchestrator({"task": 1.0}).state_dict()
        | {"components": {"counted": {}}, "norms": {}},
    )


def test_the_number_of_values_is_bounded():
    orchestrator = score_batches(score_purely, range(7), ("counted",), cache_entries=5)[3]
    assert len(orchestrator.components["counted"].cache) == 5
    bounded = score_batches(score_purely, range(7), ("counted",), cache_entries=5)[0]
    assert bounded == score_batches(score_purely, range(7))[0]


def test_an_impure_function_is_detected():
    def count_up(trajectories, calls=[0.0]):  # noqa: B006 it is what makes it impure
        calls[0] += 1
        return [calls[0]] * len(trajectories)

    with pytest.raises(
        RewardError, match=r"reward 'counted' gave 2\.0 .* and 1\.0 before, so it is not pure"
    ):
        score_batches(count_up, [0, 0], ("counted",))


def test_functions_of_trl_with_none_and_what_they_ask_for():
    def score_like_trl(completions, **kwargs):
        return [None if text.endswith("2") else float(len(text)) for text in completions]

    def run_batches(function, cache):
        options = RewardSettings(cache=cache)
        orchestrator = RewardOrchestrator(
            {"counted": 1.0}, options=options, functions={"counted": function}
        )
        results = []
        for number in (0, 1, 0):
            groups = build_batch(number)
            metrics = orchestrator.score(groups)
            metrics.pop("reward/counted/cached", None)
            results.append((metrics, [each.reward for group in groups for each in group.rollouts]))
        return results

    uncached = run_batches(score_like_trl, ())
    assert run_batches(score_like_trl, ("counted",)) == uncached
    assert uncached[0][0]["reward/counted/skipped"] > 0

    def read_state(completions, trainer_state):
        return [0.0] * len(completions)

    with pytest.raises(SettingsError, match="asks for `trainer_state`, so it is not pure"):
        run_batches(read_state, ("counted",))

    def log_length(completions, **kwargs):
        kwargs["log_metric"]("length", 1.0)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="logs metrics, so it is not pure"):
        run_batches(log_length, ("counted",))


def test_a_name_that_is_no_function_is_refused():
    with pytest.raises(
        SettingsError, match=r"reward_options\.cache: 'task' is not a user function"
    ):
        RewardOrchestrator({"task": 1.0}, options=RewardSettings(cache=("task",)))
    with pytest.raises(
        SettingsError,
        match=r"reward_options\.cache: 'a:c' is not a component of rewards; did you mean 'a:b'",
    ):
        PolicySettings(rewards={"a:b": 1.0}, reward_options=RewardSettings(cache=("a:c",)))
    PolicySettings(reward_options=RewardSettings(cache=("handed_in",)))
