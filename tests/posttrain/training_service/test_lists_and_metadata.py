"""Metadata, projects, published runs, storage, traces and the audit of a day; without a worker."""

import json

import pytest
from helpers.service import random_data

from posttrain.training_service.store import CheckpointRecord, ResultBody

OTHER = {"project_id": "archive"}


def create_run(service, number=0, session=None, **facts):
    """Accept the creation of a run; return (session, run)."""
    session = session or service.post("create_session", facts)["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "base",
        "lora_config": {"rank": 4},
    }
    return session, service.post("create_model", body)["model_id"]


def add_checkpoint(service, run, name="a", **values):
    """Add saved weights of a run as the worker records them."""
    record = CheckpointRecord(
        path=f"tinker://{run}/weights/{name}",
        model_id=run,
        owner=service.key.key_id,
        kind="weights",
        name=name,
        folder=f"weights/{run}/weights/{name}",
        created=service.store.read_clock(),
        **values,
    )
    service.store.add_checkpoint_copy(service.store.find_run(run), record)
    return record.path


@pytest.fixture
def other(idle):
    _, secret = idle.store.create_key("other")
    return {"X-API-Key": secret}


def list_run_ids(response):
    return [run["training_run_id"] for run in response["training_runs"]]


def test_metadata_that_no_database_takes_is_refused_with_its_place(idle):
    """JSON has neither NaN nor infinity, and PostgreSQL no NUL; such a request must not affect others."""
    session = idle.session()
    oversized = {"k": "x" * 70_000}
    for route, body in (
        ("create_session", {}),
        ("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "base"}),
    ):
        for invalid, reason in (
            ('{"a": NaN}', "not finite; write it as text"),
            ('{"a": [1, -Infinity]}', "not finite"),
            (json.dumps(oversized), "at most 65536 are allowed"),
        ):
            text = json.dumps({**body, "user_metadata": 0}).replace(": 0}", f": {invalid}}}")
            response = idle.call(
                "POST",
                route,
                content=text,
                headers={"content-type": "application/json"},
                status=422,
            )
            assert response["detail"].startswith("user_metadata: ") and reason in response["detail"]
            assert "xxxx" not in response["detail"]
    named = idle.post("create_session", {"display_name": "a\0b"}, status=422)["detail"]
    assert named == "display_name: holds a NUL character"
    for status, route in ((404, "sessions/a%00"), (404, f"training_runs/{session}:train:0%00")):
        idle.call("GET", route, status=status)
    assert idle.post("create_session", {"user_metadata": {"a": [1.5, None, "é"]}})["session_id"]


def test_metadata_of_saved_states_reaches_the_worker(idle):
    _, run = create_run(idle)
    idle.post(
        "save_weights", {"model_id": run, "seq_id": 1, "path": "a", "user_metadata": {"step": "7"}}
    )
    # its result
    idle.post(
        "save_weights", {"model_id": run, "seq_id": 2, "path": "b", "user_metadata": {"step": 7}}
    )
    facts = {request.seq: request.facts for request in idle.store.list_requests(run)}
    assert facts[1] == {"user_metadata": {"step": "7"}} and facts[2] == {}


def test_runs_of_a_project(idle):
    _, first = create_run(idle)
    session, second = create_run(idle, **OTHER)
    assert list_run_ids(idle.call("GET", "training_runs", params=OTHER)) == [second]
    assert list_run_ids(idle.call("GET", "training_runs", params={"project_id": "default"})) == [
        first
    ]
    assert list_run_ids(idle.call("GET", "training_runs", params={"project_id": "none\0"})) == []
    idle.call("PUT", f"sessions/{session}/project", json={"project_id": "default"}, status=204)
    response = idle.call("GET", "training_runs", params={"project_id": "default", "limit": 1})
    assert response["cursor"]["total_count"] == 2 and len(response["training_runs"]) == 1


def test_runs_with_published_weights_are_accessible_to_all_keys(idle, other):
    _, run = create_run(idle)
    path = add_checkpoint(idle, run)
    add_checkpoint(idle, run, "secret", public=False)
    accessible = {"access_scope": "accessible"}
    idle.call("GET", f"training_runs/{run}", params=accessible, headers=other, status=403)
    idle.store.update_checkpoint(path, public=True)
    response = idle.call("GET", f"training_runs/{run}", params=accessible, headers=other)
    # not the newest
    assert response["training_run_id"] == run and response["last_checkpoint"]["tinker_path"] == path
    idle.call("GET", f"training_runs/{run}", headers=other, status=403)
    assert list_run_ids(idle.call("GET", "training_runs", params=accessible, headers=other)) == [
        run
    ]
    assert list_run_ids(idle.call("GET", "training_runs", headers=other)) == []
    idle.call("GET", "training_runs", params={"access_scope": "all"}, status=422)
    idle.store.delete_checkpoint(path)
    assert list_run_ids(idle.call("GET", "training_runs", params=accessible, headers=other)) == []


def test_sessions_of_other_owners_are_hidden(idle):
    session = idle.session()

    def search(**asked):
        return [item["session_id"] for item in idle.post("sessions/search", asked)["sessions"]]

    assert search(owner={"type": "accessible"}) == search(owner={"type": "own"}) == [session]
    assert search(owner={"type": "user", "owner_urns": ["key-none"]}) == []
    assert search(owner={"type": "user", "owner_urns": [idle.key.key_id]}) == [session]
    for wrong in (
        {"owner": {"type": "all"}},
        {"statuses": [{"type": "active", "reasons": 5}]},
        {"statuses": [5]},
        {"cursor": {"last_session_id": 5}},
    ):
        assert idle.post("sessions/search", wrong, status=422)["detail"].startswith(
            next(iter(wrong))
        )


def test_storage_by_project(idle, other):
    _, run = create_run(idle, **OTHER)
    _, second = create_run(idle)
    for name, size in (("a", 1_500_000_000), ("b", 500_000_000)):
        add_checkpoint(idle, run, name, bytes=size)
    add_checkpoint(idle, second, bytes=7)
    deleted = add_checkpoint(idle, second, "gone", bytes=7)
    idle.store.delete_checkpoint(deleted)
    route = "billing/usage/checkpoints/current"
    archive, default = idle.call("GET", route)["data"]
    assert (archive["project_id"], archive["checkpoint_count"], archive["size_bytes"]) == (
        "archive",
        2,
        2_000_000_000,
    )
    assert archive["size_gigabytes"] == 2.0 and archive["user_name"] == "me"
    assert (default["project_id"], default["checkpoint_count"], default["size_bytes"]) == (
        "default",
        1,
        7,
    )
    assert idle.call("GET", route, params=OTHER)["data"] == [archive]
    assert idle.call("GET", route, headers=other)["data"] == []


def test_a_trace_of_a_session_has_every_request_from_acceptance_to_its_end(idle, other):
    session, run = create_run(idle)
    promise = idle.forward_backward(run, 1, random_data(1))
    (creation, forward) = reversed(idle.store.list_requests(run))
    idle.store.claim_requests([creation.request_id])
    idle.store.finish_requests([(creation.request_id, ResultBody(b"{}", "json"))])
    idle.call("GET", f"sessions/{session}/trace_export", headers=other, status=403)
    response = idle.call("GET", f"sessions/{session}/trace_export")
    assert response["status"] == "ready"
    url = response["url"].removeprefix("http://127.0.0.1:8123/api/v1/")
    events = idle.call("GET", url, headers={"X-API-Key": ""})["traceEvents"]
    assert events[0] == {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": run}}
    assert [(event["ph"], event["name"], event["id"]) for event in events[1:]] == [
        ("b", "create_model 0", creation.request_id),
        ("b", "computing", creation.request_id),
        ("e", "computing", creation.request_id),
        ("e", "create_model 0", creation.request_id),
        ("b", "forward_backward 1", promise["request_id"]),
        ("e", "forward_backward 1", promise["request_id"]),
    ]
    times = [event["ts"] for event in events[1:5]]
    assert times == sorted(times) and times[0] == round(creation.accepted * 1e6)
    assert events[5]["args"] == {"request_id": forward.request_id, "seq": 1, "state": "waiting"}
    idle.call("GET", url.replace(session, "another"), status=403)


def test_the_audit_of_a_day(idle):
    idle.store.record_audit_entry(idle.key.key_id, "checkpoint_delete", "tinker://a/weights/b\0c")
    today = idle.call("GET", "audit", params={"event_type": "checkpoints"})["entries"]
    assert today[0]["event_details"]["subject"] == "tinker://a/weights/b\N{REPLACEMENT CHARACTER}c"
    assert idle.call("GET", "audit", params={"day": "2020-01-01"})["entries"] == []
    for wrong in ("9999-12-31", "yesterday"):
        assert (
            "expected YYYY-MM-DD"
            in idle.call("GET", "audit", params={"day": wrong}, status=422)["detail"]
        )


def test_a_sampler_that_is_not_ready_yet_is_known_however_much_is_asked_of_it(idle):
    session = idle.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = idle.post("create_sampling_session", body)["sampling_session_id"]
    for seq in range(101):
        idle.post(
            "asample", {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": []}}
        )
    assert idle.call("GET", f"samplers/{sampler}")["base_model"] == "base"


def test_reported_states_are_on_disk(idle, monkeypatch):
    """Commits do not wait for the disk, so every route that reports a state must sync first."""
    _, run = create_run(idle)
    synced = []
    monkeypatch.setattr(idle.store, "sync_to_disk", lambda: synced.append(1))
    for route in (f"/runs/{run}/requests", f"/runs/{run}/queue/stats", f"/runs/{run}", "/runs"):
        synced.clear()
        assert idle.client.get(route).status_code == 200 and synced, route


def test_keys_that_are_not_known_take_no_memory_of_their_size(idle):
    secret = "tml-" + "x" * 5000
    idle.post("client/config", headers={"X-API-Key": secret}, status=401)
    server = idle.client.app.app.state.server
    assert all(len(name) == 32 for name in server._keys) and len(server._keys) >= 1
