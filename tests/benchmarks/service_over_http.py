"""A training service as two processes, and clients of it over HTTP, for `service_throughput.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from helpers.service_clients import loss

from posttrain.operations.processes import is_port_free
from posttrain.settings_files import parse_service_settings
from posttrain.training_service.store import ServiceStore
from rl_core.service.requests import Datum
from rl_core.storage.atomic_files import write_json_atomic
from tasks.config import dump_settings

__all__ = [
    "RANKS",
    "SIZES",
    "Client",
    "PeerClient",
    "draw_data",
    "open_clients",
    "run_peer",
    "run_service",
]

ROOT = Path(__file__).parents[2]
RANKS = (4, 8, 16, 32)
SIZES = {
    "tiny": (1, 16),
    "small": (4, 32),
    "large": (16, 64),
}  # sequences of a request, tokens of each


def draw_data(seed: int, size: str) -> tuple[Datum, ...]:
    """Draw sequences of random tokens."""
    rows, tokens = SIZES[size]
    tokens_BS = np.random.default_rng(seed).integers(2, 512, (rows, tokens + 1))
    return tuple(Datum(row[:-1], {"target_tokens": row[1:]}) for row in tokens_BS)


@contextlib.contextmanager
def run_service(
    folder: Path, base: Path, threads: int, batch_runs: str, name: str = "base"
) -> Iterator[tuple[str, str, list[int]]]:
    """Run a service of two processes, whose only base model has this name; yield address, key and process numbers."""
    port = next(number for number in range(8500, 8600) if is_port_free(number))
    engine = {"bases": {name: str(base)}, "device": "cpu", "batch_runs": batch_runs}
    settings = parse_service_settings(
        {"folder": str(folder), "server": {"port": port}, "engine": engine}
    )
    store = ServiceStore(settings.store_url)
    _, key = store.create_key("bench")
    store.close()
    write_json_atomic(folder / "settings.json", dump_settings(settings))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    processes = []
    for role in ("server", "worker"):
        command = [
            sys.executable,
            "-m",
            "posttrain.training_service.process",
            role,
            str(folder / "settings.json"),
        ]
        with open(folder / f"{role}.log", "wb") as log:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, processes[0], folder / "server.log")
        yield address, key, [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers. Raises: RuntimeError with the end of its log if it does not."""
    for _ in range(3000):
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=5).close()
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"{address} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


# SkyRL's server has to be a child of `uv run`, and starts its engine so; here this takes uv's place.
_UV = """#!/bin/sh
while [ "$1" != "-m" ]; do shift; done
"{python}" "$@" &
child=$!
trap 'kill $child' TERM
wait $child
wait $child
"""


@contextlib.contextmanager
def run_peer(folder: Path, base: Path, python: str) -> Iterator[tuple[str, list[int]]]:
    """Run SkyRL's server over the same model, by its JAX backend; yield address and process numbers (server, engine).

    Args:
        python: of an environment with `skyrl[tinker,jax]` and aiohttp, which 0.4.0 leaves out (Python 3.12).
    """
    port = next(number for number in range(8600, 8700) if is_port_free(number))
    (folder / "bin").mkdir(parents=True)
    shim = folder / "bin" / "uv"
    shim.write_text(_UV.format(python=python))
    shim.chmod(0o755)
    backend = {"max_lora_adapters": 2 * max(RANKS), "max_lora_rank": max(RANKS)}
    command = [
        str(shim),
        "run",
        "-m",
        "skyrl.tinker.api",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--base-model",
        base.name,
        "--backend",
        "jax",
        "--backend-config",
        json.dumps(backend),
        "--checkpoints-base",
        str(folder / "checkpoints"),
        "--database-url",
        f"sqlite:///{folder / 'peer.db'}",
    ]
    without = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    with open(folder / "peer.log", "wb") as log:
        server = subprocess.Popen(command, cwd=base.parent, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address, server, folder / "peer.log")
        below = psutil.Process(server.pid).children(recursive=True)
        yield (
            address,
            [
                process.pid
                for process in below
                if process.name() != "uv" and "sh" not in process.name()
            ][:2],
        )
    finally:
        server.terminate()
        server.wait(60)


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of a response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)


