"""Sampling against vLLM and llama.cpp on a CPU, in alternating rounds on the same weights in bfloat16.

    python tests/benchmarks/bench_sampling_peers.py --model FOLDER [--vllm VENV/bin/python] [--llama-cpp FOLDER]
        [--rows 1,8,32,64] [--new 128] [--threads 2] [--repeats 3]

model: a Hugging Face folder, exported to GGUF for llama.cpp. vllm: the Python of an environment with vLLM's build for
CPUs (deployments/vllm/install_cpu.py). llama-cpp: the folder into which `make llama-test` installed xllamacpp; it
samples one sequence at a time. Prompts are 16 tokens, temperature 1, no end token.
Prints tokens/s as the median [lowest, highest], and the ratio of each round, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = 16


def main() -> None:
    options = parse_options()
    if options.serve:
        answer_rounds(build_side(options.serve, options), options)
        return
    from compare_speed import describe_processor

    print(f"{describe_processor()}; {options.threads} threads; {options.new} tokens a sequence")
    sides = {"float32": start_side("float32", sys.executable, options)}
    sides["bfloat16"] = start_side("bfloat16", sys.executable, options)
    if options.vllm:
        sides["vllm"] = start_side("vllm", options.vllm, options)
    if options.llama_cpp:
        sides["llama.cpp"] = start_side("llama.cpp", sys.executable, options)
    try:
        for rows in map(int, options.rows.split(",")):
            measure_rows(rows, sides, options)
    finally:
        for side in sides.values():
            side.stdin.close()
            side.wait(timeout=60)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm", default="")
    parser.add_argument("--llama-cpp", default="")
    parser.add_argument("--rows", default="1,8,32,64")
    for name, default in (("new", 128), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--serve", default="", help="a worker's option")
    return parser.parse_args()


def start_side(name: str, python: str, options: argparse.Namespace) -> Any:
    """Start a process that samples on request, and wait until its model is loaded."""
    arguments = [python, __file__, "--serve", name, "--model", str(options.model.resolve())]
    arguments += ["--new", str(options.new), "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if name == "llama.cpp":
        environment["PYTHONPATH"] = os.pathsep.join(
            [options.llama_cpp, environment.get("PYTHONPATH", "")]
        )
    process = subprocess.Popen(
        arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ask_side(process, 0)
    return process


def ask_side(process: Any, rows: int) -> float:
    """Return the tokens per second of a round; 0 rows wait for the model."""
    process.stdin.write(f"{rows}\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("RATE "):
            return float(line.split()[1])
    raise SystemExit(f"a side ended with exit code {process.wait()}")


def measure_rows(rows: int, sides: dict[str, Any], options: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    names = [name for name in sides if name != "llama.cpp" or rows == 1]
    for repeat in range(options.repeats + 1):
        for name in names if repeat % 2 else reversed(names):
            rate = ask_side(sides[name], rows)
            if repeat:  # the first round warms up
                rates[name].append(rate)
    for name in names:
        ratios = [a / b for a, b in zip(rates["bfloat16"], rates[name], strict=True)]
        print(
            f"{rows:3} rows {name:>9}: {statistics.median(rates[name]):7.1f} tokens/s "
            f"[{min(rates[name]):.1f}, {max(rates[name]):.1f}]; ours in bfloat16 "
            f"{statistics.median(ratios):.2f} times [{min(ratios):.2f}, {max(ratios):.2f}]",
            flush=True,
        )


def answer_rounds(sample: Callable[[int], int], options: argparse.Namespace) -> None:
    for line in sys.stdin:
        rows = int(line)
        began = time.perf_counter()
        tokens = sample(rows) if rows else 0
        print(f"RATE {tokens / (time.perf_counter() - began)}", flush=True)


def build_side(name: str, options: argparse.Namespace) -> Callable[[int], int]:
    if name == "vllm":
        return build_vllm(options)
    import torch

    torch.set_num_threads(options.threads)
    return build_llama_cpp(options) if name == "llama.cpp" else build_ours(name, options)


def make_prompts(rows: int) -> list[list[int]]:
    return [
        [(7 + 13 * row + 29 * index) % 40_000 + 100 for index in range(PROMPT)]
        for row in range(rows)
    ]


def build_ours(name: str, options: argparse.Namespace) -> Callable[[int], int]:
    import torch
    from bench_rollouts import Endless
    from transformers import AutoModelForCausalLM

    from rl_core.inference.engine import create_rollout_backend
    from rl_core.settings import SamplingSettings

    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    model.requires_grad_(False)
    engine = create_rollout_backend(model, eos_ids=(1,), pad_id=0, max_length=PROMPT + options.new)

    def sample(rows: int) -> int:
        sequences = [Endless(ids, seed) for seed, ids in enumerate(make_prompts(rows))]
        engine.run_sequences(
            sequences, SamplingSettings(max_completion_tokens=options.new, slots=rows)
        )
        return sum(len(sequence.sampled) for sequence in sequences)

    return sample


def build_vllm(options: argparse.Namespace) -> Callable[[int], int]:
    from vllm import LLM, SamplingParams  # ty: ignore

    engine = LLM(
        model=str(options.model),
        dtype="bfloat16",
        max_model_len=PROMPT + options.new,
        enable_prefix_caching=False,
    )
    settings = SamplingParams(temperature=1.0, max_tokens=options.new, ignore_eos=True)

    def sample(rows: int) -> int:
        prompts = [{"prompt_token_ids": ids} for ids in make_prompts(rows)]
        results = engine.generate(prompts, settings, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return sample


def build_llama_cpp(options: argparse.Namespace) -> Callable[[int], int]:
    import xllamacpp
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl_core.models.gguf_export import write_gguf_file

    folder = Path(tempfile.mkdtemp(prefix="sampling-"))
    model = AutoModelForCausalLM.from_pretrained(options.model)
    file = folder / "model.gguf"
    write_gguf_file(model, AutoTokenizer.from_pretrained(options.model), file, "bf16")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel = PROMPT + options.new + 8, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    parameters.port, parameters.warmup, parameters.verbosity = 0, False, 0
    server = xllamacpp.Server(parameters)
    settings = {"n_predict": options.new, "temperature": 1.0, "ignore_eos": True}
    settings |= {"cache_prompt": False, "samplers": ["temperature"]}

    def sample(rows: int) -> int:
        count = 0
        for ids in make_prompts(rows):
            request = urllib.request.Request(
                f"{server.listening_address}/completion",
                json.dumps({"prompt": ids, **settings}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as response:
                count += json.load(response)["tokens_predicted"]
        return count

    return sample


if __name__ == "__main__":
    main()
