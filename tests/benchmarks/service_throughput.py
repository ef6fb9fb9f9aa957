"""Throughput of the training service: several runs together, requests in flight, and the overhead of a future.

engine       updates/s of 1, 4 and 16 runs (ranks 4 to 32), one after the other and together, in one process
service      the same through server and worker as processes, a client each, over HTTP
pipelining   updates/s of one run with the next update in flight and one request at a time, with latency added to every
             exchange
futures      overhead of a future at 64 clients: from asking to the answer in hand, without the time of computing

With `--skyrl PYTHON` (an environment of Python 3.12 with `skyrl[tinker,jax]`) the last three are measured of SkyRL's
server, too, over the same model, by the same clients; of its futures only the total time is known.

    PYTHONPATH=.:tests python tests/benchmarks/service_throughput.py --output outputs/service-throughput
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from helpers.service import make_base
from service_over_http import (
    RANKS,
    SIZES,
    Client,
    PeerClient,
    draw_data,
    open_clients,
    run_peer,
    run_service,
)

from posttrain.training_service.store import ServiceStore
from rl_core.service.requests import AdapterConfig, CreateModel, ForwardBackward, OptimStep
from rl_core.service.training_engine import TrainingEngine
from rl_core.settings import ServiceEngineSettings

SHAPE = dict(  # 3.2M
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=688,
    max_position_embeddings=256,
    initializer_range=0.02,
)
RUNS = (1, 4, 16)
LATENCIES = (0, 20, 50, 100)  # ms
CLIENTS, PAUSE = 64, 0.5


Mark = tuple[float, tuple[float, ...]]


class Times:
    """Seconds by the clock and of processors, alternating between one after the other and together."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        """Initialise; others: processes (server, worker) whose processor time counts with this one's."""
        self._processes = [psutil.Process(), *map(psutil.Process, others)]
        self._measurements: list[tuple[Mark, Mark]] = []

    def mark(self) -> Mark:
        """Return seconds until now, by the clock and of each process."""
        used = [process.cpu_times() for process in self._processes]
        return time.perf_counter(), tuple(times.user + times.system for times in used)

    def add(self, begun: Mark, middle: Mark) -> None:
        """Add a measurement that ends now: one after the other until `middle`, then together."""
        self._measurements.append(
            (_subtract_marks(begun, middle), _subtract_marks(middle, self.mark()))
        )

    def row(self, updates: int) -> dict[str, Any]:
        """Updates a second, ratios, and milliseconds of each process an update."""
        clock = [(alone[0], joint[0]) for alone, joint in self._measurements]
        processors = [(sum(alone[1]), sum(joint[1])) for alone, joint in self._measurements]
        row: dict[str, Any] = {}
        for name, pairs in (("clock", clock), ("processors", processors)):
            row[name] = {
                "alone_per_second": round(updates / median(pair[0] for pair in pairs), 1),
                "at_once_per_second": round(updates / median(pair[1] for pair in pairs), 1),
                "ratio": round(median(pair[0] / pair[1] for pair in pairs), 2),
                "ratios": [round(pair[0] / pair[1], 2) for pair in pairs],
            }
        names = ("this", "server", "worker")[: len(self._processes)]
        for name, kind in (("alone_ms", 0), ("at_once_ms", 1)):
            row[name] = {
                process: round(
                    1000 * median(pair[kind][1][index] for pair in self._measurements) / updates, 2
                )
                for index, process in enumerate(names)
            }
        return row | {"load": round(os.getloadavg()[0], 1)}


def _subtract_marks(begun: Mark, ended: Mark) -> Mark:
    return ended[0] - begun[0], tuple(b - a for a, b in zip(begun[1], ended[1], strict=True))


# ------------------------------------------------------------------------------------------------------------- engine


def measure_engine(
    base: Path, steps: int, repeats: int, batch_runs: str
) -> Iterator[dict[str, Any]]:
    """Updates/s of the engine alone."""
    alone = TrainingEngine(
        ServiceEngineSettings(bases={"base": str(base)}, device="cpu", batch_runs="never")
    )
    joint = TrainingEngine(
        ServiceEngineSettings(bases={"base": str(base)}, device="cpu", batch_runs=batch_runs)
    )
    for engine in (alone, joint):
        for number in range(max(RUNS)):
            adapter = AdapterConfig(rank=RANKS[number % len(RANKS)], seed=number)
            engine.create_model(CreateModel(model_id=str(number), base="base", adapter=adapter))
    for size in SIZES:
        for count in RUNS:
            passes = [
                ForwardBackward(model_id=str(n), data=draw_data(n, size), loss_fn="cross_entropy")
                for n in range(count)
            ]
            updates = [OptimStep(model_id=str(n)) for n in range(count)]
            times = Times()
            for repeat in range(repeats + 1):
                marks = [times.mark()]
                for request, update in zip(passes, updates, strict=True):
                    for _ in range(steps):
                        alone.forward_backward([request])
                        alone.optim_steps([update])
                marks.append(times.mark())
                for _ in range(steps):
                    joint.forward_backward(passes)
                    joint.optim_steps(updates)
                if repeat:  # the first warms up
                    times.add(*marks)
            yield {
                "part": "engine",
                "size": size,
                "runs": count,
                **times.row(count * steps),
                "joint": joint.base_info("base").batches_runs,
            }


