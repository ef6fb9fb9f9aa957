"""Rows to token ids: one after the other and twice, through the tokenizer's call, against `token_cache`; and memory.

    python tests/benchmarks/bench_tokenising.py [--rows 4000] [--tokens 300] [--turns 1] [--processes 2]
    python tests/benchmarks/bench_tokenising.py --memory 1000000 [--processes 2] [--word-level] --folder DIR

The first prints rows a second and of processor time for both ways, which give the same ids and masks. The old way
checks the length of every row and makes its ids again afterwards, as lists; each pass has a separate renderer, as
stages have. The second writes a file of so many rows, reads, tokenises and splits it by the Python API in a separate
process, draws the batches of a hundred thousand rows from it, and prints the largest resident memory. Rows are of words
drawn at random; their tokenizer is a byte-level BPE of 4096 entries trained on the same words. With --word-level a word
is a token, which is made ten times as fast; the text of a row, whose memory is measured, is half as long again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core.api.data import load_conversations
from rl_core.data.batches import DataOrder
from rl_core.data.chat import ChatRenderer
from rl_core.data.token_cache import TokenCache, compute_rows_digest
from rl_core.data.tokenising import TokenisationJob, tokenize_rows
from rl_core.data.tokenizer import END_TOKEN, PAD_TOKEN, ROLES, train_tokenizer
from rl_core.data.training_sequences import TokenRows, build_training_sequences
from rl_core.rollouts.batching import TrainRow, build_batches

CONTEXT = 4096
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def make_words(count: int = 3000, seed: int = 0) -> list[str]:
    """Make words; `make_sentence` draws earlier ones more often by Zipf's law."""
    rng = random.Random(seed)
    return [
        "".join(rng.choices(LETTERS, range(26, 0, -1), k=rng.randint(2, 9))) for _ in range(count)
    ]


def make_sentence(rng: random.Random, known: list[str], count: int) -> str:
    """Draw a sentence of `count` words."""
    return (
        " ".join(known[min(int(rng.paretovariate(0.7)) - 1, len(known) - 1)] for _ in range(count))
        + "."
    )


def make_row(rng: random.Random, known: list[str], tokens: int, turns: int) -> dict[str, Any]:
    """Make a conversation with a third of its words in the user's turns. A word is about 1.45 tokens."""
    count = max(1, round(tokens / 1.45 / turns / 3))
    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": make_sentence(rng, known, count)})
        messages.append({"role": "assistant", "content": make_sentence(rng, known, 2 * count)})
    return {"messages": messages}


