"""What a policy learns from judges of known accuracy, against the true reward with the same episodes.

    python tests/benchmarks/judges.py --output DIR [--seeds 3] [--episodes 2560] [--arms "true reward,ranking 0.9"]

`pixel_grid`, from the SFT model of configs/demo.yaml, GRPO. The judge is a stand-in over HTTP on loopback that knows
the right answer and errs at a set rate, from the texts alone: `score` and `rubric` grade each answer, `ranking` ranks a
prompt's samples, `pairwise` compares each with two others in both orders. Success: 200 held-out episodes, each played 8
times at temperature 1. Intervals over seeds (Student's t). Existing results in DIR are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from claimed.intervals import format_share  # noqa: E402
from helpers.fakes.judge_server import run_judge_server  # noqa: E402
from learning_runs.jobs import BATCH, COMMON  # noqa: E402
from learning_runs.training import Bench, train_sft_model  # noqa: E402

ARMS = {  # name -> mode, accuracy; None = the environment's reward
    "true reward": None,
    "rubric 0.9": ("rubric", 0.9),
    "ranking 0.9": ("ranking", 0.9),
    "pairwise 0.9": ("pairwise", 0.9),
    "ranking 0.7": ("ranking", 0.7),
    "pairwise 0.7": ("pairwise", 0.7),
    "pairwise 0.5": ("pairwise", 0.5),
}
MODES = {
    "rubric": dict(criteria=[dict(name="correct", description="the answer is right")]),
    "ranking": {},
    "pairwise": dict(opponents=2),
}


def grade_answer(question, answer, prompt):
    """Return 1 if the last line answers what the instructions name."""
    target = re.search(r"The right answer is: (.*)\.", prompt)[1]
    last = answer.strip().splitlines()[-1] if answer.strip() else ""
    return float(last.removeprefix("answer").strip() == target.strip())


def run_arm(config, model, judge, seed, episodes, algorithm="grpo"):
    """Train one run; return its success, its curve, and what the judge was asked."""
    from rl_core.evaluation import evaluate
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import PolicySettings, build_settings
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

    bench = Bench(config, model)
    iterations = episodes // BATCH
    rewards, options = {"task": 1.0}, {}
    if judge is not None:
        rewards = {"judge": 1.0}
        options = {"judge": judge, "max_failed_share": 0.0}
    settings = build_settings(
        {
            **COMMON,
            "algorithm": algorithm,
            "iterations": iterations,
            "rewards": rewards,
            "reward_options": options,
        },
        PolicySettings,
        "policy",
    )
    settings = dataclasses.replace(settings, sampling=bench.sampling)
    backend = bench.policy.backend()
    trainer = PolicyGradientTrainer(
        bench.policy.model,
        None,
        bench.policy.renderer,
        bench.environment,
        settings,
        seed,
        RewardOrchestrator(settings.rewards, options=settings.reward_options),
        backend,
    )
    rows = [trainer.step() for _ in range(iterations)]
    backend.refresh_weights()
    result = evaluate(
        bench.environment,
        backend,
        bench.policy.renderer,
        bench.reported[:200],
        samples=8,
        sampling=bench.sampling,
        seed=1000 + seed,
    )
    last = rows[-1]
    return {
        "success": 100 * statistics.fmean(episode.successes / 8 for episode in result.episodes),
        "training": 100 * statistics.fmean(row["train/success_rate"] for row in rows),
        "curve": [row["train/success_rate"] for row in rows],
        "calls": last.get("reward/judge/calls", 0.0) / max(1, iterations),
        "first_rate": statistics.fmean(row.get("reward/judge/first_rate", 0.5) for row in rows),
        "correlation": last.get("reward/correlation/total", 0.0),
        "seconds": sum(row["perf/step_seconds"] for row in rows if "perf/step_seconds" in row),
    }


def run_judged_arm(config, model, arm, seed, episodes):
    """Run an arm with its judge on loopback; judgements are not shared between runs."""
    if ARMS[arm] is None:
        return run_arm(config, model, None, seed, episodes)
    mode, accuracy = ARMS[arm]
    with run_judge_server(grade_answer, accuracy) as server, tempfile.TemporaryDirectory() as cache:
        judge = dict(
            mode=mode,
            url=server.url,
            model="stand-in",
            instructions="The right answer is: {target}.",
            cache=cache,
            concurrency=4,
            **MODES[mode],
        )
        return run_arm(config, model, judge, seed, episodes)


def format_table(results):
    lines = [
        "| reward | success after training [95%] | during training | calls per iteration | correlation with success |",
        "|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        each = ", ".join(f"{row['success']:.1f}" for row in rows)
        success = format_share([row["success"] for row in rows])
        means = {key: statistics.fmean(row[key] for row in rows) for key in ("training", "calls")}
        correlation = statistics.fmean(row["correlation"] for row in rows)
        lines.append(
            f"| {name} | {success} ({each}) | {means['training']:.1f}% | "
            f"{means['calls']:.0f} | {correlation:.2f} |"
        )
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", default=str(ROOT / "configs/demo.yaml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=2560)
    parser.add_argument("--arms", default=",".join(ARMS))
    options = parser.parse_args()
    arms = options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"--arms: {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}")
    logging.disable(logging.WARNING)
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = str(train_sft_model(options.config, folder, 1, []))
    results = {}
    for arm in arms:
        for seed in range(options.seeds):
            path = folder / f"{arm}-{seed}.json".replace(" ", "_")
            if not path.is_file():
                row = run_judged_arm(options.config, model, arm, seed, options.episodes)
                path.write_text(json.dumps(row))
                print(arm, seed, row["success"], row["training"], row["seconds"], flush=True)
            results.setdefault(arm, []).append(json.loads(path.read_text()))
    table = format_table(results)
    print(table)
    (folder / "judges.md").write_text(table)


if __name__ == "__main__":
    main()
