"""GRPO with rollouts from vLLM on one GPU: started, trained with, killed, deceived. Called by `gpu.py --vllm PYTHON`.

Random weights and prompts, made from a seed; trainer and server share the GPU. For each case vLLM is started with
deployments/vllm/start.py on the model's folder, and GRPO runs some iterations: the largest difference of log-probs on
the probe and on the rollouts, seconds of the iteration and of bringing weights, tokens/s. At the end of the first case
the server is killed with SIGKILL in the middle of the rollouts and started again; then it samples at another
temperature than requested, which has to be refused with the figure. DIR/gpu_vllm.json and DIR/gpu_vllm.md.

`--vllm own` replaces vLLM by `posttrain serve`: it shows that the command works, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import torch
from speed import inputs

from rl_core.errors import SamplerMismatch
from rl_core.models.causal_lm import save
from rl_core.models.lora import add_adapter
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollout_workers.server_backend import ServerBackend
from rl_core.settings import (
    LoraSettings,
    PolicySettings,
    RolloutServerSettings,
    RolloutSettings,
    SamplingSettings,
)
from rl_core.timing import collect_seconds
from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0  # of a server: loading, and what vLLM compiles
KEY = "POSTTRAIN_GPU_BENCHMARK_KEY"


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train with a server."""

    name: str
    dtype: str
    lora: bool = False
    sleeps: bool = False


CASES = (
    Case("float32, whole model", "float32"),
    Case("bfloat16, whole model, sleep", "bfloat16", sleeps=True),
    Case("bfloat16, LoRA", "bfloat16", lora=True),
)


class Server:
    """The process of one server, started again on demand."""

    def __init__(self, python, folder, case, output):
        self.port = free_port()
        self.url, self._log = (
            f"http://127.0.0.1:{self.port}",
            output / f"server_{case.name.replace(' ', '_')}.log",
        )
        if python == "own":
            self._command = [
                sys.executable,
                "-m",
                "posttrain.cli.main",
                "serve",
                str(folder),
                "--port",
                str(self.port),
                "--output",
                str(output / "own"),
                "--name",
                "policy",
                "--set",
                "serving.rollouts=true",
                "--set",
                f"model.dtype={case.dtype}",
            ]
        else:
            self._command = [
                sys.executable,
                str(ROOT / "deployments/vllm/start.py"),
                "--python",
                python,
                "--model",
                str(folder),
                "--port",
                str(self.port),
                "--dtype",
                case.dtype,
                "--gpu-memory",
                "0.4",
                *(["--sleeps"] if case.sleeps else []),
                *(["--lora-rank", "16"] if case.lora else []),
            ]
        self._serving_key = output / "own" / "serving" / "token" if python == "own" else None
        self.start()

    def start(self):
        """Start, and wait until it answers; returns the seconds that took."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        while not is_answering(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() - began > START_S:
                raise SystemExit(f"the server did not start; its log: {self._log}")
            time.sleep(0.5)
        os.environ[KEY] = (
            self._serving_key.read_text().strip() if self._serving_key is not None else "none"
        )
        return time.monotonic() - began

    def kill(self):
        """Kill the process group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_vllm(bench, python, output, games):
    """Run all cases; `games` returns renderer, environment and rewards of `gpu.py`."""
    results = {"about": bench.about(), "server": python, "cases": []}
    for number, case in enumerate(CASES):
        result = run_case(bench, python, output, games, case, with_faults=number == 0)
        results["cases"].append(result)
        print(json.dumps(result), flush=True)
        (output / "gpu_vllm.json").write_text(json.dumps(results, indent=1) + "\n")
        (output / "gpu_vllm.md").write_text(format_table(results))
    print((output / "gpu_vllm.md").read_text())


def run_case(bench, python, output, games, case, *, with_faults):
    folder = output / f"base_{case.dtype}"
    model = bench.model().to(getattr(torch, case.dtype))
    save(model, inputs.make_tokenizer(bench.config.vocab_size), folder)
    if case.lora:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = add_adapter(model, LoraSettings(rank=16, alpha=32.0))
    server = Server(python, folder, case, output)
    try:
        trainer = make_trainer(bench, games, case, model, server)
        rows = [run_iteration(trainer) for _ in range(bench.steps + 1)]
        faults = try_faults(trainer, server) if with_faults else {}
        described = trainer.server.description
        trainer.server.close()
    finally:
        server.kill()
    taken = rows[1:]
    return {
        "case": case.name,
        "server": described.engine_label,
        "versions": dict(described.versions),
        "iterations": len(taken),
        "seconds": statistics.median(row["seconds"] for row in taken),
        "sync_seconds": statistics.median(row["sync_seconds"] for row in taken),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in taken),
        "weight_mb": taken[-1]["weight_bytes"] / 1e6,
        "probe_difference": max(row["probe_difference"] for row in rows),
        "rollout_difference": max(row["rollout_difference"] for row in rows),
        **faults,
    }


