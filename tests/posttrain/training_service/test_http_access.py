"""Keys, foreign resources, limits, hostile bodies and waiting; without a worker, so nothing is ever computed."""

import asyncio
import dataclasses
import json
import re
import threading
import time
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from helpers.service import random_data
from helpers.service_clients import loss, sample
from helpers.service_http import ADDRESS, running_service

from posttrain.training_service.http import result_waiter
from posttrain.training_service.paths import TinkerPath
from posttrain.training_service.store import ResultBody
from rl_core.errors import BackendError

MIB = 1 << 20


@pytest.fixture
def started(idle):
    """Start a session and a run on a service that computes nothing."""
    session = idle.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "base",
        "lora_config": {"rank": 4},
    }
    return session, idle.post("create_model", body)["model_id"]


def create_other_key(service, **limits):
    _, secret = service.store.create_key("other", **limits)
    return {"X-API-Key": secret}


def test_requests_without_a_valid_key_are_refused(idle):
    for headers in ({"X-API-Key": ""}, {"X-API-Key": "tml-unknown"}):
        response = idle.post("client/config", status=401, headers=headers)
        assert "posttrain service key create" in response["detail"]
    assert idle.post("client/config")["parallel_fwdbwd_chunks"] is False
    assert idle.call("GET", "healthz", headers={"X-API-Key": ""}) == {"status": "ok"}
    assert idle.store.list_keys()[0].key_id == idle.call("GET", "auth/apikey/me")["key_id"]
    headers = create_other_key(idle)
    idle.post("client/config", headers=headers)
    idle.call("DELETE", "auth/apikey/me", headers=headers, status=204)
    time.sleep(2.1)  # for which a key is believed
    idle.post("client/config", headers=headers, status=401)


def test_secrets_of_keys_are_nowhere_in_the_folder(idle):
    secret = idle.client.headers["x-api-key"]
    idle.session()
    contents = [path.read_bytes() for path in idle.folder.rglob("*") if path.is_file()]
    assert len(contents) > 1 and not any(
        secret.encode() in data or secret[4:].encode() in data for data in contents
    )


def test_foreign_things_are_refused(idle, started):
    session, run = started
    path = TinkerPath(run, "weights", "a")
    idle.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    headers, other_session = create_other_key(idle), {}
    other_session["session"] = idle.post("create_session", {}, headers=headers)["session_id"]
    posts = {
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "base"},
        "get_info": {"model_id": run},
        "optim_step": {"model_id": run, "seq_id": 1, "adam_params": {}},
        "save_weights": {"model_id": run, "seq_id": 1},
        "save_weights_for_sampler": {"model_id": run, "seq_id": 1, "path": "x"},
        "save_weights_external": {"model_id": run, "seq_id": 1, "path": "x"},
        "load_weights": {"model_id": run, "seq_id": 1, "path": str(path)},
        "create_sampling_session": {
            "session_id": session,
            "sampling_session_seq_id": 0,
            "base_model": "base",
        },
        "asample": {
            "sampling_session_id": f"{session}:sample:0",
            "seq_id": 0,
            "prompt": {"chunks": []},
        },
        "retrieve_futures": {"target": {"sampling_session_id": f"{session}:sample:0"}},
        f"sessions/{session}/finish": {},
    }
    for route, body in posts.items():
        assert "another API key" in idle.post(route, body, headers=headers, status=403)["detail"], (
            route
        )
    sent = {**headers, "content-type": "application/x-protobuf"}
    payload = loss(run, 1, random_data(1)).payload
    idle.call("POST", "forward_backward", content=payload, headers=sent, status=403)
    for route in (
        f"training_runs/{run}",
        f"training_runs/{run}/checkpoints",
        f"sessions/{session}",
    ):
        idle.call("GET", route, headers=headers, status=403)
    assert idle.client.get(f"/runs/{run}/queue/stats", headers=headers).status_code == 403
    (saved,) = [
        request for request in idle.store.list_requests(run) if request.kind == "save_weights"
    ]
    for route in ("retrieve_future", "cancel_future"):
        idle.post(route, {"request_id": saved.request_id}, headers=headers, status=403)
    assert idle.call("GET", "training_runs", headers=headers)["training_runs"] == []
    assert idle.call("GET", "sessions", headers=headers)["sessions"] == [other_session["session"]]


