"""The service's store: acceptance once and durably, order, limits, cancel, forgetting, keys; on PostgreSQL too."""

import dataclasses
import os
import shutil
import sqlite3
import threading
import time

import pytest
import sqlalchemy as sa
from helpers.postgres import missing, postgres
from helpers.service_clients import create, loss, open_sampler, sample, update

from flows.service.store import (
    Answer,
    CheckpointRecord,
    OverLimit,
    RequestGone,
    SeqReused,
    ServiceStore,
)
from flows.service.store.work import RequestOutcome
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


DONE = Answer(b"{}", "json")


def finish(store, *requests, answer=DONE):
    store.claim([request.request_id for request in requests])
    store.finish([(request.request_id, answer) for request in requests])


def test_a_request_is_there_after_the_process_is_gone_and_is_known_again(store, url, clock):
    first = store.accept(dataclasses.replace(create("r"), facts={"seed": 7}))
    store.close()
    other = ServiceStore(url, clock)
    again = other.accept(dataclasses.replace(create("r"), facts={"seed": 8}))  # a retry draws another seed
    assert again == first and again.facts == {"seed": 7} and again.state == "waiting"
    assert other.request(first.request_id) == first and other.request("r-none") is None
    assert other.run("r").state == "creating"
    other.close()


def test_another_request_under_the_same_number_is_refused(store):
    store.accept(create("r"))
    store.accept(update("r", 1))
    with pytest.raises(SeqReused, match="seq_id 1 of r was used before"):
        store.accept(update("r", 1, learning_rate=0.5))
    with pytest.raises(SeqReused):
        store.accept(dataclasses.replace(update("r", 1), kind="save_weights"))
    store.accept(open_sampler("r", base="base"))  # another line of the same name: numbers of its own
    store.accept(sample("r", 0))
    assert [one.kind for one in store.ready()] == ["create_model", "optim_step", "create_sampler", "sample"]


def test_training_waits_for_holes_and_samples_do_not(store):
    store.accept(create("r"))
    for seq in (3, 2, 5):
        store.accept(update("r", seq))
    store.accept(sample("s", 9))
    assert [(one.target, one.seq) for one in store.ready()] == [("r", 0), ("s", 9)]
    store.accept(update("r", 1))
    assert [(one.target, one.seq) for one in store.ready()] == [("r", 0), ("r", 1), ("r", 2), ("r", 3), ("s", 9)]
    finish(store, *(store.accept(one) for one in (create("r"), update("r", 1), update("r", 2))))
    assert store.run("r").next_seq == 3 and [one.seq for one in store.ready()] == [3, 9]


def test_a_cancelled_request_is_no_hole_and_what_runs_is_not_cancelled(store):
    made, first, second = (store.accept(one) for one in (create("r"), update("r", 1), update("r", 2)))
    assert store.cancel(first.request_id) and not store.cancel(first.request_id) and not store.cancel("r-none")
    assert [one.seq for one in store.ready()] == [0, 2]
    store.claim([made.request_id])
    assert not store.cancel(made.request_id)
    finish(store, made, second)
    assert store.ready() == [] and store.run("r").next_seq == 3
    found = store.accept(update("r", 1))
    assert (found.state, found.error, found.category) == ("cancelled", "cancelled", "user")


def test_a_deadline_cancels_what_has_not_begun(store, clock):
    store.accept(create("r"))
    late = store.accept(dataclasses.replace(update("r", 1), deadline=clock.now + 5))
    begun = store.accept(dataclasses.replace(sample("s", 0), deadline=clock.now + 5))
    store.claim([begun.request_id])
    clock.now += 6
    assert [one.seq for one in store.ready()] == [0]
    assert "deadline" in store.request(late.request_id).error and store.request(begun.request_id).state == "running"


