"""Training and sampling against model size, context, group size and rows, with the floor of this machine beside.

    python tests/benchmarks/cost_growth.py --output DIR [--axes size,context,group,rows] [--threads 2] [--repeats 3]
        [--precisions float32,bfloat16] [--quick]

Run it monthly: it shows where cost at real sizes has grown. Models are Llamas with random weights; 135M has the shape
of SmolLM2-135M and 494M that of Qwen2.5-0.5B. Training is one forward and backward pass over a batch, sampling one
decoding step for all rows. Each point is a fresh process and DIR/points/*.json; a finished point is not run again. At
the end: DIR/cost_growth.md.

The floor counts matrix products alone, at the rate of this project's products with 1,024 rows of the model's width; in
training three times those of a forward pass, in sampling the longer of products and of reading every weight once.
bfloat16 is autocast over float32 weights. --quick takes the two cheapest values of each axis. Timings hold on an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_rollouts import Endless
from compare_speed import describe_processor, parse_names, read_commit, read_or_make, run_python
from speed.protocol import Others, read_peak_mb
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.cpu import layer_kernels
from rl_core.inference.engine import create_rollout_backend
from rl_core.models.forward_modes import enable_autocast
from rl_core.models.logprobs import completion_logprobs
from rl_core.settings import SamplingSettings
from rl_core.types import TrainBatch

# millions of parameters -> hidden, layers, heads, key heads, width of the MLP, vocabulary
SHAPES = {
    1: (128, 4, 4, 2, 344, 512),
    27: (512, 8, 8, 4, 1408, 4096),
    135: (576, 30, 9, 3, 1536, 49_152),
    494: (896, 24, 14, 2, 4864, 151_936),
}
DEFAULT_SIZE = 135
AXES = {
    "size": tuple(SHAPES),
    "context": (128, 512, 2048, 8192),
    "group": (1, 4, 16),
    "rows": (1, 8, 32, 64),
}
WORKS = {
    "size": ("train", "sample"),
    "context": ("train", "sample"),
    "group": ("train",),
    "rows": ("sample",),
}
TRAIN_TOKENS = 1024  # of a batch, in rows of CONTEXT tokens; at least one row
CONTEXT, ROWS, PROMPT, COMPLETION, NEW_TOKENS = 256, 8, 256, 64, 16


def main() -> int:
    options = parse_options()
    if options.point:
        print(json.dumps(measure_point(json.loads(options.point), options)))
        return 0
    output = options.output.resolve()
    (output / "points").mkdir(parents=True, exist_ok=True)
    points = []
    for axis in options.axes:
        for work in WORKS[axis]:
            for value in AXES[axis][: 2 if options.quick else None]:
                for precision in options.precisions:
                    points.append(run_point(axis, work, value, precision, options))
                    print(format_row(points[-1]), flush=True)
    about = (
        f"{describe_processor()}, {options.threads} threads, torch {torch.__version__}, commit {read_commit()}, "
        f"{time.strftime('%d %B %Y')}"
    )
    (output / "cost_growth.md").write_text(format_table(points, about))
    print(f"written: {output / 'cost_growth.md'}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--axes", type=parse_names(tuple(AXES)), default=list(AXES))
    parser.add_argument(
        "--precisions",
        type=parse_names(("float32", "bfloat16")),
        default=["float32", "bfloat16"],
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--point", default="", help="measure this point here (a worker's option)")
    return parser.parse_args()


def run_point(
    axis: str, work: str, value: int, precision: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a point in a fresh process, unless its file exists."""
    point = {"axis": axis, "work": work, "value": value, "precision": precision}
    arguments = ["--output", str(options.output), "--point", json.dumps(point)]
    arguments += ["--threads", str(options.threads), "--repeats", str(options.repeats)]
    result: dict[str, Any] = read_or_make(
        options.output / "points" / f"{axis}-{work}-{value}-{precision}.json",
        lambda: json.loads(run_python([__file__, *arguments], options.threads).splitlines()[-1]),
    )
    return result


