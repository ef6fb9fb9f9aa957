"""The service's store: durable acceptance, order, limits, cancellation, expiry, keys; also on PostgreSQL."""

import dataclasses
import os
import shutil
import sqlite3
import threading
import time

import pytest
import sqlalchemy as sa
from helpers.postgres import find_postgres_problem, postgres
from helpers.service_clients import create, loss, open_sampler, sample, update

from posttrain.training_service.store import (
    CheckpointRecord,
    KeyLimitExceeded,
    RequestForgotten,
    ResultBody,
    SequenceIdReused,
    ServiceStore,
)
from posttrain.training_service.store.work_queue import RequestOutcome
from rl_core.errors import BackendError, ServiceError, SettingsError
from rl_core.storage import faults, write_ahead_log


class Clock:
    def __init__(self):
        self.now = 1_000_000_020.0  # 0 s into a minute

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/deep/service.db"


@pytest.fixture
def store(url, clock):
    store = ServiceStore(url, clock)
    yield store
    store.close()


DONE = ResultBody(b"{}", "json")


def finish(store, *requests, answer=DONE):
    store.claim_requests([request.request_id for request in requests])
    store.finish_requests([(request.request_id, answer) for request in requests])


def test_a_request_survives_its_process_and_is_recognised(store, url, clock):
    first = store.accept_request(dataclasses.replace(create("r"), facts={"seed": 7}))
    store.close()
    other = ServiceStore(url, clock)
    # a retry draws another seed
    again = other.accept_request(dataclasses.replace(create("r"), facts={"seed": 8}))
    assert again == first and again.facts == {"seed": 7} and again.state == "waiting"
    assert other.find_request(first.request_id) == first and other.find_request("r-none") is None
    assert other.find_run("r").state == "creating"
    other.close()


def test_another_request_under_the_same_number_is_refused(store):
    store.accept_request(create("r"))
    store.accept_request(update("r", 1))
    with pytest.raises(SequenceIdReused, match="seq_id 1 of r was used before"):
        store.accept_request(update("r", 1, learning_rate=0.5))
    with pytest.raises(SequenceIdReused):
        store.accept_request(dataclasses.replace(update("r", 1), kind="save_weights"))
    # another line of the same target has separate numbers
    store.accept_request(open_sampler("r", base="base"))
    store.accept_request(sample("r", 0))
    assert [request.kind for request in store.list_ready_requests()] == [
        "create_model",
        "optim_step",
        "create_sampler",
        "sample",
    ]


def test_training_waits_for_holes_and_samples_do_not(store):
    store.accept_request(create("r"))
    for seq in (3, 2, 5):
        store.accept_request(update("r", seq))
    store.accept_request(sample("s", 9))
    assert [(request.target, request.seq) for request in store.list_ready_requests()] == [
        ("r", 0),
        ("s", 9),
    ]
    store.accept_request(update("r", 1))
    assert [(request.target, request.seq) for request in store.list_ready_requests()] == [
        ("r", 0),
        ("r", 1),
        ("r", 2),
        ("r", 3),
        ("s", 9),
    ]
    finish(
        store,
        *(store.accept_request(item) for item in (create("r"), update("r", 1), update("r", 2))),
    )
    assert store.find_run("r").next_seq == 3 and [
        request.seq for request in store.list_ready_requests()
    ] == [3, 9]


def test_a_cancelled_request_is_no_hole_and_what_runs_is_not_cancelled(store):
    created, first, second = (
        store.accept_request(item) for item in (create("r"), update("r", 1), update("r", 2))
    )
    assert (
        store.cancel_request(first.request_id)
        and not store.cancel_request(first.request_id)
        and not store.cancel_request("r-none")
    )
    assert [request.seq for request in store.list_ready_requests()] == [0, 2]
    store.claim_requests([created.request_id])
    assert not store.cancel_request(created.request_id)
    finish(store, created, second)
    assert store.list_ready_requests() == [] and store.find_run("r").next_seq == 3
    stored = store.accept_request(update("r", 1))
    assert (stored.state, stored.error, stored.category) == ("cancelled", "cancelled", "user")