def make_trainer(bench, games, case, model, server):
    """Make a trainer as `gpu.py`'s GRPO, whose backend is the server."""
    work = bench.work
    settings = PolicySettings(
        algorithm="grpo",
        iterations=1000,
        prompts_per_iteration=work["prompts"],
        group_size=work["group"],
        rewards={"gpu:reward_differently": 1.0},
        micro_batch_tokens=work["micro_batch"],
        importance="token",
        sampling=SamplingSettings(max_completion_tokens=work["completion"], temperature=0.9),
        rollouts=RolloutSettings(
            workers="server",
            address=f"127.0.0.1:{server.port}",
            server=RolloutServerSettings(key_variable=KEY, sleeps=case.sleeps, patience_s=START_S),
        ),
        learning_rate=1e-3 if case.lora else 1e-5,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
    )
    length = work["prompt"] + work["completion"]
    backend = ServerBackend(
        model,
        inputs.make_tokenizer(bench.config.vocab_size),
        settings.rollouts,
        eos_ids=(),
        max_length=length,
    )
    trainer = PolicyGradientTrainer(
        model,
        None,
        games.Numbers(),
        games.Questions(bench.config.vocab_size, work["prompt"]),
        settings,
        games.SEED,
        RewardOrchestrator(settings.rewards),
        backend,
    )
    trainer.server = backend
    return trainer


def run_iteration(trainer):
    began = time.perf_counter()
    with collect_seconds() as spans:
        metrics = trainer.step()
    return {
        "seconds": time.perf_counter() - began,
        "sync_seconds": spans.get("weight_sync", 0.0),
        "tokens_per_s": metrics["perf/rollout_tokens_per_second"],
        "weight_bytes": metrics["perf/weight_bytes"],
        "probe_difference": metrics["policy/server_difference"],
        "rollout_difference": metrics["policy/sampler_difference_max"],
    }


def try_faults(trainer, server):
    """Try SIGKILL in the middle, a start after it, and a server that samples at another temperature than requested."""
    complete, counted, again = trainer.server.server.sample_completion, [], []

    def killing(*arguments):
        counted.append(None)
        if len(counted) == 9:  # eight are the probe
            server.kill()
            thread = threading.Thread(target=lambda: again.append(server.start()))
            thread.start()
        return complete(*arguments)

    trainer.server.server.sample_completion = killing
    trainer.server.weights._verified_temperatures.clear()  # so that the probe is asked first
    metrics = trainer.step()

    def hot(name, ids, most, sampling, seed, eos_ids):
        return complete(
            name, ids, most, dataclasses.replace(sampling, temperature=2.0), seed, eos_ids
        )

    trainer.server.server.sample_completion = hot
    try:
        trainer.step()
        refused = "NOT refused"
    except SamplerMismatch as error:
        refused = str(error)
    return {
        "recoveries": metrics["perf/server_recoveries"],
        "restart_seconds": again[0],
        "refused": refused,
    }


def format_table(results):
    lines = [
        f"{results['about']['device']}, torch {results['about']['torch']}, "
        f"{results['about']['parameters'] / 1e6:,.0f}M "
        "parameters; differences are the largest of a token, in nats.",
        "",
        "| case | server | tokens/s | s an iteration | s for weights | MB | probe | rollouts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["cases"]:
        lines.append(
            f"| {row['case']} | {row['server']} | {row['tokens_per_s']:,.0f} | {row['seconds']:.2f} "
            f"| {row['sync_seconds']:.2f} | {row['weight_mb']:,.1f} | {row['probe_difference']:.2g} "
            f"| {row['rollout_difference']:.2g} |"
        )
    for row in results["cases"]:
        if "refused" in row:
            lines += [
                "",
                f"Killed in the middle: {row['recoveries']:.0f} recovery, {row['restart_seconds']:.1f} s until the "
                f"server answered again. Another temperature: {row['refused']}",
            ]
    return "\n".join(lines) + "\n"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def is_answering(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
