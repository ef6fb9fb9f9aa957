"""Names of trackers beside MLflow, and conditions of alerts, as pipelines and the training service take them.

Settings of `posttrain prefer`.

Settings of `posttrain serve`.

Settings of the training service.
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
    "trackers beside MLflow: tensorboard[:FOLDER], wandb[:PROJECT], prometheus[:FOLDER, :PORT or :HOST:PORT], "
    "dogstatsd[:HOST:PORT]; none can fail a step (docs/metrics-out.md)"
)
ALERTS_DOC = (
    "metric -> condition, as policy/ref_kl: '> 0.5'; each time one comes true, the event posttrain.alert is emitted, "
    "which the webhook gets; reward/alarm: '> 0' is always there, unless it is named"
)
_PACKAGES = {
    "prometheus": ("prometheus_client", "prometheus-client"),
    "dogstatsd": ("datadog", "datadog"),
}
_EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "dogstatsd": "datadog"}
_CONDITION = re.compile(r"([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def check_sinks(sinks: Iterable[str]) -> None:
    """Raises: SettingsError for a name that is no tracker's."""
    for sink in sinks:
        if sink.partition(":")[0] not in SINKS:
            raise SettingsError(
                f"sinks: {sink!r} is no tracker; {suggest_name(sink.partition(':')[0], SINKS)}"
            )


def check_sink_installed(sink: str) -> None:
    """Raises: SettingsError where the package of a tracker is missing; nothing is imported."""
    kind = sink.partition(":")[0]
    module, package = _PACKAGES.get(kind, (kind, kind))
    if importlib.util.find_spec(module) is None:
        extra = f", or posttrain[{_EXTRAS[kind]}]" if kind in _EXTRAS else ""
        raise SettingsError(f"{kind} needs the package {package}; install it{extra}")


def check_alerts(alerts: Mapping[str, str]) -> None:
    """Raises: SettingsError for a text that is no condition."""
    for metric, text in alerts.items():
        if _CONDITION.fullmatch(text.strip()) is None:
            raise SettingsError(
                f"alerts.{metric}: {text!r} is no condition; write '> 0.5' or '< 0.1'"
            )


def parse_condition(text: str) -> tuple[str, float]:
    """Sign and bound of a condition that was checked."""
    found = _CONDITION.fullmatch(text.strip())
    assert found is not None
    return found[1], float(found[2])


RATING_REASONS = (
    "right answer",
    "clearer",
    "follows the instruction",
    "better use of tools",
    "safer",
    "shorter",
)


