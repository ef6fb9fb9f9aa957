"""Reference models in few bits: bytes, time, KL on real text, and what DPO and GRPO learn with them.

    python tests/benchmarks/bench_references.py OUTPUT GSM8K.jsonl PREFERENCES.jsonl [--steps 400]

GSM8K rows have `question` and `answer`, preference rows `prompt`, `chosen` and `rejected`. A model of 3M parameters is
trained on the questions' answers first. Results are printed, and written as JSON lines to OUTPUT/results.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import rl_core
from rl_core.api.data import load_preference_pairs
from rl_core.api.recipes import Recipe
from rl_core.data.batches import attention_mask, pad_rows
from rl_core.models.logprobs import completion_logprobs, iter_next_token_logprobs
from rl_core.references.quantized import count_weight_bytes
from rl_core.references.scorer import ReferenceSource, load_reference_model
from rl_core.settings import ModelSettings, resolve_defaults
from rl_core.trainers.preference import PreferenceTrainer, compute_reference_logprobs
from rl_core.types import TrainBatch

PRECISIONS = ("full", "int8", "int4")
CONTEXT = 256
RUNS = (
    ("full", 0),
    ("int8", 0),
    ("int4", 0),
    ("full", 1),
    ("full", 2),
)  # precision, seed of training


def read_lines(path, count):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]


def load(folder, precision, dtype="float32"):
    return load_reference_model(
        ReferenceSource(
            path=str(folder),
            kind="policy",
            precision=precision,
            model=ModelSettings(dtype=dtype, device="cpu"),
        )
    )


def record_row(output, **row):
    print(json.dumps(row), flush=True)
    with (output / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def make_base_model(output, rows, steps):
    """Train a policy on the answers of 1,800 questions."""
    folder = output / "base"
    if not folder.is_dir():
        texts = [f"{row['question']} {row['answer']}" for row in rows]
        model = ModelSettings(preset="small", vocab_size=2048, context=CONTEXT, device="cpu")
        policy = rl_core.create_policy(texts, model)
        data = [{"prompt": row["question"], "completion": row["answer"]} for row in rows[:1800]]
        data = [
            row
            for row in data
            if len(policy.tokenizer(row["prompt"] + row["completion"]).input_ids) < CONTEXT - 20
        ]
        settings = rl_core.SFTSettings(
            learning_rate=2e-3,
            max_steps=steps,
            epochs=99,
            batch_size=16,
            warmup_steps=20,
            eval_every=0,
            patience=None,
        )
        training = rl_core.sft(policy, data, heldout=0.02, settings=settings)
        training.run()
        policy.save(folder)
    return folder


def encode_rows(tokenizer, texts):
    return [ids for text in texts if 8 < len(ids := tokenizer(text).input_ids) <= CONTEXT]


def compute_kl_and_nll(model, other, rows):
    """Mean and largest KL(model || other) over the vocabulary, and the text's mean NLL under both; nats a token."""
    total, largest, count, nlls = 0.0, 0.0, 0, [0.0, 0.0]
    for start in range(0, len(rows), 8):
        part = rows[start : start + 8]
        ids, mask = pad_rows(part, 0), attention_mask([len(row) for row in part])
        scored = mask.clone()
        scored[:, 0] = False
        batch = TrainBatch(ids, mask, scored)
        targets, offset = ids[scored], 0
        for p, q in zip(
            iter_next_token_logprobs(model, batch),
            iter_next_token_logprobs(other, batch),
            strict=True,
        ):
            kl = (p.exp() * (p - q)).sum(1)
            total, largest, count = (
                total + float(kl.sum()),
                max(largest, float(kl.max())),
                count + len(kl),
            )
            for index, logprobs in enumerate((p, q)):
                nlls[index] -= float(
                    logprobs.gather(1, targets[offset : offset + len(kl), None]).sum()
                )
            offset += len(kl)
    return {
        "kl_mean": total / count,
        "kl_max": largest,
        "nll": nlls[0] / count,
        "nll_other": nlls[1] / count,
        "tokens": count,
    }