def test_what_does_not_exist_is_404(idle, started):
    session, _ = started
    assert (
        "did you mean 'base'?"
        in idle.post(
            "create_model",
            {"session_id": session, "model_seq_id": 5, "base_model": "bas"},
            status=404,
        )["detail"]
    )
    idle.post("get_info", {"model_id": f"{session}:train:9"}, status=404)
    idle.post("get_info", {"model_id": "nothing:train:9"}, status=404)
    idle.post("retrieve_future", {"request_id": "r-nothing"}, status=410)
    idle.call("GET", "samplers/nothing:sample:0", status=404)
    for path in ("billing/usage/events", "auth/token", "unload_model", "create_custom_loss"):
        assert "is not served here" in idle.post(path, status=404)["detail"]


def test_a_repeated_number_is_the_same_promise_and_another_payload_an_error(idle, started):
    _, run = started
    late = idle.forward_backward(run, 2, random_data(2))  # chunks may come in any order
    first = idle.forward_backward(run, 1, random_data(1))
    assert idle.forward_backward(run, 1, random_data(1)) == first != late
    assert "was used before" in idle.forward_backward(run, 1, random_data(3), status=422)["detail"]
    body = {
        "session_id": run[:32],
        "model_seq_id": 0,
        "base_model": "base",
        "lora_config": {"rank": 8},
    }
    idle.post("create_model", body, status=422)


def test_a_result_is_waited_for(idle, started):
    _, run = started
    promise = idle.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})
    began = time.monotonic()
    response = idle.post("retrieve_future", promise, status=408)
    assert (
        response == {"type": "try_again", "queue_state": "active"}
        and time.monotonic() - began >= 0.2
    )
    answer = ResultBody(b'{"metrics": {}}', "json")
    object.__setattr__(idle.settings.server, "poll_seconds", 30.0)
    later = threading.Timer(
        0.3, lambda: idle.store.finish_requests([(promise["request_id"], answer)])
    )
    later.start()
    assert idle.post("retrieve_future", promise) == {"metrics": {}}
    later.join()


def test_a_thousand_idle_polls_cost_no_look_and_hold_nobody_up(idle, started):
    """A thousand polls are held by one thread that polls the store; other calls are answered.

    One result wakes only its polls and is read once for all of them; the others are answered with 408.
    """
    _, run = started
    object.__setattr__(idle.settings.server, "poll_seconds", 60.0)
    promises = [
        idle.post("optim_step", {"model_id": run, "seq_id": 1 + n, "adam_params": {}})
        for n in range(4)
    ]
    waiter, reads = idle.client.app.app.state.server.result_waiter, []
    result, results = idle.store.find_result, idle.store.find_results
    idle.store.find_result = lambda request_id: reads.append(request_id) or result(request_id)
    idle.store.find_results = lambda ids: reads.append(list(ids)) or results(ids)

    async def poll():
        transport = httpx.ASGITransport(app=idle.client.app)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            transport=transport, base_url=ADDRESS, timeout=60, limits=limits
        ) as client:

            async def send(path, body):
                return await client.post(
                    f"/api/v1/{path}", json=body, headers=dict(idle.client.headers)
                )

            polls = [
                asyncio.create_task(send("retrieve_future", promises[n % 4])) for n in range(1000)
            ]
            while len(waiter) < 1000:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert (await send("client/config", {})).status_code == 200
            assert reads == [] and not any(poll.done() for poll in polls)
            idle.store.finish_requests(
                [(promises[1]["request_id"], ResultBody(b'{"metrics": {}}', "json"))]
            )
            answered = await asyncio.gather(*polls[1::4])
            assert not any(poll.done() for poll in polls[0::4]) and reads == [
                [promises[1]["request_id"]]
            ]
            waiter.stop_thread()  # the server ends, so the others need not wait for their timeout
            return answered, await asyncio.gather(*polls[0::4], *polls[2::4], *polls[3::4])

    answered, others = idle.client.portal.call(poll)
    assert {response.text for response in answered} == {'{"metrics": {}}'} and len(answered) == 250
    assert {response.status_code for response in others} == {408} and len(others) == 750