def measure_point(point: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Measure seconds, floor and memory of a point in this process."""
    torch.set_num_threads(options.threads)
    value = point["value"]
    size = value if point["axis"] == "size" else DEFAULT_SIZE
    context = value if point["axis"] == "context" else CONTEXT
    in_bf16 = point["precision"] == "bfloat16"
    model = build_model(size, context + COMPLETION)
    products_rate, read_rate = measure_rates(model, in_bf16=in_bf16)
    others = Others([])
    if point["work"] == "train":
        batch = (
            build_group(value) if point["axis"] == "group" else build_rows(context, TRAIN_TOKENS)
        )
        seconds = time_calls(build_training(model, batch, point["precision"]), options.repeats)
        tokens = int(batch.attention_mask_BS.sum())
        floor = count_training_flops(model, batch) / products_rate
    else:
        rows = value if point["axis"] == "rows" else ROWS
        tokens = rows
        seconds = time_decoding_step(model, rows, context, point["precision"], options.repeats)
        weights = count_product_weights(model)
        floor = max(2 * rows * weights / products_rate, (2 if in_bf16 else 4) * weights / read_rate)
    return {
        **point,
        "seconds": seconds,
        "floor_seconds": floor,
        "tokens": tokens,
        "peak_mb": read_peak_mb(),
        "others_cpu": others.cores(),
    }


def build_model(size: int, max_length: int) -> LlamaForCausalLM:
    """Build a model with random weights; its output head is the embedding from 135M on."""
    hidden, layers, heads, key_heads, width, vocabulary = SHAPES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=width,
        vocab_size=vocabulary,
        max_position_embeddings=max(2048, max_length),
        tie_word_embeddings=size >= 135,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def build_rows(length: int, tokens: int) -> TrainBatch:
    """Build rows of different tokens; all but the first quarter of each carries loss."""
    rows = max(1, tokens // length)
    ids_BS = torch.randint(3, 500, (rows, length), generator=torch.Generator().manual_seed(1))
    loss_BS = torch.arange(length).expand(rows, -1) >= max(1, length // 4)
    return TrainBatch(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), loss_BS)


def build_group(group: int) -> TrainBatch:
    """Build the samples of one prompt."""
    batch = build_rows(PROMPT + COMPLETION, group * (PROMPT + COMPLETION))
    batch.input_ids_BS[:, :PROMPT] = batch.input_ids_BS[:1, :PROMPT]
    batch.loss_mask_BS = (torch.arange(PROMPT + COMPLETION) >= PROMPT).expand(group, -1)
    return batch


def build_training(
    model: LlamaForCausalLM, batch: TrainBatch, precision: str
) -> Callable[[], object]:
    """Return a function that computes the loss of a batch and its gradient."""
    model.train()

    def compute_gradient() -> None:
        model.zero_grad(set_to_none=True)
        autocast = "bfloat16" if precision == "bfloat16" else "none"
        with enable_autocast(autocast, torch.device("cpu")):
            logprobs_BS, _ = completion_logprobs(model, batch)
        (-logprobs_BS.sum() / batch.num_loss_tokens).backward()

    return compute_gradient


def time_decoding_step(
    model: LlamaForCausalLM, rows: int, context: int, precision: str, repeats: int
) -> float:
    """Return the seconds of one decoding step for all rows, from two runs of different lengths."""
    model.eval().requires_grad_(False)
    engine = create_rollout_backend(
        model,
        eos_ids=(1,),
        pad_id=0,
        max_length=context + 4 * NEW_TOKENS,
        autocast="bfloat16" if precision == "bfloat16" else "none",
    )
    prompts = torch.randint(3, 500, (rows, context), generator=torch.Generator().manual_seed(1))

    def sample(new: int) -> None:
        sequences = [Endless(row, seed) for seed, row in enumerate(prompts.tolist())]
        engine.run_sequences(sequences, SamplingSettings(max_completion_tokens=new, slots=rows))

    few, many = (
        time_calls(lambda count=count: sample(count), repeats)
        for count in (NEW_TOKENS, 3 * NEW_TOKENS)
    )
    return (many - few) / (2 * NEW_TOKENS)


def time_calls(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, after one that is not timed."""
    call()
    durations = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def count_product_weights(model: LlamaForCausalLM) -> int:
    """Count the weights that a token is multiplied by, output head included."""
    trunk = sum(
        module.weight.numel()
        for module in model.model.modules()
        if isinstance(module, torch.nn.Linear)
    )
    return trunk + model.lm_head.weight.numel()


def count_training_flops(model: LlamaForCausalLM, batch: TrainBatch) -> float:
    """Count the products of forward and backward; tokens that rows share at their beginning count once."""
    head = model.lm_head.weight.numel()
    trunk = count_product_weights(model) - head
    rows = batch.input_ids_BS
    shared = int((rows == rows[:1]).all(0).cumprod(0).sum()) if len(rows) > 1 else 0
    tokens = int(batch.attention_mask_BS.sum()) - shared * (len(rows) - 1)
    return 3.0 * 2.0 * (trunk * tokens + head * batch.num_loss_tokens)


def measure_rates(model: LlamaForCausalLM, *, in_bf16: bool) -> tuple[float, float]:
    """Measure products, FLOP/s at the model's width, and reading, bytes/s."""
    width, inner = model.config.hidden_size, model.config.intermediate_size
    x, weight = torch.randn(1024, width), torch.randn(2 * inner, width)
    seconds = min(
        time_calls(lambda: layer_kernels.compute_linear(x, [weight], in_bf16=in_bf16), 3)
        for _ in range(3)
    )
    block, other = torch.ones(2**26), torch.ones(2**26)
    rates = [4.0 * block.numel() / min(time_calls(block.sum, 5) for _ in range(2))]
    rates.append(8.0 * block.numel() / min(time_calls(lambda: block @ other, 5) for _ in range(2)))
    return 2.0 * x.numel() * len(weight) / seconds, max(rates)


def format_row(point: dict[str, Any]) -> str:
    unit = "" if point["axis"] != "size" else "M"
    share = point["floor_seconds"] / point["seconds"]
    others = "-" if point["others_cpu"] is None else f"{point['others_cpu']:.2f}"
    return (
        f"| {point['axis']} | {point['value']}{unit} | {point['work']} | {point['precision']} | "
        f"{point['seconds']:.4f} | {point['tokens'] / point['seconds']:,.0f} | {point['floor_seconds']:.4f} | "
        f"{share:.0%} | {point['peak_mb'] / 1000:.1f} | {others} |"
    )


def format_table(points: list[dict[str, Any]], about: str) -> str:
    header = [
        "# Cost against size, context, group and rows",
        "",
        about,
        "",
        f"Training: batches of {TRAIN_TOKENS} tokens in rows of {CONTEXT}, unless the axis says otherwise; a group is",
        f"the samples of one prompt, {PROMPT} + {COMPLETION} tokens each. Sampling: one step of {ROWS} rows after",
        f"{CONTEXT} tokens. {DEFAULT_SIZE}M parameters unless the axis is size.",
        "",
        "| axis | value | work | precision | seconds | tokens/s | floor, s | floor's share | peak GB | others' cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*header, *map(format_row, points)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
