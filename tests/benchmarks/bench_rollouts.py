"""Rollout engine against transformers' `generate`, interleaved in one process, on the same weights and prompts.

python tests/benchmarks/bench_rollouts.py [--rows 32] [--new 64] [--threads 1] [--repeats 7]

A random Llama of 3.2M parameters; both sides sample at temperature 1 without an end token, so that both decode exactly
rows x new tokens. Prints tokens/s as the median of the repeats, with the fastest and the slowest, and the ratio.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import dataclass, field

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.inference.engine import create_rollout_backend
from rl_core.settings import SamplingSettings

PROMPT = 32


@dataclass
class Endless:
    """A sequence that ends at its token limit."""

    prompt_ids: list[int]
    seed: int
    sampled: list[int] = field(default_factory=list)

    def take_action(self, action_ids: list[int], logprobs: list[float], hit_limit: bool) -> None:
        """Keep what was sampled; there is no next turn."""
        self.sampled = list(action_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("rows", 32), ("new", 64), ("threads", 1), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        vocab_size=512,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(3, 512, (options.rows, PROMPT))
    engine = create_rollout_backend(model, eos_ids=(1,), pad_id=0, max_length=PROMPT + options.new)
    sampling = SamplingSettings(max_completion_tokens=options.new, slots=options.rows)

    def ours() -> int:
        sequences = [Endless(row, seed) for seed, row in enumerate(prompts.tolist())]
        engine.run_sequences(sequences, sampling)
        return sum(len(sequence.sampled) for sequence in sequences)

    def theirs() -> int:
        with torch.inference_mode():
            out = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=options.new,
                max_new_tokens=options.new,
            )
        return (out.shape[1] - PROMPT) * options.rows

    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    for repeat in range(options.repeats + 1):
        for name, run in (("engine", ours), ("generate", theirs)):
            started = time.perf_counter()
            tokens = run()
            if repeat:  # the first round warms up
                rates[name].append(tokens / (time.perf_counter() - started))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.processor() or 'cpu'}"
    print(f"{options.rows} rows x {options.new} tokens, {options.threads} threads; {versions}")
    for name, values in rates.items():
        print(
            f"{name:>9}: {statistics.median(values):8,.0f} tokens/s  [{min(values):,.0f}, {max(values):,.0f}]"
        )
    ratio = statistics.median(
        a / b for a, b in zip(rates["engine"], rates["generate"], strict=True)
    )
    print(f"    ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
