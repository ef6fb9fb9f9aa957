"""Evaluations over HTTP with the typed client: accepted once, computed once, owned. Every route has a call."""

import asyncio
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import pytest
from helpers import ROOT
from helpers.service import random_data
from helpers.service_clients import OWNER, create, loss, save, update
from helpers.service_load import settings_of

from posttrain.training_service.store import NewRequest, ServiceStore
from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.errors import BackendError, DataError, ServiceError, SettingsError
from rl_core.service import client as client_module
from rl_core.service import client_calls
from rl_core.service.client import AsyncServiceClient, ServiceClient
from rl_core.service.client_calls import Sampling, parse_record
from rl_core.service.responses import ModelEvaluation, QueueStats, RunList
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault

ADDRESS = "http://127.0.0.1:8123"
TEXTS = ["a b c", [3, 4, 5, 6], [9, 8, 7]]


def forward_to_app(service, request):
    """Forward a client's request to the application in this process."""
    headers = {
        name: value
        for name, value in request.headers.items()
        if name in ("x-api-key", "content-type")
    }
    response = service.client.request(
        request.method, str(request.url), content=request.content, headers=headers
    )
    return httpx.Response(
        response.status_code,
        headers={"content-type": response.headers["content-type"]},
        content=response.content,
    )


def connect_client(service, key=None):
    transport = httpx.MockTransport(lambda request: forward_to_app(service, request))
    return ServiceClient(ADDRESS, key or service.secret, transport=transport)


@pytest.fixture
def client(service):
    service.secret = service.client.headers["X-API-Key"]
    with connect_client(service) as client:
        yield client


