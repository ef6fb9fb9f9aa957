"""Experiences, sum tree and buffer: checks, exact shares, eviction and limits by hand."""

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
from rl_core.storage.append_log import encode_checked_line, parse_checked_line

LABEL = Label("answer", "feedback", text="a")


def check_valid(experience_, **options):
    check_experience(experience_, vocab_size=VOCABULARY, **{"max_tokens": 100, **options})


def test_an_experience_comes_back_to_the_last_bit():
    original = experience(top=True, logprobs=(-0.1 - 1e-17, -math.pi))
    record, problem = parse_checked_line(encode_checked_line({"value": original.to_json()}))
    restored = Experience.from_json(record["value"])
    assert problem == "" and json.dumps(restored.to_json()) == json.dumps(original.to_json())
    assert restored.rollouts == original.rollouts and restored.vote == original.vote
    assert all(
        (ours.logprobs_TK == theirs.logprobs_TK).all() and (ours.rest_T == theirs.rest_T).all()
        for ours, theirs in zip(restored.recorded, original.recorded, strict=True)
    )
    check_valid(restored)


def change_first_rollout(**changes):
    """Return an experience whose first rollout has these values."""
    original = experience()
    first = dataclasses.replace(original.rollouts[0], **changes)
    return dataclasses.replace(original, rollouts=(first, *original.rollouts[1:]))


