"""Load of `posttrain serve`: answers and tokens a second against the offline engine, latencies, overload, peers.

    python tests/benchmarks/serving.py --output DIR [--preset small] [--tokens 128] [--peer]

Every client is a coroutine of one process that asks again as soon as it has an answer; with the package openai its
AsyncOpenAI, else httpx. Servers run as separate processes, so clients and server share the machine's processors.
The offline engine plays as many sequences together as there are clients, in a process with the server's threads, alone
and next to a busy interpreter. Peer: `transformers serve` on the same folder (needs the packages that it asks for).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "colour at row {} column {}?"
TEXTS = ["User:\ncolour at row 2 column 3?\n\nAssistant:\nzoom 2 3\n", "answer red\n"] * 50


def make_model(folder: Path, preset: str) -> Path:
    """Make a model of a preset's shape with random weights; most of its answers end at the limit of tokens."""
    from rl_core import create_policy
    from rl_core.settings import ModelSettings

    if not (folder / "config.json").is_file():
        policy = create_policy(TEXTS, ModelSettings(preset=preset, context=1024, device="cpu"))
        policy.save(folder)
    return folder


def measure_offline(folder: Path, counts: list[int], tokens: int, threads: int) -> dict[str, float]:
    """Return sampled tokens a second of the offline engine by number of sequences, the best of three."""
    code = f"""
import json, time, torch
torch.set_num_threads({threads})
from rl_core import load_policy
from rl_core.inference.serving_requests import AnswerSequence
from rl_core.settings import ModelSettings, SamplingSettings
policy = load_policy({str(folder)!r}, ModelSettings(device="cpu"))
backend, speeds = policy.backend(), {{}}
for clients in {counts}:
    for attempt in range(4):
        rows = [
            AnswerSequence(
                policy.renderer.prompt_ids([{{"role": "user", "content": {QUESTION!r}.format(n, attempt)}}]),
                n + 1000 * attempt,
            )
            for n in range(clients * 4)
        ]
        began = time.perf_counter()
        backend.run_sequences(rows, SamplingSettings(max_completion_tokens={tokens}, slots=clients))
        seconds = time.perf_counter() - began
        if attempt:
            speeds[clients] = max(speeds.get(clients, 0.0), sum(len(row.tokens) for row in rows) / seconds)
print(json.dumps(speeds))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=build_environment(threads), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    speeds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return speeds


def build_environment(threads: int) -> dict[str, str]:
    """Return the environment of measured processes."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