def test_answers_are_final_and_come_in_the_order_of_finishing(store):
    cursor = store.finish_cursor()
    made, step, drawn = (store.accept(one) for one in (create("r"), update("r", 1), sample("s", 0)))
    seen = store.changes()
    finish(store, drawn)
    store.claim([made.request_id, step.request_id])
    failure = ServiceError("bad base", "user")
    store.finish([RequestOutcome(request_id=made.request_id, answer=failure, run={"state": "failed"})])
    store.finish([(step.request_id, DONE), (made.request_id, DONE)])  # the second is final already
    found, after = store.finished_since(cursor)
    assert [target for _, target in found] == [drawn.target, made.target, step.target]
    ids = [request_id for request_id, _ in found]
    assert ids == [drawn.request_id, made.request_id, step.request_id] and store.finished_since(after) == ([], after)
    assert store.wait_for_change(seen, 0.0) != seen
    found = store.request(made.request_id)
    assert (found.state, found.answer, found.error, found.category) == ("failed", None, "bad base", "user")
    assert store.run("r").state == "failed" and store.request(step.request_id).answer == b"{}"
    assert store.request(drawn.request_id).payload == b"" and store.request(step.request_id).payload  # may be replayed


def test_what_a_dead_worker_computed_waits_again(store):
    made = store.accept(create("r"))
    assert [one.request_id for one in store.claim([made.request_id])] == [made.request_id]
    assert store.claim([made.request_id]) == [] and store.ready() == []
    assert store.reclaim() == 1 and [(one.request_id, one.deaths) for one in store.ready()] == [(made.request_id, 1)]
    store.claim([made.request_id])
    assert store.reclaim(died=False) == 1 and store.request(made.request_id).deaths == 1  # the store was away, say


def test_forgotten_answers_stay_known_and_go_in_the_end(store, clock):
    made, drawn = store.accept(create("r")), store.accept(sample("s", 0))
    finish(store, made, drawn)
    store.forget([made.request_id, drawn.request_id])
    again = store.accept(sample("s", 0))
    assert again.forgotten and again.answer is None and again.request_id == drawn.request_id
    clock.now += 100
    assert store.expire(result_seconds=50, memory_seconds=50) == (0, 1)  # no snapshot of the run: it stays
    assert store.request(drawn.request_id) is None and store.request(made.request_id).forgotten
    finish(store, store.accept(update("r", 1)), answer=Answer(b"{1}", "json"))
    for seq in (0, 1):
        store.cover("r", seq, steps=seq)
    clock.now += 100
    assert store.expire(result_seconds=50, memory_seconds=50) == (1, 1)
    with pytest.raises(RequestGone, match="its answer was fetched"):
        store.accept(create("r"))
    assert [one.seq for one in store.history("r", -1)] == [1]


def test_payloads_stay_until_two_snapshots_hold_them(store):
    requests = [store.accept(create("r")), *(store.accept(update("r", seq)) for seq in (1, 2, 3))]
    finish(store, *requests)
    store.cover("r", 1, steps=1)
    assert all(one.payload for one in store.history("r", -1)) and store.run("r").covered == 1
    store.cover("r", 3, steps=3)
    assert [bool(one.payload) for one in store.history("r", -1)] == [False, False, True, True]
    store.cover("r", 2, steps=2)  # an older one changes nothing
    assert (store.run("r").covered, store.run("r").covered_before, store.run("r").steps) == (3, 1, 3)


def test_limits_of_a_key(store, clock):
    key, _ = store.create_key("small", queue=2, requests_per_minute=4)

    def mine(seq):
        return dataclasses.replace(sample("s", seq), owner=key.key_id)

    first, _ = store.accept(mine(0)), store.accept(mine(1))
    with pytest.raises(OverLimit, match="2 requests of this key wait") as raised:
        store.accept(mine(2))
    assert raised.value.retry_after > 0
    assert store.accept(mine(0)) == first  # a repeat counts nothing
    store.accept(sample("s", 2))  # nor does another key
    finish(store, *(store.accept(mine(seq)) for seq in (0, 1)))
    finish(store, store.accept(mine(3)), store.accept(mine(4)))
    with pytest.raises(OverLimit, match="4 requests per minute"):
        store.accept(mine(5))
    clock.now += 60
    with pytest.raises(OverLimit):  # 4 of the last minute still count in full
        store.accept(mine(5))
    clock.now += 30
    finish(store, store.accept(mine(5)), store.accept(mine(6)))  # now 2 of them, and 2 new ones
    with pytest.raises(OverLimit):
        store.accept(mine(7))


def test_a_run_that_is_not_there_or_over_takes_nothing(store):
    with pytest.raises(ServiceError, match="no training run 'r'"):
        store.accept(update("r", 1))
    made = store.accept(create("r"))
    store.claim([made.request_id])
    store.finish([RequestOutcome(request_id=made.request_id, answer=DONE, run={"state": "unloaded"})])
    with pytest.raises(ServiceError, match="was unloaded"):
        store.accept(update("r", 1))