def test_a_deadline_cancels_what_has_not_begun(store, clock):
    store.accept_request(create("r"))
    late = store.accept_request(dataclasses.replace(update("r", 1), deadline=clock.now + 5))
    begun = store.accept_request(dataclasses.replace(sample("s", 0), deadline=clock.now + 5))
    store.claim_requests([begun.request_id])
    clock.now += 6
    assert [request.seq for request in store.list_ready_requests()] == [0]
    assert (
        "deadline" in store.find_request(late.request_id).error
        and store.find_request(begun.request_id).state == "running"
    )


def test_answers_are_final_and_come_in_the_order_of_finishing(store):
    cursor = store.read_finish_cursor()
    creation, step, drawn = (
        store.accept_request(item) for item in (create("r"), update("r", 1), sample("s", 0))
    )
    seen = store.read_change_counter()
    finish(store, drawn)
    store.claim_requests([creation.request_id, step.request_id])
    failure = ServiceError("bad base", "user")
    store.finish_requests(
        [RequestOutcome(request_id=creation.request_id, answer=failure, run={"state": "failed"})]
    )
    # the second is final already
    store.finish_requests([(step.request_id, DONE), (creation.request_id, DONE)])
    result, after = store.list_finished_since(cursor)
    assert [target for _, target in result] == [drawn.target, creation.target, step.target]
    ids = [request_id for request_id, _ in result]
    assert ids == [
        drawn.request_id,
        creation.request_id,
        step.request_id,
    ] and store.list_finished_since(after) == ([], after)
    assert store.wait_for_change(seen, 0.0) != seen
    result = store.find_request(creation.request_id)
    assert (result.state, result.answer, result.error, result.category) == (
        "failed",
        None,
        "bad base",
        "user",
    )
    assert (
        store.find_run("r").state == "failed"
        and store.find_request(step.request_id).answer == b"{}"
    )
    # may be replayed
    assert (
        store.find_request(drawn.request_id).payload == b""
        and store.find_request(step.request_id).payload
    )


def test_what_a_dead_worker_computed_waits_again(store):
    creation = store.accept_request(create("r"))
    assert [request.request_id for request in store.claim_requests([creation.request_id])] == [
        creation.request_id
    ]
    assert store.claim_requests([creation.request_id]) == [] and store.list_ready_requests() == []
    assert store.reset_running_requests() == 1 and [
        (request.request_id, request.deaths) for request in store.list_ready_requests()
    ] == [(creation.request_id, 1)]
    store.claim_requests([creation.request_id])
    # the store was away, say
    assert (
        store.reset_running_requests(count_death=False) == 1
        and store.find_request(creation.request_id).deaths == 1
    )


def test_dropped_answers_stay_known_and_are_removed_in_the_end(store, clock):
    created, drawn = store.accept_request(create("r")), store.accept_request(sample("s", 0))
    finish(store, created, drawn)
    store.drop_results([created.request_id, drawn.request_id])
    again = store.accept_request(sample("s", 0))
    assert again.forgotten and again.answer is None and again.request_id == drawn.request_id
    clock.now += 100
    # no snapshot of the run: it stays
    assert store.expire_results(result_seconds=50, memory_seconds=50) == (
        0,
        1,
    )
    assert (
        store.find_request(drawn.request_id) is None
        and store.find_request(created.request_id).forgotten
    )
    finish(store, store.accept_request(update("r", 1)), answer=ResultBody(b"{1}", "json"))
    for seq in (0, 1):
        store.record_snapshot("r", seq, steps=seq)
    clock.now += 100
    assert store.expire_results(result_seconds=50, memory_seconds=50) == (1, 1)
    with pytest.raises(RequestForgotten, match="its answer was fetched"):
        store.accept_request(create("r"))
    assert [request.seq for request in store.list_replay_requests("r", -1)] == [1]


