"""Rounds: which requests are computed together, and turns of runs and samplers."""

import dataclasses

from posttrain.training_service.store.waiting_requests import ReadyRequest
from posttrain.training_service.worker.fair_rounds import BATCH_BYTES, FairRounds

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


def select_round(ready, max_requests, max_runs):
    """Select the requests of the first round."""
    return FairRounds(max_requests, max_runs).select_round(ready)


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


# ------------------------------------------------------------------------------------------------------------- owners


class SimulatedWorker:
    """A worker whose requests take set seconds, on a simulated clock."""

    def __init__(self, seconds, max_requests=256, max_runs=100, fixed_seconds=0.0):
        self.fixed_seconds = fixed_seconds  # of a round
        self.now, self.seconds = 0.0, seconds  # seconds: of a request, by owner
        self.rounds = FairRounds(max_requests, max_runs, lambda: self.now)
        self.waiting, self.order, self._number = [], [], 0

    def submit(self, owner, count=1, kind="sample", target=None):
        for _ in range(count):
            self._number += 1
            target_name = target or f"{owner}.s"
            self.waiting.append(
                ReadyRequest(
                    f"{owner}{self._number}",
                    kind,
                    target_name,
                    self._number,
                    self._number,
                    1,
                    owner=owner,
                )
            )

    def run_round(self):
        """Compute a round; return its requests' owners."""
        selected = self.rounds.select_round(self.waiting)
        names = [*selected.single, *selected.updates, *selected.passes, *selected.samples]
        chosen = [request for request in self.waiting if request.request_id in names]
        assert chosen, "a round without requests, although some wait"
        took = self.fixed_seconds + sum(self.seconds[request.owner] for request in chosen)
        self.now += took
        self.rounds.record_seconds(chosen, [self.seconds[r.owner] for r in chosen], took)
        self.waiting = [request for request in self.waiting if request not in chosen]
        self.order += [request.owner for request in chosen]
        return [request.owner for request in chosen]


def test_a_light_owner_is_served_in_the_round_after_the_one_it_arrived_in():
    """Measured before: its sample came behind up to 256 of the other's in a round."""
    worker = SimulatedWorker({"flood": 0.1, "light": 0.1})
    worker.submit("flood", 600)
    worker.run_round()
    for _ in range(5):  # the worker gets to know the costs
        worker.submit("light")
        while any(request.owner == "light" for request in worker.waiting):
            worker.run_round()
    waits = []
    for _ in range(50):
        assert worker.run_round() == ["flood"]  # one request: no longer than the other's
        worker.submit("light")
        arrived = worker.now
        worker.run_round()
        waits.append(worker.now - arrived)
        assert not any(request.owner == "light" for request in worker.waiting)
    assert max(waits) <= 0.2 + 1e-9


def test_owners_at_full_load_share_time_and_not_requests():
    worker = SimulatedWorker({"large": 0.25, "small": 0.025})
    worker.submit("large", 200)
    worker.submit("small", 2000)
    started, served = len(worker.order), {"large": 0, "small": 0}
    while worker.now < 30:
        for owner in worker.run_round():
            served[owner] += worker.seconds[owner]
    assert started == 0 and 0.8 < served["large"] / served["small"] < 1.25


def test_a_debt_is_bounded_and_an_owner_alone_gets_long_rounds():
    worker = SimulatedWorker({"first": 0.01, "second": 0.01})
    worker.submit("first", 5000)
    sizes = [len(worker.run_round()) for _ in range(7)]
    assert sizes == [16, 32, 64, 128, 256, 256, 256]  # up to the bound of a batch
    worker.submit("second", 5000)
    before = worker.now
    owners = []
    while "first" not in owners:  # it has had more than its part
        owners += worker.run_round()
    assert worker.now - before < 2.5


def test_a_batch_grows_where_that_is_faster_and_else_stays_short():
    """Half a second for each request: 16 at a time. Ten seconds for any number, as on a GPU: as many as are allowed."""
    slow = SimulatedWorker({"me": 0.5})
    slow.submit("me", 1000)
    assert [len(slow.run_round()) for _ in range(5)] == [16, 32, 16, 16, 16]  # 32 are tried once
    wide = SimulatedWorker({"me": 0.01}, fixed_seconds=10.0)
    wide.submit("me", 2000)
    assert [len(wide.run_round()) for _ in range(6)] == [16, 32, 64, 128, 256, 256]


def test_a_pass_is_left_out_with_the_update_before_it():
    rounds = FairRounds(256, 100, lambda: 0.0)
    ready = []
    for run in range(20):
        for seq, kind in enumerate(("optim_step", "forward_backward")):
            ready.append(
                ReadyRequest(f"{run}.{seq}", kind, f"r{run}", seq, len(ready), 1, owner="me")
            )
    selected = rounds.select_round(ready)
    assert len(selected.updates) == 16
    assert {name[:-2] for name in selected.passes} == {name[:-2] for name in selected.updates}


def test_runs_of_one_owner_do_not_take_all_places_in_memory():
    worker = SimulatedWorker({"many": 0.01, "one": 0.01}, max_runs=4)
    for number in range(10):
        worker.submit("many", kind="forward_backward", target=f"many.{number}")
    worker.submit("one", kind="forward_backward", target="one.0")
    assert "one" in worker.run_round()


def test_a_pass_never_comes_before_the_update_that_it_follows():
    """The update arrived after the pass, and the budget of the round ends between them."""
    ready = [
        ReadyRequest("u1", "optim_step", "u", 1, 7, 1, owner="me"),
        ReadyRequest("u2", "forward_backward", "u", 2, 1, 1, owner="me"),
        ReadyRequest("v1", "forward_backward", "v", 1, 2, 1, owner="me"),
        ReadyRequest("w1", "sample", "w", 1, 3, 1, owner="other"),
    ]
    rounds = FairRounds(100, 100, lambda: 0.0)
    for _ in range(6):
        selected = rounds.select_round(ready)
        computed = [*selected.updates, *selected.passes]
        assert "u2" not in computed or "u1" in computed
        some = [item for item in ready if item.request_id in computed]
        rounds.record_seconds(some, [1.0] * len(some), 3.0)
