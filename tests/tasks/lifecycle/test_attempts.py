"""Attempts at the gate: each counted once, by the episodes that they share."""

import dataclasses

import pytest
from helpers.evaluations import build_evaluation
from helpers.model_tags import ModelTags

from tasks.lifecycle.promotion import (
    SKETCH_SIZE,
    build_attempt,
    claim_attempt,
    compute_comparison_id,
    list_earlier_attempts,
    read_attempts,
    record_attempt,
    sketch_episodes,
)
from tasks.tracking import Tracking


def build_test_attempt(
    challenger="a", champion="x", *, wins=3, first=0, draw=0, environment="grid", version=2
):
    return build_attempt(
        environment,
        compute_comparison_id(challenger, champion),
        draw,
        version=version,
        champion=1,
        challenger_evaluation=build_evaluation([1] * wins + [0] * (5 - wins), first=first),
        champion_evaluation=build_evaluation([0] * 5, first=first),
    )


def test_each_comparison_counts_once_however_often_it_is_repeated():
    tags = ModelTags()
    assert claim_attempt(tags, "m", build_test_attempt("a")).number == 1
    # the stage was resumed, retried, or run again
    assert claim_attempt(tags, "m", build_test_attempt("a")).number == 1
    assert claim_attempt(tags, "m", build_test_attempt("b")).number == 2
    # the same weights, registered once more
    assert claim_attempt(tags, "m", build_test_attempt("a", version=9)).number == 1
    assert [
        attempt.number
        for attempt in sorted(read_attempts(tags, "m"), key=lambda attempt: attempt.number or 0)
    ] == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("other", "number"),
    [
        ({"champion": "y"}, 2),  # a new champion does not make the episodes new
        ({"wins": 4}, 2),  # other outcomes on the same episodes are another look
        ({"first": 3}, 2),  # two of five episodes are the same
        ({"first": 5}, 1),
        ({"environment": "other"}, 1),
    ],
)
def test_attempts_that_share_episodes_are_counted(other, number):
    tags = ModelTags()
    claim_attempt(tags, "m", build_test_attempt())
    assert claim_attempt(tags, "m", build_test_attempt(**other)).number == number


def test_a_claim_of_a_killed_process_counts_and_is_continued():
    tags = ModelTags()
    record_attempt(tags, "m", build_test_attempt("a"))  # killed before it was counted
    assert claim_attempt(tags, "m", build_test_attempt("b")).number == 2
    resumed = claim_attempt(tags, "m", build_test_attempt("a"))
    # two attempts; neither is counted twice
    assert resumed.number == 2 and len(read_attempts(tags, "m")) == 2
    assert claim_attempt(tags, "m", build_test_attempt("c")).number == 3


def test_concurrent_claims_never_get_too_low_a_number():
    """Both write before either counts, at every point where the second can interfere."""
    for when in range(1, 4):
        tags, met = ModelTags(), []

        class Interrupted(ModelTags):
            def __init__(self, inner):
                self.inner, self.calls = inner, 0

            def _step(self):
                self.calls += 1
                if self.calls == when:  # noqa: B023
                    met.append(claim_attempt(self.inner, "m", build_test_attempt("b")).number)  # noqa: B023

            def read_model_tags(self, name):
                self._step()
                return self.inner.read_model_tags(name)

            def tag_model(self, name, key, value):
                self._step()
                self.inner.tag_model(name, key, value)

        number = claim_attempt(Interrupted(tags), "m", build_test_attempt("a")).number
        assert sorted([number, *met]) in ([1, 2], [2, 2])


def test_earlier_attempts_in_their_order():
    tags = ModelTags()
    claimed = [claim_attempt(tags, "m", build_test_attempt(name)) for name in "abc"]
    claim_attempt(tags, "m", build_test_attempt("z", first=100))
    attempts = read_attempts(tags, "m")
    assert [attempt.id for attempt in list_earlier_attempts(attempts, claimed[2])] == [
        claimed[0].id,
        claimed[1].id,
    ]
    assert list_earlier_attempts(attempts, claimed[0]) == []
    record_attempt(
        tags, "m", dataclasses.replace(claimed[1], p_value=0.25, level=0.0083, decision="rejected")
    )
    again = claim_attempt(tags, "m", build_test_attempt("b"))
    assert (again.number, again.p_value, again.decision) == (2, 0.25, "rejected")


def test_invalid_tags_are_skipped(caplog):
    tags = ModelTags()
    tags.tags = {
        "gate.attempt.aa": "nonsense",
        "gate.attempt.bb": '{"episodes": [], "who": 1}',
        "other": "x",
    }
    assert read_attempts(tags, "m") == []
    assert "gate.attempt.aa is no attempt" in caplog.text


def test_sketches_meet_where_sets_overlap():
    episodes = [("l", seed) for seed in range(2000)]
    sketch = sketch_episodes("e", episodes)
    assert len(sketch) == SKETCH_SIZE and list(sketch) == sorted(set(sketch))
    assert set(sketch) & set(sketch_episodes("e", episodes[:500]))  # a quarter of them
    # a twentieth of both
    assert set(sketch) & set(sketch_episodes("e", [("l", seed) for seed in range(1800, 3800)]))
    assert not set(sketch) & set(sketch_episodes("e", [("l", seed) for seed in range(2000, 4000)]))
    assert not set(sketch) & set(sketch_episodes("e", [("k", seed) for seed in range(2000)]))


def test_a_real_store_keeps_them_for_other_pipelines_and_without_their_versions(tmp_path):
    def store(output):
        return Tracking(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / output, output)

    first, second = store("one"), store("two")  # two pipelines, two folders, one registered model
    assert read_attempts(first, "shared") == []
    client = first.store.client
    client.create_registered_model("shared")
    client.create_model_version("shared", "file:///nowhere")
    assert claim_attempt(first, "shared", build_test_attempt("a", version=1)).number == 1
    client.delete_model_version("shared", "1")  # as `posttrain store gc` does
    assert claim_attempt(second, "shared", build_test_attempt("b")).number == 2
    assert claim_attempt(second, "shared", build_test_attempt("a")).number == 1
    assert {attempt.version for attempt in read_attempts(first, "shared")} == {1, 2}
    long = [("level", seed) for seed in range(5000)]
    record_attempt(
        first,
        "shared",
        dataclasses.replace(build_test_attempt("c"), episodes=sketch_episodes("e", long)),
    )
    # MLflow's column
    assert max(len(value) for value in first.read_model_tags("shared").values()) < 5000
    stored = {attempt.id: attempt for attempt in read_attempts(second, "shared")}[
        build_test_attempt("c").id
    ]
    assert stored.episodes == sketch_episodes("e", long) and len(stored.episodes) == SKETCH_SIZE
