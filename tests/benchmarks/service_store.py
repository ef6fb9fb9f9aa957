"""Cost of a future through the training service's store: from acceptance to the answer in the asker's hands.

Askers are threads of one process, as the server's are; a worker process claims and answers immediately: nothing is
computed. Each asker sends, waits for its answer, pauses, and sends again; without a pause the store is saturated.

    PYTHONPATH=.:tests python tests/benchmarks/service_store.py --output outputs/service-store
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from posttrain.training_service.store import NewRequest, ResultBody, ServiceStore


def run_worker(url: str) -> None:
    """Answer all requests, as one batch."""
    store, answer = ServiceStore(url), ResultBody(b"x" * 2000, "protobuf")
    while True:
        seen = store.read_change_counter()
        if ready := store.list_ready_requests(256):
            taken = store.claim_requests([request.request_id for request in ready])
            store.finish_requests([(request.request_id, answer) for request in taken])
        else:
            store.wait_for_change(seen, 1.0)


class Watch:
    """The server's one watcher: wakes those whose request is final."""

    def __init__(self, store: ServiceStore) -> None:
        self.events: dict[str, threading.Event] = {}
        self._final: set[str] = set()
        self._guard = threading.Lock()
        self._store = store
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        cursor = self._store.read_finish_cursor()
        seen = self._store.read_change_counter()
        while True:
            ids, cursor = self._store.list_finished_since(cursor)
            with self._guard:
                for request_id, _ in ids:
                    if event := self.events.pop(request_id, None):
                        event.set()
                    else:
                        self._final.add(request_id)
            if not ids:
                seen = self._store.wait_for_change(seen, 1.0)

    def wait(self, request_id: str) -> None:
        with self._guard:
            if request_id in self._final:
                self._final.discard(request_id)
                return
            event = self.events[request_id] = threading.Event()
        event.wait(60)


def run_asker(
    store: ServiceStore,
    watch: Watch,
    number: int,
    pause: float,
    until: float,
    latencies: list[tuple[float, float]],
) -> None:
    """Run one asker."""
    draw, seq = random.Random(number), 0
    payload = os.urandom(4000)
    time.sleep(draw.uniform(0, pause))
    while time.monotonic() < until:
        new = NewRequest(
            kind="sample",
            owner="key",
            session_id="s",
            target=f"sampler-{number}",
            seq=seq,
            payload=payload,
            content_type="json",
        )
        began = time.perf_counter()
        stored = store.accept_request(new)
        accepted = time.perf_counter()
        watch.wait(stored.request_id)
        answered = store.find_result(stored.request_id)
        assert answered is not None and answered.answer is not None
        latencies.append((accepted - began, time.perf_counter() - began))
        seq += 1
        if pause:
            time.sleep(draw.expovariate(1 / pause))


def _read_processor_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def measure(url: str, askers: int, pause: float, seconds: float) -> dict[str, Any]:
    """Measure one row."""
    store = ServiceStore(url)
    worker = multiprocessing.get_context("spawn").Process(
        target=run_worker, args=(url,), daemon=True
    )
    worker.start()
    watch = Watch(store)
    warm: list[tuple[float, float]] = []
    run_asker(store, watch, 10_000, 0.0, time.monotonic() + 3.0, warm)
    latencies: list[tuple[float, float]] = []
    used = time.process_time(), _read_processor_seconds(worker.pid)
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=run_asker, args=(store, watch, n, pause, until, latencies))
        for n in range(askers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asker_seconds, others = (
        time.process_time() - used[0],
        _read_processor_seconds(worker.pid) - used[1],
    )
    worker.kill()
    accepts, totals = (sorted(values) for values in zip(*latencies, strict=True))

    def quantile(values: list[float], share: float) -> float:
        return round(1000 * values[min(len(values) - 1, int(share * len(values)))], 2)

    return {
        "askers": askers,
        "pause_s": pause,
        "futures": len(latencies),
        "per_second": round(len(latencies) / seconds, 1),
        "accept_p50_ms": quantile(accepts, 0.5),
        "accept_p99_ms": quantile(accepts, 0.99),
        "future_p50_ms": quantile(totals, 0.5),
        "future_p99_ms": quantile(totals, 0.99),
        "asker_cpu_ms": round(1000 * asker_seconds / len(latencies), 2),
        "worker_cpu_ms": round(1000 * others / len(latencies), 2),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", required=True, help="folder of the stores and of service_store.json"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row (default: 10)")
    parser.add_argument("--askers", type=int, default=64)
    arguments = parser.parse_args()
    folder = Path(arguments.output)
    rows = []
    for name, askers, pause in (
        ("one", 1, 0.0),
        ("paced", arguments.askers, 0.5),
        ("saturated", arguments.askers, 0.0),
    ):
        rows.append(
            measure(
                f"sqlite:///{folder}/{name}-{time.time_ns()}.db", askers, pause, arguments.seconds
            )
        )
        print(json.dumps(rows[-1]), flush=True)
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rows": rows,
    }
    (folder / "service_store.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
