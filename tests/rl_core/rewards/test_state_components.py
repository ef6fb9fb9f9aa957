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
    # after the prompt's state, which has no part in it: cosines 0.5 (in), -0.5 (half), 1.0 (0); row 1 is repeated
    states = walk([9, -9], [1, 0], [0.5, half], [0.5, -half], [1.0, -2 * half])
    assert reward([rollout(turns)], [states]) == [pytest.approx((1 + 0.5 + 0) / 3 - 0.5, abs=1e-6)]
    assert reward.metrics == pytest.approx(
        {"repetitions": 1.0, "contradictions": 0.0, "similarity": 1 / 3, "in_band": 1 / 3}, abs=1e-6
    )
    draft = say("answer 3\nno\nanswer 4")
    single = walk([1, 0], [1, 1])
    assert reward([rollout([say("answer 3")]), rollout([draft])], [single, single]) == [1.0, 0.75]
    assert "similarity" not in reward.metrics  # no pair of turns


def test_repetitions_and_contradictions():
    def counts(*turns):
        trajectory = rollout(turns).trajectory
        return count_repetitions(trajectory), count_contradictions(trajectory)

    assert counts(call(row=1), call(row=2), say("answer x")) == (0, 0)
    assert counts(call(action="Look  1"), call(action="look 1"), call(action="look 1")) == (2, 0)
    assert counts(call(action="#### 5\nlook 1"), say("#### 6")) == (0, 1)
    assert counts(call(action="#### 5\nlook 1"), say("so 5.0\n#### 5.0")) == (
        0,
        0,
    )  # the same number
    assert counts(say("answer red\nanswer blue\nanswer red")) == (0, 2)
    assert counts(say("<think>\nanswer red\n</think>\nanswer blue")) == (
        0,
        0,
    )  # a thought states nothing
    # an answer that was taken and followed by another question is the end of one part
    assert counts(
        say("answer 3", observation="next?"), say("answer 4", observation="next?"), say("answer 4")
    ) == (0, 0)
    assert counts(say("answer 3 ?", error=True, observation="no"), say("answer 4")) == (
        0,
        1,
    )  # it was not taken


def curiosity(seed=0, **options):
    return CuriosityReward(
        CuriositySettings(**{"hidden": 16, "learning_rate": 1e-2, "steps": 8, **options}), seed
    )


def walks(seed, count=6, size=8):
    generator = torch.Generator().manual_seed(seed)

    def draw(rows):
        return torch.randn(rows, size, generator=generator).tolist()

    return [walk(*draw(4), actions=draw(3)) for _ in range(count)]


def test_curiosity_by_hand():
    reward = curiosity()
    reward._build_model(2)
    for parameter in reward.model.parameters():
        torch.nn.init.zeros_(
            parameter
        )  # predicts 0, so that the error of any layer-normed state [1, -1] is 1
    one = walk([1.0, 0.0], [5.0, 0.0], [0.0, 3.0])  # layer-normed: [1, -1], [1, -1], [-1, 1]
    still = walk([1.0, 0.0], [5.0, 0.0])  # nothing came back
    with torch.no_grad():
        reward.model[-1].bias.copy_(torch.tensor([1.0, -1.0]))  # predicts [1, -1]
    other = walk([1.0, 0.0], [0.0, 2.0], [0.0, 2.0], observed=[True, True])  # errors 4 and 4
    values = reward([rollout()] * 3, [one, still, other])
    # means 0 and 4 of the two that have transitions: root mean square sqrt(8)
    assert values == pytest.approx([0.0, 0.0, 4 / math.sqrt(8)], abs=1e-3)
    assert reward.metrics == pytest.approx(
        {"transitions": 3, "error": 8 / 3, "scale": math.sqrt(8)}, abs=1e-3
    )


def test_without_transitions_there_is_nothing_to_be_curious_about():
    reward = curiosity()
    assert reward([rollout()], [walk([1.0, 0.0], [1.0, 2.0])]) == [0.0]
    assert reward.model is None and reward.scale.count == 0
    fresh = curiosity()
    fresh.load_state_dict(reward.state_dict())
    assert fresh.model is None


def test_curiosity_falls_on_what_is_known_and_not_on_what_is_new():
    reward = curiosity()
    known, new = walks(0), walks(1)
    rollouts = [rollout()] * 6
    first = reward(rollouts, known)
    for _ in range(60):
        last = reward(rollouts, known)
    assert all(b < 0.2 * a for a, b in zip(first, last, strict=True))
    surprised = reward(rollouts, new)
    assert min(surprised) > 3 * max(last)


def test_curiosity_knows_the_action():
    left, right = [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
    seen = [
        walk([0.0, 1.0, 0.0], after, actions=[action], observed=[True])
        for action, after in ((left, [2.0, 1.0, 0.0]), (right, [0.0, 1.0, 2.0]))
    ]
    reward = curiosity()
    for _ in range(200):
        reward([rollout()] * 2, seen)
    assert (
        reward.metrics["error"] < 1e-3
    )  # from the state alone both are equally likely, which leaves about 1


def test_curiosity_resumes_bit_for_bit_and_is_seeded():
    whole, first, second = curiosity(), curiosity(), curiosity(seed=5)
    rollouts = [rollout()] * 6
    expected = [whole(rollouts, walks(n)) for n in range(6)]
    assert [first(rollouts, walks(n)) for n in range(3)] == expected[:3]
    other = second(rollouts, walks(0))
    assert other != expected[0]  # another seed, another forward model
    encoder = StateEncoder(1 << 20)
    text = json.dumps(
        encoder.encode_value(copy.deepcopy(first.state_dict()), "x", "x"), allow_nan=False
    )
    second.load_state_dict(StateDecoder(dict(encoder.iter_shards())).decode_value(json.loads(text)))
    assert [second(rollouts, walks(n)) for n in range(3, 6)] == expected[3:]
    state = first.state_dict()
    for part in ("scale", "model", "optimizer"):  # each of them matters
        broken = curiosity()
        broken(rollouts, walks(0))
        broken.load_state_dict(
            {**copy.deepcopy(state), part: copy.deepcopy(broken.state_dict()[part])}
        )
        assert [broken(rollouts, walks(n)) for n in range(3, 6)] != expected[3:], part


def test_curiosity_moves_no_other_random_number():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    curiosity()([rollout()] * 6, walks(0))
    assert torch.equal(torch.rand(2), expected)
