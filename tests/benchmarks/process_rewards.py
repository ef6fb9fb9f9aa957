"""What rewards of steps add to a reward of the outcome, with the same episodes.

    python tests/benchmarks/process_rewards.py --output DIR [--seeds 3] [--iterations 60] [--arms outcome,mean,...]

The task is a chain of sums modulo 10, `2 + 0 + 2 + 1 + 2 + 0 =`, answered with one running sum a line. The policy (nano
preset) starts from SFT on chains in which each line is wrong with probability 0.25, so that few of its chains are right
to the end. A verifier scores each line: 1 if it follows from the line before and the question. `outcome` rewards the
last line alone; the other arms add the process reward with an aggregate, `ppo` arms use a critic. `prm` scores lines
with a reward model of steps, trained on labelled samples of the SFT policy. Success: 300 held-out chains, 4 samples
each at temperature 1; also the mean number of lines written. Intervals over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from claimed.intervals import format_share  # noqa: E402

LENGTH, ERROR_RATE = 6, 0.25
ARMS = {  # name -> algorithm, aggregate (None = outcome alone), reward model
    "outcome": ("grpo", None, False),
    "mean": ("grpo", "mean", False),
    "sum": ("grpo", "sum", False),
    "min": ("grpo", "min", False),
    "prm mean": ("grpo", "mean", True),
    "ppo outcome": ("ppo", None, False),
    "ppo mean": ("ppo", "mean", False),
}


def build_chain(seed):
    """Return the question and the right lines."""
    numbers = random.Random(seed).choices(range(3), k=LENGTH)
    sums = [sum(numbers[: count + 1]) % 10 for count in range(1, LENGTH)]
    return " + ".join(map(str, numbers)) + " =", [str(value) for value in sums]


def check_lines(steps, trajectory):
    """Return 1 for each line that follows from the one before, 0 for others and for lines beyond the chain."""
    numbers = [int(part) for part in trajectory.prompt.removesuffix(" =").split(" + ")]
    scores, total = [], numbers[0]
    for index, step in enumerate(steps):
        is_inside = index + 1 < len(numbers)
        expected = (total + numbers[index + 1]) % 10 if is_inside else None
        text = step.strip()
        scores.append(float(is_inside and text == str(expected)))
        total = int(text) if text.isdigit() and len(text) == 1 else -1000
    return scores


def write_demonstration(seed):
    """Return a demonstration in which each line is wrong at a rate; later lines follow from it."""
    dice = random.Random(f"demo {seed}")
    question, _ = build_chain(seed)
    numbers = [int(part) for part in question.removesuffix(" =").split(" + ")]
    total, lines = numbers[0], []
    for number in numbers[1:]:
        total = (total + number) % 10
        if dice.random() < ERROR_RATE:
            total = dice.randrange(10)
        lines.append(str(total))
    return {"prompt": question, "completion": "\n".join(lines)}


def build_lines(question):
    numbers = [int(part) for part in question.removesuffix(" =").split(" + ")]
    return [str(sum(numbers[: count + 1]) % 10) for count in range(1, len(numbers))]


def outcome(trajectories):
    """Reward the last line of the right number of lines."""
    rewards = []
    for trajectory in trajectories:
        lines, right = trajectory.completion.strip().split("\n"), build_lines(trajectory.prompt)
        rewards.append(float(len(lines) == len(right) and lines[-1].strip() == right[-1]))
    return rewards


def train_start(folder):
    """Train and save the SFT policy; return its folder."""
    import rl_core

    target = folder / "sft"
    if not target.is_dir():
        rows = [write_demonstration(seed) for seed in range(4000)]
        texts = [f"{row['prompt']} {row['completion']}" for row in rows[:200]]
        settings = {"preset": "nano", "vocab_size": 300, "context": 96, "device": "cpu"}
        policy = rl_core.create_policy(texts, settings)
        options = {"epochs": 12, "batch_size": 32, "learning_rate": 3e-3, "eval_every": 0}
        rl_core.sft(policy, rows, heldout=0.05, settings={**options, "patience": None}).run()
        policy.save(target)
    return target


def train_step_model(folder, start):
    """Train a reward model of steps on labelled samples of the SFT policy; return its folder and accuracy."""
    import rl_core

    target = folder / "prm"
    if not target.is_dir():
        questions = [build_chain(f"prm {seed}")[0] for seed in range(1500)]
        texts = rl_core.generate(str(start), questions, samples=2, sampling=SAMPLING, seed=5)
        rows = []
        for question, answers in zip(questions, texts, strict=True):
            for answer in answers:
                steps = [step for step in answer.split("\n") if step.strip()]
                labels = check_lines(steps, type("T", (), {"prompt": question}))
                if steps:
                    rows.append(
                        {
                            "prompt": question,
                            "completions": steps,
                            "labels": [label == 1 for label in labels],
                        }
                    )
        settings = {"loss": "process", "epochs": 8, "learning_rate": 1e-3, "batch_size": 64}
        training = rl_core.reward_model(str(start), rows, settings=settings)
        training.run()
        training.save(target)
        metrics = training.recipe.trainer.evaluate()
        (folder / "prm.json").write_text(json.dumps(metrics))
        print("reward model of steps", metrics, flush=True)
    return target


SAMPLING = {"max_completion_tokens": 24, "max_turns": 1}


def run_arm(folder, start, arm, seed, iterations):
    import rl_core

    algorithm, aggregate, uses_model = ARMS[arm]
    policy = rl_core.load_policy(str(start))
    reward, options, more = {outcome: 1.0}, {}, {}
    if aggregate is not None:
        reward["process"] = 1.0
        function = None if uses_model else f"{Path(__file__).resolve()}:check_lines"
        options = {"process": {"function": function, "aggregate": aggregate}}
        if uses_model:
            more["reward_model"] = train_step_model(folder, start)
    settings = {
        "algorithm": algorithm,
        "iterations": iterations,
        "prompts_per_iteration": 16,
        "group_size": 8,
        "learning_rate": 5e-4,
        "warmup_steps": 5,
        "reward_options": options,
        "sampling": {**SAMPLING, "slots": 256},
    }
    if algorithm == "ppo":
        settings["critic"] = {"learning_rate": 1e-3}
    prompts = [build_chain(f"train {number}")[0] for number in range(4000)]
    run = rl_core.policy_gradient(
        policy, prompts=prompts, reward=reward, settings=settings, seed=seed, **more
    )
    run.run()
    curve = run.metrics()
    questions = [build_chain(f"test {number}")[0] for number in range(300)]
    answers = rl_core.generate(policy, questions, samples=4, sampling=SAMPLING, seed=1000 + seed)
    texts = [
        (question, answer)
        for question, group in zip(questions, answers, strict=True)
        for answer in group
    ]
    right = [answer.strip().split("\n") == build_lines(question) for question, answer in texts]
    name = next(column for column in curve.columns if column.endswith("outcome"))
    return {
        "success": 100 * statistics.fmean(right),
        "lines": statistics.fmean(len(answer.strip().split("\n")) for _, answer in texts),
        "curve": [float(value) for value in curve[name]],
        "training": 100 * statistics.fmean(curve[name]),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--arms", default=",".join(ARMS))
    options = parser.parse_args()
    arms = options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms: {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}")
    logging.disable(logging.WARNING)
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    start = train_start(folder)
    results = {}
    for arm in arms:
        for seed in range(options.seeds):
            path = folder / f"{arm}-{seed}.json".replace(" ", "_")
            if not path.is_file():
                row = run_arm(folder, start, arm, seed, options.iterations)
                path.write_text(json.dumps(row))
                print(arm, seed, row["success"], row["lines"], row["training"], flush=True)
            results.setdefault(arm, []).append(json.loads(path.read_text()))
    lines = [
        "| reward | all lines right [95%] | lines written | right answers during training |",
        "|---|---|---|---|",
    ]
    for name, rows in results.items():
        each = ", ".join(f"{row['success']:.1f}" for row in rows)
        success = format_share([row["success"] for row in rows])
        written = statistics.fmean(row["lines"] for row in rows)
        training = statistics.fmean(row["training"] for row in rows)
        lines.append(f"| {name} | {success} ({each}) | {written:.2f} | {training:.1f}% |")
    table = "\n".join([*lines, ""])
    print(table)
    (folder / "process_rewards.md").write_text(table)


if __name__ == "__main__":
    main()
