"""Values of reward functions that are declared pure: the same bits, computed once."""

import dataclasses
import math

import pytest
import torch
from helpers.reward_rollouts import group, rollout, say

from rl_core.errors import RewardError, SettingsError
from rl_core.rewards import cached_function
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import PolicySettings, RewardSettings


def batch(number, rows=False):
    """Twelve rollouts, most of which other batches have too; what varies from policy to policy differs."""
    made = []
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
        made.append(played)
    return [group(*made[:6]), group(*made[6:])]


def scored(function, numbers, cache=(), state=None, rows=False, **options):
    """Totals, metrics and calls over some batches; the orchestrator afterwards."""
    calls = []

    def counted(trajectories, **columns):
        calls.append(len(trajectories))
        return function(trajectories, **columns)

    counted.__wrapped__ = function  # its signature is the function's
    options = RewardSettings(cache=cache, max_failed_share=1.0, **options)
    orchestrator = RewardOrchestrator({"own": 0.7}, options=options, functions={"own": counted})
    if state is not None:
        orchestrator.load_state_dict(state)
    totals, metrics = [], []
    for number in numbers:
        groups = batch(number, rows)
        metrics.append(orchestrator.score(groups))
        played = [each for one in groups for each in one.rollouts]
        totals.append([(each.reward.hex(), each.is_masked) for each in played])
    return totals, metrics, calls, orchestrator


def pure(trajectories):
    return [
        math.sin(len(t.completion) * (t.seed + 1) + hash(t.turns[0].action[-1]) % 1)
        for t in trajectories
    ]


def by_row(trajectories, weight):
    return [
        float(w) + int(t.turns[0].action[-1]) for t, w in zip(trajectories, weight, strict=True)
    ]


def failing(trajectories):
    if any(t.turns[0].action.endswith("4") for t in trajectories):
        raise ValueError("cannot read a four")
    return pure(trajectories)


@pytest.mark.parametrize(
    ("function", "rows"),
    [(pure, False), (by_row, True), (failing, False)],
    ids=["pure", "columns", "failing"],
)
def test_the_values_are_the_same_bits_with_and_without(function, rows):
    without = scored(function, range(5), rows=rows)
    cached = scored(function, range(5), ("own",), rows=rows)
    assert cached[0] == without[0]
    plain = [
        {name: value for name, value in row.items() if name != "reward/own/cached"}
        for row in cached[1]
    ]
    assert plain == without[1]
    if function is pure:
        assert without[2] == [12] * 5
        # each batch has 12 questions of (3 seeds) x (texts); what is new, and one kept value
        assert sum(cached[2]) < 45 and all(count >= 1 for count in cached[2])
        assert cached[1][0]["reward/own/cached"] == pytest.approx(1 - cached[2][0] / 12)


def test_what_was_played_before_is_asked_once_more_alone():
    """By hand: the same batch again needs no value, and computes the first one again."""
    _, metrics, calls, orchestrator = scored(pure, [0, 0, 0], ("own",))
    distinct = len(
        {
            (t.seed, t.turns[0].action, t.answer)
            for one in batch(0)
            for t in (each.trajectory for each in one.rollouts)
        }
    )
    assert calls == [distinct, 1, 1] and len(orchestrator.components["own"].cache) == distinct
    assert [row["reward/own/cached"] for row in metrics] == pytest.approx(
        [1 - distinct / 12, 11 / 12, 11 / 12]
    )


def test_values_survive_in_the_checkpoint_and_another_code_does_not_use_them(monkeypatch):
    whole = scored(pure, range(4), ("own",))
    half = scored(pure, range(2), ("own",))
    state = half[3].state_dict()
    assert state["components"]["own"]["cache"]["values"].dtype == torch.float64
    rest = scored(pure, range(2, 4), ("own",), state)
    assert (half[0] + rest[0], half[1] + rest[1], half[2] + rest[2]) == whole[:3], (
        "resumed, bit for bit"
    )
    monkeypatch.setattr(cached_function, "_digest_code", lambda name, function: "edited")
    edited = scored(pure, range(2, 4), ("own",), state)
    assert edited[0] == rest[0] and edited[2][0] > rest[2][0]
    scored(
        pure,
        [0],
        ("own",),
        RewardOrchestrator({"task": 1.0}).state_dict() | {"components": {"own": {}}, "norms": {}},
    )


def test_the_number_of_values_is_bounded():
    orchestrator = scored(pure, range(7), ("own",), cache_entries=5)[3]
    assert len(orchestrator.components["own"].cache) == 5
    assert scored(pure, range(7), ("own",), cache_entries=5)[0] == scored(pure, range(7))[0]


def test_a_function_that_is_not_pure_is_found_out():
    def counting(trajectories, calls=[0.0]):  # noqa: B006 it is what makes it impure
        calls[0] += 1
        return [calls[0]] * len(trajectories)

    with pytest.raises(
        RewardError, match=r"reward 'own' gave 2\.0 .* and 1\.0 before, so it is not pure"
    ):
        scored(counting, [0, 0], ("own",))


def test_functions_of_trl_with_none_and_what_they_ask_for():
    def trl(completions, **kwargs):
        return [None if text.endswith("2") else float(len(text)) for text in completions]

    def run(function, cache):
        options = RewardSettings(cache=cache)
        orchestrator = RewardOrchestrator(
            {"own": 1.0}, options=options, functions={"own": function}
        )
        found = []
        for number in (0, 1, 0):
            groups = batch(number)
            metrics = orchestrator.score(groups)
            metrics.pop("reward/own/cached", None)
            found.append((metrics, [each.reward for one in groups for each in one.rollouts]))
        return found

    assert run(trl, ("own",)) == run(trl, ()) and run(trl, ())[0][0]["reward/own/skipped"] > 0

    def stateful(completions, trainer_state):
        return [0.0] * len(completions)

    with pytest.raises(SettingsError, match="asks for `trainer_state`, so it is not pure"):
        run(stateful, ("own",))

    def logging(completions, **kwargs):
        kwargs["log_metric"]("length", 1.0)
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match="logs metrics, so it is not pure"):
        run(logging, ("own",))


def test_a_name_that_is_no_function_is_refused():
    with pytest.raises(
        SettingsError, match=r"reward_options\.cache: 'task' is no function of yours"
    ):
        RewardOrchestrator({"task": 1.0}, options=RewardSettings(cache=("task",)))
    with pytest.raises(
        SettingsError,
        match=r"reward_options\.cache: 'a:c' is not a component of rewards; did you mean 'a:b'",
    ):
        PolicySettings(rewards={"a:b": 1.0}, reward_options=RewardSettings(cache=("a:c",)))
    PolicySettings(reward_options=RewardSettings(cache=("handed_in",)))
