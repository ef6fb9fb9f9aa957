"""Settings of services: the rating page, `posttrain serve`, the training service; names of sinks and alert conditions.

Sinks are trackers in addition to MLflow; pipelines and the training service use the same names and conditions.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError, suggest_name
from rl_core.settings.base import Settings, setting
from rl_core.settings.common import ReferenceSettings, SamplingSettings

SINKS = ("tensorboard", "wandb", "prometheus", "dogstatsd")
SINKS_DOC = (
    "trackers in addition to MLflow: tensorboard[:FOLDER], wandb[:PROJECT], prometheus[:FOLDER, :PORT or :HOST:PORT], "
    "dogstatsd[:HOST:PORT]; none can fail a step (docs/observing.md)"
)
ALERTS_DOC = (
    "metric -> condition, such as policy/ref_kl: '> 0.5'; whenever one becomes true, the event posttrain.alert is "
    "emitted, which the webhook receives; reward/alarm: '> 0' is included by default"
)
RATING_REASONS = (
    "right answer",
    "clearer",
    "follows the instruction",
    "better use of tools",
    "safer",
    "shorter",
)
_PACKAGES = {
    "prometheus": ("prometheus_client", "prometheus-client"),
    "dogstatsd": ("datadog", "datadog"),
}
_EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "dogstatsd": "datadog"}
_CONDITION = re.compile(r"([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def check_sinks(sinks: Iterable[str]) -> None:
    """Raise SettingsError for a name that is not a tracker."""
    for sink in sinks:
        if sink.partition(":")[0] not in SINKS:
            raise SettingsError(
                f"sinks: {sink!r} is not a tracker; {suggest_name(sink.partition(':')[0], SINKS)}"
            )


def check_sink_installed(sink: str) -> None:
    """Raise SettingsError if the package of a tracker is missing, without importing it."""
    kind = sink.partition(":")[0]
    module, package = _PACKAGES.get(kind, (kind, kind))
    if importlib.util.find_spec(module) is None:
        extra = f", or posttrain[{_EXTRAS[kind]}]" if kind in _EXTRAS else ""
        raise SettingsError(f"{kind} needs the package {package}; install it{extra}")


def check_alerts(alerts: Mapping[str, str]) -> None:
    """Raise SettingsError for a text that is not a condition."""
    for metric, text in alerts.items():
        if _CONDITION.fullmatch(text.strip()) is None:
            raise SettingsError(
                f"alerts.{metric}: {text!r} is not a condition; write '> 0.5' or '< 0.1'"
            )


def parse_condition(text: str) -> tuple[str, float]:
    """Return the sign and bound of a condition that was checked."""
    match = _CONDITION.fullmatch(text.strip())
    assert match is not None
    return match[1], float(match[2])


@dataclass(frozen=True, kw_only=True)
class RatingSettings(Settings):
    """The page of `posttrain label`: what people are shown and asked, and in which order."""

    ask: Literal["pairs", "scores", "thumbs"] = setting(
        "pairs",
        doc="pairs: which of two answers is better; scores: 1 to 5 for one answer; thumbs: up or down",
    )
    question: str | None = setting(
        None, doc="the question above the answers; unset: one that fits `ask`"
    )
    reasons: tuple[str, ...] = setting(
        RATING_REASONS, doc="reasons to choose from; at most one is stored with a rating"
    )
    models: tuple[str, ...] = setting(
        (),
        doc="models that answer: models:/NAME@ALIAS, model or stage folders, or hub names, one (two rollouts of it) or "
        "two; unset: the pipeline's champion",
    )
    prompts: int = setting(100, ge=1, le=1_000_000, doc="training episodes that the models answer")
    levels: tuple[str, ...] = setting(
        (), doc="levels of these episodes, in turn; unset: all of the environment"
    )
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how the answers are drawn")
    reward_model: str | None = setting(
        None,
        doc="folder of the reward model whose uncertainty chooses; unset: a new head on the first model",
    )
    choose: Literal["uncertainty", "random"] = setting(
        "uncertainty",
        doc="how to choose the next pair; uncertainty: the one whose label informs the reward model most (BALD, "
        "arXiv:1112.5745)",
    )
    overlap: float = setting(
        0.2, ge=0, le=1, doc="share of pairs that every rater is asked, to measure agreement"
    )
    repeat: float = setting(
        0.05, ge=0, lt=1, doc="share of questions that a rater is asked again later"
    )
    port: int = setting(
        8331, ge=1, le=65_535, doc="loopback port of the page; if taken, the next free one"
    )

    def check(self) -> None:
        """Check that answers of a single model differ, and that reasons are short texts without repeats."""
        if len(self.models) > 2:
            raise SettingsError(f"models: {len(self.models)} are named; use one or two")
        if len(set(self.reasons)) != len(self.reasons) or not all(
            0 < len(r.strip()) <= 60 for r in self.reasons
        ):
            raise SettingsError("reasons: each must be unique and have 1 to 60 characters")
        if len(self.models) < 2:
            self.sampling.check_varied()


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """The server of `posttrain serve`: the model, its slots, limits of requests."""

    model: str | None = setting(
        None,
        doc="models:/NAME@ALIAS, a model or stage folder, or a hub name; unset: the pipeline's champion",
    )
    name: str | None = setting(
        None, doc="name of the model for clients; unset: the pipeline's name"
    )
    host: str = setting(
        "127.0.0.1", doc="loopback address to listen on; 127.0.0.1, ::1 or localhost"
    )
    port: int = setting(8321, ge=1, le=65_535, doc="port to listen on")
    slots: int = setting(64, ge=1, le=65_536, doc="answers decoded concurrently")
    context: int = setting(
        4096,
        ge=16,
        le=1_048_576,
        doc="maximum tokens of a prompt and its answer, limited by the model",
    )
    threads: int | None = setting(
        None, ge=1, le=1024, doc="CPU threads of the engine; unset: torch decides"
    )
    max_waiting: int = setting(
        256,
        ge=1,
        le=1_000_000,
        doc="answers that may wait for a slot; further ones are refused with 429",
    )
    turn_tokens: int = setting(
        256,
        ge=1,
        le=1_048_576,
        doc="tokens after which an answer yields its slot to waiting ones and continues later",
    )
    request_seconds: float = setting(
        600.0,
        gt=0,
        le=1e6,
        doc="time limit of one request, including waiting; a trainer's turns (rollouts) are limited only by the "
        "trainer",
    )
    max_body_bytes: int = setting(8 * 2**20, ge=1024, le=2**31, doc="largest body of a request")
    images_folder: str | None = setting(
        None,
        doc="folder whose files chat requests may name as image_url; unset: they send images as data URLs",
    )
    max_choices: int = setting(64, ge=1, le=65_536, doc="largest n of a request")
    max_connections: int = setting(
        2048, ge=1, le=1_000_000, doc="open connections; further ones are closed immediately"
    )
    idle_seconds: float = setting(
        15.0,
        gt=0,
        le=1e6,
        doc="time for a request's head and body to arrive, and between two requests of a connection",
    )
    write_seconds: float = setting(
        30.0, gt=0, le=1e6, doc="time that a client may take to read part of an answer"
    )
    reload_seconds: float = setting(
        10.0,
        ge=0,
        le=1e6,
        doc="seconds between checks of the registry for a new version of the alias; 0 = never",
    )
    tools: Literal["template", "instructions", "read"] = setting(
        "template",
        doc="tools of a request; template: described by the chat template, if it supports tools; instructions: in a "
        "system message; read: only parsed from answers, for policies that know them, and if the template supports "
        "none",
    )

    rollouts: bool = setting(
        False,
        doc="true: a trainer may load weights and adapters from folders of this machine, and make the server sleep and "
        "wake (docs/scaling.md); the registry is not checked for new versions",
    )
    record: bool = setting(
        False, doc="true: record sessions of agents elsewhere (docs/agents.md), as --record does"
    )
    max_sessions: int = setting(
        64, ge=1, le=100_000, doc="open recorded sessions; further ones are refused with 429"
    )
    max_tenant_sessions: int = setting(
        32, ge=1, le=100_000, doc="open recorded sessions of one tenant"
    )
    session_seconds: float = setting(
        3600.0, gt=0, le=1e7, doc="time of a recorded session; one without a score is then dropped"
    )
    session_calls: int = setting(
        200, ge=1, le=1_000_000, doc="answered requests of a recorded session"
    )
    session_tokens: int = setting(
        32_768,
        ge=1,
        le=1_073_741_824,
        doc="tokens of a recorded session: answers, and what its conversations add to them",
    )
    stored_responses: int = setting(
        1000,
        ge=0,
        le=1_000_000,
        doc="responses of /v1/responses in memory, for previous_response_id; the oldest are dropped",
    )

    def check(self) -> None:
        """Check that the server listens on this machine only; a tunnel or a proxy with TLS leads to it."""
        if self.host not in ("127.0.0.1", "::1", "localhost"):
            raise SettingsError(
                f"host: {self.host!r} is not loopback; other machines reach the server through an SSH tunnel"
            )


@dataclass(frozen=True, kw_only=True)
class ServiceEngineSettings(Settings):
    """Base models of the engine, their precision, and the size of passes."""

    bases: dict[str, Any] = setting(
        {}, doc="base models: name -> model folder or hub name; loaded at first use"
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", doc="dtype of base models; adapters are float32"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", doc="auto: GPU if available")
    batch_runs: Literal["exact", "always", "never"] = setting(
        "exact",
        doc="rows of several training runs in one pass; exact: only if no number of a run depends on it, to the last "
        "bit; always: also if numbers agree only up to rounding, so replay after a crash may differ in the last bits",
    )
    micro_batch_tokens: int = setting(
        8192,
        ge=1,
        le=1_073_741_824,
        doc="tokens of one run in a pass; affects the order of its sums",
    )
    pass_tokens: int = setting(
        32768,
        ge=1,
        le=1_073_741_824,
        doc="tokens of all runs in a pass; affects no numbers",
    )
    slots: int = setting(128, ge=1, le=65_536, doc="sequences sampled concurrently")
    max_runs: int = setting(64, ge=1, le=1_048_576, doc="maximum training runs in memory")
    max_samplers: int = setting(1024, ge=1, le=1_048_576, doc="maximum samplers in memory")
    max_rank: int = setting(512, ge=1, le=65_536, doc="largest rank of an adapter")
    max_data: int = setting(4096, ge=1, le=1_048_576, doc="maximum sequences per request")
    max_samples: int = setting(1024, ge=1, le=1_048_576, doc="maximum samples per request")
    max_top: int = setting(
        64, ge=1, le=65_536, doc="maximum most likely tokens, or target tokens, per position"
    )

    def check(self) -> None:
        """Check that every base model has a name and a path."""
        for name, path in self.bases.items():
            if not isinstance(path, str) or not path or not name:
                raise SettingsError(f"bases: {name!r}: {path!r} is not a model folder or hub name")


@dataclass(frozen=True, kw_only=True)
class ServiceWorkerSettings(Settings):
    """Durability and memory of the worker process, and lifetimes of its results."""

    snapshot_steps: int = setting(
        10,
        ge=1,
        le=1_048_576,
        doc="updates of a run between two snapshots; after a crash at most that many are repeated",
    )
    snapshot_seconds: float = setting(
        60.0,
        ge=0.0,
        le=1e6,
        doc="a changed run without a snapshot for this long is also saved; 0: after every request",
    )
    idle_seconds: float = setting(
        3600.0, gt=0.0, le=1e9, doc="a run unused for this long is unloaded until the next request"
    )
    samplers_in_memory: int = setting(
        64, ge=1, le=1_048_576, doc="samplers in memory; others are reloaded from their folder"
    )
    batch_requests: int = setting(
        256, ge=1, le=65_536, doc="maximum requests of one kind passed to the engine together"
    )
    result_seconds: float = setting(
        86_400.0, gt=0.0, le=1e9, doc="lifetime of a result that nobody fetches"
    )
    memory_seconds: float = setting(
        3600.0,
        gt=0.0,
        le=1e9,
        doc="how long a repeated request is recognised after its result was dropped",
    )
    sampler_seconds: float = setting(
        86_400.0,
        gt=0.0,
        le=1e9,
        doc="lifetime of an unused sampler without a saved path; one hour after its session's end",
    )
    recorded_seconds: float = setting(
        86_400.0,
        gt=0.0,
        le=1e9,
        doc="how long what a sample recorded (record_stability_info) can be trained on, after sampling or its last use",
    )
    stop_seconds: float = setting(
        60.0,
        gt=0.0,
        le=80.0,
        doc="time after SIGTERM to finish computations and save all runs; then the worker exits, and "
        "unsaved runs are recomputed from their last snapshots",
    )
    registered: Literal["none", "weights", "sampler_weights", "all"] = setting(
        "none", doc="which saved paths become versions in the model registry (`mlflow`)"
    )
    registered_name: str = setting(
        "service", doc="name of the registered model; the base model's name is added"
    )


@dataclass(frozen=True, kw_only=True)
class ServiceServerSettings(Settings):
    """The HTTP server: address, limits of requests, waiting."""

    host: str = setting(
        "127.0.0.1", doc="loopback address to listen on; 127.0.0.1, ::1 or localhost"
    )
    port: int = setting(8123, ge=1, le=65_535, doc="port to listen on")
    max_body_bytes: int = setting(
        64 * 2**20,
        ge=1024,
        le=2**31,
        doc="largest body of a request, before and after decompression",
    )
    max_connections: int = setting(
        8192,
        ge=1,
        le=1_000_000,
        doc="open connections; further ones are closed immediately; each client that waits for a result holds one",
    )
    idle_seconds: float = setting(
        30.0,
        gt=0.0,
        le=1e6,
        doc="time for a request's head to arrive, and between two requests of a connection",
    )
    body_seconds: float = setting(120.0, gt=0.0, le=1e6, doc="time for a request's body to arrive")
    poll_seconds: float = setting(
        25.0, gt=0.0, le=40.0, doc="how long a request for a result is held open"
    )
    fetched_seconds: float = setting(
        600.0,
        ge=0.0,
        le=1e9,
        doc="how long a fetched result may be fetched again before it is dropped",
    )
    url_seconds: float = setting(
        3600.0, gt=0.0, le=1e9, doc="lifetime of the signed URLs of exported weights"
    )

    def check(self) -> None:
        """Check that the server listens on this machine only; a tunnel or a proxy with TLS leads to it."""
        if self.host not in ("127.0.0.1", "::1", "localhost"):
            raise SettingsError(
                f"host: {self.host!r} is not loopback; other machines reach the service through an SSH tunnel"
            )


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(Settings):
    """The training service: its folder, store, server, engine and worker."""

    folder: str = setting("outputs/service", doc="folder of the store, snapshots and saved weights")
    store: str = setting(
        "",
        doc="URL of the store: sqlite:///FILE or postgresql://...; unset: a file in the folder",
    )
    mlflow: str = setting(
        "", doc="MLflow server or store of the model registry; unset: a store in the folder"
    )
    mlflow_runs: bool = setting(
        True, doc="record an MLflow run for each training run, in that store"
    )
    sinks: tuple[str, ...] = setting((), doc=SINKS_DOC)
    alerts: dict[str, str] = setting({}, doc=ALERTS_DOC)
    system_metrics_seconds: float = setting(
        5.0, ge=0, doc="seconds between samples of CPU, memory, GPU; 0 = off"
    )
    server: ServiceServerSettings = setting(ServiceServerSettings(), doc="the HTTP server")
    engine: ServiceEngineSettings = setting(ServiceEngineSettings(), doc="the engine")
    worker: ServiceWorkerSettings = setting(ServiceWorkerSettings(), doc="the worker process")
    reference_models: dict[str, Any] = setting(
        {},
        doc="frozen models in addition to the bases, for evaluations and KL terms: name -> model folder or hub name",
    )
    reward_models: dict[str, Any] = setting(
        {},
        doc="frozen reward models whose scores clients may request: name -> model folder or hub name",
    )
    references: ReferenceSettings = setting(
        ReferenceSettings(), doc="precision of reference models, and how many stay in memory"
    )

    def check(self) -> None:
        """Check sinks, alert conditions and reference models."""
        taken = {"base": "a base model", **dict.fromkeys(self.engine.bases, "a base model")}
        for block in ("reference_models", "reward_models"):
            for name, path in getattr(self, block).items():
                if not isinstance(path, str) or not path or not name:
                    raise SettingsError(
                        f"{block}: {name!r}: {path!r} is not a model folder or hub name"
                    )
                if name in taken:
                    raise SettingsError(
                        f"{block}: '{name}' is already the name of {taken[name]}; choose another"
                    )
            taken |= dict.fromkeys(self.reference_models, "a reference model")
        check_sinks(self.sinks)
        check_alerts(self.alerts)

    @property
    def store_url(self) -> str:
        """URL of the store."""
        return self.store or f"sqlite:///{self.folder}/service.db"
