"""Recipes of `tinker-cookbook`, unmodified, against the training service: do they learn?

chat_sl   supervised learning on 400 sums in a local file, from random weights
math_rl   `env=arithmetic`: sums of two numbers up to 100, from a model that gives a third of the answers

Both train adapters of rank 32 on a model of two layers made here, whose tokens are digits and pieces of text, in a
separate environment (Python 3.12 with `tinker-cookbook==0.6.1 tinker==0.38.0 sympy pylatexenc math-verify`, by
`uv pip install --override FILE`, whose line is `tml-renderers==0.2.1`):

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/cookbook.py --output outputs/cookbook --cookbook PYTHON

Written to `cookbook.json`: the machine, each recipe's options, its number at every update; to `cookbook.png`: curves.
A part that has ended is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from service_over_http import run_service
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl_core.storage.atomic_files import write_json_atomic

KNOWN = 0.35  # share of right answers of the model that math_rl begins with
WIDTH, LAYERS, LARGEST = 96, 2, 100
TURN = "User: What is {} + {}?\n\nAssistant:"  # as the renderer role_colon writes it
WINDOW = 10  # batches of a mean in the figure


def encode_prompt(a: int, b: int) -> str:
    """Encode the recipe's line of one example, and a question."""
    return TURN.format(4, 5) + " 9\n\n" + TURN.format(a, b)