def test_payloads_stay_until_two_snapshots_hold_them(store):
    requests = [
        store.accept_request(create("r")),
        *(store.accept_request(update("r", seq)) for seq in (1, 2, 3)),
    ]
    finish(store, *requests)
    store.record_snapshot("r", 1, steps=1)
    assert (
        all(request.payload for request in store.list_replay_requests("r", -1))
        and store.find_run("r").covered == 1
    )
    store.record_snapshot("r", 3, steps=3)
    assert [bool(request.payload) for request in store.list_replay_requests("r", -1)] == [
        False,
        False,
        True,
        True,
    ]
    store.record_snapshot("r", 2, steps=2)  # an older one changes nothing
    assert (
        store.find_run("r").covered,
        store.find_run("r").covered_before,
        store.find_run("r").steps,
    ) == (3, 1, 3)


def test_limits_of_a_key(store, clock):
    key, _ = store.create_key("small", queue=2, requests_per_minute=4)

    def make_request(seq):
        return dataclasses.replace(sample("s", seq), owner=key.key_id)

    first, _ = store.accept_request(make_request(0)), store.accept_request(make_request(1))
    with pytest.raises(KeyLimitExceeded, match="2 requests of this key wait") as raised:
        store.accept_request(make_request(2))
    assert raised.value.retry_after > 0
    assert store.accept_request(make_request(0)) == first  # a repeat counts nothing
    store.accept_request(sample("s", 2))  # nor does another key
    finish(store, *(store.accept_request(make_request(seq)) for seq in (0, 1)))
    finish(store, store.accept_request(make_request(3)), store.accept_request(make_request(4)))
    with pytest.raises(KeyLimitExceeded, match="4 requests per minute"):
        store.accept_request(make_request(5))
    clock.now += 60
    with pytest.raises(KeyLimitExceeded):  # 4 of the last minute still count in full
        store.accept_request(make_request(5))
    clock.now += 30
    # now 2 of them, and 2 new ones
    finish(store, store.accept_request(make_request(5)), store.accept_request(make_request(6)))
    with pytest.raises(KeyLimitExceeded):
        store.accept_request(make_request(7))


def test_a_run_that_is_not_there_or_over_takes_nothing(store):
    with pytest.raises(ServiceError, match="no training run 'r'"):
        store.accept_request(update("r", 1))
    created = store.accept_request(create("r"))
    store.claim_requests([created.request_id])
    store.finish_requests(
        [RequestOutcome(request_id=created.request_id, answer=DONE, run={"state": "unloaded"})]
    )
    with pytest.raises(ServiceError, match="was unloaded"):
        store.accept_request(update("r", 1))


def test_many_threads_accept_each_request_once(store):
    store.accept_request(create("r"))
    results = []

    def client():
        for seq in range(1, 21):
            results.append((seq, store.accept_request(update("r", seq)).request_id))

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 120 and len(set(results)) == 20
    assert [request.seq for request in store.list_ready_requests()] == list(range(21))


def test_a_transaction_that_breaks_leaves_nothing_and_the_next_one_works(store):
    store.accept_request(create("r"))
    faults.configure_faults("service.accepting:1:raise")
    with pytest.raises(OSError, match="injected"):
        store.accept_request(update("r", 1))
    faults.configure_faults(None)
    assert [request.seq for request in store.list_ready_requests()] == [0] and store.accept_request(
        update("r", 1)
    ).seq == 1


def test_acknowledged_requests_and_results_survive_a_power_cut(store, clock, tmp_path, monkeypatch):
    """The disk holds what was synced. Nothing may be acknowledged before it is on disk."""
    log = [b""]
    monkeypatch.setattr(
        write_ahead_log,
        "_fdatasync",
        lambda descriptor: log.append(os.pread(descriptor, 1 << 24, 0)),
    )

    def reopen_after_power_cut():
        folder = tmp_path / f"after-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        shutil.copyfile(tmp_path / "deep" / "service.db", folder / "service.db")
        (folder / "service.db-wal").write_bytes(log[-1])
        return ServiceStore(f"sqlite:///{folder}/service.db", clock)

    creation = store.accept_request(create("r"))
    again = reopen_after_power_cut()
    assert again.find_request(creation.request_id) == creation
    again.close()
    accepted = store.accept_batch([update("r", 1)])[0]
    store.claim_requests([creation.request_id])
    store.finish_requests([(creation.request_id, DONE)], is_synced=False)
    again = reopen_after_power_cut()
    assert (
        again.find_request(accepted.request_id) is None
        and not again.find_request(creation.request_id).is_final
    )
    again.close()
    store.sync_to_disk()
    again = reopen_after_power_cut()
    assert again.find_request(creation.request_id).is_final and [
        request.seq for request in again.list_ready_requests()
    ] == [1]
    again.close()
    store.finish_requests([(accepted.request_id, DONE)])
    again = reopen_after_power_cut()
    assert again.find_run("r").next_seq == 2
    again.close()