def compare_sizes(output):
    """Measure bytes and peak memory of a Llama of 139M parameters, each precision in a separate process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = output / "large"
    if not folder.is_dir():
        config = LlamaConfig(
            vocab_size=16384,
            hidden_size=1024,
            num_hidden_layers=10,
            num_attention_heads=16,
            num_key_value_heads=8,
            intermediate_size=2816,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        tokenizer = rl_core.load_policy(output / "base").tokenizer
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for precision in PRECISIONS:
        subprocess.run(
            [sys.executable, __file__, str(output), "-", "-", "--size-of", precision], check=True
        )


class AnonymousMemory:
    """Largest resident memory of this process, files' pages left out, while it is looked at."""

    def __init__(self):
        self.largest, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.start = self.now()
        self._thread.start()

    def now(self):
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )
        return int(line.split()[1]) * 1024

    def _look(self):
        while not self._stop.wait(0.005):
            self.largest = max(self.largest, self.now())

    def growth(self):
        """Return the growth in bytes: (at the peak, now)."""
        self._stop.set()
        self._thread.join()
        return self.largest - self.start, self.now() - self.start


def measure_size(output, precision):
    load(output / "base", precision)  # imports
    gc.collect()
    memory = AnonymousMemory()
    started = time.perf_counter()
    model, _ = load(output / "large", precision)
    seconds = time.perf_counter() - started
    peak, after = memory.growth()
    rows = torch.randint(1, 16000, (4, 256))
    batch = TrainBatch(
        rows, torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows, dtype=torch.bool)
    )
    batch.loss_mask_BS[:, 1:] = True
    times = []
    with torch.no_grad():
        for _ in range(4):
            begun = time.process_time()
            completion_logprobs(model, batch)
            times.append(time.process_time() - begun)
    linear = sum(
        m.numbers.nbytes + m.scale_OG.nbytes for m in model.modules() if hasattr(m, "scale_OG")
    )
    record_row(
        output,
        what="size",
        precision=precision,
        bytes=count_weight_bytes(model),
        linear_bytes=linear,
        load_seconds=seconds,
        anonymous_peak=peak,
        anonymous_after=after,
        pass_cpu_seconds=min(times),
    )


def compare_text_kl(output, folder, questions, pairs):
    full, tokenizer = load(folder, "full")
    sets = {
        "gsm8k_heldout": encode_rows(
            tokenizer, [f"{row['question']}\n{row['answer']}" for row in questions[1800:1950]]
        ),
        "preferences": encode_rows(
            tokenizer, [f"{row['prompt']}\n{row['chosen']}" for row in pairs[:150]]
        ),
    }
    for precision in PRECISIONS[1:]:
        other, _ = load(folder, precision)
        for name, rows in sets.items():
            record_row(
                output,
                what="kl",
                precision=precision,
                text=name,
                rows=len(rows),
                **compute_kl_and_nll(full, other, rows),
            )


