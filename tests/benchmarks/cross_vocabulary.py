"""What a policy learns from a teacher with another vocabulary, from one with its own, and by GRPO.

    python tests/benchmarks/cross_vocabulary.py OUTPUT.json [--seeds 0 1 2] [--iterations 40]

The task: sums of two numbers from 1 to 10, answered in words ("seventeen"). The policy, a model from scratch with 320
tokens, is fine-tuned on answers of which two in five are right; teachers with 320 tokens (the policy's tokenizer) and
with 450 on right answers alone. Then each arm takes the same number of rollouts (16 prompts x 8 an iteration). Success:
all 100 sums, each answered 8 times at temperature 1. Intervals over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from claimed.intervals import format_share  # noqa: E402
from self_distillation import PAIRS, SHARED, SumEpisode, Sums, measure_success  # noqa: E402

import rl_core  # noqa: E402
from rl_core.api.policy import load_policy  # noqa: E402

UNITS = "zero one two three four five six seven eight nine ten".split()  # noqa: SIM905
TEENS = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
WORDS = [*UNITS, *TEENS, "twenty", *(f"twenty-{unit}" for unit in UNITS[1:4])]
VOCABULARIES = {"policy": 320, "own": 320, "other": 450}
TOKENS = 12  # of an answer, at most
ARMS = {
    "grpo": None,
    "own vocabulary, sampled": ("own", {"divergence": "sampled"}),
    "own vocabulary, gold": ("own", {"divergence": "gold"}),
    "other vocabulary, sampled": ("other", {"divergence": "sampled"}),
    "other vocabulary, uld": ("other", {"divergence": "uld"}),
    "other vocabulary, gold": ("other", {"divergence": "gold"}),
}


class WordSumEpisode(SumEpisode):
    """One sum, to be answered in words."""

    def reset(self):
        messages = super().reset()
        self.target = WORDS[int(self.target)]
        return messages


class WordSums(Sums):
    """All sums in words."""

    name = "word_sums"

    def episode(self, seed, level):
        return WordSumEpisode(seed, level)


def make_rows(seed, skill):
    rng, rows = random.Random(seed), []
    for a, b in PAIRS:
        for _ in range(6):
            wrong = a + b + rng.choice([-2, -1, 1, 2, 3])
            answer = WORDS[a + b if rng.random() < skill else max(wrong, 0)]
            rows.append({"prompt": f"{a} + {b} = ?", "completion": answer})
    return rows


def train_model(name, seed, folder):
    """Train the policy's start, or a teacher, from scratch."""
    rows = make_rows(seed, 0.4 if name == "policy" else 1.0)
    model = rl_core.create_policy(
        [f"{row['prompt']} {row['completion']}" for row in make_rows(0, 1.0)] + WORDS,
        rl_core.ModelSettings(preset="tiny", context=64, vocab_size=VOCABULARIES[name]),
        seed=seed if name == "policy" else seed + 50,
    )
    settings = dict(epochs=40, batch_size=64, learning_rate=3e-3, eval_every=0, warmup_steps=20)
    training = rl_core.sft(model, rows, heldout=0.0, settings=settings, seed=seed)
    training.run()
    return training.save(folder / f"{name}-{seed}")


def run_arm(name, models, seed, iterations):
    policy = load_policy(str(models["policy"]))
    settings = {
        **SHARED,
        "iterations": iterations,
        "sampling": {"max_completion_tokens": TOKENS},
    }
    if ARMS[name] is None:
        training = rl_core.grpo(policy, environment=WordSums(), settings=settings, seed=seed)
    else:
        teacher, options = ARMS[name]
        training = rl_core.distill(
            policy,
            str(models[teacher]),
            environment=WordSums(),
            settings={**settings, **options},
            seed=seed,
        )
    begun = time.perf_counter()
    rows = [training.trainer.step() for _ in range(iterations)]
    return {
        "arm": name,
        "seed": seed,
        "success": measure_success(policy, 100 + seed, WordSums(), TOKENS),
        "curve": [row["train/success_rate"] for row in rows],
        "aligned": rows[-1].get("policy/aligned_rate"),
        "seconds": time.perf_counter() - begun,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folder = options.output.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    rows = json.loads(options.output.read_text()) if options.output.is_file() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in options.seeds:
        models = {name: folder / f"{name}-{seed}" for name in VOCABULARIES}
        for name in VOCABULARIES:
            if (name, seed) not in done:
                train_model(name, seed, folder)
                policy = load_policy(str(models[name]))
                success = measure_success(policy, seed, WordSums(), TOKENS)
                rows.append({"arm": name, "seed": seed, "success": success})
                print(rows[-1], flush=True)
        for name in ARMS:
            if (name, seed) not in done:
                rows.append(run_arm(name, models, seed, options.iterations))
                print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
            options.output.write_text(json.dumps(rows))
    print(format_table(rows))


def format_table(rows):
    lines = [
        "| arm | success [95%] | each seed | mean success of the rollouts | spans of one token |",
        "|---|---|---|---|---|",
    ]
    names = {
        "policy": "start",
        "own": "teacher, own vocabulary",
        "other": "teacher, other vocabulary",
    }
    for name in (*names, *ARMS):
        ours = [row for row in rows if row["arm"] == name]
        success = format_share([row["success"] for row in ours])
        each = ", ".join(f"{row['success']:.1f}" for row in ours)
        curve = [100 * statistics.fmean(row["curve"]) for row in ours if "curve" in row]
        training = f"{statistics.fmean(curve):.1f}%" if curve else ""
        aligned = [100 * row["aligned"] for row in ours if row.get("aligned") is not None]
        share = f"{statistics.fmean(aligned):.0f}%" if aligned else ""
        lines.append(f"| {names.get(name, name)} | {success} | {each} | {training} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