def test_writers_of_two_processes_take_turns_while_the_log_is_copied(store, url, clock):
    """Two stores represent two processes: neither waits longer and longer while the other is busy."""
    other, durations = ServiceStore(url, clock), []
    store.accept_request(create("r"))

    def client(one, first):
        for seq in range(first, first + 40):
            started_at = time.monotonic()
            one.accept_request(sample("s", seq))
            durations.append(time.monotonic() - started_at)

    threads = [
        threading.Thread(target=client, args=(entry, 1000 * n))
        for n, entry in enumerate((store, other, store))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.checkpoint_log(0)
    for thread in threads:
        thread.join()
    assert len(durations) == 120 and len(store.list_ready_requests()) == 121
    other.close()


def test_a_new_database_that_another_process_is_making_is_waited_for(tmp_path):
    other = sqlite3.connect(tmp_path / "new.db", isolation_level=None, check_same_thread=False)
    # it has no log yet, and SQLite refuses immediately to start one
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, other.rollback).start()
    store = ServiceStore(f"sqlite:///{tmp_path / 'new.db'}")
    create(store)
    store.close()
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_log_is_restarted_if_long_and_not_because_its_file_was(store, tmp_path):
    """Restarting the log delays writers, and its file never shrinks."""
    statements = []
    sa.event.listen(
        store._database._engine,
        "checkout",
        lambda raw, *_: raw.set_trace_callback(statements.append),
    )

    def count_restarts():
        return sum("RESTART" in statement for statement in statements)

    max_bytes = 1 << 19
    for seq in range(4):
        store.accept_request(dataclasses.replace(sample("s", seq), payload=bytes(1 << 18)))
    store.checkpoint_log(max_bytes)
    assert count_restarts() == 1
    store.accept_request(sample("s", 4))
    store.checkpoint_log(max_bytes)
    assert (
        count_restarts() == 1 and (tmp_path / "deep" / "service.db-wal").stat().st_size > max_bytes
    )


def test_a_database_that_is_away_is_an_error_with_a_name_for_those_who_watch_it(store, monkeypatch):
    class Away:
        def execute(self, statement):
            raise sqlite3.OperationalError("disk I/O error")

        def close(self):
            """Nothing is open."""

    store.read_change_counter()
    store._database._change_connection.close()
    monkeypatch.setattr(store._database, "_change_connection", Away())
    with pytest.raises(BackendError, match="the service's store: disk I/O error"):
        store.read_change_counter()


def test_any_number_of_answers_is_dropped_together(store):
    created = store.accept_request(create("r"))
    finish(store, created)
    store.drop_results([*(f"r-{number}" for number in range(300_000)), created.request_id])
    assert store.find_request(created.request_id).forgotten