# ------------------------------------------------------------------------------------------------------------ service


async def measure_service(
    address: str,
    key: str,
    others: Sequence[int],
    steps: int,
    repeats: int,
    kind: type[Client] = Client,
) -> AsyncIterator[dict[str, Any]]:
    """Updates/s of several clients, each with a pass and an update in flight."""
    async with open_clients(address, key, max(RUNS), kind) as opened:
        for size in SIZES:
            await asyncio.gather(*(client.train(2, size, 1) for client in opened))
            for count in RUNS:
                times = Times(others)
                for _ in range(repeats):
                    begun = times.mark()
                    for client in opened[:count]:
                        await client.train(steps, size, 1)
                    middle = times.mark()
                    await asyncio.gather(
                        *(client.train(steps, size, 1) for client in opened[:count])
                    )
                    times.add(begun, middle)
                part = "service" if kind is Client else "peer"
                yield {"part": part, "size": size, "runs": count, **times.row(count * steps)}


async def measure_pipelining(
    address: str, key: str, steps: int, repeats: int, kind: type[Client] = Client
) -> AsyncIterator[dict[str, Any]]:
    """Updates/s of one client by latency."""
    part = "pipelining" if kind is Client else "peer_pipelining"
    async with open_clients(address, key, 1, kind) as (client,):
        for size in SIZES:
            await client.train(2, size, 1)
            for latency in LATENCIES:
                client.latency = latency / 1000
                times: dict[int, list[float]] = {0: [], 1: [], 2: []}
                for _ in range(repeats):
                    for ahead, some in times.items():
                        begun = time.perf_counter()
                        await client.train(steps, size, ahead)
                        some.append(time.perf_counter() - begun)
                rates = {ahead: steps / median(some) for ahead, some in times.items()}
                yield {
                    "part": part,
                    "size": size,
                    "latency_ms": latency,
                    "one_at_a_time": round(rates[0], 2),
                    "pass_and_update_in_flight": round(rates[1], 2),
                    "next_in_flight": round(rates[2], 2),
                    "gain": round(rates[2] / rates[0] - 1, 3),
                    "load": os.getloadavg()[0],
                }


async def measure_futures(
    address: str, key: str, others: Sequence[int], seconds: float, kind: type[Client] = Client
) -> dict[str, Any]:
    """Measure the overhead of samples of one token, requested by many clients of one sampler."""
    async with open_clients(address, key, 1, kind) as (first,):
        body = {"session_id": first.session, "sampling_session_seq_id": 0, "base_model": "base"}
        sampler = (await first.send("create_sampling_session", body)).json()["sampling_session_id"]
        askers = [kind(address, key) for _ in range(CLIENTS)]
        durations: list[float] = []
        promised: list[float] = []
        ids: list[
            tuple[str, float, float]
        ] = []  # request, when it was asked for (s since the epoch), seconds it took
        times = Times(others)

        async def ask(number: int, client: Client) -> None:
            await asyncio.sleep(PAUSE * number / CLIENTS)
            prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
            for turn in range(int(seconds / PAUSE)):
                body = {
                    "sampling_session_id": sampler,
                    "seq_id": 1 + number * 10_000 + turn,
                    "prompt": prompt,
                    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "seed": turn},
                }
                asked_at, begun = time.time(), time.perf_counter()
                promise = (await client.send("asample", body)).json()
                accepted = time.perf_counter() - begun
                await client.result(promise)
                took = time.perf_counter() - begun
                if turn:  # the first opens connections
                    promised.append(accepted)
                    durations.append(took)
                    ids.append((promise["request_id"], asked_at, took))
                await asyncio.sleep(max(0.0, PAUSE - took))

        begun = times.mark()
        await asyncio.gather(*(ask(number, client) for number, client in enumerate(askers)))
        _, used = _subtract_marks(begun, times.mark())
        for client in askers:
            await client.close()
    spent = {
        name: round(1000 * mean / len(durations), 2)
        for name, mean in zip(("this", "server", "worker"), used, strict=True)
    }
    return {
        "part": "futures" if kind is Client else "peer_futures",
        "clients": CLIENTS,
        "every_seconds": PAUSE,
        "processor_ms": spent,
        "whole": durations,
        "promised": promised,
        "ids": ids,
    }