class Connections:
    """HTTP/1.1 connections to one address that stay open: as little work as can be, so that the clients of a
    measurement are not what is measured."""

    def __init__(self, address: str, key: str) -> None:
        self._host, _, port = address.removeprefix("http://").partition(":")
        self._port = int(port)
        self._head = f"Host: {self._host}:{port}\r\nX-API-Key: {key}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes, content_type: str) -> Reply:
        """Exchange one request; on another connection if the server has closed one that was idle."""
        head = f"POST /api/v1/{path} HTTP/1.1\r\n{self._head}Content-Type: {content_type}\r\n"
        while True:
            is_used = bool(self._idle)
            reader, writer = (
                self._idle.pop()
                if is_used
                else await asyncio.open_connection(self._host, self._port)
            )
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            try:
                response_head = (await reader.readuntil(b"\r\n\r\n")).lower()
                break
            except (asyncio.IncompleteReadError, ConnectionResetError):
                writer.close()
                if not is_used:
                    raise
        length = int(response_head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        reply = Reply(int(response_head[9:12]), await reader.readexactly(length) if length else b"")
        self._idle.append((reader, writer))
        return reply

    async def close(self) -> None:
        """End all connections."""
        for _, writer in self._idle:
            writer.close()


class Client:
    """A client of the service; every exchange takes `latency` seconds more."""

    def __init__(self, address: str, key: str, latency: float = 0.0) -> None:
        self._http = Connections(address, key)
        self.latency = latency
        self.model_id, self._seq, self.session = "", 0, ""

    async def send(self, path: str, content: dict[str, Any] | bytes) -> Reply:
        """Send a request in JSON or protobuf; repeat it while there is no result."""
        body, kind = content, "application/x-protobuf"
        if isinstance(body, dict):
            body, kind = json.dumps(body).encode(), "application/json"
        while True:
            if self.latency:
                await asyncio.sleep(self.latency / 2)
            reply = await self._http.post(path, body, kind)
            if self.latency:
                await asyncio.sleep(self.latency / 2)
            if reply.status != 408:
                assert reply.status == 200, reply
                return reply

    async def open(self, rank: int) -> None:
        """Open a session and a run."""
        self.session = (await self.send("create_session", {})).json()["session_id"]
        lora = {"rank": rank, "seed": rank}
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": "base",
            "lora_config": lora,
        }
        created = (await self.send("create_model", body)).json()
        self.model_id = created["model_id"]
        await self.result(created)

    async def result(self, promise: dict[str, Any]) -> Reply:
        """Return the result of a request."""
        return await self.send("retrieve_future", {"request_id": promise["request_id"]})

    async def pass_(self, datums: Sequence[Datum]) -> dict[str, Any]:
        """Request a forward and backward pass; return its promise."""
        self._seq += 1
        payload = loss(self.model_id, self._seq, datums).payload
        promise: dict[str, Any] = (await self.send("forward_backward", payload)).json()
        return promise

    async def update(self) -> dict[str, Any]:
        """Request an update; return its promise."""
        self._seq += 1
        body = {
            "model_id": self.model_id,
            "seq_id": self._seq,
            "adam_params": {"learning_rate": 1e-4},
        }
        promise: dict[str, Any] = (await self.send("optim_step", body)).json()
        return promise

    async def train(self, steps: int, size: str, ahead: int) -> None:
        """Updates. ahead: 0 = every result before the next request; k = up to k updates in flight behind the newest."""
        flying: list[asyncio.Task[Reply]] = []
        for step in range(steps):
            gradient = asyncio.create_task(self.result(await self.pass_(draw_data(step, size))))
            if not ahead:
                await gradient
            other = asyncio.create_task(self.result(await self.update()))
            flying += [gradient, other]
            while len(flying) > 2 * max(0, ahead - 1):
                await flying.pop(0)
        await asyncio.gather(*flying)

    async def close(self) -> None:
        """End the connections."""
        await self._http.close()


class PeerClient(Client):
    """The same of SkyRL's server, which chooses the names of runs itself."""

    async def open(self, rank: int) -> None:
        """As `Client.open`."""
        self.session = (await self.send("create_session", {"tags": [], "sdk_version": "0"})).json()[
            "session_id"
        ]
        body = {
            "session_id": self.session,
            "base_model": "base",
            "lora_config": {"rank": rank, "seed": rank},
        }
        created = (await self.send("create_model", body)).json()
        self.model_id = created["model_id"]
        await self.result(created)


@contextlib.asynccontextmanager
async def open_clients(
    address: str, key: str, count: int, kind: type[Client] = Client
) -> AsyncIterator[list[Client]]:
    """Open clients with a run each."""
    opened = [kind(address, key) for _ in range(count)]
    for number, client in enumerate(opened):
        await client.open(RANKS[number % len(RANKS)])
    yield opened
    for client in opened:
        await client.close()
