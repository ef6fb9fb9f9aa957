"""Settings of the training service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting
from rl_core.settings.references import ReferenceSettings
from rl_core.settings.sinks import ALERTS_DOC, SINKS_DOC, check_alerts, check_sinks

__all__ = ["ServiceEngineSettings", "ServiceServerSettings", "ServiceSettings", "ServiceWorkerSettings"]


@dataclass(frozen=True, kw_only=True)
class ServiceEngineSettings(Settings):
    """Base models of the engine, their precision, and the size of passes."""

    bases: dict[str, Any] = setting({}, doc="base models: name -> model folder or hub name; loaded at first use")
    dtype: Literal["float32", "bfloat16"] = setting("float32", doc="dtype of base models; adapters are float32")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", doc="auto: GPU if available")
    batch_runs: Literal["exact", "always", "never"] = setting(
        "exact",
        doc="rows of several training runs in one pass; exact: where no number of a run depends on it, to the last "
        "bit; always: also where they agree to rounding alone, so replay after a crash may differ in the last bits",
    )
    micro_batch_tokens: int = setting(
        8192, ge=1, le=1_073_741_824, doc="tokens of one run in a pass; a change changes the order of its sums"
    )
    pass_tokens: int = setting(
        32768, ge=1, le=1_073_741_824, doc="tokens of all runs together in a pass; changes no number"
    )
    slots: int = setting(128, ge=1, le=65_536, doc="sequences sampled together")
    max_runs: int = setting(64, ge=1, le=1_048_576, doc="training runs in memory")
    max_samplers: int = setting(1024, ge=1, le=1_048_576, doc="samplers in memory")
    max_rank: int = setting(512, ge=1, le=65_536, doc="largest rank of an adapter")
    max_data: int = setting(4096, ge=1, le=1_048_576, doc="sequences of one request")
    max_samples: int = setting(1024, ge=1, le=1_048_576, doc="samples of one request")
    max_top: int = setting(64, ge=1, le=65_536, doc="most likely tokens, or target tokens, at one position")

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
        60.0, ge=0.0, le=1e6, doc="a changed run that has none for so long is saved, too; 0: after every request"
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
    result_seconds: float = setting(86_400.0, gt=0.0, le=1e9, doc="lifetime of an answer that nobody fetches")
    memory_seconds: float = setting(
        3600.0, gt=0.0, le=1e9, doc="for so long a repeated request is still known after its answer is forgotten"
    )
    sampler_seconds: float = setting(
        86_400.0,
        gt=0.0,
        le=1e9,
        doc="lifetime of an unused sampler without a path of its own; one hour after its session's end",
    )
    stop_seconds: float = setting(
        60.0, gt=0.0, le=80.0, doc="after SIGTERM, for what is being computed and for saving all runs; then the worker "
        "ends without, and runs that are not saved are computed again from their last snapshots",
    )  # fmt: skip
    registered: Literal["none", "weights", "sampler_weights", "all"] = setting(
        "none", doc="saved paths that become versions in the model registry (`mlflow`)"
    )
    registered_name: str = setting("service", doc="name of the registered model; the base model's name is added")


@dataclass(frozen=True, kw_only=True)
class ServiceServerSettings(Settings):
    """The HTTP server: address, bounds of requests, waiting."""

    host: str = setting("127.0.0.1", doc="loopback address to listen on; 127.0.0.1, ::1 or localhost")
    port: int = setting(8123, ge=1, le=65_535, doc="port to listen on")
    max_body_bytes: int = setting(
        64 * 2**20, ge=1024, le=2**31, doc="largest body of a request, before and after decompression"
    )
    poll_seconds: float = setting(25.0, gt=0.0, le=40.0, doc="for so long a request for a result is held")
    fetched_seconds: float = setting(
        600.0, ge=0.0, le=1e9, doc="for so long a fetched result may be fetched again before it is forgotten"
    )
    url_seconds: float = setting(3600.0, gt=0.0, le=1e9, doc="life of the signed addresses of exported weights")

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
    store: str = setting("", doc="URL of the store: sqlite:///FILE or postgresql://...; left out: a file in the folder")
    mlflow: str = setting("", doc="MLflow server or store of the model registry; left out: a store in the folder")
    mlflow_runs: bool = setting(True, doc="an MLflow run for each training run, in that store")
    sinks: tuple[str, ...] = setting((), doc=SINKS_DOC)
    alerts: dict[str, str] = setting({}, doc=ALERTS_DOC)
    system_metrics_seconds: float = setting(5.0, ge=0, doc="seconds between samples of CPU, memory, GPU; 0 = off")
    server: ServiceServerSettings = setting(ServiceServerSettings(), doc="the HTTP server")
    engine: ServiceEngineSettings = setting(ServiceEngineSettings(), doc="the engine")
    worker: ServiceWorkerSettings = setting(ServiceWorkerSettings(), doc="the process that computes")
    reference_models: dict[str, Any] = setting(
        {}, doc="frozen models beside the bases, for evaluations and KL terms: name -> model folder or hub name"
    )
    references: ReferenceSettings = setting(ReferenceSettings(), doc="their precision, and how many stay in memory")

    def check(self) -> None:
        """Sinks, conditions and reference models are known ones."""
        for name, place in self.reference_models.items():
            if not isinstance(place, str) or not place or not name:
                raise SettingsError(f"reference_models: {name!r}: {place!r} is no model folder or hub name")
            if name in self.engine.bases or name == "base":
                raise SettingsError(f"reference_models: '{name}' is a base model's name already; choose another")
        check_sinks(self.sinks)
        check_alerts(self.alerts)

    @property
    def store_url(self) -> str:
        """URL of the store."""
        return self.store or f"sqlite:///{self.folder}/service.db"
