"""Small runs of everything that writes or answers, made to see the names that they leave."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from crash.pipelines import write_inputs
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from helpers.frozen_declarations import list_described_fields, list_routes
from helpers.frozen_records import list_fields
from helpers.online_worker import run_to_end, settings, write_traffic
from helpers.rating import TOKEN as RATING_TOKEN
from helpers.rating import room_of
from helpers.resume_scenarios import CUT, SCENARIOS, MemoryStore
from helpers.resume_scenarios import run as run_scenario
from helpers.service import make_base, random_data
from helpers.service_http import ADDRESS, Service, running_service
from helpers.serving import make_folder_of_model, running_server
from helpers.vector_worlds import walkers
from posttrain.cli.main import main
from posttrain.monitor.server import export_run_files
from posttrain.online.worker_processes import replay_buffer
from posttrain.preferences.rating_routes import build_rating_app
from posttrain.serving.application import build_chat_app
from rl_core.analysis.statistics import Rate
from rl_core.api.policy import load_policy
from rl_core.environments import make_environment
from rl_core.models import export_verification_child
from rl_core.networks.actor_critic import ActionSpace, ActorCritic, NetworkShape
from rl_core.networks.network_files import publish_network
from rl_core.networks.trainer import NetworkTrainer
from rl_core.online.build_worker import build_update_worker
from rl_core.online.canary_gate import CanaryGate
from rl_core.online.learning_folder import LearningFolder
from rl_core.online.service_files import GATE_FILE, METRICS_FILE
from rl_core.online.update_audit import UpdateAudit
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.service.client import ServiceClient
from rl_core.service.client_calls import Sampling
from rl_core.settings import (
    LoraSettings,
    ModelSettings,
    NetworkSettings,
    OnlineGateSettings,
    SamplingSettings,
)
from rl_core.storage.checkpoint import CheckpointStore
from rl_core.tracking import MemoryTracker
from rl_core.training.loop import run_loop
from tasks.config import PipelineSettings, load_settings
from tasks.lifecycle.data_lineage import inspect_data_sources
from tasks.lifecycle.promotion import record_check
from tasks.lifecycle.retraining import plan_retraining, record_outcome, record_start
from tasks.pipeline.dag import run_dag, wrap_stage_call
from tasks.pipeline.pipeline_run import PipelineRun
from tasks.pipeline.run_options import RunOptions

# ---------------------------------------------------------------------------------------- pipelines


def play_pipeline(folder: Path) -> set[str]:
    """Run the stages, a part again against the champion, and commands; return what they print."""
    config = write_inputs(folder)
    first = run_stages(load_settings(config))
    short = [
        f"stages.{stage}=null"
        for stage in ("distill", "preference", "reward_model", "policy", "analyze")
    ]
    overrides = [
        "stages.promote.approve=manual",
        "stages.promote.approval_timeout_seconds=600",
        "seed=1",
    ]
    again = run_stages(load_settings(config, [*short, *overrides]))
    printed = ask_commands(config, [str(run.parent.run_id) for run in (first, again)])
    assert run_command(
        ["approve", "small", "--config", str(config), "--yes", "--by", "ann", "--note", "fine"]
    )
    assert run_command(["promote", "--config", str(config), "--version", "1", "--note", "back"])
    record_check(again.home, 1, None, Rate(0.5, 0.4, 0.6, 100))
    plan = plan_retraining(
        load_settings(config), inspect_data_sources(load_settings(config)), None, []
    )
    assert plan.record is not None
    record_start(again.home, plan.record)
    record_outcome(again.home, plan.record, note="finished")
    export_run_files(again.output, "", folder / "exported")
    return printed


def ask_commands(config: Path, runs: list[str]) -> set[str]:
    """Return the fields that commands print for programs."""
    output_options = ["--output", str(config.parent / "work" / "outputs")]
    questions = {
        "runs": output_options,
        "compare": [*runs, *output_options],
        "approve": output_options,
        "gc": ["--keep", "1", *output_options],
        "replay": output_options,
        "status": output_options,
        "why": [str(config)],
        "plan": [str(config)],
    }
    paths = set()
    for command, arguments in questions.items():
        values = json.loads(run_command([command, *arguments, "--json"]))
        paths |= {f"posttrain {command} --json: {path}" for path in list_fields(values)}
    return paths


def run_command(arguments: list[str]) -> str:
    """Return what a command of `posttrain` prints."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    assert code in (0, 1), errors.getvalue()
    return output.getvalue()


