"""Components over the policy's states: coherence, curiosity. Numbers worked by hand."""

import copy
import json
import math

import pytest
import torch
from helpers.reward_rollouts import call, rollout, say, walk
from hypothesis import given
from hypothesis import strategies as st

from rl_core.analysis.summary import count_contradictions, count_repetitions, score_similarity_band
from rl_core.rewards.state_components import CoherenceReward, CuriosityReward
from rl_core.settings import CoherenceSettings, CuriositySettings
from rl_core.storage.checkpoint import StateDecoder, StateEncoder


def test_band_by_hand():
    for cosine, expected in (
        (0.2, 1),
        (0.5, 1),
        (0.8, 1),
        (0.9, 0.5),
        (1.0, 0),
        (-0.4, 0.5),
        (-1, 0),
        (1.0001, 0),
    ):
        assert score_similarity_band(cosine, 0.2, 0.8) == pytest.approx(expected)
    assert score_similarity_band(1.0, 0.0, 1.0) == 1.0  # nothing above the band


@given(st.floats(-1, 1), st.floats(-1, 0.4), st.floats(0.5, 1))
def test_band_lies_between_0_and_1_and_is_1_inside_alone(cosine, low, high):
    score = score_similarity_band(cosine, low, high)
    assert 0 <= score <= 1 and (score == 1) >= (low <= cosine <= high)


def test_coherence_by_hand():
    reward = CoherenceReward(
        CoherenceSettings(low=0.0, high=0.8, repetition=0.5, contradiction=0.25)
    )
    turns = [call(row=1), call(row=2), call(row=1), say("answer 3")]
    half = math.sqrt(3) / 2
    # the prompt's state does not count: cosines 0.5 (in), -0.5 (half), 1.0 (0); row 1 is repeated
    states = walk([9, -9], [1, 0], [0.5, half], [0.5, -half], [1.0, -2 * half])
    assert reward([rollout(turns)], [states]) == [pytest.approx((1 + 0.5 + 0) / 3 - 0.5, abs=1e-6)]
    assert reward.metrics == pytest.approx(
        {"repetitions": 1.0, "contradictions": 0.0, "similarity": 1 / 3, "in_band": 1 / 3}, abs=1e-6
    )
    draft = say("answer 3\nno\nanswer 4")
    single = walk([1, 0], [1, 1])
    assert reward([rollout([say("answer 3")]), rollout([draft])], [single, single]) == [1.0, 0.75]
    assert "similarity" not in reward.metrics  # there is no pair of turns


def test_repetitions_and_contradictions():
    def count_both(*turns):
        trajectory = rollout(turns).trajectory
        return count_repetitions(trajectory), count_contradictions(trajectory)

    assert count_both(call(row=1), call(row=2), say("answer x")) == (0, 0)
    assert count_both(call(action="Look  1"), call(action="look 1"), call(action="look 1")) == (
        2,
        0,
    )
    assert count_both(call(action="#### 5\nlook 1"), say("#### 6")) == (0, 1)
    assert count_both(call(action="#### 5\nlook 1"), say("so 5.0\n#### 5.0")) == (
        0,
        0,
    )  # the same number
    assert count_both(say("answer red\nanswer blue\nanswer red")) == (0, 2)
    assert count_both(say("<think>\nanswer red\n</think>\nanswer blue")) == (
        0,
        0,
    )  # a thought makes no statement
    # an accepted answer followed by another question ends a part
    assert count_both(
        say("answer 3", observation="next?"), say("answer 4", observation="next?"), say("answer 4")
    ) == (0, 0)
    assert count_both(say("answer 3 ?", error=True, observation="no"), say("answer 4")) == (
        0,
        1,
    )  # it was not accepted


def build_curiosity(seed=0, **options):
    return CuriosityReward(
        CuriositySettings(**{"hidden": 16, "learning_rate": 1e-2, "steps": 8, **options}), seed
    )


def draw_walks(seed, count=6, size=8):
    generator = torch.Generator().manual_seed(seed)

    def draw_rows(rows):
        return torch.randn(rows, size, generator=generator).tolist()

    return [walk(*draw_rows(4), actions=draw_rows(3)) for _ in range(count)]


