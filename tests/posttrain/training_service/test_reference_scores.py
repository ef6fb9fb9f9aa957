"""Scores of reference and reward models by request: values, limits, ids, keys, both clients, killed workers."""

import asyncio

import httpx
import numpy as np
import pytest
import torch
from helpers.service import CONTEXT, VOCAB, make_base
from helpers.service_http import running_service

from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.errors import ServiceError, SettingsError
from rl_core.models import causal_lm, heads
from rl_core.service.client import AsyncServiceClient, ServiceClient
from rl_core.settings import ModelSettings, ServiceSettings
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault

ADDRESS = "http://127.0.0.1:8123"
ROWS = [[3, 4, 5, 6, 7], [9, 8], [5], list(range(2, 40))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Make a reference model and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    start = make_base(folder / "start", seed=3)
    model, tokenizer = heads.create_reward_model(start, ModelSettings(device="cpu"), seed=4)
    causal_lm.save(model, tokenizer, folder / "reward")
    return {
        "reference_models": {"start": str(start)},
        "reward_models": {"judge": str(folder / "reward")},
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory, base_folder, models):
    folder = tmp_path_factory.mktemp("running") / "service"
    with running_service(folder, base_folder, models=models) as running:
        yield running


def forward(service, request):
    headers = {
        name: value
        for name, value in request.headers.items()
        if name in ("x-api-key", "content-type")
    }
    response = service.client.request(
        request.method, str(request.url), content=request.content, headers=headers
    )
    sent = {"content-type": response.headers["content-type"]}
    sent |= {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
    return httpx.Response(response.status_code, headers=sent, content=response.content)


def connect(service, key=None, **options):
    transport = httpx.MockTransport(lambda request: forward(service, request))
    key = key or service.client.headers["X-API-Key"]
    return ServiceClient(ADDRESS, key, transport=transport, **options)


@pytest.fixture
def client(service):
    with connect(service) as client:
        yield client


def compute_expected_logprobs(path, row, temperature):
    model, _ = causal_lm.load_model(path, ModelSettings(device="cpu"))
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_models(client, models, temperature):
    answer = client.score("start", ROWS, temperature=temperature)
    assert (answer.model, answer.kind, answer.scores) == ("start", "policy", None)
    assert [len(row) for row in answer.logprobs] == [4, 1, 0, 37]
    for row, logprobs in zip(ROWS, answer.logprobs, strict=True):
        if len(row) > 1:
            path = models["reference_models"]["start"]
            expected = compute_expected_logprobs(path, row, temperature)
            assert logprobs == pytest.approx(expected, abs=1e-4)


def test_scores_are_the_reward_models(client, models):
    answer = client.score("judge", ROWS)
    model, _ = heads.load_reward_model(
        models["reward_models"]["judge"], ModelSettings(device="cpu")
    )
    assert answer.kind == "reward_model" and answer.logprobs is None
    assert answer.scores == pytest.approx(heads.score_rows(model, ROWS), abs=1e-5)
    assert np.std(answer.scores) > 0
    listed = [(item.name, item.kind) for item in client.references()]
    assert listed == [("judge", "reward_model"), ("start", "policy")]


def test_the_asynchronous_client_gathers_requests(service, client):
    async def gather():
        transport = httpx.MockTransport(lambda request: forward(service, request))
        key = service.client.headers["X-API-Key"]
        async with AsyncServiceClient(ADDRESS, key, transport=transport) as asynchronous:
            return await asyncio.gather(
                asynchronous.references(),
                *(asynchronous.score("start", [row]) for row in ROWS),
                asynchronous.score("judge", ROWS),
            )

    listed, *single, judged = asyncio.run(gather())
    assert listed == client.references() and judged == client.score("judge", ROWS)
    whole = client.score("start", ROWS).logprobs
    for answer, row in zip(single, whole, strict=True):
        assert answer.logprobs[0] == pytest.approx(row, abs=1e-5)


def test_a_repeated_id_is_computed_once(client):
    first = client.submit_scores("start", ROWS, scores_id="mine")
    assert client.submit_scores("start", ROWS, scores_id="mine") == first
    assert client.scores(first.request_id, wait=20.0) == client.score(
        "start", ROWS, scores_id="mine"
    )
    with pytest.raises(ServiceError, match="scores_id: 'mine' was used before with other rows"):
        client.submit_scores("start", ROWS[:1], scores_id="mine")


@pytest.mark.parametrize(
    ("model", "rows", "options", "text"),
    [
        ("strat", ROWS, {}, "no model 'strat' here; did you mean 'start'"),
        ("start", [], {}, "rows: 0, expected 1 to 4096"),
        ("start", [[3], []], {}, r"rows\[1\]: 0 tokens"),
        (
            "start",
            [[3] * (CONTEXT + 1)],
            {},
            f"rows\\[0\\]: {CONTEXT + 1} tokens, and 'start' takes",
        ),
        ("judge", [[3] * (CONTEXT + 1)], {}, f"'judge' takes 1 to {CONTEXT}"),
        ("start", [[3, VOCAB]], {}, f"token {VOCAB}"),
        ("start", [[3, -1]], {}, "rows"),
        ("start", [[3] * 40] * 4097, {}, "rows: 4097"),
        ("judge", ROWS, {"temperature": 0.5}, "whose scores have no temperature"),
        ("start", ROWS, {"temperature": 1e4}, "temperature: 10000.0"),
        ("start", ROWS, {"temperature": 0}, "temperature"),
    ],
)
def test_refusals_name_the_row_and_the_limit(client, model, rows, options, text):
    with pytest.raises(ServiceError, match=text) as refused:
        client.score(model, rows, **options)
    assert refused.value.category == "user"


def test_too_many_tokens_are_refused(service, client):
    settings = service.settings.engine
    assert settings.max_data * CONTEXT < 1 << 18  # the rows' number bounds the tokens of this model
    engine = service._worker._executor._engine
    engine.references._max_rows = 10_000
    try:
        with pytest.raises(ServiceError, match="at most 262144 in one request; split it"):
            client.score("start", [[3] * CONTEXT] * 5500)
    finally:
        engine.references._max_rows = settings.max_data


def test_limits_and_ownership_of_keys(service, client):
    _, secret = service.store.create_key("other", requests_per_minute=2)
    _, full = service.store.create_key("full", queue=0)
    accepted = client.submit_scores("start", ROWS)
    with connect(service, secret, patience=0.1) as other:
        with pytest.raises(ServiceError, match="belongs to another API key"):
            other.scores(accepted.request_id)
        assert other.score("start", ROWS[:1]).logprobs and other.score("judge", ROWS[:1]).scores
        limited = service.client.post(
            "/references/start/scores", json={"rows": ROWS}, headers={"X-API-Key": secret}
        )
        assert limited.status_code == 429 and "requests per minute" in limited.json()["detail"]
        assert int(float(limited.headers["Retry-After"])) >= 1
    queued = service.client.post(
        "/references/start/scores", json={"rows": ROWS}, headers={"X-API-Key": full}
    )
    assert queued.status_code == 429 and "requests of this key wait" in queued.json()["detail"]
    assert service.client.get("/references", headers={"X-API-Key": "no"}).status_code == 401
    run = service.new_run(service.session())
    foreign = service.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    with pytest.raises(ServiceError, match="is no request to a reference model"):
        client.scores(foreign["request_id"])
    actions = [entry.action for entry in service.store.list_audit_entries(limit=10).items]
    assert "score" in actions


@pytest.mark.parametrize("body", [{}, {"rows": "x"}, {"rows": [["a"]]}, {"rows": [[3]], "x": 1}])
def test_bad_bodies_are_refused_at_once(service, body):
    response = service.client.post("/references/start/scores", json=body)
    assert response.status_code == 422, response.text


@pytest.mark.parametrize("point", ["claimed", "computed", "finishing", "finished"])
def test_a_worker_that_dies_computes_them_again(tmp_path, base_folder, models, point):
    with (
        running_service(
            tmp_path / "s", base_folder, worker=False, models=models, poll_seconds=0.2
        ) as idle,
        connect(idle) as client,
    ):
        accepted = client.submit_scores("start", ROWS)
        assert client.scores(accepted.request_id) is None
        faults.configure_faults(f"service.{point}:1:raise")
        deaths = 0
        while client.scores(accepted.request_id) is None:
            worker = EngineProcess(idle.settings, idle.store)
            idle.store.reset_running_requests()
            try:
                worker.step(wait=0.0)
            except InjectedFault:
                deaths += 1
        faults.configure_faults(None)
        assert deaths == 1
        assert len(client.scores(accepted.request_id).logprobs) == len(ROWS)


def test_names_of_models_are_unique():
    for options in (
        {"reference_models": {"a": "x"}, "reward_models": {"a": "y"}},
        {"reward_models": {"base": "y"}},
    ):
        with pytest.raises(SettingsError, match="is already the name of"):
            ServiceSettings(**options)
