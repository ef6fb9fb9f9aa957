"""What a policy learns from a teacher with another vocabulary, beside one with its own and GRPO, from the same start.

    python tests/benchmarks/cross_vocabulary.py OUTPUT.json [--seeds 0 1 2] [--iterations 20]

The task: sums of two numbers from 1 to 10, answered by a word. The policy, a model from scratch whose tokenizer spells
words by letters and short pieces, is fine-tuned on answers of which two in five are right. The teachers are fine-tuned
on right answers alone: one has the policy's tokenizer, one a larger one with most words as single tokens. Each arm then
takes the same number of rollouts (16 prompts x 8 an iteration). Success: all 100 sums, each answered 8 times at
temperature 1. Intervals over seeds (Student's t).
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
from claimed.intervals import estimate_interval  # noqa: E402
from self_distillation import PAIRS, SumEpisode, Sums  # noqa: E402

import rl_core  # noqa: E402
from rl_core.api.policy import load_policy  # noqa: E402
from rl_core.evaluation import evaluate as play_episodes  # noqa: E402
from rl_core.rollouts.episode_sequence import EpisodeRequest  # noqa: E402

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
WORDS = NUMBERS.split()
SIZES = {"start": 300, "same": 300, "other": 420}  # entries of the tokenizers
SAMPLING = dict(max_completion_tokens=14)
SHARED = dict(
    iterations=20,
    prompts_per_iteration=16,
    group_size=8,
    learning_rate=1e-3,
    warmup_steps=5,
    eval_every=0,
    patience=None,
    sampling=SAMPLING,
)
ARMS = {
    "GRPO": None,
    "own vocabulary, sampled": ("same", {}),
    "other vocabulary, sampled": ("other", {}),
    "other vocabulary, uld": ("other", dict(divergence="uld")),
    "other vocabulary, gold": ("other", dict(divergence="gold")),
}


class WordEpisode(SumEpisode):
    """One sum; `target` is the word of its result."""

    def reset(self):
        messages = super().reset()
        self.target = WORDS[int(self.target)]
        return messages


class WordSums(Sums):
    """All sums, answered by words."""

    def episode(self, seed, level):
        return WordEpisode(seed, level)


def make_rows(seed, right_share):
    rng, rows = random.Random(seed), []
    for a, b in PAIRS:
        for _ in range(6):
            wrong = a + b + rng.choice([-2, -1, 1, 2] if a + b < 19 else [-2, -1])
            answer = a + b if rng.random() < right_share else wrong
            rows.append({"prompt": f"{a} + {b} = ?", "completion": WORDS[answer]})
    return rows


def train_model(kind, seed, folder):
    rows = make_rows(seed, 0.4 if kind == "start" else 1.0)
    texts = [f"{row['prompt']} {row['completion']}" for row in make_rows(0, 1.0)]
    model = rl_core.create_policy(
        texts,
        rl_core.ModelSettings(preset="tiny", context=64, vocab_size=SIZES[kind]),
        seed=seed if kind == "start" else 1000 + seed,
    )
    training = rl_core.sft(
        model,
        rows,
        heldout=0.0,
        settings=dict(epochs=20, batch_size=64, learning_rate=3e-3, eval_every=0, warmup_steps=20),
        seed=seed,
    )
    training.run()
    return training.save(folder / f"{kind}-{seed}")


def measure_success(policy, seed):
    backend = policy.backend()
    backend.refresh_weights()
    result = play_episodes(
        WordSums(),
        backend,
        policy.renderer,
        [EpisodeRequest("sum", number) for number in range(len(PAIRS))],
        samples=8,
        sampling=rl_core.SamplingSettings(**SAMPLING),
        seed=seed,
    )
    return 100 * statistics.fmean(episode.successes / 8 for episode in result.episodes)


def run_arm(name, folders, seed, iterations):
    policy = load_policy(str(folders["start"]))
    settings = {**SHARED, "iterations": iterations}
    if ARMS[name] is None:
        training = rl_core.grpo(policy, environment=WordSums(), settings=settings, seed=seed)
    else:
        kind, options = ARMS[name]
        training = rl_core.distill(
            policy,
            str(folders[kind]),
            environment=WordSums(),
            settings={**settings, **options},
            seed=seed,
        )
    begun = time.perf_counter()
    rows = [training.trainer.step() for _ in range(iterations)]
    seconds = time.perf_counter() - begun
    return {
        "arm": name,
        "seed": seed,
        "success": measure_success(policy, 100 + seed),
        "curve": [row["train/success_rate"] for row in rows],
        "kl": [row.get("policy/teacher_kl") for row in rows],
        "aligned": statistics.fmean(row.get("policy/aligned_rate", 1.0) for row in rows),
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folder = options.output.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    rows = json.loads(options.output.read_text()) if options.output.is_file() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in options.seeds:
        folders = {kind: folder / f"{kind}-{seed}" for kind in SIZES}
        for kind, path in folders.items():
            if (kind, seed) not in done:
                folders[kind] = train_model(kind, seed, folder)
                success = measure_success(load_policy(str(path)), seed)
                rows.append({"arm": kind, "seed": seed, "success": success})
                print(rows[-1], flush=True)
        for name in ARMS:
            if (name, seed) not in done:
                rows.append(run_arm(name, folders, seed, options.iterations))
                shown = {k: v for k, v in rows[-1].items() if k not in ("curve", "kl")}
                print(shown, flush=True)
            options.output.write_text(json.dumps(rows))
    print("| arm | success [95%] | each seed | training success | one token on both sides |")
    print("|---|---|---|---|---|")
    for name in (*SIZES, *ARMS):
        ours = [row for row in rows if row["arm"] == name]
        mean, low, high = estimate_interval([row["success"] for row in ours])
        each = ", ".join(f"{row['success']:.1f}" for row in ours)
        curve = [100 * statistics.fmean(row["curve"]) for row in ours if "curve" in row]
        training = f"{statistics.fmean(curve):.1f}%" if curve else ""
        aligned = [100 * row["aligned"] for row in ours if "aligned" in row and "other" in name]
        share = f"{statistics.fmean(aligned):.0f}%" if aligned else ""
        print(f"| {name} | {mean:.1f}% [{low:.1f}, {high:.1f}] | {each} | {training} | {share} |")


if __name__ == "__main__":
    main()
