"""Sampling with bfloat16 against float32 weights on a CPU, in alternating rounds.

python tests/benchmarks/bench_bf16_decoding.py [--rows 1,8,32,64] [--new 128] [--threads 2] [--repeats 5] [--in-place]

A random Llama of SmolLM2-135M's shape (vocabulary 49,152, tied); prompts of 16 tokens; temperature 1, no end token.
A run includes packing the weights. `--in-place` adds bfloat16 weights that torch multiplies where they are, without
compiled code. Prints tokens/s: median [lowest, highest], and the ratio to float32, the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from bench_rollouts import Endless
from compare_speed import describe_processor
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.capabilities import Decision, check_fused_step, decoding
from rl_core.cpu import packed_gemm
from rl_core.inference.engine import create_rollout_backend
from rl_core.settings import SamplingSettings

PROMPT = 16


def build_model() -> LlamaForCausalLM:
    """Build a model of SmolLM2-135M's shape with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49_152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def build_sampler(
    model: LlamaForCausalLM, new: int, *, in_place: bool = False
) -> Callable[[int], int]:
    """Return a function that samples `rows` sequences and returns the number of tokens."""
    engine = create_rollout_backend(model, eos_ids=(1,), pad_id=0, max_length=PROMPT + new)
    prompts = torch.randint(3, 49_152, (64, PROMPT), generator=torch.Generator().manual_seed(1))

    def sample(rows: int) -> int:
        sequences = [Endless(row, seed) for seed, row in enumerate(prompts[:rows].tolist())]
        check = decoding.check_packed_weights
        if in_place:
            decision = Decision("packed weights", False, "for comparison")
            decoding.check_packed_weights = lambda *_, **__: decision
        try:
            engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=new, slots=rows))
        finally:
            decoding.check_packed_weights = check
        return sum(len(sequence.sampled) for sequence in sequences)

    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--in-place", action="store_true")
    for name, default in (("new", 128), ("threads", 2), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    floats = build_model()
    halves = copy.deepcopy(floats).bfloat16()
    print(
        f"{describe_processor()}; torch {torch.__version__}, transformers {transformers.__version__}"
    )
    products = packed_gemm.load_bf16_products()
    kernel = "none" if products is None else packed_gemm.describe_bf16_kernel(products)
    print(
        f"{options.threads} threads; fused: {check_fused_step(halves).allowed}; products {kernel}"
    )
    samplers = {
        "float32": build_sampler(floats, options.new),
        "bfloat16": build_sampler(halves, options.new),
    }
    if options.in_place:
        samplers["bfloat16 in place"] = build_sampler(halves, options.new, in_place=True)
    for rows in map(int, options.rows.split(",")):
        rates: dict[str, list[float]] = {name: [] for name in samplers}
        for repeat in range(options.repeats + 1):
            for name, sample in samplers.items():
                started = time.perf_counter()
                tokens = sample(rows)
                if repeat:  # the first round warms up
                    rates[name].append(tokens / (time.perf_counter() - started))
        for name, values in rates.items():
            ratios = [a / b for a, b in zip(values, rates["float32"], strict=True)]
            print(
                f"{rows:3} x {options.new} {name:>17}: {statistics.median(values):7.1f} tokens/s "
                f"[{min(values):.1f}, {max(values):.1f}], ratio {statistics.median(ratios):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
