"""Lower bound of the work of any implementation, at this machine's speed: `python -m speed.floor FOLDER --threads 1`.

Counted: matrix products on real tokens alone (the head where its output is read, attention's causal half), at the rate
that this model's shapes reach with 2048 rows; a decoding step takes the longer of its products and of reading every
weight once; AdamW streams 7 float32 values a parameter. Norms, rotary embedding, softmax, sampling and Python count as
nothing, so that nobody reaches the floor. A rate is the best of several passes: a busy neighbour lowers it least so.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from speed import inputs
from speed.protocol import Others

MATRIX_ROWS, CACHE_BYTES = 2048, 32 * 2**20  # weights above this do not stay in a cache


@dataclass(frozen=True)
class Shape:
    """A Llama's matrices, in parameters."""

    hidden: int
    layers: int
    trunk: int  # all matrices between embedding and head
    head: int

    @classmethod
    def of(cls, config):
        """From a dict as in `inputs.SIZES`."""
        hidden, layers, inner = (
            config["hidden_size"],
            config["num_hidden_layers"],
            config["intermediate_size"],
        )
        keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
        layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
        return cls(hidden, layers, layers * layer, hidden * config["vocab_size"])

    @property
    def parameters(self):
        """Embedding and norms included."""
        return self.trunk + 2 * self.head + (2 * self.layers + 1) * self.hidden

    def forward_flops(self, lengths, head_tokens):
        """Count FLOPs of full sequences: 2 per parameter and token; causal half of attention, 2 n^2 H per layer."""
        attention = sum(2 * n * n * self.hidden * self.layers for n in lengths)
        return 2 * self.trunk * sum(lengths) + 2 * self.head * head_tokens + attention


@dataclass(frozen=True)
class Rates:
    """Throughput of the machine per second."""

    train_flops: float  # the model's matrices, MATRIX_ROWS rows
    best_flops: float  # the same, with as many rows as is quickest
    read_bytes: float  # from memory that is as large as the weights
    copy_bytes: float  # read and written


def compute_adamw_seconds(shape, rates):
    """Reads weight, gradient and two moments, writes weight and moments."""
    size = 4 * shape.parameters
    return (
        7
        * size
        / (rates.copy_bytes if size > CACHE_BYTES else max(rates.copy_bytes, rates.read_bytes))
    )


def compute_decode_seconds(shape, rates, rows, new, prompt, unique):
    """Return seconds of `new` tokens for `rows` prompts of `prompt` tokens each, of which `unique` differ."""
    context = sum(prompt + index for index in range(new))
    flops = rows * (
        new * 2 * (shape.trunk + shape.head) + 4 * context * shape.hidden * shape.layers
    )
    compute = unique * 2 * shape.trunk * prompt / rates.train_flops + flops / rates.best_flops
    return max(compute, new * 4 * (shape.trunk + shape.head) / rates.read_bytes)


