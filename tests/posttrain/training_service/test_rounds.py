"""Rounds: what is computed together, and turns of runs and samplers."""

import dataclasses

from posttrain.training_service.store.work_queue import ReadyRequest
from posttrain.training_service.worker.request_execution import BATCH_BYTES, select_round

LETTERS = {
    "c": "create_model",
    "f": "forward_backward",
    "o": "optim_step",
    "s": "sample",
    "n": "create_sampler",
}


def ready(text, size=1):
    """`a:ffo` = run a with these requests, in this order of acceptance."""
    found = []
    for word in text.split():
        target, _, kinds = word.partition(":")
        for letter in kinds:
            seq = sum(one.target == target for one in found)
            found.append(
                ReadyRequest(f"{target}{seq}", LETTERS[letter], target, seq, len(found), size)
            )
    return found


def chosen(text, most=100, most_runs=100, size=1):
    found = select_round(ready(text, size), most, most_runs)
    return " | ".join(
        " ".join(ids) for ids in (found.single, found.updates, found.passes, found.samples)
    )


def test_runs_at_different_points_of_their_loop_meet_in_one_batch():
    assert chosen("a:fof b:offo c:co d:ss") == "c0 | b0 | a0 b1 b2 | d0 d1"


def test_new_samplers_come_before_samples():
    assert chosen("x:s y:ns") == "y0 |  |  | x0 y1"


def test_a_long_queue_of_one_run_keeps_no_other_from_its_turn():
    assert chosen("a:fffff b:ff c:f", most=4) == " |  | a0 b0 c0 a1 | "


def test_chunks_that_came_in_another_order_are_computed_in_that_of_their_numbers():
    late = ready("a:fff")
    late = [
        ReadyRequest(one.request_id, one.kind, one.target, 2 - one.seq, one.place, 1)
        for one in late
    ]
    assert select_round(late, 10, 10).passes == ["a2", "a1", "a0"]


def test_what_was_computed_when_workers_died_is_computed_by_itself():
    suspects = [
        dataclasses.replace(one, deaths=3 * (one.request_id in ("a1", "b0")))
        for one in ready("a:fff b:f c:f")
    ]
    assert select_round(suspects, 10, 10).passes == ["a0"]
    assert select_round(suspects[1:3], 10, 10).passes == ["a1"]
    assert select_round(suspects[2:], 10, 10).passes == ["a2"]
    updates = select_round(
        [dataclasses.replace(one, deaths=3 * (one.target == "a")) for one in ready("a:o b:o c:o")],
        10,
        10,
    )
    assert (updates.single, updates.updates) == (["a0"], ["b0", "c0"])
    assert select_round(
        [dataclasses.replace(one, deaths=2) for one in suspects], 10, 10
    ).passes == [
        "a0",
        "b0",
        "c0",
        "a1",
        "a2",
    ]


def test_a_batch_is_bounded_by_bytes_and_by_the_runs_that_fit_into_memory():
    assert chosen("a:f b:f c:f", size=BATCH_BYTES // 2) == " |  | a0 b0 | "
    assert chosen("a:f b:f", size=2 * BATCH_BYTES) == " |  | a0 | "  # never nothing
    assert chosen("a:of b:f c:f", most_runs=2) == " | a0 | a1 b0 | "
