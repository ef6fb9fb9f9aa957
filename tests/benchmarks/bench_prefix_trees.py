"""Prefix trees against rows computed alone: forward and backward pass of one step, three ways in turn.

python tests/benchmarks/bench_prefix_trees.py [--size 3 | 135] [--micro 2048] [--threads 1] [--repeats 5] [--lora]

Random weights of a Llama of 3.2M parameters or of SmolLM2-135M's shape, random tokens. The steps:

    turns     4 episodes of 4 turns; each turn is a row that sends the conversation so far again (260 to 620 tokens)
    group     2 prompts of 400 tokens, 8 completions of 60 each
    agent     2 conversations of 300 tokens that branch into 3, each branch into 3; 9 leaves of 60 + 60 tokens
    distinct  16 rows of 260 tokens that share nothing: what trees cost where they save nothing

The ways: each row alone within length-sorted micro-batches; common beginnings shared within these micro-batches, as
before prefix trees were planned; micro-batches planned by trees. Loss on the last 60 tokens of each row. Prints seconds
of processor time as median [lowest, highest] of the repeats (other programs slow a clock's seconds), the median by the
clock, the ratio of both to the first way, tokens that the layers compute, micro-batches, and the largest difference of
a gradient to the first way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from compare_speed import describe_processor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rl_core.cpu import packed_forward
from rl_core.models.logprobs import completion_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import LoraSettings
from rl_core.types import TrainBatch

SHAPES = {
    3: {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 688,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
    135: {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}
LOSS_TOKENS = 60
WAYS = ("rows alone", "shared within micro-batches", "trees")


def draw_tokens(count: int) -> list[int]:
    return torch.randint(3, 512, (count,)).tolist()


def build_step(kind: str) -> list[list[int]]:
    """Build the token ids of the rows of one step."""
    rows = []
    if kind == "turns":
        for _ in range(4):
            history = draw_tokens(200)
            for _ in range(4):
                history = [*history, *draw_tokens(LOSS_TOKENS)]
                rows.append(history)
                history = [*history, *draw_tokens(60)]
    elif kind == "group":
        for _ in range(2):
            prompt = draw_tokens(400)
            rows += [[*prompt, *draw_tokens(LOSS_TOKENS)] for _ in range(8)]
    elif kind == "agent":
        for _ in range(2):
            conversation = draw_tokens(300)
            for _ in range(3):
                branch = [*conversation, *draw_tokens(60)]
                rows += [[*branch, *draw_tokens(60 + LOSS_TOKENS)] for _ in range(3)]
    else:
        rows = [draw_tokens(260) for _ in range(16)]
    return rows


@contextmanager
def compute_rows_alone() -> Iterator[None]:
    """Let the packed forward pass find no common beginnings."""
    original = packed_forward.build_separate_trees
    packed_forward.build_separate_trees = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        packed_forward.build_separate_trees = original


def run_step(model: PreTrainedModel, batches: list[TrainBatch]) -> tuple[float, float]:
    """Run forward and backward passes; return the seconds of processor time and by the clock."""
    model.zero_grad()
    started = time.process_time(), time.perf_counter()
    for batch in batches:
        logprobs_BS, _ = completion_logprobs(model, batch)
        weights_BS = torch.cos(torch.tensor(batch.rows, dtype=torch.float32))[:, None]
        (logprobs_BS * weights_BS).sum().backward()
    return time.process_time() - started[0], time.perf_counter() - started[1]


def measure_case(kind: str, model: PreTrainedModel, options: argparse.Namespace) -> None:
    torch.manual_seed(1)
    rows = [
        TrainRow(ids[:-LOSS_TOKENS], ids[-LOSS_TOKENS:], [True] * LOSS_TOKENS)
        for ids in build_step(kind)
    ]
    plain = build_batches(rows, options.micro, 0)
    plans = [plain, plain, build_batches(rows, options.micro, 0, shares_prefixes=True)]
    seconds: list[list[tuple[float, float]]] = [[] for _ in WAYS]
    computed = [0] * len(WAYS)
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in WAYS]

    def count_tokens(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        computed[way] += len(inputs[0]) if inputs[0].ndim == 2 else 0  # not those of a trial

    for repeat in range(options.repeats + 1):  # the first round warms up, counts and compares
        ways = range(len(WAYS)) if repeat % 2 == 0 else reversed(range(len(WAYS)))
        for way in ways:
            layer = model.get_submodule(options.counted)
            hook = layer.register_forward_pre_hook(count_tokens) if repeat == 0 else None
            if way == 0:
                with compute_rows_alone():
                    duration = run_step(model, plans[way])
            else:
                duration = run_step(model, plans[way])
            if hook is not None:
                hook.remove()
                gradients[way] = {
                    name: parameter.grad.clone()
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
            else:
                seconds[way].append(duration)
    medians = [[statistics.median(column) for column in zip(*way, strict=True)] for way in seconds]
    for way, name in enumerate(WAYS):
        differences = [
            float((gradients[way][key] - gradient).norm() / gradient.norm().clamp_min(1e-12))
            for key, gradient in gradients[0].items()
        ]
        (spent, clock), (base, base_clock) = medians[way], medians[0]
        lowest, highest = min(seconds[way])[0], max(seconds[way])[0]
        print(
            f"| {kind} | {name} | {spent:.2f} [{lowest:.2f}, {highest:.2f}] | {clock:.2f} | "
            f"{base / spent:.2f}, {base_clock / clock:.2f} | {computed[way]:,} | {len(plans[way])} | "
            f"{max(differences):.0e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, choices=tuple(SHAPES), default=3)
    for name, default in (("micro", 2048), ("threads", 1), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16")
    parser.add_argument("--steps", nargs="+", default=["turns", "group", "agent", "distinct"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[options.size], max_position_embeddings=2048, pad_token_id=0, eos_token_id=None
    )
    model = LlamaForCausalLM(config).train()
    options.counted = "model.layers.0.mlp.gate_proj"
    if options.lora:
        model = add_adapter(model, LoraSettings(rank=16))
        options.counted = f"base_model.model.{options.counted}"
    adapters = ", adapters" if options.lora else ""
    print(
        f"{options.size}M parameters{adapters}, micro_batch_tokens {options.micro}, threads {options.threads}; "
        f"{describe_processor()}; torch {torch.__version__}, transformers {transformers.__version__}\n"
    )
    print("| step | way | processor s | clock s | ratios | tokens | micro-batches | gradient |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in options.steps:
        measure_case(kind, model, options)


if __name__ == "__main__":
    main()
