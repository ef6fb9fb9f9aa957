"""Requests behind a gap, and values that a database refuses: one client's never stop the others'."""

import asyncio
import dataclasses
import time

import pytest
from helpers.postgres import find_postgres_problem, postgres
from helpers.service_clients import create, loss, open_sampler, sample, update

from posttrain.training_service.http.group_commit import GroupCommit, IntakeQueue
from posttrain.training_service.store import ServiceStore
from posttrain.training_service.store.work_queue import RequestOutcome
from rl_core.errors import ServiceError


def test_what_waits_behind_a_hole_hides_nothing_that_is_ready(tmp_path):
    """The oldest requests are examined first; any number of blocked ones does not hide the ready ones."""
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db")
    for request in (create("blocked"), create("free")):
        stored = store.accept_request(request)
        store.claim_requests([stored.request_id])
        store.finish_requests(
            [RequestOutcome(request_id=stored.request_id, answer=ServiceError("x", "user"))]
        )
    store.accept_batch([update("blocked", seq) for seq in range(2, 20)])  # the first was never sent
    assert store.list_ready_requests(2) == []
    free = store.accept_request(update("free", 1))
    assert [item.request_id for item in store.list_ready_requests(2)] == [free.request_id]
    late = store.accept_request(dataclasses.replace(sample("s", 0), deadline=time.time() - 1))
    assert [item.request_id for item in store.list_ready_requests(2)] == [free.request_id]
    assert store.find_result(late.request_id).state == "cancelled"
    store.claim_requests([free.request_id])
    assert store.list_ready_requests(2) == []
    first = store.accept_request(update("blocked", 1))  # the last of all, and the first of its run
    assert [item.seq for item in store.list_ready_requests(2)] == [
        1,
        2,
    ] and store.list_ready_requests(2)[0].request_id == first.request_id
    assert [item.seq for item in store.list_ready_requests(100)] == list(range(1, 20))
    for run in ("free", "other"):  # each run's own requests, whichever is looked at last
        store.accept_request(create("other") if run == "other" else update(run, 2))
    assert {(item.target, item.seq) for item in store.list_ready_requests(100)} >= {
        ("other", 0),
        ("blocked", 19),
    }
    assert store.cancel_request(first.request_id) and [
        item.seq for item in store.list_ready_requests(2)
    ] == [2, 3]
    store.close()


@pytest.mark.skipif(bool(find_postgres_problem()), reason=find_postgres_problem())
def test_values_that_postgresql_does_not_take_are_the_fault_of_their_sender():
    """NaN in JSON and NUL in texts: the rest of the batch is accepted, errors are stored, and the worker continues."""
    with postgres() as address:
        store = ServiceStore(f"postgresql+psycopg2://{address}/postgres")

        async def accept_all(*requests):
            group_commit = GroupCommit(store)
            queue = IntakeQueue(store, group_commit)
            group_commit.start_thread()
            queue.start_thread()
            try:
                return await asyncio.gather(
                    *map(queue.accept_request, requests), return_exceptions=True
                )
            finally:
                queue.stop_thread()
                group_commit.stop_thread()

        invalid = dataclasses.replace(create("bad"), facts={"user_metadata": {"a": float("nan")}})
        error, good, other = asyncio.run(
            accept_all(invalid, create("good"), open_sampler("s", base="base"))
        )
        assert (
            isinstance(error, ServiceError)
            and error.category == "user"
            and "cannot hold" in str(error)
        )
        assert (good.state, other.state) == ("waiting", "waiting") and store.find_run("bad") is None
        accepted = store.accept_request(loss("good", 1, (), "a\0b"))
        outcome = RequestOutcome(
            request_id=accepted.request_id, answer=ServiceError("there is no 'a\0b\ud800'", "user")
        )
        store.finish_requests([outcome])
        assert (
            store.find_result(accepted.request_id).error
            == "there is no 'a\N{REPLACEMENT CHARACTER}b?'"
        )
        store.record_audit_entry("key-1", "checkpoint_load", "a\0b")
        assert store.list_audit_entries("key-1").items[0].subject == "a\N{REPLACEMENT CHARACTER}b"
        store.create_session("s", "key-1", {"project_id": "p"})
        assert (
            store.list_runs("key-1", project="default").total == 0
            and store.list_runs("key-1", project="p").total == 1
        )
        assert (
            store.summarize_storage("key-1") == []
            and store.list_runs("key-2", with_published=True).total == 0
        )
        assert (
            store.list_runs_to_snapshot() == []
            and store.find_sampler_creation("s").kind == "create_sampler"
        )
        store.close()
