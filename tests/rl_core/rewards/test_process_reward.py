"""The process reward: steps of a rollout, functions that fail, a reward model of steps."""

import pytest
from helpers.reward_rollouts import group, rollout

from rl_core.errors import RewardError, SettingsError
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import PolicySettings, RewardSettings
from rl_core.types import Turn

MODULE = """
import asyncio

async def check_slowly(steps, trajectory):
    await asyncio.sleep(0)
    if "cancel" in steps:
        raise asyncio.CancelledError
    return [float(step == trajectory.target) for step in steps]

def check(steps, trajectory):
    if "raise" in steps:
        raise ValueError("no such step")
    if "short" in steps:
        return [1.0]
    if "nan" in steps:
        return [float("nan")] * len(steps)
    if "dict" in steps:
        return {0: 1.0}
    if "text" in steps:
        return "1"
    return [float(step == trajectory.target) for step in steps]
"""


def decode(ids):
    return "".join(map(chr, ids))


def play(*texts, observation=""):
    """Build a rollout of one turn a text, its letters as tokens, with an end-of-turn token."""
    turns, ids, mask = [], [], []
    for text in texts:
        turns.append(Turn(text, num_tokens=len(text) + 1, observation=observation))
        ids += [*map(ord, text), 0, *map(ord, observation)]
        mask += [True] * (len(text) + 1) + [False] * len(observation)
    played = rollout(turns, mask=mask)
    played.completion_ids = ids
    return played


@pytest.fixture
def score(tmp_path):
    (tmp_path / "steps.py").write_text(MODULE)

    def score_texts(*episodes, scorer=None, max_failed_share=0.9, name="check", **options):
        function = None if scorer else f"{tmp_path}/steps.py:{name}"
        rewards = RewardOrchestrator(
            {"process": 2.0},
            options=RewardSettings(
                process={"function": function, **options}, max_failed_share=max_failed_share
            ),
            step_scorer=scorer,
            decode=lambda ids: decode(i for i in ids if i),
        )
        rollouts = [play(*texts) if isinstance(texts, tuple) else texts for texts in episodes]
        metrics = rewards.score([group(*rollouts)])
        return rollouts, metrics

    return score_texts


def test_steps_are_scored_and_placed_on_their_last_tokens(score):
    rollouts, metrics = score(("t\nx\n\nt",), ("x",))
    # "t\n" ends at token 1, "x\n\n" at 4, "t" and its end of turn at 6
    assert rollouts[0].step_scores == [(1, 1.0), (4, 0.0), (6, 1.0)]
    assert rollouts[1].step_scores == [(1, 0.0)]
    assert [played.reward for played in rollouts] == [pytest.approx(4 / 3), 0.0]
    assert metrics["reward/process"] == pytest.approx(1 / 3)
    assert metrics["reward/process/steps"] == 2.0
    assert metrics["reward/process/step_score"] == 0.5
    assert metrics["reward/process/first_low"] == pytest.approx((1 / 3 + 0) / 2)


@pytest.mark.parametrize(("aggregate", "value"), [("sum", 2.0), ("mean", 2 / 3), ("min", 0.0)])
def test_the_value_of_a_completion(score, aggregate, value):
    (played,), _ = score(("t\nx\nt",), aggregate=aggregate)
    assert played.reward == pytest.approx(2 * value)


def test_turns_have_their_own_steps(score):
    played = play("t\nx", "t", observation="o\no")
    (played,), _ = score(played)
    assert played.step_scores == [(1, 1.0), (3, 0.0), (8, 1.0)]
    assert [played.loss_mask[end] for end, _ in played.step_scores] == [True] * 3


def test_another_delimiter(score):
    (played,), _ = score(("t; x; t",), delimiter="; ")
    assert [end for end, _ in played.step_scores] == [2, 5, 7]


@pytest.mark.parametrize("bad", ["raise", "short\nt", "nan", "dict", "text"])
def test_a_function_that_fails_excludes_the_rollout(score, bad):
    rollouts, metrics = score(("t",), (bad,))
    assert [played.is_masked for played in rollouts] == [False, True]
    assert rollouts[1].step_scores == [] and metrics["reward/masked_rate"] == 0.5
    assert metrics["reward/process"] == 1.0
    with pytest.raises(RewardError, match=r"reward 'process' (raised|gave)"):
        score(("t",), (bad,), max_failed_share=0.0)


def test_a_function_may_be_async_and_cancelled(score):
    rollouts, metrics = score(("t\nx",), ("cancel",), name="check_slowly")
    assert rollouts[0].step_scores == [(1, 1.0), (3, 0.0)]
    assert rollouts[1].is_masked and metrics["reward/masked_rate"] == 0.5


def test_a_reward_model_scores_positions_of_the_whole_sequence(score):
    seen = []

    def scorer(rows, positions):
        seen.append((rows, positions))
        return [[0.25] * len(places) for places in positions]

    (played,), _ = score(("t\nx",), scorer=scorer)
    assert seen == [([[0, *map(ord, "t\nx"), 0]], [[2, 4]])]
    assert played.step_scores == [(1, 0.25), (3, 0.25)]
    with pytest.raises(RewardError, match="scored a step of rollout 0"):
        score(("t",), scorer=lambda rows, positions: [[float("inf")]])


def test_what_nothing_scores_is_refused():
    with pytest.raises(SettingsError, match="needs a reward model trained with `loss: process`"):
        RewardOrchestrator({"process": 1.0}).check_step_scorer()
    with pytest.raises(RewardError, match="needs the policy's tokenizer"):
        RewardOrchestrator({"process": 1.0}).score([group(play("a"))])
    with pytest.raises(SettingsError, match="delimiter: a reward model of steps"):
        RewardSettings(process={"delimiter": ";"})


REFUSED = [
    ({"algorithm": "reinforce"}, "reinforce has no advantages by step"),
    ({"algorithm": "maxrl"}, "maxrl has no advantages by step"),
    ({"algorithm": "gdpo"}, "gdpo has no advantages by step"),
    ({"algorithm": "gspo"}, "gspo has no advantages by step"),
    ({"turn_credit": {}}, "not used by step with turn_credit"),
    ({"role_baseline": {}}, "not used by step with role_baseline"),
    ({"reward_options": {"clip": 1.0}}, "reward_options.clip changes the value"),
    ({"reward_options": {"normalise": ["process"]}}, "reward_options.normalise changes the value"),
]


@pytest.mark.parametrize(("changes", "problem"), REFUSED)
def test_settings_without_credit_by_step_are_refused(changes, problem):
    from rl_core.settings import build_settings

    with pytest.raises(SettingsError, match=problem):
        build_settings({"rewards": {"process": 1.0}, **changes}, PolicySettings)
    options = {"process": {"credit": "rollout"}, **changes.get("reward_options", {})}
    build_settings(
        {"rewards": {"process": 1.0}, **changes, "reward_options": options}, PolicySettings
    )