def compute_floor_rates(shape, rates, rows):
    """Return tokens per second at the floor, by stage: all real tokens; for generate_RxN, new tokens.

    Args:
        rows: as `inputs.make_rows` gives them; the lengths are their means. Episodes have no floor here.
    """
    adam, train = compute_adamw_seconds(shape, rates), rates.train_flops

    def batch(lengths, head_tokens, size):
        """Forward FLOPs and tokens of a mean batch."""
        share = size / len(lengths)
        return share * shape.forward_flops(lengths, head_tokens), share * sum(lengths)

    sft, sft_tokens = batch(
        [len(row["prompt"]) + len(row["completion"]) + 1 for row in rows["sft"]],
        sum(len(row["completion"]) + 1 for row in rows["sft"]),
        inputs.BATCH["sft"],
    )
    sides = [
        (len(row["prompt"]), len(row[name]) + 1)
        for row in rows["pairs"]
        for name in ("chosen", "rejected")
    ]
    lengths = [prompt + completion for prompt, completion in sides]
    scores, pair_tokens = batch(lengths, 0, 2 * inputs.BATCH["reward"])
    dpo, _ = batch(lengths, sum(completion for _, completion in sides), 2 * inputs.BATCH["dpo"])

    prompt, new = (
        sum(len(row["prompt"]) for row in rows["prompts"]) / len(rows["prompts"]),
        inputs.MAX_NEW,
    )
    count = inputs.BATCH["grpo"]
    policy, policy_tokens = batch([prompt + new] * count, count * new, count)
    values, _ = batch([prompt + new] * count, 0, count)
    grouped = compute_decode_seconds(shape, rates, count, new, prompt, count // inputs.GROUP)
    alone = compute_decode_seconds(shape, rates, count, new, prompt, count)
    floors = {
        "sft": sft_tokens / (3 * sft / train + adam),  # backward costs two forwards
        "reward": pair_tokens / (3 * scores / train + adam),
        "dpo": pair_tokens / (4 * dpo / train + adam),  # and the reference's forward
        "grpo": policy_tokens / (grouped + 3 * policy / train + adam),
        "grpo4": policy_tokens / (grouped + 4 * (3 * policy / train + adam)),
        # reference's and reward model's forward; policy's and critic's update
        "ppo": policy_tokens / (alone + (4 * policy + 4 * values) / train + 2 * adam),
    }
    for size in (32, 64):
        for length in (64, 256):
            seconds = compute_decode_seconds(shape, rates, size, length, prompt, size)
            floors[f"generate_{size}x{length}"] = size * length / seconds
    return floors


def measure_best_seconds(work, passes, seconds=0.25, least=5):
    """Return the quickest call over `passes` spells of `seconds` each."""
    work()
    best = float("inf")
    for _ in range(passes):
        end, calls = time.perf_counter() + seconds, 0
        while calls < least or time.perf_counter() < end:
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
            calls += 1
    return best


def measure(config, passes):
    """Measure rates for this shape, with the threads that torch has."""
    import torch

    shape = Shape.of(config)
    hidden, inner, vocabulary = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    matrices = [
        (hidden, hidden, 2),
        (hidden, keys, 2),
        (hidden, inner, 2),
        (inner, hidden, 1),
        (hidden, vocabulary, 1 / shape.layers),
    ]

    def flops(rows):
        work = spent = 0.0
        for width, out, times in matrices:
            x, weight, result = (
                torch.randn(rows, width),
                torch.randn(out, width),
                torch.empty(rows, out),
            )

            def multiply(x=x, weight=weight, result=result):
                torch.mm(x, weight.t(), out=result)

            spent += times * measure_best_seconds(multiply, passes, 0.06)
            work += times * 2 * rows * width * out
        return work / spent

    def read():
        block = torch.ones(shape.parameters)
        return 4 * block.numel() / measure_best_seconds(block.sum, passes, 0.15, 3)

    def copy():
        source, target = torch.ones(2**27), torch.empty(2**27)  # 512 MiB each: no cache holds them
        return (
            8 * source.numel() / measure_best_seconds(lambda: target.copy_(source), passes, 0.4, 3)
        )

    by_rows = [flops(rows) for rows in (MATRIX_ROWS, 32, 64)]
    return Rates(
        train_flops=by_rows[0], best_flops=max(by_rows), read_bytes=read(), copy_bytes=copy()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of one size, as `inputs.build` wrote it")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    config = inputs.SIZES[options.folder.name]
    others = Others([])
    rates = measure(config, options.passes)
    rows = {name: inputs.read(options.folder, name) for name in ("sft", "pairs", "prompts")}
    results = {
        "rates": asdict(rates),
        "tokens_per_s": compute_floor_rates(Shape.of(config), rates, rows),
    }
    print(json.dumps({**results, "others_cpu": others.cores()}))


if __name__ == "__main__":
    main()