def train_dpo(output, folder, rows, runs):
    """Run DPO whose reference log-probabilities come from a quantized model; the policy starts in full precision."""
    probe = rl_core.load_policy(folder)
    rows = [
        row
        for row in rows
        if max(
            len(probe.tokenizer(row["prompt"] + row[side]).input_ids)
            for side in ("chosen", "rejected")
        )
        < CONTEXT - 20
    ]
    for precision, seed in runs:
        policy = rl_core.load_policy(folder)
        settings = rl_core.PreferenceSettings(
            learning_rate=3e-4, epochs=1, batch_size=16, warmup_steps=5, eval_every=0, patience=None
        )
        settings = resolve_defaults(settings, policy.kind, policy.context)
        pairs = load_preference_pairs(rows, 0.2, policy.renderer, policy.context, 0, "dpo", None)
        reference, _ = load(folder, precision)
        references = tuple(
            compute_reference_logprobs(
                reference,
                part,
                pad_id=policy.renderer.pad_id,
                max_tokens=settings.micro_batch_tokens,
            )
            for part in (pairs.train, pairs.heldout)
        )
        trainer = PreferenceTrainer(
            policy.model,
            policy.renderer.pad_id,
            pairs.train,
            pairs.heldout,
            settings,
            seed,
            references,
        )
        outcome = Recipe(trainer, trainer.total_steps).run(settings)
        policy_logprobs = compute_reference_logprobs(
            policy.model, pairs.heldout, pad_id=policy.renderer.pad_id, max_tokens=8192
        )
        finals = torch.tensor(policy_logprobs)
        path = output / f"dpo-{precision}-{seed}.json"
        path.write_text(json.dumps(policy_logprobs))
        first = torch.tensor(json.loads((output / "dpo-full-0.json").read_text()))
        exact = compute_reference_logprobs(
            load(folder, "full")[0], pairs.heldout, pad_id=policy.renderer.pad_id, max_tokens=8192
        )
        margins = 0.1 * ((finals - torch.tensor(exact)) @ torch.tensor([1.0, -1.0]))
        tokens = [
            sum(pair.chosen.loss_mask) + sum(pair.rejected.loss_mask) for pair in pairs.heldout
        ]
        apart = (finals - first).abs().sum(1) / torch.tensor(tokens)
        record_row(
            output,
            what="dpo",
            precision=precision,
            seed=seed,
            train=len(pairs.train),
            heldout=len(pairs.heldout),
            steps=outcome.steps,
            accuracy=float((margins > 0).float().mean()),
            margin=float(margins.mean()),
            eval_loss=float(torch.nn.functional.softplus(-margins).mean()),
            difference_to_full_nats_per_token=float(apart.mean()),
        )


def share_digits(trajectories):
    """Return the share of the answer's characters that are digits."""
    texts = [trajectory.turns[-1].action for trajectory in trajectories]
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]


def train_grpo(output, folder, questions, iterations, runs):
    full, tokenizer = load(folder, "full")
    rows = encode_rows(
        tokenizer, [f"{row['question']}\n{row['answer']}" for row in questions[1800:1860]]
    )
    prompts = [
        row["question"]
        for row in questions[:200]
        if len(tokenizer(row["question"]).input_ids) < 150
    ]
    for precision, seed in runs:
        settings = rl_core.PolicySettings(
            kl_coef=0.05,
            reference_precision=precision,
            iterations=iterations,
            prompts_per_iteration=4,
            group_size=8,
            learning_rate=3e-4,
            warmup_steps=2,
            eval_every=0,
            patience=None,
            sampling=rl_core.SamplingSettings(max_completion_tokens=32),
        )
        training = rl_core.grpo(
            folder, prompts=prompts, reward=share_digits, settings=settings, seed=seed
        )
        training.run()
        table = training.metrics()
        reward, kl = list(table["reward/mean"].dropna()), list(table["policy/ref_kl"].dropna())
        record_row(
            output,
            what="grpo",
            precision=precision,
            seed=seed,
            iterations=iterations,
            first_rewards=[round(value, 4) for value in reward[:3]],
            reward_last_10=sum(reward[-10:]) / 10,
            ref_kl_first=kl[0],
            ref_kl_last_10=sum(kl[-10:]) / 10,
            text_kl_to_start=compute_kl_and_nll(training.model.eval(), full, rows)["kl_mean"],
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("gsm8k")
    parser.add_argument("preferences")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--size-of")
    parser.add_argument(
        "--part", choices=["text", "sizes", "dpo", "grpo"], help="one part alone; default: all"
    )
    parser.add_argument("--run", help="PRECISION:SEED, one run of dpo or grpo alone")
    options = parser.parse_args()
    if options.size_of:
        measure_size(options.output, options.size_of)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    questions, pairs = read_lines(options.gsm8k, 2000), read_lines(options.preferences, 1500)
    folder = make_base_model(options.output, questions, options.steps)
    runs = RUNS
    if options.run:
        precision, _, seed = options.run.partition(":")
        runs = ((precision, int(seed)),)
    if options.part in (None, "text"):
        compare_text_kl(options.output, folder, questions, pairs)
    if options.part in (None, "sizes"):
        compare_sizes(options.output)
    if options.part in (None, "dpo"):
        train_dpo(options.output, folder, pairs[:700], runs)
    if options.part in (None, "grpo"):
        train_grpo(options.output, folder, questions, options.iterations, runs)


if __name__ == "__main__":
    main()
