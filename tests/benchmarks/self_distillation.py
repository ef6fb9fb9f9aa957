"""What a policy learns from itself with a hint, beside GRPO with the same rollouts, from the same start.

    python tests/benchmarks/self_distillation.py OUTPUT.json [--seeds 0 1 2] [--iterations 40]

The task: sums of two numbers from 1 to 10, answered at once. A model from scratch is fine-tuned on answers of which two
in five are right, and, for other rows, to copy a number that its prompt says is the right answer. Then each arm takes
the same number of rollouts (16 prompts x 8 an iteration). Success: all 100 sums, each answered 8 times at temperature
1. Intervals over seeds (Student's t).
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

import rl_core  # noqa: E402
from rl_core.api.policy import load_policy  # noqa: E402
from rl_core.environments.tools import Toolset  # noqa: E402
from rl_core.evaluation import evaluate as play_episodes  # noqa: E402
from rl_core.rollouts.episode_sequence import EpisodeRequest  # noqa: E402

HINT = "{{prompt}} The right answer is {{{name}}}"
PAIRS = [(a, b) for a in range(1, 11) for b in range(1, 11)]


class SumEpisode(rl_core.Episode):
    """One sum; `target` is its result."""

    def reset(self):
        a, b = PAIRS[self.seed % len(PAIRS)]
        self.target = str(a + b)
        return [{"role": "user", "content": f"{a} + {b} = ?"}]

    def act(self, text):
        success = text.strip() == self.target
        return rl_core.Step(
            reward=float(success), terminated=True, success=success, answer=text.strip()
        )


class Sums(rl_core.Environment):
    """All sums; held-out episodes are the same sums, as the question is what training teaches."""

    name = "sums"
    levels = ("sum",)

    @property
    def tools(self):
        return Toolset([])

    def episode(self, seed, level):
        return SumEpisode(seed, level)


def make_rows(seed):
    rng, rows = random.Random(seed), []
    for a, b in PAIRS:
        for _ in range(6):
            wrong = a + b + rng.choice([-3, -2, -1, 1, 2, 3])
            answer = a + b if rng.random() < 0.4 else wrong
            rows.append({"prompt": f"{a} + {b} = ?", "completion": str(answer)})
            said = rng.randint(2, 20)
            hinted = HINT.format(name="target").format(prompt=f"{a} + {b} = ?", target=said)
            rows.append({"prompt": hinted, "completion": str(said)})
    return rows


def train_start(seed, folder):
    rows = make_rows(seed)
    model = rl_core.create_policy(
        [f"{row['prompt']} {row['completion']}" for row in rows],
        rl_core.ModelSettings(preset="tiny", context=64, vocab_size=384),
        seed=seed,
    )
    training = rl_core.sft(
        model,
        rows,
        heldout=0.0,
        settings=dict(epochs=40, batch_size=64, learning_rate=3e-3, eval_every=0, warmup_steps=20),
        seed=seed,
    )
    training.run()
    return training.save(folder / f"start-{seed}")


SHARED = dict(
    iterations=40,
    prompts_per_iteration=16,
    group_size=8,
    learning_rate=1e-3,
    warmup_steps=5,
    eval_every=0,
    patience=None,
    sampling=dict(max_completion_tokens=6),
)


def teach(name, weights):
    prompt = HINT.format(name=name)
    return dict(self_teacher=dict(prompt=prompt, weights=weights))


ARMS = {
    "grpo": None,
    "answer, current": teach("target", "current"),
    "answer, ema": teach("target", "ema"),
    "answer, initial": teach("target", "initial"),
    "solution, ema": teach("solution", "ema"),
}


def measure_success(policy, seed, environment=None, tokens=6):
    backend = policy.backend()
    backend.refresh_weights()
    result = play_episodes(
        environment or Sums(),
        backend,
        policy.renderer,
        [EpisodeRequest("sum", number) for number in range(len(PAIRS))],
        samples=8,
        sampling=rl_core.SamplingSettings(max_completion_tokens=tokens),
        seed=seed,
    )
    return 100 * statistics.fmean(episode.successes / 8 for episode in result.episodes)


def run_arm(name, start, seed, iterations):
    policy = load_policy(str(start))
    settings = {**SHARED, "iterations": iterations}
    if ARMS[name] is None:
        training = rl_core.grpo(policy, environment=Sums(), settings=settings, seed=seed)
    else:
        settings |= ARMS[name]
        training = rl_core.distill(policy, environment=Sums(), settings=settings, seed=seed)
    begun = time.perf_counter()
    rows = [training.trainer.step() for _ in range(iterations)]
    seconds = time.perf_counter() - begun
    return {
        "arm": name,
        "seed": seed,
        "success": measure_success(policy, 100 + seed),
        "curve": [row["train/success_rate"] for row in rows],
        "taught": statistics.fmean(row.get("train/taught_rate", 1.0) for row in rows),
        "entropy": rows[-1].get("policy/entropy"),
        "seconds": seconds,
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
        start = folder / f"start-{seed}"
        if ("start", seed) not in done:
            start = train_start(seed, folder)
            rows.append(
                {
                    "arm": "start",
                    "seed": seed,
                    "success": measure_success(load_policy(str(start)), seed),
                }
            )
            print(rows[-1], flush=True)
        for name in ARMS:
            if (name, seed) not in done:
                rows.append(run_arm(name, start, seed, options.iterations))
                print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
            options.output.write_text(json.dumps(rows))
    print("| teacher's prompt, weights | success [95%] | each seed | training success | taught |")
    print("|---|---|---|---|---|")
    for name in ("start", *ARMS):
        ours = [row for row in rows if row["arm"] == name]
        success = format_share([row["success"] for row in ours])
        each = ", ".join(f"{row['success']:.1f}" for row in ours)
        curve = [100 * statistics.fmean(row["curve"]) for row in ours if "curve" in row]
        training = f"{statistics.fmean(curve):.1f}%" if curve else ""
        taught = [100 * row["taught"] for row in ours if "taught" in row and name != "grpo"]
        share = f"{statistics.fmean(taught):.0f}%" if taught else ""
        print(f"| {name} | {success} | {each} | {training} | {share} |")


if __name__ == "__main__":
    main()