def test_many_threads_accept_each_request_once(store):
    store.accept(create("r"))
    found = []

    def client():
        for seq in range(1, 21):
            found.append((seq, store.accept(update("r", seq)).request_id))

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120 and len(set(found)) == 20
    assert [one.seq for one in store.ready()] == list(range(21))


def test_a_transaction_that_breaks_leaves_nothing_and_the_next_one_works(store):
    store.accept(create("r"))
    faults.configure("service.accepting:1:raise")
    with pytest.raises(OSError, match="injected"):
        store.accept(update("r", 1))
    faults.configure(None)
    assert [one.seq for one in store.ready()] == [0] and store.accept(update("r", 1)).seq == 1


def test_who_is_told_of_a_request_or_a_result_finds_it_after_a_power_cut(store, clock, tmp_path, monkeypatch):
    """The disk holds what was synced. An answer may come later, but not later than somebody hears of it."""
    log = [b""]
    monkeypatch.setattr(write_ahead_log, "_to_disk", lambda descriptor: log.append(os.pread(descriptor, 1 << 24, 0)))

    def after_power_cut():
        folder = tmp_path / f"after-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        shutil.copyfile(tmp_path / "deep" / "service.db", folder / "service.db")
        (folder / "service.db-wal").write_bytes(log[-1])
        return ServiceStore(f"sqlite:///{folder}/service.db", clock)

    made = store.accept(create("r"))
    again = after_power_cut()
    assert again.request(made.request_id) == made
    again.close()
    taken = store.accept_together([update("r", 1)])[0]
    store.claim([made.request_id])
    store.finish([(made.request_id, DONE)], synced=False)
    again = after_power_cut()
    assert again.request(taken.request_id) is None and not again.request(made.request_id).is_final
    again.close()
    store.sync()
    again = after_power_cut()
    assert again.request(made.request_id).is_final and [one.seq for one in again.ready()] == [1]
    again.close()
    store.finish([(taken.request_id, DONE)])
    again = after_power_cut()
    assert again.run("r").next_seq == 2
    again.close()


