"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rl_core.inference.server_loop import LoopState
from rl_core.trackers.prometheus import prometheus_name

__all__ = ["ServerMetrics"]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_RECENT = 4096  # answers that rates and quantiles are taken over, at most


class ServerMetrics:
    """Counts of requests and tokens, times, and the state of the serving loop at the moment of asking."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def name(text: str) -> str:
            return prometheus_name(f"serving_{text}")

        own = self._registry
        self.requests = Counter(
            name("requests"), "Requests for answers, by status of the response.", ["code"], registry=own
        )
        self.tokens = Counter(name("tokens"), "Tokens of answered requests.", ["kind"], registry=own)
        self.seconds = Histogram(
            name("request_seconds"), "Time from a request to the end of its answer.", buckets=_SECONDS, registry=own
        )
        self.first = Histogram(
            name("first_part_seconds"),
            "Time from a request to the first part of its stream.",
            buckets=_SECONDS,
            registry=own,
        )
        self.gone = Counter(name("clients_gone"), "Requests whose client left before the answer.", registry=own)
        self.feedback = Counter(name("feedback"), "Labels that were taken.", registry=own)
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_RECENT)
        self._gauges = {
            field: Gauge(name(field), about, registry=own)
            for field, about in (
                ("policy_version", "Version of the weights that answer new requests."),
                ("versions", "Sets of weights in memory."),
                ("waiting", "Answers that wait for a slot."),
                ("active", "Answers in slots."),
                ("parked", "Answers that have left their slot to others and go on later."),
                ("capacity", "Slots."),
                ("parkings", "Times that an answer left its slot to others."),
                ("reloads", "Times that weights were taken over."),
            )
        }

    def answered(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """Count an answered request."""
        self.tokens.labels("prompt").inc(prompt_tokens)
        self.tokens.labels("completion").inc(completion_tokens)
        self.seconds.observe(seconds)
        self._recent.append((time.monotonic(), seconds, completion_tokens))

    def recent(self, window: float = 60.0) -> dict[str, float]:
        """Answers and tokens a second, and quantiles of the time to an answer, over the last seconds."""
        now = time.monotonic()
        found = [entry for entry in list(self._recent) if now - entry[0] <= window]
        covered = window
        if len(self._recent) == _RECENT and found:  # the newest ones alone are known
            covered = max(1e-3, min(window, now - found[0][0]))
        numbers = {
            "online/answers_per_second": len(found) / covered,
            "online/tokens_per_second": sum(entry[2] for entry in found) / covered,
        }
        times = sorted(entry[1] for entry in found)
        for percent in (50, 90, 99) if times else ():
            numbers[f"online/latency_p{percent}_seconds"] = times[min(len(times) - 1, len(times) * percent // 100)]
        return numbers

    def text(self, state: Callable[[], LoopState] | None) -> bytes:
        """Everything, as Prometheus reads it."""
        if state is not None:
            now = state()
            for field, gauge in self._gauges.items():
                gauge.set(getattr(now, field))
        return generate_latest(self._registry)
