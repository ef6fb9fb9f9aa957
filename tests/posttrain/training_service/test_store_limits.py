"""Requests behind a gap, and values that a database refuses: one client's never stop the others'."""

import asyncio
import dataclasses
import time

import pytest
from helpers.postgres import find_postgres_problem, postgres
from helpers.service_clients import create, loss, open_sampler, sample, update

from posttrain.training_service.http.group_commit import GroupCommit, IntakeQueue
from posttrain.training_service.store import ServiceStore, open_service_store
from posttrain.training_service.store.waiting_requests import WaitingRequests
from posttrain.training_service.store.work_queue import RequestOutcome
from rl_core.errors import ServiceError, SettingsError
from rl_core.settings import ServiceSettings


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


@pytest.mark.parametrize("lost", ["empty", "missing", "another"])
def test_a_lost_store_beside_snapshots_is_refused(tmp_path, lost):
    """A new store took its place, and the runs of the snapshots were unknown from then on."""
    folder = tmp_path / "service"
    settings = ServiceSettings(folder=str(folder))
    open_service_store(settings).close()  # nothing is lost yet
    (folder / "snapshots" / "s:train:0").mkdir(parents=True)
    file = folder / "service.db"
    for part in folder.glob("service.db*"):
        part.unlink()
    if lost == "empty":
        file.touch()
    elif lost == "another":
        ServiceStore(settings.store_url).close()
    problem = {"empty": "is empty", "missing": "does not exist", "another": "no training run"}
    with pytest.raises(SettingsError, match=problem[lost] + ".*snapshots of 1 training run"):
        open_service_store(settings)
    if lost != "another":
        assert not file.exists() or file.stat().st_size == 0, "it was replaced"


def finish_creation(store, run, session="s"):
    """Create a run whose creation is final."""
    stored = store.accept_request(dataclasses.replace(create(run), session_id=session))
    store.claim_requests([stored.request_id])
    failure = ServiceError("x", "user")
    store.finish_requests([RequestOutcome(request_id=stored.request_id, answer=failure)])


def test_what_waits_behind_a_hole_ends_with_its_session(tmp_path):
    """It waited without end; a run whose session is alive, and one without a hole, are not affected."""
    now = [1_000_000.0]
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db", lambda: now[0])
    for session in ("over", "silent", "alive"):
        store.create_session(session, "key-1", {})
        finish_creation(store, f"{session}:r", session)
        store.accept_batch([update(f"{session}:r", seq) for seq in (2, 3, 5)])
    store.finish_session("over")
    finish_creation(store, "over:whole", "over")
    whole = store.accept_request(update("over:whole", 1))
    assert store.cancel_blocked_requests(3600.0) == 3
    now[0] += 4000.0
    store.mark_session_active("alive")
    assert store.cancel_blocked_requests(3600.0) == 3
    assert store.cancel_blocked_requests(3600.0) == 0
    states = {
        session: {request.state for request in store.list_requests(f"{session}:r") if request.seq}
        for session in ("over", "silent", "alive")
    }
    assert states == {"over": {"cancelled"}, "silent": {"cancelled"}, "alive": {"waiting"}}
    (cancelled, *_) = store.list_requests("over:r")
    assert "seq_id 1 of over:r never arrived" in store.find_result(cancelled.request_id).error
    assert [item.request_id for item in store.list_ready_requests()] == [whole.request_id]
    # The missing one, if it comes after all, is computed, and its successors count as cancelled.
    late = store.accept_request(update("silent:r", 1))
    assert late.request_id in [item.request_id for item in store.list_ready_requests()]
    store.close()


def test_a_round_reads_only_what_has_changed(tmp_path):
    """20,000 requests behind a hole were read in every round."""
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db")
    finish_creation(store, "blocked")
    store.accept_batch([update("blocked", seq) for seq in range(2, 500)])
    assert store.list_ready_requests() == []
    read, parse = [], WaitingRequests._add_row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            WaitingRequests, "_add_row", lambda self, row: read.append(row.seq) or parse(self, row)
        )
        free = store.accept_request(sample("s", 7))
        assert [item.request_id for item in store.list_ready_requests()] == [free.request_id]
        assert store.list_ready_requests() and read == [7]
        store.accept_request(update("blocked", 1))
        assert len(store.list_ready_requests()) == 500 and read == [7, 1]
    store.close()


def test_requests_of_one_owner_do_not_hide_those_of_another(tmp_path):
    """The list ended after the oldest 1,024, so that another owner's came up only when they were computed."""
    store = ServiceStore(f"sqlite:///{tmp_path}/service.db")
    store.accept_batch([sample("s", seq) for seq in range(50)])
    other = store.accept_request(dataclasses.replace(sample("o", 0), owner="key-2"))
    ready = store.list_ready_requests(10)
    assert other.request_id in [item.request_id for item in ready]
    assert [item.seq for item in ready] == [0, 1, 2, 3, 4, 0]
    store.close()