def test_nothing_is_acknowledged_before_it_is_on_disk(idle, started):
    """An acceptance, a result and a list of results: 503 while the disk fails, and the repeated request is answered."""
    session, run = started
    sampler = idle.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"},
    )["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [3]}]},
        "sampling_params": {},
    }
    promise = idle.post("asample", body)
    target = {"target": {"type": "sampling_session", "sampling_session_id": sampler}, "timeout": 0}

    def refuse():
        raise BackendError("the service's store: the disk fails")

    idle.store.sync_to_disk = refuse
    idle.store.finish_requests(
        [(promise["request_id"], ResultBody(b"{}", "json"))], is_synced=False
    )
    step = {"model_id": run, "seq_id": 1, "adam_params": {}}
    for _ in range(2):
        assert "the disk fails" in idle.post("optim_step", step, status=503)["detail"]
        assert "the disk fails" in idle.post("retrieve_future", promise, status=503)["detail"]
        assert "the disk fails" in idle.post("retrieve_futures", target, status=503)["detail"]
    del idle.store.sync_to_disk
    assert idle.post("retrieve_future", promise) == {}
    assert [
        completion["request_id"]
        for completion in idle.post("retrieve_futures", target)["completions"]
    ] == [promise["request_id"]]
    assert (
        idle.post("optim_step", step)["model_id"] == run and len(idle.store.list_requests(run)) == 2
    )


def test_a_fetched_result_is_held_until_it_is_forgotten(idle, started):
    _, run = started
    promise = idle.forward_backward(run, 1, random_data(1))
    idle.store.finish_requests([(promise["request_id"], ResultBody(b"1", "protobuf"))])
    looks, result = [], idle.store.find_result
    idle.store.find_result = lambda request_id: looks.append(request_id) or result(request_id)
    assert [idle.post("retrieve_future", promise) for _ in range(3)] == [b"1"] * 3 and len(
        looks
    ) <= 1
    server = idle.client.app.app.state.server
    idle.client.portal.call(server.drop_results, [promise["request_id"]])
    idle.post("retrieve_future", promise, status=410)


def test_numbers_that_the_store_cannot_hold_are_the_callers_fault(idle, started):
    session, run = started
    target = {
        "type": "sampling_session",
        "sampling_session_id": f"{session}:sample:0",
        "cloned_sampler_id": 1 << 62,
    }
    assert (
        "cloned_sampler_id"
        in idle.post("retrieve_futures", {"target": target, "timeout": 0}, status=422)["detail"]
    )
    for path in ("runs", f"runs/{run}/requests"):
        assert idle.client.get(f"/{path}", params={"offset": 10**30}).status_code == 422


def test_a_result_that_could_not_be_read_is_delivered_later(idle, started, monkeypatch):
    """A finished request is listed only once, so losing it would let its client wait for ever."""
    monkeypatch.setattr(result_waiter, "RETRY_SECONDS", 0.01)
    object.__setattr__(idle.settings.server, "poll_seconds", 30.0)
    _, run = started
    promise = idle.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})
    results, faults = idle.store.find_results, [BackendError("the service's store: disk I/O error")]
    idle.store.find_results = lambda ids: results(ids) if not faults else raise_error(faults.pop())
    answer = ResultBody(b'{"metrics": {}}', "json")
    later = threading.Timer(
        0.1, lambda: idle.store.finish_requests([(promise["request_id"], answer)])
    )
    later.start()
    assert idle.post("retrieve_future", promise) == {"metrics": {}} and not faults
    later.join()