@dataclass(frozen=True, kw_only=True)
class RatingSettings(Settings):
    """The page of `posttrain prefer`: what people are shown and asked, and in which order."""

    ask: Literal["pairs", "scores", "thumbs"] = setting(
        "pairs",
        doc="pairs: which of two answers is better; scores: 1 to 5 for one answer; thumbs: up or down",
    )
    question: str | None = setting(
        None, doc="the question above the answers; left out: one that fits `ask`"
    )
    reasons: tuple[str, ...] = setting(
        RATING_REASONS, doc="reasons to choose from; none or one of them is kept with a rating"
    )
    models: tuple[str, ...] = setting(
        (),
        doc="who answers: models:/NAME@ALIAS, model or stage folders, or hub names, one (two rollouts of it) or two; "
        "left out: the pipeline's champion",
    )
    prompts: int = setting(100, ge=1, le=1_000_000, doc="training episodes that they answer")
    levels: tuple[str, ...] = setting(
        (), doc="levels of these episodes, in turn; left out: all of the environment"
    )
    sampling: SamplingSettings = setting(SamplingSettings(), doc="how the answers are drawn")
    reward_model: str | None = setting(
        None,
        doc="folder of a reward model whose uncertainty chooses; left out: that of a new head on the first model",
    )
    choose: Literal["uncertainty", "random"] = setting(
        "uncertainty",
        doc="the next pair; uncertainty: of which a label tells the reward model most (BALD, arXiv:1112.5745)",
    )
    overlap: float = setting(
        0.2, ge=0, le=1, doc="share of pairs that every rater is asked, for their agreement"
    )
    repeat: float = setting(
        0.05, ge=0, lt=1, doc="share of questions that a rater is asked again, later on"
    )
    port: int = setting(
        8331, ge=1, le=65_535, doc="loopback port of the page; if taken, the next free one"
    )

    def check(self) -> None:
        """Answers of one model differ; reasons are short texts, each once."""
        if len(self.models) > 2:
            raise SettingsError(f"models: {len(self.models)} are named; one or two answer")
        if len(set(self.reasons)) != len(self.reasons) or not all(
            0 < len(r.strip()) <= 60 for r in self.reasons
        ):
            raise SettingsError("reasons: each is there once and has 1 to 60 characters")
        if len(self.models) < 2:
            self.sampling.check_not_greedy()


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """The server of `posttrain serve`: the model, its slots, bounds of requests."""

    model: str | None = setting(
        None,
        doc="models:/NAME@ALIAS, a model or stage folder, or a hub name; left out: the pipeline's champion",
    )
    name: str | None = setting(
        None, doc="name by which clients ask for the model; left out: the pipeline's name"
    )
    host: str = setting(
        "127.0.0.1", doc="loopback address to listen on; 127.0.0.1, ::1 or localhost"
    )
    port: int = setting(8321, ge=1, le=65_535, doc="port to listen on")
    slots: int = setting(64, ge=1, le=65_536, doc="answers decoded together")
    context: int = setting(
        4096, ge=16, le=1_048_576, doc="tokens of a prompt and its answer, at most the model's own"
    )
    threads: int | None = setting(
        None, ge=1, le=1024, doc="CPU threads of the engine; left out: torch decides"
    )
    max_waiting: int = setting(
        256, ge=1, le=1_000_000, doc="answers that wait for a slot; more are refused with 429"
    )
    turn_tokens: int = setting(
        256,
        ge=1,
        le=1_048_576,
        doc="tokens after which an answer leaves its slot to others that wait, and goes on later",
    )
    request_seconds: float = setting(
        600.0,
        gt=0,
        le=1e6,
        doc="time of one request, its waiting included; a trainer's turns (rollouts) are bounded by the trainer alone",
    )
    max_body_bytes: int = setting(8 * 2**20, ge=1024, le=2**31, doc="largest body of a request")
    max_choices: int = setting(64, ge=1, le=65_536, doc="largest n of a request")
    max_connections: int = setting(
        2048, ge=1, le=1_000_000, doc="open connections; further ones are closed at once"
    )
    idle_seconds: float = setting(
        15.0,
        gt=0,
        le=1e6,
        doc="time for a request's head and body to arrive, and between two requests of a connection",
    )
    write_seconds: float = setting(
        30.0, gt=0, le=1e6, doc="time that a client may take to read a part of an answer"
    )
    reload_seconds: float = setting(
        10.0,
        ge=0,
        le=1e6,
        doc="between two looks at the registry for a new version behind the alias; 0 = never",
    )
    tools: Literal["template", "instructions", "read"] = setting(
        "template",
        doc="tools of a request; template: described by the chat template, where it takes tools; instructions: in a "
        "system message; read: only read from answers, for policies that know them; where a template takes none: read",
    )

    rollouts: bool = setting(
        False,
        doc="true: a trainer may give orders: load weights and adapters from folders of this machine, sleep, wake "
        "(docs/inference-servers.md); the registry is not looked at for new versions",
    )

    def check(self) -> None:
        """The server is for this machine; a tunnel or a proxy with TLS leads to it."""
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
        doc="rows of several training runs in one pass; exact: where no number of a run depends on it, to the last "
        "bit; always: also where they agree to rounding alone, so replay after a crash may differ in the last bits",
    )
    micro_batch_tokens: int = setting(
        8192,
        ge=1,
        le=1_073_741_824,
        doc="tokens of one run in a pass; a change changes the order of its sums",
    )
    pass_tokens: int = setting(
        32768,
        ge=1,
        le=1_073_741_824,
        doc="tokens of all runs together in a pass; changes no number",
    )
    slots: int = setting(128, ge=1, le=65_536, doc="sequences sampled together")
    max_runs: int = setting(64, ge=1, le=1_048_576, doc="training runs in memory")
    max_samplers: int = setting(1024, ge=1, le=1_048_576, doc="samplers in memory")
    max_rank: int = setting(512, ge=1, le=65_536, doc="largest rank of an adapter")
    max_data: int = setting(4096, ge=1, le=1_048_576, doc="sequences of one request")
    max_samples: int = setting(1024, ge=1, le=1_048_576, doc="samples of one request")
    max_top: int = setting(
        64, ge=1, le=65_536, doc="most likely tokens, or target tokens, at one position"
    )

    def check(self) -> None:
        """Every base model has a name and a place."""
        for name, place in self.bases.items():
            if not isinstance(place, str) or not place or not name:
                raise SettingsError(f"bases: {name!r}: {place!r} is no model folder or hub name")


