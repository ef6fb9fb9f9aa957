"""Experiences, sum tree and buffer: checks, exact shares, eviction and caps by hand."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
from helpers.online import VOCABULARY, experience, recorded, rollout

from rl_core.errors import DataError, SettingsError
from rl_core.online.experience import Experience, check_experience
from rl_core.online.experience_buffer import (
    ExperienceBuffer,
    SumTree,
    compute_importance_weights,
    compute_sampling_beta,
)
from rl_core.online.labels import Label
from rl_core.settings import OnlineBufferSettings
from rl_core.storage.line_logs import encode_checked_line, parse_checked_line

LABEL = Label("answer", "feedback", text="a")


def check(found, **options):
    check_experience(found, vocab_size=VOCABULARY, **{"max_tokens": 100, **options})


def test_an_experience_comes_back_to_the_last_bit():
    made = experience(top=True, logprobs=(-0.1 - 1e-17, -math.pi))
    record, problem = parse_checked_line(encode_checked_line({"value": made.to_json()}))
    back = Experience.from_json(record["value"])
    assert problem == "" and json.dumps(back.to_json()) == json.dumps(made.to_json())
    assert back.rollouts == made.rollouts and back.vote == made.vote
    assert all(
        (ours.logprobs_TK == theirs.logprobs_TK).all() and (ours.rest_T == theirs.rest_T).all()
        for ours, theirs in zip(back.recorded, made.recorded, strict=True)
    )
    check(back)


def changed(**changes):
    """An experience whose first rollout has these values."""
    made = experience()
    first = dataclasses.replace(made.rollouts[0], **changes)
    return dataclasses.replace(made, rollouts=(first, *made.rollouts[1:]))


def with_recorded(**changes):
    made = experience(top=True)
    top = dataclasses.replace(recorded(made.rollouts[0]), **changes)
    return dataclasses.replace(made, recorded=(top, *made.recorded[1:]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (lambda: changed(prompt_ids=[]), "rollouts.0.prompt_ids"),
        (lambda: changed(prompt_ids=[1, VOCABULARY]), "rollouts.0.prompt_ids.1: 11"),
        (lambda: changed(completion_ids=[3, True]), "rollouts.0.completion_ids.1: True"),
        (lambda: changed(completion_ids=[3]), "rollouts.0.loss_mask: 2 entries for 1"),
        (lambda: changed(sampler_logprobs=[-1.0, math.nan]), "rollouts.0.sampler_logprobs.1: nan"),
        (lambda: changed(sampler_logprobs=[0.5, -1.0]), "rollouts.0.sampler_logprobs.0: 0.5"),
        (lambda: changed(loss_mask=[False, False]), "no token was sampled"),
        (lambda: changed(context_starts=[2]), "context_starts"),
        (lambda: changed(trajectory=rollout(temperature=0.0).trajectory), "greedy"),
        (lambda: changed(trajectory=rollout(version=3).trajectory), "policy_version: \\[0, 3\\]"),
        (lambda: changed(trajectory=rollout(level="hard").trajectory), "one environment and level"),
        (lambda: experience(caller=""), "caller"),
        (lambda: experience(request="x" * 300), "request_id"),
        (lambda: experience(time=math.inf), "time"),
        (lambda: dataclasses.replace(experience(), rollouts=()), "rollouts: 0"),
        (lambda: experience(answers=["a"] * 30), "at most 100"),
        (lambda: with_recorded(rest_T=np.array([0.9, 0.9], np.float32)), "add up to"),
        (lambda: with_recorded(ids_TK=np.array([[1, 1, 2], [0, 1, 2]], np.int32)), "occurs twice"),
        (
            lambda: with_recorded(ids_TK=np.array([[1, 3, 2], [0, 1, 11]], np.int32)),
            "vocabulary has 11",
        ),
        (lambda: with_recorded(rest_T=np.array([0.5], np.float32)), "shapes"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(bad, named):
    check(experience(top=True))
    with pytest.raises(DataError, match=named):
        check(bad())


# ------------------------------------------------------------------------------------------------------------ sum tree


def test_a_sum_tree_by_hand():
    tree = SumTree(5)
    for leaf, priority in enumerate([1.0, 0.0, 2.0, 3.0, 4.0]):
        tree.set_priority(leaf, priority)
    assert tree.total == 10.0
    assert [tree.find_leaf(m) for m in (0.0, 0.999, 1.0, 2.999, 3.0, 5.999, 6.0, 9.999, 10.0)] == [
        0,
        0,
        2,
        2,
        3,
        3,
        4,
        4,
        4,
    ]
    tree.set_priority(4, 0.0)
    assert tree.total == 6.0 and tree.find_leaf(6.0) == 3  # never a leaf without priority
    with pytest.raises(DataError, match="all priorities are 0"):
        SumTree(3).find_leaf(0.0)
    for leaf, priority in ((5, 1.0), (0, -1.0), (0, math.nan), (0, math.inf)):
        with pytest.raises(DataError):
            tree.set_priority(leaf, priority)


def test_a_sum_tree_agrees_with_cumulated_sums_and_does_not_drift():
    rng = np.random.default_rng(0)
    tree, priorities = SumTree(37), np.zeros(37)
    for _ in range(2000):
        leaf, value = (
            int(rng.integers(37)),
            float(rng.choice([0.0, rng.random(), 1e-9 * rng.random()])),
        )
        tree.set_priority(leaf, value)
        priorities[leaf] = value
    fresh = SumTree(37)
    fresh.load_state_dict(tree.state_dict())
    assert (fresh.nodes == tree.nodes).all()
    edges = np.cumsum(priorities)
    for mass in rng.random(500) * tree.total:
        found = tree.find_leaf(float(mass))
        assert (
            priorities[found] > 0
            and abs(edges[found] - priorities[found] / 2 - mass) <= priorities[found] / 2 + 1e-12
        )


# -------------------------------------------------------------------------------------------------------------- buffer


def buffer(**options):
    return ExperienceBuffer(
        OnlineBufferSettings(**{"capacity": 4, "max_caller_share": 1.0, **options})
    )


def filled(found, names, **options):
    for number, name in enumerate(names, start=1):
        found.add_experience(number, experience(name, **options), LABEL, version=0)
    return found


def test_importance_weights_and_beta_by_hand():
    # (4 * 1/2)^-1/2 = 0.7071, (4 * 1/8)^-1/2 = 1.4142: over the largest 0.5 and 1
    assert compute_importance_weights([0.5, 0.125], 4, 0.5) == pytest.approx([0.5, 1.0])
    assert compute_importance_weights([0.5, 0.125], 4, 0.0) == [1.0, 1.0]
    assert [
        compute_sampling_beta(u, start=0.4, updates=100) for u in (0, 50, 100, 900)
    ] == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_draws_follow_the_priorities_and_priorities_follow_the_errors():
    found = filled(buffer(priority_exponent=1.0, priority_floor=0.1), ["r1", "r2", "r3"])
    for name, error in (("r1", 0.0), ("r2", 0.2), ("r3", 0.5)):
        found.record_error(name, error)
    assert found.tree.priorities.tolist() == pytest.approx([0.1, 0.3, 0.6, 0.0])
    rng = np.random.default_rng(1)
    counts = Counter(
        kept.experience.request_id
        for _ in range(4000)
        for kept in found.sample_experiences(1, 0.4, rng).experiences
    )
    for name, share in (("r1", 0.1), ("r2", 0.3), ("r3", 0.6)):
        assert counts[name] / 4000 == pytest.approx(
            share, abs=4 * math.sqrt(share * (1 - share) / 4000)
        )
    # one from each tenth of the mass: exactly in proportion
    drawn = found.sample_experiences(10, 1.0, rng)
    assert Counter(kept.experience.request_id for kept in drawn.experiences) == {
        "r1": 1,
        "r2": 3,
        "r3": 6,
    }
    assert drawn.weights == pytest.approx([1.0] + [1 / 3] * 3 + [1 / 6] * 6)


def test_without_a_label_nothing_is_drawn_and_a_new_one_comes_first():
    found = buffer()
    found.add_experience(1, experience("r1"), None, version=0)
    with pytest.raises(DataError, match="priorities are 0"):
        found.sample_experiences(1, 1.0, np.random.default_rng(0))
    found.set_label("r1", LABEL)
    found.record_error("r1", 3.0)
    found.add_experience(2, experience("r2"), LABEL, version=0)
    assert found.errors == {0: 3.0, 1: 3.0}  # as large as any so far
    with pytest.raises(DataError, match="error"):
        found.record_error("r1", math.nan)


def test_the_longest_answer_is_that_of_what_is_here():
    found = buffer(capacity=1)
    assert found.count_longest_answer_tokens() == 0
    long = experience("long")
    long.rollouts[1].completion_ids[:] = [3] * 9
    found.add_experience(1, long, LABEL, version=0)
    assert found.count_longest_answer_tokens() == 9
    filled(found, ["short"])
    assert found.count_longest_answer_tokens() == 2


def test_eviction_takes_the_least_first():
    found = filled(buffer(), ["r1", "r2", "r3", "r4"])
    for name, error in (("r1", 0.5), ("r2", 0.1), ("r3", 0.9), ("r4", 0.1)):
        found.record_error(name, error)
    found.add_experience(5, experience("r5"), None, version=0)
    assert set(found.slot_of) == {"r1", "r3", "r4", "r5"}  # of r2 and r4 the older one
    found.add_experience(6, experience("r6"), LABEL, version=0)
    # r5 waits for its label in its quarter of the room
    assert set(found.slot_of) == {
        "r1",
        "r3",
        "r5",
        "r6",
    }
    assert sum(found.evicted.values()) == 2


def test_a_label_that_comes_later_finds_its_experience_in_a_full_buffer():
    found = filled(buffer(capacity=8, waiting_share=0.5), [f"old{i}" for i in range(8)])
    for number in range(100):
        found.add_experience(100 + number, experience(f"r{number}"), None, version=0)
        if number >= 3:
            assert found.find_experience(f"r{number - 3}") is not None, number
            if number % 10 == 3:
                found.set_label(f"r{number - 3}", LABEL)
    labels = [kept.label is not None for kept in found.slots.values()]
    assert (labels.count(True), labels.count(False)) == (3, 5)  # 4 wait, and the one that came last
    none = filled(buffer(capacity=8, waiting_share=0.0), [f"old{i}" for i in range(8)])
    (
        none.add_experience(9, experience("r9"), None, version=0),
        none.add_experience(10, experience("r10"), LABEL, version=0),
    )
    assert none.find_experience("r9") is None


def test_of_a_caller_at_its_cap_a_share_waits_too():
    found = filled(
        buffer(capacity=16, max_caller_share=0.5, waiting_share=0.25), [f"old{i}" for i in range(8)]
    )
    for number in range(20):
        found.add_experience(100 + number, experience(f"r{number}"), None, version=0)
    waiting = [kept.experience.request_id for kept in found.slots.values() if kept.label is None]
    assert sorted(waiting) == ["r17", "r18", "r19"] and len(found) == 8


def test_nobody_owns_the_buffer():
    found = filled(buffer(capacity=8, max_caller_share=0.25), ["first"], caller="anna")
    found.record_error("first", 0.0)  # the least useful of all, and it stays
    for number in range(50):
        found.add_experience(
            10 + number, experience(f"m{number}", caller="mallory"), LABEL, version=0
        )
    assert found.find_experience("first") is not None
    for number in range(5):
        found.add_experience(
            100 + number, experience(f"a{number}", caller=f"anna{number}"), LABEL, version=0
        )
    assert Counter(kept.experience.caller for kept in found.slots.values())["mallory"] == 2
    assert len(found) == 8 and found.evicted == {"caller": 48}
    assert found.compute_metrics()["online/buffer_largest_caller"] == pytest.approx(2 / 8)


def test_eviction_by_age_and_by_staleness():
    found = filled(buffer(max_age_s=100, max_staleness=10), ["r1", "r2"])
    found.add_experience(3, experience("r3", time=1101.0, version=9), LABEL, version=9)
    assert set(found.slot_of) == {"r1", "r2", "r3"}  # one time alone may be a clock that jumped
    for number in (4, 5):
        found.add_experience(
            number, experience(f"r{number}", time=1101.0, version=9), LABEL, version=9
        )
    assert set(found.slot_of) == {"r3", "r4", "r5"} and found.evicted["age"] == 2
    # came late
    assert not found.add_experience(6, experience("r6", time=1000.0, version=9), LABEL, version=9)
    found.evict_outdated(19)
    assert set(found.slot_of) == {"r3", "r4", "r5"}
    found.evict_outdated(20)
    assert len(found) == 0 and found.evicted["staleness"] == 3
    # the same request again
    assert not filled(buffer(), ["r1"]).add_experience(2, experience("r1"), LABEL, version=0)


def test_a_clock_that_jumps_costs_no_more_than_the_jump():
    found = buffer(capacity=64, max_age_s=100)
    year = 3e7
    times = [1000.0] * 20 + [1000.0 + year] + [1001.0] * 20  # one answer from the future
    taken = [
        found.add_experience(n, experience(f"r{n}", time=t), LABEL, version=0)
        for n, t in enumerate(times, start=1)
    ]
    assert all(taken) and not found.evicted
    for number in range(10):  # it is really later now
        found.add_experience(
            100 + number, experience(f"l{number}", time=1001.0 + year), LABEL, version=0
        )
    assert len(found) == 11 and found.compute_metrics()["online/buffer_age_max_seconds"] == 1.0
    for number in range(20):  # and the clock is set right again
        found.add_experience(200 + number, experience(f"b{number}", time=1002.0), LABEL, version=0)
    assert len(found) > 20 and found.find_experience("b19") is not None


def test_where_segments_are_removed_the_buffer_reaches_back_over_half_the_log():
    with pytest.raises(SettingsError, match="at most a quarter of max_bytes 8000"):
        OnlineBufferSettings(max_bytes=8000, segment_bytes=2001, keep_segments=False)
    for keep, left in (
        (False, {"r5", "r6", "r7", "r8", "r9"}),
        (True, {"r0", "r6", "r7", "r8", "r9"}),
    ):
        found = buffer(capacity=5, max_bytes=8000, segment_bytes=2000, keep_segments=keep)
        for number in range(10):
            found.add_experience(
                number, experience(f"r{number}"), LABEL, version=0, position=1000 * number
            )
            found.record_error(f"r{number}", 9.0 if number == 0 else 0.1)
        assert set(found.slot_of) == left  # r0 has the largest error
        assert (found.evicted["log"] == 5) == (not keep)


def test_state_comes_back_and_goes_on_alike():
    found = filled(buffer(capacity=3, max_caller_share=1.0), ["r1", "r2", "r3", "r4", "r5"])
    found.record_error("r4", 0.25)
    kept = {number: experience(f"r{number}") for number in range(1, 7)}
    other = buffer(capacity=3)
    other.load_state_dict(found.state_dict(), kept)
    for one in (found, other):
        one.add_experience(6, kept[6], LABEL, version=0)
    assert other.state_dict() == found.state_dict()
    assert (other.tree.nodes == found.tree.nodes).all()
    rngs = [np.random.default_rng(3) for _ in range(2)]
    drawn = [
        [k.number for k in one.sample_experiences(8, 0.5, rng).experiences]
        for one, rng in zip((found, other), rngs, strict=True)
    ]
    assert drawn[0] == drawn[1]
    with pytest.raises(DataError, match="record"):
        buffer(capacity=3).load_state_dict(found.state_dict(), {})
