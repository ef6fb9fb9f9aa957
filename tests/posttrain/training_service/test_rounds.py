"""Rounds: which requests are computed together, and turns of runs and samplers."""

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


def parse_ready(text, size=1):
    """Parse ready requests: `a:ffo` = run a with these requests, in this order of acceptance."""
    requests = []
    for word in text.split():
        target, _, kinds = word.partition(":")
        for letter in kinds:
            seq = sum(request.target == target for request in requests)
            requests.append(
                ReadyRequest(f"{target}{seq}", LETTERS[letter], target, seq, len(requests), size)
            )
    return requests


def describe_round(text, max_requests=100, max_runs=100, size=1):
    selected = select_round(parse_ready(text, size), max_requests, max_runs)
    return " | ".join(
        " ".join(ids)
        for ids in (selected.single, selected.updates, selected.passes, selected.samples)
    )


def test_runs_at_different_points_of_their_loop_meet_in_one_batch():
    assert describe_round("a:fof b:offo c:co d:ss") == "c0 | b0 | a0 b1 b2 | d0 d1"


def test_new_samplers_come_before_samples():
    assert describe_round("x:s y:ns") == "y0 |  |  | x0 y1"


def test_a_long_queue_of_one_run_keeps_no_other_from_its_turn():
    assert describe_round("a:fffff b:ff c:f", max_requests=4) == " |  | a0 b0 c0 a1 | "


def test_chunks_that_came_in_another_order_are_computed_in_that_of_their_numbers():
    late = parse_ready("a:fff")
    late = [
        ReadyRequest(item.request_id, item.kind, item.target, 2 - item.seq, item.place, 1)
        for item in late
    ]
    assert select_round(late, 10, 10).passes == ["a2", "a1", "a0"]


def test_what_was_computed_when_workers_died_is_computed_by_itself():
    suspects = [
        dataclasses.replace(item, deaths=3 * (item.request_id in ("a1", "b0")))
        for item in parse_ready("a:fff b:f c:f")
    ]
    assert select_round(suspects, 10, 10).passes == ["a0"]
    assert select_round(suspects[1:3], 10, 10).passes == ["a1"]
    assert select_round(suspects[2:], 10, 10).passes == ["a2"]
    updates = select_round(
        [
            dataclasses.replace(item, deaths=3 * (item.target == "a"))
            for item in parse_ready("a:o b:o c:o")
        ],
        10,
        10,
    )
    assert (updates.single, updates.updates) == (["a0"], ["b0", "c0"])
    assert select_round(
        [dataclasses.replace(suspect, deaths=2) for suspect in suspects], 10, 10
    ).passes == [
        "a0",
        "b0",
        "c0",
        "a1",
        "a2",
    ]


def test_a_batch_is_bounded_by_bytes_and_by_the_runs_that_fit_into_memory():
    assert describe_round("a:f b:f c:f", size=BATCH_BYTES // 2) == " |  | a0 b0 | "
    assert describe_round("a:f b:f", size=2 * BATCH_BYTES) == " |  | a0 | "  # never nothing
    assert describe_round("a:of b:f c:f", max_runs=2) == " | a0 | a1 b0 | "
