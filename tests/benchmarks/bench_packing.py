"""Packed rows against length-sorted padding: one forward and backward pass of SFT, interleaved in one process.

python tests/benchmarks/bench_packing.py [--rows 32] [--mean 60] [--threads 1] [--repeats 15]

A random Llama of 3.2M parameters and demonstrations of mean / 3 to 5 / 3 mean tokens, the last two thirds of each with
loss. Three ways: padded to the longest row in one batch, length-sorted padded micro-batches of a quarter of that, and
packed rows in one batch. Prints milliseconds as the median of the repeats and how many tokens each way runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.losses.supervised import supervised_loss
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import TrainRow, build_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("rows", 32), ("mean", 60), ("threads", 1), ("repeats", 15)):
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
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).train()
    rows = []
    for length in torch.randint(
        options.mean // 3, options.mean * 5 // 3 + 1, (options.rows,)
    ).tolist():
        ids, cut = torch.randint(3, 512, (length,)).tolist(), length // 3
        rows.append(TrainRow(ids[:cut], ids[cut:], [True] * (length - cut)))
    longest = max(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
    num_padded = longest * len(rows)
    ways = {
        "padded": build_batches(rows, num_padded, 0),
        "padded, 4 parts": build_batches(rows, num_padded // 4, 0),
        "packed": build_batches(rows, num_padded, 0, packing=True),
    }
    count = sum(sum(row.loss_mask) for row in rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, batches in ways.items():
            started = time.perf_counter()
            for batch in batches:
                logprobs_BS, _ = completion_logprobs(model, batch)
                supervised_loss(logprobs_BS, batch.loss_mask_BS, num_loss_tokens=count)[
                    0
                ].backward()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
            model.zero_grad()
    real = sum(int(batch.attention_mask_BS.sum()) for batch in ways["packed"])
    print(
        f"{options.rows} rows, {real} tokens, the longest {longest}; {options.threads} threads; "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for name, batches in ways.items():
        run = sum(batch.input_ids_BS.numel() for batch in batches)
        ratio = statistics.median(
            a / b for a, b in zip(seconds["padded"], seconds[name], strict=True)
        )
        print(
            f"{name:>16}: {statistics.median(seconds[name]) * 1e3:7.1f} ms [{min(seconds[name]) * 1e3:.1f}, "
            f"{max(seconds[name]) * 1e3:.1f}], {run} tokens run, {ratio:.2f} x padded"
        )


if __name__ == "__main__":
    main()