def run_stages(chosen: PipelineSettings, options: RunOptions | None = None) -> PipelineRun:
    """Run the stages of a pipeline in this process, without Prefect."""
    with PipelineRun(chosen, options) as pipeline_run:
        run_dag(pipeline_run, {}, wrap_stage_call)
    return pipeline_run


def answer_proofs(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `subprocess.run` that answers proofs of exports here, without a fresh process."""

    def run(command: Any, **options: Any) -> Any:
        if '"models"' not in str(options.get("input", "")):
            return start(command, **options)
        results = [
            export_verification_child.process_request(model)
            for model in json.loads(options["input"])["models"]
        ]
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(results), stderr="")

    return run


# ------------------------------------------------------------------------------------------- states


def collect_trainer_states() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (scenario, checkpoint's state) of every trainer, cut in its run."""
    for name, scenario in SCENARIOS.items():
        store = MemoryStore()
        goes_back = name in (
            "grpo rollback",
            "grpo numerics",
        )  # to what it keeps from its first iterations
        run_scenario(scenario, store, cut=CUT if goes_back else 1)
        yield name, store.state
    for continuous in (False, True):
        yield (
            f"network {'continuous' if continuous else 'discrete'}",
            collect_network_state(continuous),
        )


def collect_network_state(continuous: bool) -> dict[str, Any]:
    """Return the checkpoint's state of a trainer of networks."""
    chosen = NetworkSettings(
        num_environments=2,
        rollout_steps=4,
        environment_steps=100,
        epochs=1,
        hidden=(4,),
        eval_every=0,
        normalise_observations=continuous,
    )
    trainer = NetworkTrainer(None, chosen, 0, name="Walk", vector=walkers(2, continuous=continuous))
    store = MemoryStore()
    run_loop(trainer, chosen, iterations=1, tracker=MemoryTracker(), checkpoints=store)
    return store.state


def save_states(folder: Path) -> None:
    """Write a checkpoint of tensors and plain values, and the files of a network."""
    with CheckpointStore(folder / "checkpoints") as store:
        store.save_version(
            {
                "model": {"weight": torch.ones(2)},
                "loop": {"iteration": 1, "pair": (1, b"x"), "none": None},
            }
        )
    shape = NetworkShape(observation_size=2, actions=ActionSpace("discrete", 3), hidden=(4,))
    publish_network(ActorCritic(shape), folder / "network", "Walk")


# ---------------------------------------------------------------------------------- online learning


def learn_online(folder: Path, lora: LoraSettings | None = None) -> None:
    """Learn from traffic in a folder of online learning, with a gate that looks."""
    model = make_folder_of_model(folder / "model-of-start")
    output, folder = folder / "replayed", folder / "service"
    learning_folder = LearningFolder.open_or_create(
        folder, model, {"name": "demo", "reference": "models:/demo@champion", "version": 3}
    )
    few = SamplingSettings(max_completion_tokens=4, max_turns=1, temperature=0.0)
    chosen = settings(
        model=ModelSettings(path=str(folder / "model"), device="cpu", lora=lora),
        gate=OnlineGateSettings(
            episodes_per_look=2, max_episodes=2, levels=("easy",), sampling=few
        ),
        folder=str(folder),
    )
    learning_folder.write_settings(chosen)
    learning_folder.append_event("promoted", "snapshot 2: no worse")
    learning_folder.record_forwarded_orders({"gate.json": 1})
    write_traffic(folder / "buffer", range(13))
    with (
        UpdateAudit(folder, chosen.audit) as audit,
        build_update_worker(chosen, folder, audit=audit) as worker,
    ):
        run_to_end(worker)
        (folder / METRICS_FILE).write_text(
            json.dumps({"paused": worker.paused, **worker.collect_metrics()})
        )
    play_canaries(folder, chosen)
    replay_buffer(chosen, folder, output)


def play_canaries(folder: Path, chosen: Any) -> None:
    """Run the gate until it opens the newest snapshot, plays, and decides."""
    snapshots = WeightSnapshots(folder / "snapshots")
    snapshots.set_live_version(snapshots.list_versions()[0])
    environment = make_environment("arithmetic")
    gate = CanaryGate(folder, chosen, load_policy(chosen.model), environment, snapshots)
    gate.step()
    (wanted,) = [
        order["order"]["version"]
        for order in json.loads((folder / GATE_FILE).read_text())["orders"]
    ]
    metrics = json.loads((folder / METRICS_FILE).read_text())
    (folder / METRICS_FILE).write_text(
        json.dumps({**metrics, "online/held_version": float(wanted)})
    )
    for _ in range(3):
        gate.step()


# ----------------------------------------------------------------------------------------- requests


class Recorder:
    """Fields of the answers to requests, by method and route."""

    def __init__(self, client: Any, routes: set[str]) -> None:
        self.fields: set[str] = set()
        self._routes = sorted(routes, key=lambda route: route.count("{"))
        self._send = client.request
        client.request = self.request

    def request(self, method: str, url: Any, *more: Any, **named: Any) -> Any:
        """Send a request as the client does, and take down the answer's fields."""
        answer = self._send(method, url, *more, **named)
        route = self.find_route(method, httpx.URL(str(url)).path)
        self.fields.add(f"{route} {answer.status_code}")
        if "json" in answer.headers.get("content-type", ""):
            with suppress(ValueError):
                self.fields |= {
                    f"{route} {answer.status_code}: {path}" for path in list_fields(answer.json())
                }
        elif route.endswith("/metrics"):
            families = text_string_to_metric_families(answer.text)
            self.fields |= {f"{route}: {family.name}" for family in families}
        return answer

    def find_route(self, method: str, path: str) -> str:
        """Return the route that answers a request."""
        for route in self._routes:
            known, _, pattern = route.partition(" ")
            if known == method and matches_route(pattern, path):
                return route
        return f"{method} nowhere"


def matches_route(pattern: str, path: str) -> bool:
    """Return True where a path is one of a route with parameters."""
    parts, segments = pattern.split("/"), path.split("/")
    if "{name:path}" in pattern:
        segments = segments[: len(parts)]
    return len(parts) == len(segments) and all(
        part == part_of_route or part.startswith("{")
        for part, part_of_route in zip(parts, segments, strict=True)
    )


def train_by_service(folder: Path) -> tuple[set[str], set[str]]:
    """Use the routes of a training service; return the answers' fields and its routes."""
    base = make_base(folder / "base", tie_word_embeddings=False)
    with running_service(folder / "service", base, worker=False) as service:
        routes = list_routes(service.client.app)
        recorder = Recorder(service.client, routes)
        service.start_worker()
        run = use_training_routes(service)
        use_management_routes(service, run)
        described = list_described_fields(service.client.app)
    return recorder.fields | described, routes


def use_training_routes(service: Service) -> str:
    """Train, save, load, sample and evaluate as a client does; return the run."""
    session = service.session()
    service.post("session_heartbeat", {"session_id": session})
    for path in ("client/config", "client/dynamic_config", "telemetry"):
        service.post(path, {})
    run = service.new_run(session)
    service.result(service.forward_backward(run, 1, random_data(0)))
    adam = {"learning_rate": 0.1}
    service.result(service.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": adam}))
    body = {"model_id": run, "seq_id": 3, "path": "a", "user_metadata": {"step": "1"}}
    saved = service.result(service.post("save_weights", body))["path"]
    body = {"model_id": run, "seq_id": 4, "path": "b"}
    weights = service.result(service.post("save_weights_for_sampler", body))["path"]
    body = {"model_id": run, "seq_id": 5, "path": "c"}
    service.result(service.post("save_weights_external", body))
    service.result(
        service.post(
            "load_weights", {"model_id": run, "seq_id": 6, "path": saved, "optimizer": True}
        )
    )
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": weights}
    sampler = service.post("create_sampling_session", body)["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "num_samples": 2,
        "prompt_logprobs": True,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 3, "seed": 1},
    }
    service.result(service.post("asample", body))
    service.post("get_info", {"model_id": run})
    service.post("weights_info", {"tinker_path": saved})
    return run


def use_management_routes(service: Service, run: str) -> None:
    """Use every route that lists, describes or changes sessions, runs and saved weights."""
    session = service.call("GET", "sessions")["sessions"][0]
    saved = service.call("GET", "checkpoints")["checkpoints"][0]["tinker_path"].removeprefix(
        f"tinker://{run}/"
    )
    checkpoint = f"training_runs/{run}/checkpoints/{saved}"
    for path in (
        "healthz",
        "get_server_capabilities",
        f"sessions/{session}",
        "auth/apikey/me",
        "training_runs",
        f"training_runs/{run}",
        f"training_runs/{run}/checkpoints",
        "billing/usage/checkpoints/current",
        f"sessions/{session}/trace_export",
    ):
        service.call("GET", path)
    service.post("sessions/search", {})
    trace = service.call("GET", f"sessions/{session}/trace_export")["url"].partition("/api/v1/")[2]
    service.call("GET", trace)
    service.call("POST", f"{checkpoint}/publish", status=204)
    service.call("PUT", f"{checkpoint}/ttl", json={"ttl_seconds": 7200}, status=204)
    service.call("GET", "training_runs/none", status=404)
    transport = httpx.MockTransport(lambda request: forward_request(service, request))
    with ServiceClient(ADDRESS, service.client.headers["X-API-Key"], transport=transport) as client:
        sampling = Sampling(max_tokens=3)
        client.evaluate(
            run, model="base", texts=["a b c"], prompts=["a"], num_samples=2, sampling=sampling
        )
        client.runs(), client.metrics()
        for call in (client.run, client.requests, client.checkpoints, client.queue_stats):
            call(run)
    service.call("DELETE", checkpoint, status=204)
    service.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})