def test_writers_of_two_processes_take_turns_and_the_log_is_copied_beside_them(store, url, clock):
    """Two stores stand for two processes: neither sleeps longer and longer while the other is busy."""
    other, longest = ServiceStore(url, clock), []
    store.accept(create("r"))

    def client(one, first):
        for seq in range(first, first + 40):
            began = time.monotonic()
            one.accept(sample("s", seq))
            longest.append(time.monotonic() - began)

    threads = [threading.Thread(target=client, args=(one, 1000 * n)) for n, one in enumerate((store, other, store))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.copy_log(0)
    for thread in threads:
        thread.join()
    assert len(longest) == 120 and len(store.ready()) == 121
    other.close()


def test_a_new_database_that_another_process_is_making_is_waited_for(tmp_path):
    other = sqlite3.connect(tmp_path / "new.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # it has no log yet: SQLite refuses at once to begin one
    threading.Timer(0.3, other.rollback).start()
    store = ServiceStore(f"sqlite:///{tmp_path / 'new.db'}")
    create(store)
    store.close()
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_log_begins_anew_where_it_is_long_and_not_because_its_file_once_was(store, tmp_path):
    """Each time holds writers up, and the file never shrinks."""
    statements = []
    sa.event.listen(store._database._engine, "checkout", lambda raw, *_: raw.set_trace_callback(statements.append))

    def times():
        return sum("RESTART" in one for one in statements)

    most = 1 << 19
    for seq in range(4):
        store.accept(dataclasses.replace(sample("s", seq), payload=bytes(1 << 18)))
    store.copy_log(most)
    assert times() == 1
    store.accept(sample("s", 4))
    store.copy_log(most)
    assert times() == 1 and (tmp_path / "deep" / "service.db-wal").stat().st_size > most


def test_a_database_that_is_away_is_an_error_with_a_name_for_those_who_watch_it(store, monkeypatch):
    class Away:
        def execute(self, statement):
            raise sqlite3.OperationalError("disk I/O error")

        def close(self):
            """Nothing is open."""

    store.changes()
    store._database._watched.close()
    monkeypatch.setattr(store._database, "_watched", Away())
    with pytest.raises(BackendError, match="the service's store: disk I/O error"):
        store.changes()


def test_any_number_of_answers_is_forgotten_at_once(store):
    made = store.accept(create("r"))
    finish(store, made)
    store.forget([*(f"r-{number}" for number in range(300_000)), made.request_id])
    assert store.request(made.request_id).forgotten


def test_lists_of_sessions_runs_and_checkpoints(store, clock):
    store.create_session("one", "key-1", {"tags": ["a"]})
    clock.now += 1
    store.create_session("two", "key-2", {})
    page = store.sessions(limit=1)
    assert (page.total, page.items[0].session_id) == (2, "two") and store.sessions("key-1").items[0].facts == {
        "tags": ["a"]
    }
    assert store.touch_session("one") and store.finish_session("one", {"reason": "success"})
    assert not store.touch_session("one") and not store.finish_session("one") and not store.touch_session("none")
    assert store.session("one").facts == {"tags": ["a"], "reason": "success"}
    for number in range(3):
        store.accept(create(f"r{number}"))
    page = store.runs(limit=2, offset=1)
    assert page.total == 3 and len(page.items) == 2 and store.runs("key-2").total == 0
    record = CheckpointRecord(
        path="tinker://r0/weights/a", model_id="r0", owner="key-1", kind="weights", name="a", folder="weights/a",
        created=clock.now, expires=clock.now + 10,
    )  # fmt: skip
    store.add_copy(store.run("r0"), record)
    assert store.checkpoint(record.path) == record and store.checkpoints(model_id="r0").items == [record]
    assert store.change_checkpoint(record.path, public=True) and store.checkpoint(record.path).public
    assert not store.drop_checkpoint(record.path)  # it lives
    clock.now += 10
    assert store.checkpoint(record.path) is None and store.checkpoints().total == 0
    assert [one.path for one in store.expired_checkpoints()] == [record.path] and store.drop_checkpoint(record.path)
    assert not store.delete_checkpoint(record.path)


def test_keys_are_kept_as_digests_and_revoked_for_good(store, url, tmp_path):
    key, secret = store.create_key("ada", queue=5)
    assert secret.startswith("tml-") and store.key_of(secret).key_id == key.key_id and store.key_of("tml-x") is None
    with pytest.raises(SettingsError, match="'ada'"):
        store.create_key("ada")
    store.note(key.key_id, "create_model", "r", "rank 4")
    assert store.audit(key.key_id).items[0].subject == "r" and store.audit("other").total == 0
    assert store.revoke_key("ada") and not store.revoke_key("ada") and store.key_of(secret) is None
    assert store.create_key("ada")[0].key_id != key.key_id and len(store.keys()) == 2
    store.close()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "deep").iterdir())
    assert b"create_model" in stored and secret.encode() not in stored


@pytest.mark.parametrize("wrong", ["sqlite://", "mysql://host/name", "no url"])
def test_a_url_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(SettingsError, match="store:"):
        ServiceStore(wrong)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_on_postgresql(clock):
    """The statements that differ: upserts, counters, locks, places; two stores stand for two processes."""
    with postgres() as address:
        url = f"postgresql+psycopg2://{address}/postgres"
        first, second = ServiceStore(url, clock), ServiceStore(url, clock)
        seen = second.changes()
        made = first.accept(create("r"))
        assert second.wait_for_change(seen, 5.0) != seen and second.accept(create("r")) == made
        with pytest.raises(SeqReused):
            second.accept(create("r", rank=8))
        requests = [made, second.accept(loss("r", 1, ())), first.accept(update("r", 2)), first.accept(sample("s", 0))]
        assert [one.request_id for one in second.ready()] == [one.request_id for one in requests]
        assert second.cancel(requests[3].request_id)
        assert len(first.claim([requests[1].request_id])) == second.reclaim() == 1
        finish(second, *requests[:3])
        assert [request_id for request_id, _ in first.finished_since(0)[0]] == [
            requests[3].request_id,
            *(one.request_id for one in requests[:3]),
        ]
        first.cover("r", 1, steps=0)
        first.cover("r", 2, steps=1)
        assert [bool(one.payload) for one in second.history("r", -1)] == [False, False, True]
        clock.now += 100
        assert second.expire(result_seconds=1, memory_seconds=1e6) == (4, 0)
        first.close()
        second.close()