def change_recorded_tokens(**changes):
    original = experience(top=True)
    top = dataclasses.replace(recorded(original.rollouts[0]), **changes)
    return dataclasses.replace(original, recorded=(top, *original.recorded[1:]))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (lambda: change_first_rollout(prompt_ids=[]), "rollouts.0.prompt_ids"),
        (lambda: change_first_rollout(prompt_ids=[1, VOCABULARY]), "rollouts.0.prompt_ids.1: 11"),
        (
            lambda: change_first_rollout(completion_ids=[3, True]),
            "rollouts.0.completion_ids.1: True",
        ),
        (lambda: change_first_rollout(completion_ids=[3]), "rollouts.0.loss_mask: 2 entries for 1"),
        (
            lambda: change_first_rollout(sampler_logprobs=[-1.0, math.nan]),
            "rollouts.0.sampler_logprobs.1: nan",
        ),
        (
            lambda: change_first_rollout(sampler_logprobs=[0.5, -1.0]),
            "rollouts.0.sampler_logprobs.0: 0.5",
        ),
        (lambda: change_first_rollout(loss_mask=[False, False]), "no token was sampled"),
        (lambda: change_first_rollout(context_starts=[2]), "context_starts"),
        (lambda: change_first_rollout(trajectory=rollout(temperature=0.0).trajectory), "greedy"),
        (
            lambda: change_first_rollout(trajectory=rollout(version=3).trajectory),
            "policy_version: \\[0, 3\\]",
        ),
        (
            lambda: change_first_rollout(trajectory=rollout(level="hard").trajectory),
            "same environment and level",
        ),
        (lambda: experience(caller=""), "caller"),
        (lambda: experience(request="x" * 300), "request_id"),
        (lambda: experience(time=math.inf), "time"),
        (lambda: dataclasses.replace(experience(), rollouts=()), "rollouts: 0"),
        (lambda: experience(answers=["a"] * 30), "at most 100"),
        (lambda: change_recorded_tokens(rest_T=np.array([0.9, 0.9], np.float32)), "add up to"),
        (
            lambda: change_recorded_tokens(ids_TK=np.array([[1, 1, 2], [0, 1, 2]], np.int32)),
            "occurs twice",
        ),
        (
            lambda: change_recorded_tokens(ids_TK=np.array([[1, 3, 2], [0, 1, 11]], np.int32)),
            "vocabulary has 11",
        ),
        (lambda: change_recorded_tokens(rest_T=np.array([0.5], np.float32)), "shapes"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_by_name(bad, named):
    check_valid(experience(top=True))
    with pytest.raises(DataError, match=named):
        check_valid(bad())


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
        leaf = int(rng.integers(37))
        value = float(rng.choice([0.0, rng.random(), 1e-9 * rng.random()]))
        tree.set_priority(leaf, value)
        priorities[leaf] = value
    fresh = SumTree(37)
    fresh.load_state_dict(tree.state_dict())
    assert (fresh.nodes == tree.nodes).all()
    edges = np.cumsum(priorities)
    for mass in rng.random(500) * tree.total:
        leaf = tree.find_leaf(float(mass))
        half = priorities[leaf] / 2
        assert half > 0 and abs(edges[leaf] - half - mass) <= half + 1e-12


def make_buffer(**options):
    return ExperienceBuffer(
        OnlineBufferSettings(**{"capacity": 4, "max_caller_share": 1.0, **options})
    )


def fill_buffer(buffer, names, **options):
    for number, name in enumerate(names, start=1):
        buffer.add_experience(number, experience(name, **options), LABEL, version=0)
    return buffer


def test_importance_weights_and_beta_by_hand():
    # (4 * 1/2)^-1/2 = 0.7071, (4 * 1/8)^-1/2 = 1.4142: over the largest 0.5 and 1
    assert compute_importance_weights([0.5, 0.125], 4, 0.5) == pytest.approx([0.5, 1.0])
    assert compute_importance_weights([0.5, 0.125], 4, 0.0) == [1.0, 1.0]
    assert [
        compute_sampling_beta(u, start=0.4, updates=100) for u in (0, 50, 100, 900)
    ] == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_draws_follow_the_priorities_and_priorities_follow_the_errors():
    buffer = fill_buffer(make_buffer(priority_exponent=1.0, priority_floor=0.1), ["r1", "r2", "r3"])
    for name, error in (("r1", 0.0), ("r2", 0.2), ("r3", 0.5)):
        buffer.record_error(name, error)
    assert buffer.tree.priorities.tolist() == pytest.approx([0.1, 0.3, 0.6, 0.0])
    rng = np.random.default_rng(1)
    counts = Counter(
        buffered.experience.request_id
        for _ in range(4000)
        for buffered in buffer.sample_experiences(1, 0.4, rng).experiences
    )
    for name, share in (("r1", 0.1), ("r2", 0.3), ("r3", 0.6)):
        tolerance = 4 * math.sqrt(share * (1 - share) / 4000)
        assert counts[name] / 4000 == pytest.approx(share, abs=tolerance)
    # one draw from each tenth of the mass: exactly in proportion
    drawn = buffer.sample_experiences(10, 1.0, rng)
    assert Counter(buffered.experience.request_id for buffered in drawn.experiences) == {
        "r1": 1,
        "r2": 3,
        "r3": 6,
    }
    assert drawn.weights == pytest.approx([1.0] + [1 / 3] * 3 + [1 / 6] * 6)


def test_without_a_label_nothing_is_drawn_and_a_new_one_comes_first():
    buffer = make_buffer()
    buffer.add_experience(1, experience("r1"), None, version=0)
    with pytest.raises(DataError, match="priorities are 0"):
        buffer.sample_experiences(1, 1.0, np.random.default_rng(0))
    buffer.set_label("r1", LABEL)
    buffer.record_error("r1", 3.0)
    buffer.add_experience(2, experience("r2"), LABEL, version=0)
    assert buffer.errors == {0: 3.0, 1: 3.0}  # the largest error so far
    with pytest.raises(DataError, match="error"):
        buffer.record_error("r1", math.nan)


def test_the_longest_answer_is_one_of_the_buffer():
    buffer = make_buffer(capacity=1)
    assert buffer.count_longest_answer_tokens() == 0
    long = experience("long")
    long.rollouts[1].completion_ids[:] = [3] * 9
    buffer.add_experience(1, long, LABEL, version=0)
    assert buffer.count_longest_answer_tokens() == 9
    fill_buffer(buffer, ["short"])
    assert buffer.count_longest_answer_tokens() == 2


def test_eviction_takes_the_least_first():
    buffer = fill_buffer(make_buffer(), ["r1", "r2", "r3", "r4"])
    for name, error in (("r1", 0.5), ("r2", 0.1), ("r3", 0.9), ("r4", 0.1)):
        buffer.record_error(name, error)
    buffer.add_experience(5, experience("r5"), None, version=0)
    assert set(buffer.slots_by_request) == {"r1", "r3", "r4", "r5"}  # r2 is older than r4
    buffer.add_experience(6, experience("r6"), LABEL, version=0)
    # r5 waits for its label in the quarter of the slots reserved for that
    assert set(buffer.slots_by_request) == {"r1", "r3", "r5", "r6"}
    assert sum(buffer.evicted.values()) == 2


def test_a_label_that_comes_later_finds_its_experience_in_a_full_buffer():
    buffer = fill_buffer(make_buffer(capacity=8, waiting_share=0.5), [f"old{i}" for i in range(8)])
    for number in range(100):
        buffer.add_experience(100 + number, experience(f"r{number}"), None, version=0)
        if number >= 3:
            assert buffer.find_experience(f"r{number - 3}") is not None, number
            if number % 10 == 3:
                buffer.set_label(f"r{number - 3}", LABEL)
    labels = [buffered.label is not None for buffered in buffer.slots.values()]
    # 4 reserved slots, and the newest experience
    assert (labels.count(True), labels.count(False)) == (3, 5)
    unreserved = fill_buffer(
        make_buffer(capacity=8, waiting_share=0.0), [f"old{i}" for i in range(8)]
    )
    unreserved.add_experience(9, experience("r9"), None, version=0)
    unreserved.add_experience(10, experience("r10"), LABEL, version=0)
    assert unreserved.find_experience("r9") is None


def test_a_share_of_a_caller_at_its_limit_waits_too():
    buffer = fill_buffer(
        make_buffer(capacity=16, max_caller_share=0.5, waiting_share=0.25),
        [f"old{i}" for i in range(8)],
    )
    for number in range(20):
        buffer.add_experience(100 + number, experience(f"r{number}"), None, version=0)
    waiting = [
        buffered.experience.request_id
        for buffered in buffer.slots.values()
        if buffered.label is None
    ]
    assert sorted(waiting) == ["r17", "r18", "r19"] and len(buffer) == 8


def test_nobody_owns_the_buffer():
    buffer = fill_buffer(make_buffer(capacity=8, max_caller_share=0.25), ["first"], caller="anna")
    buffer.record_error("first", 0.0)  # the least useful experience is not evicted
    for number in range(50):
        buffer.add_experience(
            10 + number, experience(f"m{number}", caller="mallory"), LABEL, version=0
        )
    assert buffer.find_experience("first") is not None
    for number in range(5):
        buffer.add_experience(
            100 + number, experience(f"a{number}", caller=f"anna{number}"), LABEL, version=0
        )
    assert Counter(buffered.experience.caller for buffered in buffer.slots.values())["mallory"] == 2
    assert len(buffer) == 8 and buffer.evicted == {"caller": 48}
    assert buffer.compute_metrics()["online/buffer_largest_caller"] == pytest.approx(2 / 8)


def test_eviction_by_age_and_by_staleness():
    buffer = fill_buffer(make_buffer(max_age_s=100, max_staleness=10), ["r1", "r2"])
    buffer.add_experience(3, experience("r3", time=1101.0, version=9), LABEL, version=9)
    # a single time may come from a clock that jumped
    assert set(buffer.slots_by_request) == {"r1", "r2", "r3"}
    for number in (4, 5):
        buffer.add_experience(
            number, experience(f"r{number}", time=1101.0, version=9), LABEL, version=9
        )
    assert set(buffer.slots_by_request) == {"r3", "r4", "r5"} and buffer.evicted["age"] == 2
    # too old on arrival
    assert not buffer.add_experience(6, experience("r6", time=1000.0, version=9), LABEL, version=9)
    buffer.evict_outdated(19)
    assert set(buffer.slots_by_request) == {"r3", "r4", "r5"}
    buffer.evict_outdated(20)
    assert len(buffer) == 0 and buffer.evicted["staleness"] == 3
    # the same request again
    assert not fill_buffer(make_buffer(), ["r1"]).add_experience(
        2, experience("r1"), LABEL, version=0
    )


def test_a_clock_that_jumps_costs_no_more_than_the_jump():
    buffer = make_buffer(capacity=64, max_age_s=100)
    year = 3e7
    times = [1000.0] * 20 + [1000.0 + year] + [1001.0] * 20  # one answer from the future
    accepted = [
        buffer.add_experience(n, experience(f"r{n}", time=t), LABEL, version=0)
        for n, t in enumerate(times, start=1)
    ]
    assert all(accepted) and not buffer.evicted
    for number in range(10):  # the time is really later now
        buffer.add_experience(
            100 + number, experience(f"l{number}", time=1001.0 + year), LABEL, version=0
        )
    assert len(buffer) == 11 and buffer.compute_metrics()["online/buffer_age_max_seconds"] == 1.0
    for number in range(20):  # the clock is corrected
        buffer.add_experience(200 + number, experience(f"b{number}", time=1002.0), LABEL, version=0)
    assert len(buffer) > 20 and buffer.find_experience("b19") is not None


def test_with_removed_segments_the_buffer_covers_at_most_half_the_log():
    with pytest.raises(SettingsError, match="at most a quarter of max_bytes 8000"):
        OnlineBufferSettings(max_bytes=8000, segment_bytes=2001, keep_segments=False)
    for keep, remaining in (
        (False, {"r5", "r6", "r7", "r8", "r9"}),
        (True, {"r0", "r6", "r7", "r8", "r9"}),
    ):
        buffer = make_buffer(capacity=5, max_bytes=8000, segment_bytes=2000, keep_segments=keep)
        for number in range(10):
            buffer.add_experience(
                number, experience(f"r{number}"), LABEL, version=0, position=1000 * number
            )
            buffer.record_error(f"r{number}", 9.0 if number == 0 else 0.1)
        assert set(buffer.slots_by_request) == remaining  # r0 has the largest error
        assert (buffer.evicted["log"] == 5) == (not keep)


def test_a_restored_buffer_continues_identically():
    buffer = fill_buffer(
        make_buffer(capacity=3, max_caller_share=1.0), ["r1", "r2", "r3", "r4", "r5"]
    )
    buffer.record_error("r4", 0.25)
    experiences = {number: experience(f"r{number}") for number in range(1, 7)}
    restored = make_buffer(capacity=3)
    restored.load_state_dict(buffer.state_dict(), experiences)
    for each in (buffer, restored):
        each.add_experience(6, experiences[6], LABEL, version=0)
    assert restored.state_dict() == buffer.state_dict()
    assert (restored.tree.nodes == buffer.tree.nodes).all()
    rngs = [np.random.default_rng(3) for _ in range(2)]
    drawn = [
        [row.number for row in each.sample_experiences(8, 0.5, rng).experiences]
        for each, rng in zip((buffer, restored), rngs, strict=True)
    ]
    assert drawn[0] == drawn[1]
    with pytest.raises(DataError, match="record"):
        make_buffer(capacity=3).load_state_dict(buffer.state_dict(), {})