def forward_request(service: Service, request: httpx.Request) -> httpx.Response:
    """Return the application's answer to a client's request, in this process."""
    headers = {
        name: value
        for name, value in request.headers.items()
        if name in ("x-api-key", "content-type")
    }
    response = service.client.request(
        request.method, str(request.url), content=request.content, headers=headers
    )
    kind = {"content-type": response.headers["content-type"]}
    return httpx.Response(response.status_code, headers=kind, content=response.content)


def chat_with_server(folder: Path) -> tuple[set[str], set[str]]:
    """Use the routes of `posttrain serve`; return the answers' fields and its routes."""
    model = make_folder_of_model(folder / "model")
    (folder / "answers").mkdir()
    with running_server(folder, model, rollouts=True) as running:
        routes = list_routes(build_chat_app(running.server))
        recorder = Recorder(running.client, routes)
        ask: Callable[..., Any] = running.client.request
        chat = {
            "model": "small",
            "messages": [{"role": "user", "content": "row 2"}],
            "max_tokens": 4,
            "seed": 1,
        }
        answer = ask(
            "POST", "/v1/chat/completions", json={**chat, "logprobs": True, "top_logprobs": 2}
        ).json()
        streamed = running.stream(max_tokens=20, seed=1, stream_options={"include_usage": True})
        for part in streamed:
            recorder.fields |= {
                f"stream of POST /v1/chat/completions: {path}" for path in list_fields(part)
            }
        body = {
            "model": "small",
            "prompt": [5, 6, 7],
            "max_tokens": 3,
            "seed": 1,
            "logprobs": 1,
            "return_token_ids": True,
        }
        ask("POST", "/v1/completions", json=body)
        ask("POST", "/v1/feedback", json={"id": answer["id"], "thumb": "up"})
        ask("POST", "/v1/feedback", json={"id": "none", "thumb": "up"})
        ask("POST", "/tokenize", json={"model": "small", "prompt": "row"})
        for method in ("posttrain_describe", "posttrain_state"):
            ask("POST", "/collective_rpc", json={"method": method})
        for path in ("/v1/models", "/v1/models/small", "/version", "/is_sleeping", "/metrics"):
            ask("GET", path)
        ask("POST", "/reset_prefix_cache")
    return recorder.fields, routes


def rate_answers(folder: Path) -> tuple[set[str], set[str]]:
    """Use the routes of the `posttrain label` page to rate and undo; return the fields and routes."""
    with room_of(folder, count=6) as room:
        app = build_rating_app(room, RATING_TOKEN)
        client = TestClient(
            app,
            base_url="http://127.0.0.1:8331",
            headers={"authorization": f"Bearer {RATING_TOKEN}"},
        )
        routes = list_routes(app)
        recorder = Recorder(client, routes)
        client.get("/api/page")
        shown = client.post("/api/question", json={"rater": "ann"}).json()
        for choice in ("left", "tie", "right"):
            rating = {
                "rater": "ann",
                "item": shown["question"]["item"],
                "count": shown["rated"],
                "choice": choice,
            }
            shown = client.post("/api/rate", json={**rating, "comment": "c", "seconds": 1.5}).json()
        client.post("/api/undo", json={"rater": "ann"})
        client.get("/api/agreement")
    return recorder.fields, routes