@pytest.fixture(scope="module")
def trained(service):
    """Train a run and save two paths."""
    run = service.new_run(service.session())
    paths = []
    for index in range(2):
        seq = 3 * index + 1
        service.forward_backward(run, seq, random_data(index))
        service.post(
            "optim_step",
            {"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 0.1}},
        )
        saved = service.post(
            "save_weights", {"model_id": run, "seq_id": seq + 2, "path": f"p{index}"}
        )
        paths.append(service.result(saved)["path"])
    return run, *paths


def test_two_paths_are_compared(service, client, trained):
    run, first, second = trained
    evaluation = client.evaluate(
        run,
        model=second,
        against=first,
        texts=TEXTS,
        prompts=["a"],
        num_samples=2,
        sampling=Sampling(max_tokens=4),
    )
    assert evaluation.model == second and evaluation.against == first
    assert (
        evaluation.text_tokens == sum(row.tokens for row in evaluation.rows)
        and len(evaluation.rows) == 3
    )
    assert (
        evaluation.text_comparison.kl.value > 1e-6
        and evaluation.text_comparison.kl.low <= evaluation.text_comparison.kl.value
    )
    assert evaluation.diversity.tokens.value <= 4 and evaluation.diversity_comparison is not None
    base = client.evaluate(run, model="base", against=first, texts=TEXTS)
    assert base.text.nll.value != evaluation.text.nll.value and base.diversity is None
    assert base.text_comparison.kl.value == pytest.approx(
        client.evaluate(
            run, model=first, against="base", texts=TEXTS
        ).text_comparison.reverse_kl.value,
        rel=1e-9,
    )


def test_a_repeated_id_is_one_evaluation(service, client, trained):
    run, first, _ = trained
    question = {"model": first, "texts": TEXTS, "evaluation_id": "mine"}
    first_answer, second_answer = (
        client.submit_evaluation(run, **question),
        client.submit_evaluation(run, **question),
    )
    assert first_answer == second_answer and first_answer.evaluation_id == "mine"
    assert client.evaluate(run, **question) == client.evaluation(
        run, first_answer.request_id, wait=20.0
    )
    computed = [
        request
        for request in client.requests(run, limit=1000)
        if request.request_id == first_answer.request_id
    ]
    assert len(computed) == 1 and computed[0].kind == "evaluate" and computed[0].state == "done"
    with pytest.raises(ServiceError, match="'mine' was used before with another request") as caught:
        client.submit_evaluation(run, **{**question, "seed": 1})
    assert caught.value.category == "user"
    other = client.submit_evaluation(run, model=first, texts=TEXTS)
    assert other.request_id != first_answer.request_id  # without an id it is a new one


def test_the_example_of_the_client(service, client, trained, capsys):
    specification = importlib.util.spec_from_file_location(
        "example", ROOT / "examples" / "service_client.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    result = module.main(client, ["a b", "c d e"])
    run, first, second = trained
    assert (result.model, result.against) == (second, first) and result == module.main(
        client, ["a b", "c d e"]
    )
    shown = capsys.readouterr().out
    assert (
        f"{run}: 2 updates of an adapter of rank 4 over base" in shown
        and "likelier texts: tinker://" in shown
    )


def test_the_other_calls(service, client, trained):
    run, first, second = trained
    assert client.is_up()
    listed = client.runs()
    assert run in [item.run_id for item in listed.runs] and listed.total >= 1
    status = client.run(run)
    assert (status.steps, status.lora_rank, status.base_model, status.state) == (
        2,
        4,
        "base",
        "live",
    )
    saved = client.checkpoints(run)
    assert (
        [item.path for item in saved] == [second, first]
        and saved[0].steps == 2
        and saved[0].version is None
    )
    request = client.requests(run)[-1]
    assert (
        request.kind == "create_model"
        and client.status(run, request.request_id).accepted == request.accepted
    )
    assert client.queue_stats(run).kinds["optim_step"].finished == 2
    assert client.cancel(run, request.request_id) is False
    metrics = {metric.name: metric for metric in client.metrics()}
    assert metrics["posttrain_service_training_runs"].value >= 1
    assert metrics["posttrain_service_wait_seconds"].labels["quantile"] == "0.99"


def test_every_management_route_has_a_call(service):
    """Compare the application's routes with the addresses that the client builds."""
    paths = service.client.get("/openapi.json").json()["paths"]
    offered = {(method.upper(), path) for path, methods in paths.items() for method in methods} | {
        ("GET", "/metrics")
    }
    question = {"model": "m"}
    calls = [
        client_calls.list_runs(1, 0),
        client_calls.fetch_run("R"),
        client_calls.list_checkpoints("R"),
        client_calls.list_requests("R", 1, 0),
        client_calls.fetch_request_status("R", "Q"),
        client_calls.cancel_request("R", "Q"),
        client_calls.fetch_queue_stats("R"),
        client_calls.submit_evaluation("R", **question),
        client_calls.fetch_evaluation("R", "Q", 0.0),
        client_calls.list_metrics(),
        client_calls.list_references(),
        client_calls.submit_scores("N", [[1]]),
        client_calls.fetch_scores("Q", 0.0),
    ]
    names = {"/R": "/{run_id}", "/Q": "/{request_id}", "/N": "/{name}"}
    called = set()
    for call in calls:
        path = call.path
        for short, name in names.items():
            path = path.replace(short, name)
        called.add((call.method, path))
    assert called == offered
    described = service.client.get("/openapi.json")
    assert {"ModelEvaluation", "TextComparison", "RunStatus"} <= set(
        described.json()["components"]["schemas"]
    )
    body = paths["/runs/{run_id}/evaluate"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert body["required"] == ["model"] and body["additionalProperties"] is False
    assert body["properties"]["sampling"]["properties"]["max_tokens"]["default"] == 64
    known = set(described.json()["components"]["schemas"])
    assert {
        ref.rpartition("/")[2] for ref in re.findall(r'"\$ref": ?"([^"]+)"', described.text)
    } <= known


def test_refusals_are_readable(service, client, trained):
    run, first, _ = trained
    _, stranger = service.store.create_key("stranger")
    with connect_client(service, stranger) as other:
        for call in (
            lambda: other.run(run),
            lambda: other.evaluate(run, model="base", texts=TEXTS),
        ):
            with pytest.raises(ServiceError, match="belongs to another API key"):
                call()
    with (
        connect_client(service, "tml-nobody") as nobody,
        pytest.raises(ServiceError, match="posttrain service key create"),
    ):
        nobody.runs()
    for question, message in (
        ({"model": "bose", "texts": TEXTS}, "did you mean 'base'"),
        ({"model": first.replace("p0", "gone"), "texts": TEXTS}, "no saved weights"),
        (
            {"model": "base", "texts": TEXTS, "confidence": 2.0},
            "confidence: Input should be less than 1",
        ),
        ({"model": "base", "text": TEXTS}, "text: Extra inputs are not permitted"),
        ({"model": "base", "texts": [[3, -1]]}, "texts.0"),
        ({"model": "base"}, "neither texts nor prompts"),
        ({"model": "base", "texts": [[3, 4000]]}, "token 4000 is outside the vocabulary"),
        ({"model": "tinker://../weights/a", "texts": TEXTS}, "cannot be a name"),
    ):
        with pytest.raises(ServiceError, match=message):
            client.evaluate(run, **question)
    creation = client.requests(run)[-1].request_id
    with pytest.raises(ServiceError, match="is no evaluation of run"):
        client.evaluation(run, creation)


def test_a_foreign_path_is_refused(service, client, trained):
    _, first, _ = trained
    _, secret = service.store.create_key("other owner")
    with connect_client(service, secret) as other:
        headers = {"X-API-Key": secret}
        session = service.post("create_session", {"tags": [], "sdk_version": "t"}, headers=headers)[
            "session_id"
        ]
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "base",
            "lora_config": {"rank": 2},
        }
        mine = service.post("create_model", body, headers=headers)["model_id"]
        with pytest.raises(ServiceError, match="belongs to another API key, and is not published"):
            other.evaluate(mine, model=first, texts=TEXTS)


def test_the_async_client(service, client, trained):
    run, first, _ = trained

    async def forward(request):
        return await asyncio.to_thread(forward_to_app, service, request)

    async def call_client():
        transport = httpx.MockTransport(forward)
        async with AsyncServiceClient(ADDRESS, service.secret, transport=transport) as other:
            assert await other.is_up()
            result = await other.evaluate(
                run, model=first, texts=TEXTS, evaluation_id="async", timeout=60
            )
            return result, await other.run(run), await other.checkpoints(run), await other.metrics()

    result, status, saved, metrics = asyncio.run(call_client())
    assert result == client.evaluate(run, model=first, texts=TEXTS, evaluation_id="async")
    assert status.run_id == run and len(saved) == 2 and metrics


def test_a_waiting_evaluation_is_cancelled_or_times_out(idle):
    idle.secret = idle.client.headers["X-API-Key"]
    session = idle.session()
    run = idle.post(
        "create_model", {"session_id": session, "model_seq_id": 0, "base_model": "base"}
    )["model_id"]
    with connect_client(idle) as client:
        with pytest.raises(BackendError, match=r"not finished after 0.1 s; it continues") as caught:
            client.evaluate(run, model="base", texts=TEXTS, timeout=0.1)
        request = client.requests(run)[0]
        assert request.request_id in str(caught.value) and request.state == "waiting"
        assert client.evaluation(run, request.request_id) is None
        assert client.cancel(run, request.request_id) is True
        with pytest.raises(ServiceError, match="cancelled"):
            client.evaluation(run, request.request_id)


def build_evaluation_request(run, number, path):
    body = {
        "model": path,
        "against": "base",
        "texts": TEXTS,
        "prompts": ["a b"],
        "num_samples": 2,
        "sampling": {"max_tokens": 5, "temperature": 0.8},
    }
    return NewRequest(
        kind="evaluate",
        owner=OWNER,
        session_id="s",
        target=run,
        seq=number,
        payload=json.dumps(body).encode(),
        content_type="json",
    )


@pytest.mark.parametrize("point", ["service.claimed", "service.computed", "service.finishing"])
def test_an_evaluation_survives_the_death_of_the_worker(tmp_path, base_folder, point):
    """Kill a worker at a fault point and start another: the answer equals that of an undisturbed worker."""
    answers = []
    for folder, is_killed in ((tmp_path / "calm", False), (tmp_path / "killed", True)):
        store = ServiceStore(f"sqlite:///{folder}/service.db")
        settings = settings_of(folder, base_folder)
        worker = EngineProcess(settings, store)
        for request in (
            create("r"),
            loss("r", 1, random_data(1)),
            update("r", 2),
            save("r", 3, "a"),
        ):
            store.accept_request(request)
        while worker.step(wait=0.0):
            pass
        accepted = store.accept_request(
            build_evaluation_request("r", 12345, "tinker://r/weights/a")
        )
        if is_killed:
            faults.configure_faults(f"{point}:1:raise")
            with pytest.raises(InjectedFault):
                worker.step(wait=0.0)
            faults.configure_faults(None)
            worker = EngineProcess(settings, store)
            store.reset_running_requests()
        while worker.step(wait=0.0):
            pass
        stored = store.find_request(accepted.request_id)
        assert stored.state == "done", stored.error
        assert (
            store.accept_request(
                build_evaluation_request("r", 12345, "tinker://r/weights/a")
            ).request_id
            == accepted.request_id
        )
        answers.append(stored.answer)
        store.close()
    assert answers[0] == answers[1]
    assert parse_record(ModelEvaluation, json.loads(answers[0])).text_comparison.kl.value > 0


def test_the_client_needs_httpx_alone():
    program = (
        "import sys, rl_core.service.client\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'pydantic', 'prefect', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_busy_servers_are_retried_and_refusals_are_not(monkeypatch):
    """Busy servers are retried; an unreachable server is reported with the remedy."""
    waits: list[float] = []
    monkeypatch.setattr(
        client_module, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    )
    statuses = [503, 429, 408, 200]
    body = {"runs": [], "total": 0}

    def answer(request):
        return httpx.Response(statuses.pop(0), json=body)

    with ServiceClient(ADDRESS, "k", transport=httpx.MockTransport(answer)) as client:
        assert client.runs() == RunList(runs=[], total=0)
        assert waits == [0.0, 0.2, 0.4, 0.8]

    def refuse(request):
        raise httpx.ConnectError("connection refused")

    with ServiceClient(ADDRESS, "k", patience=0.0, transport=httpx.MockTransport(refuse)) as client:
        assert client.is_up() is False
        with pytest.raises(
            BackendError,
            match=r"8123 does not answer \(connection refused\); is `posttrain service up`",
        ):
            client.runs()
    with pytest.raises(BackendError, match="no time"):
        transport = httpx.MockTransport(
            lambda request: httpx.Response(503, json={"detail": "no time"})
        )
        ServiceClient(ADDRESS, "k", patience=0.0, transport=transport).runs()
    with pytest.raises(ServiceError, match="proxy says no"):
        transport = httpx.MockTransport(lambda request: httpx.Response(502, text="proxy says no"))
        ServiceClient(ADDRESS, "k", transport=transport).runs()


def test_key_and_address(monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(SettingsError, match="no API key"):
        ServiceClient(ADDRESS)
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9/")
    assert ServiceClient()._endpoint.address == "http://127.0.0.1:9"
    with pytest.raises(SettingsError, match="is not an http address"):
        ServiceClient("localhost:8123")


def test_records_are_checked():
    sample = {
        "waiting": 1,
        "running": 0,
        "finished": 0,
        "waited_seconds": {"0.5": 1},
        "served_seconds": {},
    }
    data = {"run_id": "r", "depth": 1, "kinds": {"sample": sample}, "new": 1}
    record = parse_record(QueueStats, data)
    assert (
        record.kinds["sample"].waited_seconds == {"0.5": 1.0}
        and dataclasses.asdict(record)["depth"] == 1
    )
    for change, message in (
        ({"depth": "1"}, "answer.depth: '1', expected int"),
        ({"depth": True}, "answer.depth: 'True', expected int"),
        ({"kinds": []}, "answer.kinds: '\\[\\]', expected an object"),
    ):
        with pytest.raises(DataError, match=message):
            parse_record(QueueStats, {**data, **change})
    with pytest.raises(
        DataError, match=r"answer\.depth: is missing; is the server of another version"
    ):
        parse_record(QueueStats, {"run_id": "r", "kinds": {}})


def test_metrics_are_parsed():
    text = '# HELP a b\na_total{what="x \\"y\\" \\\\ z",q="0.5"} 3.0\nb 1e-3\n'
    first, second = client_calls.parse_prometheus_metrics(text)
    assert (first.name, first.labels, first.value) == (
        "a_total",
        {"what": 'x "y" \\ z', "q": "0.5"},
        3.0,
    )
    assert (second.name, second.labels, second.value) == ("b", {}, 0.001)
