"""Metrics of the training service for Prometheus: requests, queue, training runs, machine.

posttrain_service_requests_total{kind,outcome}          counter    requests that ended
posttrain_service_wait_seconds{kind}                    histogram  from acceptance to the start of the work
posttrain_service_request_seconds{kind}                 histogram  the work itself
posttrain_service_queue_depth{kind}                     gauge      accepted requests that wait
posttrain_service_tokens_total{kind}                    counter    tokens trained on or sampled
posttrain_service_engine_up                             gauge      1 = the engine answers
posttrain_train_loss{run}, posttrain_policy_..., ...    gauges     newest values of every training run
posttrain_system_...{process}                           gauges     CPU, memory, disk, GPUs
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rl_core.trackers.prometheus import PREFIX, MetricGauges

__all__ = ["ServiceMetrics"]

# From a look into the store to a long forward pass, seconds.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServiceMetrics:
    """One process's counters, gauges and histograms, and their text. Thread-safe; no method fails or waits.

    `kind` is that of a request (forward_backward, optim_step, sample, ...), never a text that a client chooses.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        service = f"{PREFIX}service_"
        self._requests = Counter(f"{service}requests", "Requests that ended.", ["kind", "outcome"], registry=registry)
        self._wait = Histogram(
            f"{service}wait_seconds",
            "From acceptance to the start of the work.",
            ["kind"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._seconds = Histogram(
            f"{service}request_seconds", "Work on a request.", ["kind"], buckets=_BUCKETS, registry=registry
        )  # fmt: skip
        self._depth = Gauge(f"{service}queue_depth", "Accepted requests that wait.", ["kind"], registry=registry)
        self._tokens = Counter(f"{service}tokens", "Tokens trained on or sampled.", ["kind"], registry=registry)
        self._engine = Gauge(f"{service}engine_up", "1 = the engine answers.", registry=registry)
        self._newest = MetricGauges()
        self._registry.register(self._newest)

    def started(self, kind: str, waited_s: float) -> None:
        """Work on a request begins, `waited_s` seconds after it was accepted."""
        self._wait.labels(kind).observe(max(0.0, waited_s))

    def finished(self, kind: str, seconds: float, outcome: str = "ok", tokens: int = 0) -> None:
        """A request has ended after `seconds` of work; `outcome`: ok, user_error, server_error or cancelled."""
        self._requests.labels(kind, outcome).inc()
        self._seconds.labels(kind).observe(max(0.0, seconds))
        if tokens > 0:
            self._tokens.labels(kind).inc(tokens)

    def set_queue_depth(self, kind: str, waiting: int) -> None:
        """Requests of a kind that wait now."""
        self._depth.labels(kind).set(waiting)

    def set_engine_up(self, up: bool) -> None:
        """The engine answers, or not."""
        self._engine.set(float(up))

    def training(self, run: str, metrics: Mapping[str, float], step: int) -> None:
        """The newest metrics of a training run, by tracked names (`rl_core.service.tracked_names`)."""
        self._newest.set({**metrics, "run/step": float(step)}, {"run": run})

    def forget_run(self, run: str) -> None:
        """Leave out a run that was unloaded."""
        self._newest.forget({"run": run})

    def machine(self, metrics: Mapping[str, float], process: str) -> None:
        """A reading of `tasks.tracking.system.sample`, taken in `process` (server, engine)."""
        self._newest.set(metrics, {"process": process})

    def text(self) -> str:
        """Everything in Prometheus' text format; `content_type` is its type."""
        found: bytes = generate_latest(self._registry)
        return found.decode()
