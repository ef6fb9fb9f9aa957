"""What DPPO, MaxRL and GDPO gain over GRPO with the same episodes, where each of them claims to.

    python tests/benchmarks/newest.py --output DIR [--seeds 3] [--episodes 8960] [--parts maxrl,dppo,gdpo]

`pixel_grid`, from the SFT model of configs/demo.yaml; `maxrl` from one whose demonstrator is right in a tenth of the
episodes. `dppo` takes sixteen optimizer steps on each iteration's rollouts. `gdpo` adds a length penalty that
begins at 8 tokens. Success: 200 held-out episodes, each played 8 times at temperature 1, and the share of episodes that
one of the 8 solves. Intervals over seeds (Student's t). Existing results in DIR are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from claimed.intervals import format_share  # noqa: E402
from learning_runs.jobs import BATCH, COMMON  # noqa: E402
from learning_runs.training import Bench, train_sft_model  # noqa: E402

MANY_STEPS = dict(epochs=4, minibatches=4, learning_rate=5e-4)
LENGTH = dict(reward_options=dict(length=dict(free=8, limit=64)))
WEAK = ["environment.options.skill={easy: 0.1, medium: 0.1, hard: 0.1}"]
PARTS = {  # part -> changes of the SFT's pipeline; arms: settings
    "maxrl": (
        WEAK,
        {
            "grpo": dict(algorithm="grpo"),
            "rloo": dict(algorithm="rloo"),
            "maxrl": dict(algorithm="maxrl"),
        },
    ),
    "dppo": (
        [],
        {
            "grpo": dict(algorithm="grpo", **MANY_STEPS),
            "dppo, binary_tv": dict(algorithm="dppo", **MANY_STEPS),
            "dppo, binary_kl": dict(algorithm="dppo", dppo_divergence="binary_kl", **MANY_STEPS),
            "dppo, topk_tv": dict(algorithm="dppo", dppo_divergence="topk_tv", **MANY_STEPS),
        },
    ),
    "gdpo": (
        [],
        {
            "grpo": dict(rewards={"task": 1.0, "length": 0.5}, **LENGTH),
            "gdpo, weight 0.5": dict(
                algorithm="gdpo", rewards={"task": 1.0, "length": 0.5}, **LENGTH
            ),
            "gdpo, weight 0.1": dict(
                algorithm="gdpo", rewards={"task": 1.0, "length": 0.1}, **LENGTH
            ),
        },
    ),
}


def run_arm(config, model, options, seed, episodes):
    """Train one run; return its curve of training success, its held-out success and tokens."""
    from rl_core.evaluation import evaluate
    from rl_core.rewards.orchestrator import RewardOrchestrator
    from rl_core.settings import PolicySettings, build_settings
    from rl_core.trainers.policy_gradient.trainer import PolicyGradientTrainer

    bench = Bench(config, model)
    iterations = episodes // BATCH
    settings = build_settings(
        {**COMMON, **options, "iterations": iterations}, PolicySettings, "policy"
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
    solved = [episode.successes for episode in result.episodes]
    return {
        "success": 100 * statistics.fmean(count / 8 for count in solved),
        "solved": 100 * statistics.fmean(count > 0 for count in solved),
        "curve": [row["train/success_rate"] for row in rows],
        "training": 100 * statistics.fmean(row["train/success_rate"] for row in rows),
        "tokens": statistics.fmean(row["train/action_tokens"] for row in rows[-5:]),
        "entropy": [row["policy/entropy"] for row in rows if "policy/entropy" in row][-1],
        "masked": statistics.fmean(row.get("policy/clip_fraction", 0.0) for row in rows),
        "seconds": sum(row["perf/rollout_seconds"] + row["perf/update_seconds"] for row in rows),
    }


def format_part(part, results):
    lines = [
        f"{part}:",
        "",
        "| algorithm | success [95%] | solved by one of 8 | training success | tokens | entropy | masked | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        means = {
            key: statistics.fmean(row[key] for row in rows) for key in rows[0] if key != "curve"
        }
        each = ", ".join(f"{row['success']:.1f}" for row in rows)
        cells = [
            name,
            f"{format_share([row['success'] for row in rows])} ({each})",
            format_share([row["solved"] for row in rows]),
            format_share([row["training"] for row in rows]),
            f"{means['tokens']:.1f}",
            f"{means['entropy']:.2f}",
            f"{100 * means['masked']:.1f}%",
            f"{means['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", default=str(ROOT / "configs/demo.yaml"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=8960)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tables = []
    for part in options.parts.split(","):
        changes, arms = PARTS[part]
        folder = options.output.resolve() / ("weak" if changes else "demo")
        folder.mkdir(parents=True, exist_ok=True)
        model = str(train_sft_model(options.config, folder, 1, changes))
        results = {}
        for name, settings in arms.items():
            for seed in range(options.seeds):
                path = folder / f"{part}-{name}-{seed}.json".replace(" ", "_").replace(",", "")
                if not path.is_file():
                    row = run_arm(options.config, model, settings, seed, options.episodes)
                    path.write_text(json.dumps(row))
                    print(part, name, seed, row["success"], row["training"], flush=True)
                results.setdefault(name, []).append(json.loads(path.read_text()))
        tables.append(format_part(part, results))
        print(tables[-1], flush=True)
    (options.output / "newest.md").write_text("\n".join(tables))


if __name__ == "__main__":
    main()
