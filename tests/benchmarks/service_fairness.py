"""Latency of a light tenant of the training service, alone and beside a tenant that floods it.

The light tenant draws a sample of 4 tokens, pauses, and draws the next. The flooding one holds 600 requests open all
the time: samples of 16 tokens, or passes of one run. Server and worker are processes, clients use HTTP.
`first`: the first sample after the flood has begun, when the light tenant had been away. `flood_per_second`: answers of
the flooding tenant, alone and beside the light one.

    PYTHONPATH=.:tests python tests/benchmarks/service_fairness.py --output outputs/service-fairness
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from helpers.service import make_base
from service_over_http import Client, draw_data, run_service
from service_throughput import SHAPE

from posttrain.training_service.store import ServiceStore

OPEN_REQUESTS = 600
PAUSE_SECONDS = 0.05
WARM_UP = 20
AWAY_SECONDS = 12.0  # longer than an owner counts as present
LANES = 24  # coroutines that send the flood's requests and fetch their answers


async def open_sampler(client: Client) -> str:
    """Open a session and a sampler of the base model."""
    client.session = (await client.send("create_session", {})).json()["session_id"]
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "base"}
    reply = await client.send("create_sampling_session", body)
    return str(reply.json()["sampling_session_id"])


def describe_sample(sampler: str, number: int, max_tokens: int) -> dict[str, Any]:
    """Build the body of a sample."""
    return {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": max_tokens, "temperature": 1.0, "seed": number},
    }


async def measure_light(address: str, key: str, count: int) -> list[float]:
    """Return the seconds of the light tenant's samples; the first includes nothing but the sample."""
    client = Client(address, key)
    sampler = await open_sampler(client)
    seconds = []
    for number in range(1, count + 1):
        started_at = time.perf_counter()
        promise = (await client.send("asample", describe_sample(sampler, number, 4))).json()
        await client.result(promise)
        seconds.append(time.perf_counter() - started_at)
        await asyncio.sleep(PAUSE_SECONDS)
    await client.close()
    return seconds


class Flood:
    """A tenant with many open requests."""

    def __init__(self, client: Client, kind: str) -> None:
        self._client, self._kind = client, kind
        self._sampler, self._number, self.num_answers = "", 0, 0
        self._open: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def start(self) -> None:
        """Open what the requests need, and fill the queue."""
        if self._kind == "passes":
            await self._client.open(8)
        else:
            self._sampler = await open_sampler(self._client)
        for _ in range(OPEN_REQUESTS):
            await self._send_next()

    async def _send_next(self) -> None:
        self._number += 1
        if self._kind == "passes":
            promise = await self._client.pass_(draw_data(self._number, "small"))
        else:
            body = describe_sample(self._sampler, self._number, 16)
            promise = (await self._client.send("asample", body)).json()
        self._open.put_nowait(promise)

    async def run_lane(self) -> None:
        """Fetch an answer, send the next request, without end."""
        while True:
            await self._client.result(await self._open.get())
            self.num_answers += 1
            await self._send_next()


async def _run_flood(address: str, key: str, kind: str, counter: Any) -> None:
    client = Client(address, key)
    flood = Flood(client, kind)
    await flood.start()
    lanes = [asyncio.create_task(flood.run_lane()) for _ in range(LANES)]
    while True:
        await asyncio.sleep(0.02)
        counter.value = flood.num_answers
        for lane in lanes:
            if lane.done():
                lane.result()


def flood_service(address: str, key: str, kind: str, counter: Any) -> None:
    """Flood the service until this process is terminated; `counter` gets the number of answers."""
    asyncio.run(_run_flood(address, key, kind, counter))


@contextlib.contextmanager
def start_flood(address: str, key: str, kind: str) -> Iterator[Any]:
    """Run a flood in a process of its own until the block ends; yield the counter of its answers."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    process = context.Process(target=flood_service, args=(address, key, kind, counter), daemon=True)
    process.start()
    try:
        yield counter
        assert process.is_alive(), "the flood ended"
    finally:
        process.terminate()
        process.join()


def measure_in_turn(
    address: str, light: str, heavy: str, count: int, repeats: int
) -> list[dict[str, Any]]:
    """Measure the light tenant alone and beside each kind of flood, in turn, as other load of the machine changes."""
    seconds: dict[str, list[float]] = {"alone": [], "samples": [], "passes": []}
    first: dict[str, list[float]] = {kind: [] for kind in seconds}
    rates: dict[str, list[float]] = {kind: [] for kind in seconds}
    asyncio.run(measure_light(address, light, WARM_UP))
    for _ in range(repeats):
        for kind, latencies in seconds.items():
            context = (
                contextlib.nullcontext() if kind == "alone" else start_flood(address, heavy, kind)
            )
            with context as counter:
                rate_alone = 0.0
                if counter is not None:
                    while not counter.value:
                        time.sleep(0.1)
                    before = counter.value
                    time.sleep(AWAY_SECONDS)
                    rate_alone = (counter.value - before) / AWAY_SECONDS
                before, started_at = (
                    (counter.value if counter is not None else 0),
                    time.perf_counter(),
                )
                new = asyncio.run(measure_light(address, light, count))
                if counter is not None:
                    beside = (counter.value - before) / (time.perf_counter() - started_at)
                    rates[kind] += [rate_alone, beside]
            first[kind].append(new[0])
            latencies += new[WARM_UP:]
            time.sleep(AWAY_SECONDS / 4)  # requests that the flood left are computed
    rows = []
    for kind, latencies in seconds.items():
        row = summarize_seconds(kind, latencies)
        if kind != "alone":
            row["p99_ratio"] = round(row["p99"] / rows[0]["p99"], 2)
            row["first"] = [round(value, 3) for value in first[kind]]
            row["flood_per_second"] = {
                "alone": [round(rate, 1) for rate in rates[kind][::2]],
                "beside": [round(rate, 1) for rate in rates[kind][1::2]],
            }
        rows.append(row)
    return rows


def summarize_seconds(name: str, seconds: list[float]) -> dict[str, Any]:
    """Summarise latencies."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    return {
        "beside": name,
        "samples": len(seconds),
        "p50": round(float(p50), 4),
        "p99": round(float(p99), 4),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=120, help="samples of the light tenant")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    base = make_base(arguments.output / "base", **SHAPE)
    folder = arguments.output / "service"
    folder.mkdir()
    with run_service(folder, base, arguments.threads, "exact") as (address, heavy, _):
        with contextlib.closing(ServiceStore(f"sqlite:///{folder}/service.db")) as store:
            _, light = store.create_key("light")
        rows = measure_in_turn(address, light, heavy, arguments.count, arguments.repeats)
    for row in rows:
        print(json.dumps(row))
    (arguments.output / "results.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