@dataclass(frozen=True, kw_only=True)
class ServiceWorkerSettings(Settings):
    """Durability and memory of the process that computes, and lifetimes of what it leaves."""

    snapshot_steps: int = setting(
        10,
        ge=1,
        le=1_048_576,
        doc="updates of a run between two snapshots; after a kill at most that many are repeated",
    )
    snapshot_seconds: float = setting(
        60.0,
        ge=0.0,
        le=1e6,
        doc="a changed run that has none for so long is saved, too; 0: after every request",
    )
    idle_seconds: float = setting(
        3600.0, gt=0.0, le=1e9, doc="a run unused for so long leaves memory until it is asked"
    )
    samplers_in_memory: int = setting(
        64, ge=1, le=1_048_576, doc="samplers in memory; others come back from their folder"
    )
    batch_requests: int = setting(
        256, ge=1, le=65_536, doc="requests of one kind given to the engine together, at most"
    )
    result_seconds: float = setting(
        86_400.0, gt=0.0, le=1e9, doc="lifetime of an answer that nobody fetches"
    )
    memory_seconds: float = setting(
        3600.0,
        gt=0.0,
        le=1e9,
        doc="for so long a repeated request is still known after its answer is forgotten",
    )
    sampler_seconds: float = setting(
        86_400.0,
        gt=0.0,
        le=1e9,
        doc="lifetime of an unused sampler without a path of its own; one hour after its session's end",
    )
    stop_seconds: float = setting(
        60.0,
        gt=0.0,
        le=80.0,
        doc="after SIGTERM, for what is being computed and for saving all runs; then the worker "
        "ends without, and runs that are not saved are computed again from their last snapshots",
    )
    registered: Literal["none", "weights", "sampler_weights", "all"] = setting(
        "none", doc="saved paths that become versions in the model registry (`mlflow`)"
    )
    registered_name: str = setting(
        "service", doc="name of the registered model; the base model's name is added"
    )


@dataclass(frozen=True, kw_only=True)
class ServiceServerSettings(Settings):
    """The HTTP server: address, bounds of requests, waiting."""

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
    poll_seconds: float = setting(
        25.0, gt=0.0, le=40.0, doc="for so long a request for a result is held"
    )
    fetched_seconds: float = setting(
        600.0,
        ge=0.0,
        le=1e9,
        doc="for so long a fetched result may be fetched again before it is forgotten",
    )
    url_seconds: float = setting(
        3600.0, gt=0.0, le=1e9, doc="life of the signed addresses of exported weights"
    )

    def check(self) -> None:
        """The server is for this machine; a tunnel or a proxy with TLS leads to it."""
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
        doc="URL of the store: sqlite:///FILE or postgresql://...; left out: a file in the folder",
    )
    mlflow: str = setting(
        "", doc="MLflow server or store of the model registry; left out: a store in the folder"
    )
    mlflow_runs: bool = setting(True, doc="an MLflow run for each training run, in that store")
    sinks: tuple[str, ...] = setting((), doc=SINKS_DOC)
    alerts: dict[str, str] = setting({}, doc=ALERTS_DOC)
    system_metrics_seconds: float = setting(
        5.0, ge=0, doc="seconds between samples of CPU, memory, GPU; 0 = off"
    )
    server: ServiceServerSettings = setting(ServiceServerSettings(), doc="the HTTP server")
    engine: ServiceEngineSettings = setting(ServiceEngineSettings(), doc="the engine")
    worker: ServiceWorkerSettings = setting(
        ServiceWorkerSettings(), doc="the process that computes"
    )
    reference_models: dict[str, Any] = setting(
        {},
        doc="frozen models beside the bases, for evaluations and KL terms: name -> model folder or hub name",
    )
    references: ReferenceSettings = setting(
        ReferenceSettings(), doc="their precision, and how many stay in memory"
    )

    def check(self) -> None:
        """Sinks, conditions and reference models are known ones."""
        for name, place in self.reference_models.items():
            if not isinstance(place, str) or not place or not name:
                raise SettingsError(
                    f"reference_models: {name!r}: {place!r} is no model folder or hub name"
                )
            if name in self.engine.bases or name == "base":
                raise SettingsError(
                    f"reference_models: '{name}' is a base model's name already; choose another"
                )
        check_sinks(self.sinks)
        check_alerts(self.alerts)

    @property
    def store_url(self) -> str:
        """URL of the store."""
        return self.store or f"sqlite:///{self.folder}/service.db"