def encode_answer(a: int, b: int) -> str:
    """Encode an answer, up to where the next turn begins."""
    return f" {a + b}\n\nUser:"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single digits and pieces of the turns."""
    core = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    core.decoder = decoders.ByteLevel()
    texts = [encode_prompt(a, a) + encode_answer(a, a) for a in range(LARGEST)] * 100
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Make a model with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def learn_sums(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Train until a share KNOWN of sampled answers is right; returns the share."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    rows = [
        (tokenizer(encode_prompt(a, b))["input_ids"], tokenizer(encode_answer(a, b))["input_ids"])
        for a, b in pairs
    ]
    longest = max(len(prompt_ids) + len(answer_ids) for prompt_ids, answer_ids in rows)
    ids_NT = torch.zeros(len(rows), longest, dtype=torch.long)
    labels_NT = torch.full_like(ids_NT, -100)
    for row, (prompt_ids, answer_ids) in enumerate(rows):
        ids_NT[row, : len(prompt_ids) + len(answer_ids)] = torch.tensor(prompt_ids + answer_ids)
        labels_NT[row, len(prompt_ids) : len(prompt_ids) + len(answer_ids)] = torch.tensor(
            answer_ids
        )

    def share() -> float:
        with torch.no_grad():
            logprobs = model(ids_NT[:1000]).logits[:, :-1].log_softmax(-1)
        wanted = labels_NT[:1000, 1:]
        answer_logprobs = logprobs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0].masked_fill(
            wanted == -100, 0
        )
        return float(answer_logprobs.sum(1).exp().mean())

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(1, 10_001):
        chosen = torch.randint(0, len(rows), (128,))
        loss = model(ids_NT[chosen], labels=labels_NT[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            known = share()
            print(f"model that half knows sums: {step} updates, {known:.1%} of answers", flush=True)
            if known >= KNOWN:
                return known
    raise RuntimeError(
        f"after {step} updates the model gives {known:.1%} of the answers, wanted {KNOWN:.0%}"
    )


@dataclass(frozen=True)
class Recipe:
    """A recipe, and the number that tells whether it learns."""

    module: str
    options: Callable[[Path, argparse.Namespace], list[str]]
    metric: str
    title: str


def _build_chat_options(folder: Path, arguments: argparse.Namespace) -> list[str]:
    drawn = random.Random(1)
    sums = [(drawn.randrange(LARGEST), drawn.randrange(LARGEST)) for _ in range(400)]
    turns = [
        (
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": f"{a + b}"},
        )
        for a, b in sums
    ]
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"messages": turn}) + "\n" for turn in turns)
    )
    return [
        f"dataset={folder / 'sums.jsonl'}",
        "learning_rate=0.006",
        "batch_size=32",
        f"num_epochs={arguments.epochs}",
        "max_length=256",
    ]


def _build_math_options(folder: Path, arguments: argparse.Namespace) -> list[str]:
    return [
        "env=arithmetic",
        "learning_rate=0.002",
        "group_size=16",
        "groups_per_batch=32",
        "max_tokens=5",
        f"max_steps={arguments.batches}",
    ]


RECIPES = {
    "chat_sl": Recipe(
        "chat_sl.train", _build_chat_options, "train_mean_nll", "chat_sl: nats per token"
    ),
    "math_rl": Recipe(
        "math_rl.train",
        _build_math_options,
        "env/all/correct",
        "math_rl, arithmetic: share of right answers",
    ),
}


def run_recipe(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the recipe from its first to its last update, against a separate service."""
    recipe, base = RECIPES[name], folder / "base"
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    known = learn_sums(model, tokenizer) if name == "math_rl" else 0.0
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    options = [
        f"model_name={base}",
        "renderer_name=role_colon",
        "lora_rank=32",
        "save_every=0",
        "eval_every=0",
        f"log_path={folder / 'log'}",
        "behavior_if_log_dir_exists=delete",
        *recipe.options(folder, arguments),
    ]
    command = [arguments.cookbook, "-m", f"tinker_cookbook.recipes.{recipe.module}", *options]
    service_folder = folder / f"service-{time.time_ns()}"
    service_folder.mkdir(parents=True)
    with run_service(service_folder, base, 1, "exact", name=str(base)) as (address, key, _):
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TINKER_BASE_URL": address,
            "TINKER_API_KEY": key,
        }
        environment.pop("PYTHONPATH", None)
        with open(folder / "recipe.log", "wb") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}; see {folder / 'recipe.log'}")
    logged = [
        json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()
    ]
    values = [row[recipe.metric] for row in logged if recipe.metric in row]
    part = max(1, min(WINDOW, len(values) // 4))
    first, last = mean(values[:part]), mean(values[-part:])
    print(
        f"{name}: {recipe.metric} {first:.3f} (first {part}) -> {last:.3f} (last {part} of {len(values)})",
        flush=True,
    )
    return {
        "recipe": name,
        "options": options[2:],
        "known": known,
        "metric": recipe.metric,
        "values": values,
    }


def _means(values: Sequence[float]) -> Iterator[float]:
    for index in range(len(values)):
        yield mean(values[max(0, index - WINDOW + 1) : index + 1])


def draw_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a curve for each recipe: single updates, and the mean of the last WINDOW."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rows), figsize=(5 * len(rows), 3.2), squeeze=False)
    for row, axis in zip(rows, axes[0], strict=True):
        axis.plot(row["values"], color="#9db4d3", linewidth=1, label="each update")
        axis.plot(
            list(_means(row["values"])),
            color="#1f4e8c",
            linewidth=2,
            label=f"mean of the last {WINDOW}",
        )
        axis.set_title(RECIPES[row["recipe"]].title, fontsize=10)
        axis.set_xlabel("update")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _describe_processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )


def main() -> None:
    """Run the chosen recipes, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", required=True, help="folder of models, services, logs and figures"
    )
    parser.add_argument(
        "--cookbook", required=True, metavar="PYTHON", help="of an environment with tinker-cookbook"
    )
    parser.add_argument("--parts", default=",".join(RECIPES), help="comma-separated (default: all)")
    parser.add_argument("--epochs", type=int, default=6, help="of chat_sl (default: 6, 72 updates)")
    parser.add_argument("--batches", type=int, default=80, help="of math_rl (default: 80)")
    arguments = parser.parse_args()
    arguments.cookbook = os.path.abspath(arguments.cookbook)
    folder = Path(arguments.output).resolve()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.parts.split(","):
        file = folder / name / "found.json"
        if not file.exists():
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_json_atomic(file, run_recipe(name, folder / name, arguments))
        rows.append(json.loads(file.read_text()))
    write_json_atomic(
        folder / "cookbook.json",
        {"processor": _describe_processor(), "cores": os.cpu_count(), "rows": rows},
    )
    draw_curves(rows, folder / "cookbook.png")


if __name__ == "__main__":
    main()