def test_curiosity_by_hand():
    reward = build_curiosity()
    reward._build_model(2)
    for parameter in reward.model.parameters():
        torch.nn.init.zeros_(
            parameter
        )  # predicts 0, so that the error of any layer-normed state [1, -1] is 1
    moving = walk([1.0, 0.0], [5.0, 0.0], [0.0, 3.0])  # layer-normed: [1, -1], [1, -1], [-1, 1]
    still = walk([1.0, 0.0], [5.0, 0.0])  # no observation
    with torch.no_grad():
        reward.model[-1].bias.copy_(torch.tensor([1.0, -1.0]))  # predicts [1, -1]
    other = walk([1.0, 0.0], [0.0, 2.0], [0.0, 2.0], observed=[True, True])  # errors 4 and 4
    values = reward([rollout()] * 3, [moving, still, other])
    # means 0 and 4 of the two that have transitions: root mean square sqrt(8)
    assert values == pytest.approx([0.0, 0.0, 4 / math.sqrt(8)], abs=1e-3)
    assert reward.metrics == pytest.approx(
        {"transitions": 3, "error": 8 / 3, "scale": math.sqrt(8)}, abs=1e-3
    )


def test_without_transitions_there_is_nothing_to_be_curious_about():
    reward = build_curiosity()
    assert reward([rollout()], [walk([1.0, 0.0], [1.0, 2.0])]) == [0.0]
    assert reward.model is None and reward.scale.count == 0
    fresh = build_curiosity()
    fresh.load_state_dict(reward.state_dict())
    assert fresh.model is None


def test_curiosity_falls_on_what_is_known_and_not_on_what_is_new():
    reward = build_curiosity()
    known, new = draw_walks(0), draw_walks(1)
    rollouts = [rollout()] * 6
    first = reward(rollouts, known)
    for _ in range(60):
        last = reward(rollouts, known)
    assert all(b < 0.2 * a for a, b in zip(first, last, strict=True))
    surprised = reward(rollouts, new)
    assert min(surprised) > 3 * max(last)


def test_curiosity_knows_the_action():
    left, right = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    walks = [
        walk([0.0, 1.0, 0.0], after, actions=[action], observed=[True])
        for action, after in ((left, [2.0, 1.0, 0.0]), (right, [0.0, 1.0, 2.0]))
    ]
    reward = build_curiosity()
    for _ in range(200):
        reward([rollout()] * 2, walks)
    assert (
        reward.metrics["error"] < 1e-3
    )  # from the state alone both are equally likely, which leaves about 1


def test_curiosity_resumes_bit_for_bit_and_is_seeded():
    uninterrupted, first, second = build_curiosity(), build_curiosity(), build_curiosity(seed=5)
    rollouts = [rollout()] * 6
    expected = [uninterrupted(rollouts, draw_walks(n)) for n in range(6)]
    assert [first(rollouts, draw_walks(n)) for n in range(3)] == expected[:3]
    other = second(rollouts, draw_walks(0))
    assert other != expected[0]  # another seed, another forward model
    encoder = StateEncoder(1 << 20)
    text = json.dumps(
        encoder.encode_value(copy.deepcopy(first.state_dict()), "x", "x"), allow_nan=False
    )
    second.load_state_dict(StateDecoder(dict(encoder.iter_shards())).decode_value(json.loads(text)))
    assert [second(rollouts, draw_walks(n)) for n in range(3, 6)] == expected[3:]
    state = first.state_dict()
    for part in ("scale", "model", "optimizer"):  # each of them matters
        broken = build_curiosity()
        broken(rollouts, draw_walks(0))
        broken.load_state_dict(
            {**copy.deepcopy(state), part: copy.deepcopy(broken.state_dict()[part])}
        )
        assert [broken(rollouts, draw_walks(n)) for n in range(3, 6)] != expected[3:], part


def test_curiosity_moves_no_other_random_number():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build_curiosity()([rollout()] * 6, draw_walks(0))
    assert torch.equal(torch.rand(2), expected)