@contextlib.contextmanager
def run_busy_neighbour() -> Iterator[None]:
    """Run an interpreter that counts until the block ends, as clients and HTTP servers keep another processor busy: on
    processors that share a core's units, the engine is slower next to it."""
    child = subprocess.Popen([sys.executable, "-c", "while True: sum(i * i for i in range(1000))"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def run_process(
    command: list[str], threads: int, log: Path, ready: str, headers: dict[str, str]
) -> Iterator[int]:
    """Run a server until the block ends; yield its process id."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, env=build_environment(threads), stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(ready, headers=headers, timeout=5).status_code == 200:
                    break
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no server at {ready}: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        yield child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextlib.contextmanager
def run_server(
    folder: Path, output: Path, port: int, threads: int, **settings: Any
) -> Iterator[tuple[str, str]]:
    """Run `posttrain serve`; yield (base URL, token)."""
    overrides = [
        part for name, value in settings.items() for part in ("--set", f"serving.{name}={value}")
    ]
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--name",
        "measured",
        "--output",
        str(output),
        "--set",
        f"serving.threads={threads}",
        "--set",
        "model.device=cpu",
        *overrides,
    ]
    with run_process(
        command, threads, output / f"serve-{port}.log", f"http://127.0.0.1:{port}/readyz", {}
    ):
        yield f"http://127.0.0.1:{port}/v1", (output / "serving" / "token").read_text().strip()


class Clients:
    """So many clients of one server, each asking again as soon as it has an answer."""

    def __init__(self, url: str, key: str, model: str, tokens: int, *, official: bool) -> None:
        self.url, self.key, self.model, self.tokens, self.official = (
            url,
            key,
            model,
            tokens,
            official,
        )
        self.seconds: list[float] = []
        self.sampled = 0
        self.statuses: Counter[int] = Counter()

    async def run(self, clients: int, seconds: float) -> None:
        """Send requests for so long; answers that began within it count when they end within it."""
        self.end = time.perf_counter() + seconds
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(limits=limits, timeout=120) as client:
            ask = (
                self._make_openai_asker(client) if self.official else self._make_httpx_asker(client)
            )
            await asyncio.gather(*(self._loop(ask, number) for number in range(clients)))

    async def _loop(self, ask: Any, number: int) -> None:
        turn = 0
        while time.perf_counter() < self.end:
            turn += 1
            began = time.perf_counter()
            status, tokens = await ask(QUESTION.format(number, turn))
            now = time.perf_counter()
            if now <= self.end:
                self.statuses[status] += 1
                if status == 200:
                    self.sampled += tokens
                    self.seconds.append(now - began)
            if status != 200:
                await asyncio.sleep(0.05)

    def _make_httpx_asker(self, client: httpx.AsyncClient) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"}

        async def ask(text: str) -> tuple[int, int]:
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": self.tokens,
                "temperature": 1.0,
            }
            reply = await client.post(f"{self.url}/chat/completions", json=body, headers=headers)
            return reply.status_code, reply.json()["usage"][
                "completion_tokens"
            ] if reply.status_code == 200 else 0

        return ask

    def _make_openai_asker(self, client: httpx.AsyncClient) -> Any:
        import openai

        official = openai.AsyncOpenAI(
            base_url=self.url, api_key=self.key, http_client=client, max_retries=0
        )

        async def ask(text: str) -> tuple[int, int]:
            try:
                completion = await official.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=self.tokens,
                    temperature=1.0,
                )
            except openai.APIStatusError as error:
                return error.status_code, 0
            assert completion.usage is not None
            return 200, completion.usage.completion_tokens

        return ask


def measure_load(
    url: str, key: str, model: str, clients: int, tokens: int, seconds: float, official: bool
) -> dict[str, Any]:
    """Return answers and tokens a second, and quantiles of the latency."""
    asyncio.run(Clients(url, key, model, tokens, official=official).run(clients, 3.0))  # warm
    load = Clients(url, key, model, tokens, official=official)
    asyncio.run(load.run(clients, seconds))
    times = sorted(load.seconds)
    return {
        "clients": clients,
        "answers_per_second": len(times) / seconds,
        "tokens_per_second": load.sampled / seconds,
        "p50": times[len(times) // 2] if times else None,
        "p99": times[int(0.99 * (len(times) - 1))] if times else None,
        "statuses": dict(load.statuses),
    }


def measure_peer(
    folder: Path, output: Path, port: int, threads: int, counts: list[int], arguments: Any
) -> list[dict[str, Any]]:
    """Measure the same load on `transformers serve`."""
    command = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        *arguments.peer_option,
    ]
    (output / "hub").mkdir(
        exist_ok=True
    )  # its list of models reads the hub's cache, and fails where there is none
    os.environ.setdefault("HF_HUB_CACHE", str((output / "hub").resolve()))
    with run_process(
        command, threads, output / "transformers.log", f"http://127.0.0.1:{port}/v1/models", {}
    ):
        return [
            measure_load(
                f"http://127.0.0.1:{port}/v1",
                "none",
                str(folder),
                count,
                arguments.tokens,
                arguments.seconds,
                arguments.official,
            )
            for count in counts
        ]


def main() -> None:
    """Measure, print, and write serving.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--model", type=Path, help="a model folder instead of a preset")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=18655, help="and the next one")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument(
        "--crowd",
        type=int,
        default=400,
        help="clients of the overload, more than slots and queue take",
    )
    parser.add_argument("--peer", action="store_true", help="transformers serve as well")
    parser.add_argument("--peer-option", action="append", default=[], help="of transformers serve")
    arguments = parser.parse_args()
    arguments.official = False
    with contextlib.suppress(ImportError):
        import openai  # noqa: F401

        arguments.official = True
    arguments.output.mkdir(parents=True, exist_ok=True)
    folder = arguments.model or make_model(
        arguments.output / f"model-{arguments.preset}", arguments.preset
    )
    results: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "load": os.getloadavg(),
        "client": "openai" if arguments.official else "httpx",
    }
    threads, output = arguments.threads, arguments.output
    results["offline"] = measure_offline(folder, arguments.clients, arguments.tokens, threads)
    with run_busy_neighbour():
        results["offline_beside_busy"] = measure_offline(
            folder, arguments.clients, arguments.tokens, threads
        )
    with run_server(folder, output, arguments.port, threads) as (url, key):
        results["serve"] = [
            measure_load(
                url, key, "measured", count, arguments.tokens, arguments.seconds, arguments.official
            )
            for count in arguments.clients
        ]
        results["overload"] = measure_load(
            url,
            key,
            "measured",
            arguments.crowd,
            arguments.tokens,
            arguments.seconds,
            arguments.official,
        )
    if arguments.peer:
        results["peer"] = measure_peer(
            folder, output, arguments.port + 1, threads, arguments.clients, arguments
        )
    results["load_after"] = os.getloadavg()
    (output / "serving.json").write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