def test_lists_of_sessions_runs_and_checkpoints(store, clock):
    store.create_session("one", "key-1", {"tags": ["a"]})
    clock.now += 1
    store.create_session("two", "key-2", {})
    page = store.list_sessions(limit=1)
    assert (page.total, page.items[0].session_id) == (2, "two") and store.list_sessions(
        "key-1"
    ).items[0].facts == {"tags": ["a"]}
    assert store.mark_session_active("one") and store.finish_session("one", {"reason": "success"})
    assert (
        not store.mark_session_active("one")
        and not store.finish_session("one")
        and not store.mark_session_active("none")
    )
    assert store.find_session("one").facts == {"tags": ["a"], "reason": "success"}
    for number in range(3):
        store.accept_request(create(f"r{number}"))
    page = store.list_runs(limit=2, offset=1)
    assert page.total == 3 and len(page.items) == 2 and store.list_runs("key-2").total == 0
    record = CheckpointRecord(
        path="tinker://r0/weights/a",
        model_id="r0",
        owner="key-1",
        kind="weights",
        name="a",
        folder="weights/a",
        created=clock.now,
        expires=clock.now + 10,
    )
    store.add_checkpoint_copy(store.find_run("r0"), record)
    assert store.find_checkpoint(record.path) == record and store.list_checkpoints(
        model_id="r0"
    ).items == [record]
    assert (
        store.update_checkpoint(record.path, public=True)
        and store.find_checkpoint(record.path).public
    )
    assert not store.drop_checkpoint(record.path)  # it lives
    clock.now += 10
    assert store.find_checkpoint(record.path) is None and store.list_checkpoints().total == 0
    assert [checkpoint.path for checkpoint in store.list_expired_checkpoints()] == [
        record.path
    ] and store.drop_checkpoint(record.path)
    assert not store.delete_checkpoint(record.path)


def test_keys_are_stored_as_digests_and_revoked_for_good(store, url, tmp_path):
    key, secret = store.create_key("ada", queue=5)
    assert (
        secret.startswith("tml-")
        and store.find_key(secret).key_id == key.key_id
        and store.find_key("tml-x") is None
    )
    with pytest.raises(SettingsError, match="'ada'"):
        store.create_key("ada")
    store.record_audit_entry(key.key_id, "create_model", "r", "rank 4")
    assert (
        store.list_audit_entries(key.key_id).items[0].subject == "r"
        and store.list_audit_entries("other").total == 0
    )
    assert (
        store.revoke_key("ada") and not store.revoke_key("ada") and store.find_key(secret) is None
    )
    assert store.create_key("ada")[0].key_id != key.key_id and len(store.list_keys()) == 2
    store.close()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "deep").iterdir())
    assert b"create_model" in stored and secret.encode() not in stored


@pytest.mark.parametrize("wrong", ["sqlite://", "mysql://host/name", "no url"])
def test_a_url_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(SettingsError, match="store:"):
        ServiceStore(wrong)


@pytest.mark.skipif(bool(find_postgres_problem()), reason=find_postgres_problem())
def test_on_postgresql(clock):
    """The statements that differ: upserts, counters, locks, positions. Two stores represent two processes."""
    with postgres() as address:
        url = f"postgresql+psycopg2://{address}/postgres"
        first, second = ServiceStore(url, clock), ServiceStore(url, clock)
        seen = second.read_change_counter()
        created = first.accept_request(create("r"))
        assert (
            second.wait_for_change(seen, 5.0) != seen
            and second.accept_request(create("r")) == created
        )
        with pytest.raises(SequenceIdReused):
            second.accept_request(create("r", rank=8))
        requests = [
            created,
            second.accept_request(loss("r", 1, ())),
            first.accept_request(update("r", 2)),
            first.accept_request(sample("s", 0)),
        ]
        assert [request.request_id for request in second.list_ready_requests()] == [
            request.request_id for request in requests
        ]
        assert second.cancel_request(requests[3].request_id)
        assert (
            len(first.claim_requests([requests[1].request_id]))
            == second.reset_running_requests()
            == 1
        )
        finish(second, *requests[:3])
        assert [request_id for request_id, _ in first.list_finished_since(0)[0]] == [
            requests[3].request_id,
            *(request.request_id for request in requests[:3]),
        ]
        first.record_snapshot("r", 1, steps=0)
        first.record_snapshot("r", 2, steps=1)
        assert [bool(request.payload) for request in second.list_replay_requests("r", -1)] == [
            False,
            False,
            True,
        ]
        clock.now += 100
        assert second.expire_results(result_seconds=1, memory_seconds=1e6) == (4, 0)
        first.close()
        second.close()