def raise_error(error):
    raise error


def test_a_result_whose_end_was_missed_is_returned_by_the_second_poll(idle, started):
    """A result can be missed, for example if it expired while nobody asked for anything."""
    _, run = started
    promise = idle.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})
    idle.client.app.app.state.server.result_waiter._cursor = 1 << 40
    idle.store.finish_requests([(promise["request_id"], ResultBody(b'{"metrics": {}}', "json"))])
    idle.post("retrieve_future", promise, status=408)
    assert idle.post("retrieve_future", promise) == {"metrics": {}}


def test_requests_that_arrive_together_are_accepted_whatever_one_of_them_holds(idle, started):
    """A statement names all requests of a batch; a value that the database refuses is the fault of one of them."""
    server, (session, _) = idle.client.app.app.state.server, started
    accept, sizes = idle.store.accept_batch, []
    started_event, continue_event = threading.Event(), threading.Event()

    def accept_together(batch):
        started_event.set()
        continue_event.wait(30)
        sizes.append(len(batch))
        return accept(batch)

    idle.store.accept_batch = accept_together

    def request(seq):
        return dataclasses.replace(
            sample(f"{session}:sample:0", seq), owner=idle.key.key_id, session_id=session
        )

    async def send_all():
        first = asyncio.ensure_future(server.store_request(request(0)))
        await asyncio.to_thread(started_event.wait, 30)
        others = [
            asyncio.ensure_future(server.store_request(request(seq))) for seq in range(1, 1500)
        ]
        error = asyncio.ensure_future(server.store_request(request(1 << 70)))
        await asyncio.sleep(0)
        continue_event.set()
        return await asyncio.gather(first, *others, error, return_exceptions=True)

    *results, error = idle.client.portal.call(send_all)
    assert [item.seq for item in results] == list(range(1500)) and isinstance(error, OverflowError)
    assert sizes[:2] == [1, 1000]
    assert len(sizes) < 30  # the invalid request was found by bisection among the 500 of its batch


def test_large_results_are_announced_once(idle, started):
    _, run = started
    promise = idle.forward_backward(run, 1, random_data(1))
    idle.store.finish_requests([(promise["request_id"], ResultBody(bytes(2 * MIB), "protobuf"))])
    response = idle.post("retrieve_future", {**promise, "allow_metadata_only": True})
    assert response == {"status": "complete_metadata", "response_payload_size": 2 * MIB}
    assert idle.post("retrieve_future", promise) == bytes(2 * MIB)


def test_a_waiting_request_is_cancelled(idle, started):
    _, run = started
    promise = idle.forward_backward(run, 1, random_data(1))
    assert idle.post("cancel_future", promise)["cancelled"] is True
    response = idle.post("retrieve_future", promise)
    assert (response["error"], response["category"]) == ("cancelled", "user")
    assert idle.post("cancel_future", promise)["cancelled"] is False
    actions = [entry.action for entry in idle.store.list_audit_entries().items]
    assert actions[:2] == ["request_cancel"] * 2 and {"run_create", "session_create"} <= set(
        actions
    )


def test_a_key_lists_its_actions_of_a_day(idle, started):
    _, run = started
    idle.post("create_session", {}, headers=create_other_key(idle))
    entries = idle.call("GET", "audit")["entries"]
    assert [entry["event"] for entry in entries] == ["session_create", "run_create"]
    assert entries[1]["event_details"] == {"key": "me", "subject": run, "detail": "base"}
    assert idle.call("GET", "audit", params={"day": "2001-01-01"})["entries"] == []
    assert idle.call("GET", "audit", params={"event_type": "checkpoints"})["entries"] == []
    for wrong in ({"day": "soon"}, {"event_type": "x"}):
        idle.call("GET", "audit", params=wrong, status=422)


