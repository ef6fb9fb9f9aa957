"""Sampling with drafts against sampling without, on the pretrained SmolLM2-135M, in alternating rounds.

python tests/benchmarks/bench_drafts.py --questions GSM8K.jsonl [--slots 1,8] [--new 128] [--threads 2] [--repeats 3]

Each round samples 8 completions of two questions at temperatures 0, 0.7 and 1, and of a request to repeat a table.
Prints processor seconds, their ratio (median of the rounds) and how many drafts were taken. Fails if a token differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
from compare_speed import describe_processor

import rl_core
from rl_core.cpu.fused_decode import DraftTable
from rl_core.inference.decoder import Decoder

TABLE = "\n".join(
    f"| {name} | {number * 37 % 101} | {number * 53 % 97} kg |"
    for number, name in enumerate(["apples", "pears", "plums", "cherries", "figs", "grapes"], 3)
)
REPEAT = f"Repeat this table, every row, and nothing else:\n{TABLE}"


def sample_texts(
    policy: rl_core.Policy, prompts: Sequence[str], sampling: dict[str, float], *, drafts: bool
) -> tuple[list[list[str]], float, list[DraftTable]]:
    """Sample 8 completions of each prompt; return them, the processor seconds and the tables of drafts."""
    tables: list[DraftTable] = []
    can_draft_tokens, sample_steps = Decoder.can_draft_tokens, Decoder.sample_steps

    def sample_and_record(self, states, count, is_end_V, steps, table=None):  # type: ignore[no-untyped-def]
        if table is not None and not any(table is known for known in tables):
            tables.append(table)
        sample_steps(self, states, count, is_end_V, steps, table)

    try:
        Decoder.sample_steps = sample_and_record  # type: ignore[method-assign]
        if not drafts:
            Decoder.can_draft_tokens = property(lambda self: False)  # type: ignore[assignment]
        start_time = time.process_time()
        texts = rl_core.generate(policy, prompts, samples=8, sampling=sampling)
        return texts, time.process_time() - start_time, tables
    finally:
        Decoder.can_draft_tokens, Decoder.sample_steps = can_draft_tokens, sample_steps  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--questions", required=True, help="JSONL file with `question`")
    parser.add_argument("--slots", default="1,8")
    for name, default in (("new", 128), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with open(options.questions) as file:
        questions = [json.loads(next(file))["question"] for _ in range(2)]
    policy = rl_core.load_policy("smollm2-135m")
    print(f"{describe_processor()}; {options.threads} threads; {options.new} new tokens")
    for slots in map(int, options.slots.split(",")):
        for name, prompts, temperature in (
            ("questions", questions, 0.0),
            ("questions", questions, 0.7),
            ("questions", questions, 1.0),
            ("a table to repeat", [REPEAT], 0.7),
        ):
            sampling = {
                "max_completion_tokens": options.new,
                "temperature": temperature,
                "slots": slots,
            }
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(options.repeats):
                plain, plain_seconds, _ = sample_texts(policy, prompts, sampling, drafts=False)
                drafted, drafted_seconds, tables = sample_texts(
                    policy, prompts, sampling, drafts=True
                )
                if plain != drafted:
                    raise SystemExit(f"{name}, temperature {temperature}: drafts changed a token")
                seconds[False].append(plain_seconds)
                seconds[True].append(drafted_seconds)
            ratio = statistics.median(
                a / b for a, b in zip(seconds[False], seconds[True], strict=True)
            )
            computed, taken = sum(table.counts for table in tables)
            print(
                f"{slots} slots, {name}, temperature {temperature}: {statistics.median(seconds[False]):.1f} s plain, "
                f"{statistics.median(seconds[True]):.1f} s with drafts, ratio {ratio:.2f}; "
                f"{taken} of {computed} drafts taken",
                flush=True,
            )


if __name__ == "__main__":
    main()