def make_quick_rows(count: int, tokens: int, known: list[str]) -> Iterator[dict[str, Any]]:
    """Make rows of one turn of so many words from the same thousand sentences; no two are equal."""
    rng = random.Random(3)
    questions, answers = (
        [make_sentence(rng, known, size) for _ in range(1000)]
        for size in (tokens // 3, 2 * tokens // 3)
    )
    for number in range(count):
        prompt = f"{known[number % 3000]} {known[number // 3000 % 3000]} {rng.choice(questions)}"
        answer = {"role": "assistant", "content": rng.choice(answers)}
        yield {"messages": [{"role": "user", "content": prompt}, answer]}


def make_word_tokenizer() -> ChatRenderer:
    """Make a tokenizer with a token per word."""
    bpe = train_tokenizer(["a"], 300)
    special = [PAD_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {
        word: token_id
        for token_id, word in enumerate(dict.fromkeys([*special, ".", *make_words()]))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=special[2:],
    )
    wrapped.chat_template = bpe.chat_template
    return ChatRenderer(wrapped)


def make_renderer() -> ChatRenderer:
    """Make a tokenizer trained on the words, and its renderer."""
    rng, known = random.Random(1), make_words()
    return ChatRenderer(
        train_tokenizer([make_sentence(rng, known, 200) for _ in range(2000)], 4096)
    )


def encode_one_by_one(rows: list[dict[str, Any]], tokenizer: Any) -> list[Any]:
    """Encode rows the old way: the length of each row, then its ids as lists."""
    encoded: list[Any] = []
    for wanted in ("lengths", "ids"):
        renderer = ChatRenderer(tokenizer)
        renderer.encoder._is_fast = False
        for row in rows:
            sequences = build_training_sequences(renderer, row["messages"])
            if wanted == "lengths":
                assert max(len(ids) for ids, _ in sequences) <= CONTEXT
            else:
                encoded += sequences
    return encoded


def time_call(work: Any) -> tuple[Any, float, float]:
    """Return result, seconds, and processor seconds of this process and the children that have ended."""
    before, started = os.times(), time.perf_counter()
    result = work()
    after = os.times()
    spent = sum(after[:4]) - sum(before[:4])
    return result, time.perf_counter() - started, spent


def compare_speed(options: argparse.Namespace) -> None:
    """Print rows a second of both ways."""
    rng, known, renderer = random.Random(2), make_words(), make_renderer()
    rows = [make_row(rng, known, options.tokens, options.turns) for _ in range(options.rows)]
    job = TokenisationJob("demonstrations")

    def in_processes(count: int) -> TokenRows:
        fresh = ChatRenderer(renderer.tokenizer)
        return TokenRows([chunk for chunk, _ in tokenize_rows(rows, fresh, job, count)])

    def load_cached(folder: str) -> TokenRows:
        fresh = ChatRenderer(renderer.tokenizer)
        return (
            TokenCache(Path(folder))
            .load_or_tokenize(compute_rows_digest(rows), lambda: rows, fresh, job, 0)
            .rows
        )

    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "one by one, twice": lambda: encode_one_by_one(rows, renderer.tokenizer),
            "once, 1 process": lambda: in_processes(1),
            f"once, {options.processes} processes": lambda: in_processes(options.processes),
            "once, kept on disk": lambda: load_cached(folder),
            "read again": lambda: load_cached(folder),
        }
        expected, lists = None, 0
        for name, work in ways.items():
            encoded, wall, spent = time_call(work)
            expected = expected or encoded
            assert list(encoded) == list(expected), name
            tokens = sum(len(ids) for ids, _ in encoded)
            if isinstance(encoded, TokenRows):
                size = encoded.num_bytes
            else:  # as Python holds them: a pointer and an integer above 256 for each id, a pointer for each mask
                lists = sum(
                    sys.getsizeof(ids) + sum(28 for i in ids if i > 256) + sys.getsizeof(m)
                    for ids, m in encoded
                )
                size = lists
            print(
                f"{name:22} {len(rows) / wall:9,.0f} rows/s {len(rows) / spent:9,.0f} rows/s of a processor "
                f"{size / tokens:6.1f} bytes/token, {tokens / len(rows):.0f} tokens/row",
                flush=True,
            )


def measure_memory(options: argparse.Namespace) -> None:
    """Write the file, and read it in a separate process."""
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    rng, known = random.Random(3), make_words()
    rows = (make_row(rng, known, options.tokens, options.turns) for _ in range(options.memory))
    with path.open("w") as file:
        for row in (
            make_quick_rows(options.memory, options.tokens, known) if options.word_level else rows
        ):
            file.write(json.dumps(row) + "\n")
    print(f"{options.memory:,} rows, {path.stat().st_size / 2**30:.2f} GiB of text", flush=True)
    command = [sys.executable, __file__, "--read", str(path), "--processes", str(options.processes)]
    command += ["--word-level"] * options.word_level
    for _ in range(2):  # the second time the token ids are there
        subprocess.run(command, check=True)


def read_rows(options: argparse.Namespace) -> None:
    """Read the rows once, and draw batches of some of them."""
    torch.set_num_threads(options.processes)
    renderer, path = (
        make_word_tokenizer() if options.word_level else make_renderer(),
        Path(options.read),
    )
    print(f"peak {read_peak_gib():.2f} GiB before the first row", flush=True)
    split, wall, spent = time_call(
        lambda: load_conversations(path, 0.1, renderer, CONTEXT, 0, "all", path.parent / "tokens")
    )
    rows = split.train
    print(
        f"{len(rows):,} rows to train on, {len(split.heldout):,} held out, {rows.num_tokens:,} tokens; "
        f"{wall:.0f} s, {spent:.0f} s of processors; peak {read_peak_gib():.2f} GiB, "
        f"largest child {read_peak_gib(True):.2f}",
        flush=True,
    )
    order = DataOrder(len(rows), 32, 0)
    for _ in range(min(len(rows), 100_000) // 32):
        some = [rows[index] for index in order.next_batch()]
        build_batches(
            [TrainRow(ids[:1], ids[1:], mask[1:]) for ids, mask in some], 4096, 0, packing=True
        )
    print(f"peak {read_peak_gib():.2f} GiB after batches", flush=True)


def read_peak_gib(children: bool = False) -> float:
    """Return the largest resident memory so far in GiB."""
    return (
        resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF).ru_maxrss
        / 2**20
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("rows", 4000),
        ("tokens", 300),
        ("turns", 1),
        ("processes", 2),
        ("memory", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default="")
    parser.add_argument("--word-level", action="store_true")
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (read_rows if options.read else measure_memory if options.memory else compare_speed)(options)


if __name__ == "__main__":
    main()