def summarize_overheads(folder: Path | None, row: dict[str, Any]) -> dict[str, Any]:
    """Replace single times of the row by quantiles. `overhead` is the total without the request's computing;
    `waiting` is the part of it in which the worker computed for others, `future` is the rest.

    Args:
        folder: of the service, whose store knows when it computed; None = that is not known.
    """
    ids, durations, promised = row.pop("ids"), row.pop("whole"), row.pop("promised")
    values: dict[str, list[float]] = {"whole": durations, "promised": promised}
    if folder is not None:
        served = _find_computed_spans(folder, [request_id for request_id, _, _ in ids])
        busy = _merge_spans(served)
        values["computing"] = [finished - started for started, finished in served]
        values["overhead"] = [
            took - computing
            for (_, _, took), computing in zip(ids, values["computing"], strict=True)
        ]
        values["waiting"] = [
            _measure_overlap(busy, asked_at, span[0])
            for (_, asked_at, _), span in zip(ids, served, strict=True)
        ]
        values["future"] = [
            over - wait for over, wait in zip(values["overhead"], values["waiting"], strict=True)
        ]
    for name, numbers in values.items():
        ordered = sorted(numbers)
        row |= {
            f"{name}_p{share}_ms": round(1000 * ordered[int(share / 100 * len(ordered))], 2)
            for share in (50, 99)
        }
    return row | {"futures": len(durations), "load": os.getloadavg()[0]}


def _find_computed_spans(folder: Path, request_ids: Sequence[str]) -> list[tuple[float, float]]:
    """Return when each request was computed, from and to, seconds since the epoch."""
    store = ServiceStore(f"sqlite:///{folder}/service.db")
    spans = []
    for request_id in request_ids:
        result = store.find_result(request_id)
        assert result is not None and result.started is not None and result.finished is not None
        spans.append((result.started, result.finished))
    store.close()
    return spans


def _merge_spans(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of seconds that do not touch and cover the same time, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _measure_overlap(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds of [start, end] within spans that do not touch."""
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in spans)


def main() -> None:
    """Run the chosen parts; write their rows as lines of JSON and to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", required=True, help="folder of the services and of service_throughput.json"
    )
    parser.add_argument(
        "--parts",
        default="engine,service,pipelining,futures",
        help="comma-separated (default: all)",
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="updates of a run in one measurement (default: 20)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of each row (default: 3)"
    )
    parser.add_argument(
        "--sizes",
        default=",".join(SIZES),
        help=f"of requests, among {', '.join(SIZES)} (default: all)",
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of futures (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="of the worker (default: 2)")
    parser.add_argument(
        "--skyrl",
        metavar="PYTHON",
        help="of an environment with SkyRL, whose server is measured, too",
    )
    parser.add_argument("--batch-runs", default="exact", choices=("exact", "always", "never"))
    arguments = parser.parse_args()
    for size in SIZES.keys() - set(arguments.sizes.split(",")):
        del SIZES[size]
    folder = Path(arguments.output).resolve()
    base = make_base(folder / "base", **SHAPE)
    parts: list[str] = arguments.parts.split(",")
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    if "engine" in parts:
        import torch

        torch.set_num_threads(arguments.threads)
        for row in measure_engine(base, arguments.steps, arguments.repeats, arguments.batch_runs):
            note(row)

    async def through_http(
        service_folder: Path | None,
        address: str,
        key: str,
        processes: Sequence[int],
        kind: type[Client],
    ) -> None:
        if "service" in parts:
            async for row in measure_service(
                address, key, processes, arguments.steps, arguments.repeats, kind
            ):
                note(row)
        if "pipelining" in parts:
            async for row in measure_pipelining(
                address, key, arguments.steps, arguments.repeats, kind
            ):
                note(row)
        if "futures" in parts:
            note(
                summarize_overheads(
                    service_folder,
                    await measure_futures(address, key, processes, arguments.seconds, kind),
                )
            )

    if set(parts) - {"engine"}:
        service_folder = folder / f"service-{time.time_ns()}"
        service_folder.mkdir(parents=True)
        with run_service(service_folder, base, arguments.threads, arguments.batch_runs) as (
            address,
            key,
            processes,
        ):
            asyncio.run(through_http(service_folder, address, key, processes, Client))
        if arguments.skyrl:
            service_folder = folder / f"skyrl-{time.time_ns()}"
            with run_peer(service_folder, base, os.path.abspath(arguments.skyrl)) as (
                address,
                processes,
            ):
                asyncio.run(through_http(None, address, "peer", processes, PeerClient))
    facts = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rows": rows,
    }
    (folder / "service_throughput.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