def test_limits_of_a_key(idle):
    headers = create_other_key(idle, queue=2)
    session = idle.post("create_session", {}, headers=headers)["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "base"}
    run = idle.post("create_model", body, headers=headers)["model_id"]
    step = {"model_id": run, "adam_params": {}}
    idle.post("optim_step", {**step, "seq_id": 1}, headers=headers)
    response = idle.client.post("/api/v1/optim_step", json={**step, "seq_id": 2}, headers=headers)
    assert (
        response.status_code == 429
        and int(response.headers["retry-after"]) >= 1
        and "limit 2" in response.json()["detail"]
    )
    # a repetition is no new request
    idle.post("optim_step", {**step, "seq_id": 1}, headers=headers)


def compress(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def test_compressed_bodies(idle, started):
    _, run = started
    payload = loss(run, 1, random_data(1)).payload
    response = idle.raw("forward_backward", compress(payload), content_encoding="zstd")
    assert response == idle.raw("forward_backward", payload)
    bomb = compress(loss(run, 2, random_data(1)).payload + bytes(300 * MIB))
    assert len(bomb) < MIB
    accepted = idle.raw("forward_backward", bomb, content_encoding="zstd")
    (stored,) = [
        request
        for request in idle.store.list_requests(run)
        if request.request_id == accepted["request_id"]
    ]
    assert stored.seq == 2 and "larger than 67108864 bytes, decompressed" in stored.facts["refused"]
    idle.raw("forward_backward", b"no zstd", content_encoding="zstd", status=400)
    idle.raw("forward_backward", payload, content_encoding="br", status=415)
    idle.raw("forward_backward", payload, content_type="application/json", status=415)


def test_bodies_that_are_none(idle, started):
    session, run = started
    for payload in (
        b"",
        b"\xff" * 50,
        loss(run, 1, random_data(1)).payload[:-3],
        loss("", 1, ()).payload,
    ):
        assert idle.raw("forward_backward", payload, status=400)["detail"]
    bad = {
        "optim_step": {"model_id": run},
        "asample": {"sampling_session_id": f"{session}:sample:0", "seq_id": -1, "prompt": {}},
        "create_session": {"tags": "x"},
        "load_weights": {"path": "tinker://a/weights/b", "optimizer": True},
        "retrieve_future": {},
    }
    for route, body in bad.items():
        assert idle.post(route, body, status=422)["detail"], route
    idle.call("POST", "create_session", content=b"[" * 100_000, status=422)
    run_of = {"session_id": session, "model_seq_id": 9, "base_model": "base"}
    # a database that keeps JSON as such takes none
    for number in (
        "NaN",
        '[{"b": -Infinity}]',
        "1e999",
    ):
        body = json.dumps({**run_of, "user_metadata": {"a": "?"}}).replace('"?"', number)
        response = idle.call("POST", "create_model", content=body.encode(), status=422)
        assert "user_metadata: holds a number that is not finite" in response["detail"]
    assert idle.post("create_model", {**run_of, "user_metadata": {"a": "NaN", "b": [1.5, None]}})[
        "model_id"
    ]
    idle.call("POST", "create_session", content=bytes(65 * MIB), status=413)
    for limit in ("0", "-1", "x", "1e9", "99999999999999999999"):
        idle.call("GET", "training_runs", params={"limit": limit}, status=422)


def test_other_hosts_and_pages_are_refused(idle):
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
    ):
        assert idle.client.get("/api/v1/healthz", headers=headers).status_code == 403
    assert (
        idle.client.get("/api/v1/healthz", headers={"Origin": "http://localhost:8123"}).status_code
        == 200
    )


def test_sessions_are_listed_finished_and_moved(idle):
    first = idle.post("create_session", {"display_name": "Grid A", "user_metadata": {"k": "v"}})[
        "session_id"
    ]
    second = idle.post("create_session", {"display_name": "grid b"})["session_id"]
    idle.post("session_heartbeat", {"session_id": first})
    idle.post(f"sessions/{first}/finish", {"reason": {"type": "errored"}})
    idle.post("session_heartbeat", {"session_id": first}, status=410)

    def search(**asked):
        response = idle.post("sessions/search", asked)
        return [session["session_id"] for session in response["sessions"]], response["next_cursor"]

    assert search(display_name="GRID") == ([second, first], None)
    assert search(user_metadata={"k": "v"})[0] == [first]
    assert search(statuses=[{"type": "active"}])[0] == [second]
    assert search(statuses=[{"type": "client_finished", "reasons": ["errored"]}])[0] == [first]
    page, cursor = search(limit=1)
    assert page == [second] and search(limit=1, cursor=cursor) == ([first], None)
    idle.call("PUT", f"sessions/{first}/project", json={"project_id": "p"}, status=204)
    assert search(project_ids=["p"])[0] == [first]
    assert idle.call("GET", f"sessions/{first}")["user_metadata"] == {"k": "v"}


def test_management_interface(idle, started):
    _, run = started
    promise = idle.forward_backward(run, 1, random_data(1))
    data = idle.client.get(f"/runs/{run}/requests/{promise['request_id']}/status").json()
    assert (data["state"], data["kind"], data["seq"]) == ("waiting", "forward_backward", 1)
    creation = next(
        request for request in idle.store.list_requests(run) if request.kind == "create_model"
    )
    idle.store.claim_requests([creation.request_id])
    idle.store.finish_requests([(creation.request_id, ResultBody(b"{}", "json"))])
    stats = idle.client.get(f"/runs/{run}/queue/stats").json()
    assert stats["depth"] == 1 and stats["kinds"]["forward_backward"]["waiting"] == 1
    creation_stats = stats["kinds"]["create_model"]
    assert (
        creation_stats["finished"] == 1
        and creation_stats["waited_seconds"]["0.5"] >= 0
        and creation_stats["served_seconds"]["0.99"] >= 0
    )
    requests = idle.client.get(f"/runs/{run}/requests").json()["requests"]
    assert [item["kind"] for item in requests] == ["forward_backward", "create_model"]
    text = idle.client.get("/metrics", headers={"X-API-Key": ""}).text
    assert (
        'posttrain_service_requests{kind="forward_backward",state="waiting"} 1.0'
        in text.splitlines()
    )
    dashboard = Path(__file__).parents[3] / "deployments" / "grafana-dashboard.json"
    metric_names = set(re.findall(r"posttrain_service_\w+", dashboard.read_text()))
    assert len(metric_names) >= 5 and metric_names <= set(
        re.findall(r"^posttrain_\w+", text, re.MULTILINE)
    )
    assert idle.client.get(f"/runs/{run}/queue/stats", headers={"X-API-Key": ""}).status_code == 401
    described = idle.client.get("/openapi.json").json()
    assert "/runs/{run_id}/requests/{request_id}/status" in described["paths"]
    assert "APIKeyHeader" in described["components"]["securitySchemes"]


def test_a_service_that_ends_leaves_no_thread_and_closes_its_store(tmp_path, base_folder):
    """A thread that polls the store after its end would open it again, and SQLite would keep its log."""
    before = set(threading.enumerate())
    with running_service(
        tmp_path / "service", base_folder, worker=False, poll_seconds=0.1
    ) as service:
        body = {"session_id": service.session(), "model_seq_id": 0, "base_model": "base"}
        service.post("retrieve_future", service.post("create_model", body), status=408)
        assert (tmp_path / "service" / "service.db-wal").exists()
    assert "service-results" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert not (tmp_path / "service" / "service.db-wal").exists()
