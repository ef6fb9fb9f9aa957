"""PPO of networks on five Gymnasium environments, five seeds each, beside the scores that rl-baselines3-zoo publishes.

    python -m posttrain.install --extras gymnasium && pip install 'gymnasium[box2d]'
    python tests/benchmarks/networks_zoo.py --output DIR [--only acrobot pendulum] [--seeds 5] [--episodes 100]

Each run trains as its file in `configs/` says, keeps the best validated weights if the file sets `patience`, and then
plays held-out episodes greedily. A run that has left its result in DIR is not repeated, so a stopped benchmark
continues; `DIR/table.md` is written after every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

from claimed.intervals import estimate_interval, format_interval

ROOT = Path(__file__).parents[2]
# Mean and deviation over the episodes of one trained agent, and its steps: rows "ppo" of the file benchmark.md in
# DLR-RM/rl-baselines3-zoo. LunarLander was version 2 there.
PUBLISHED = {
    "cartpole": (500.0, 0.0, 100_000),
    "acrobot": (-73.506, 18.201, 1_000_000),
    "pendulum": (-172.225, 104.159, 100_000),
    "mountain-car": (88.343, 2.572, 20_000),
    "lunar-lander": (242.119, 31.823, 1_000_000),
}


def train_and_play(name: str, seed: int, episodes: int) -> dict[str, Any]:
    """Train one seed of a configuration and play held-out episodes."""
    import rl_core
    from rl_core.networks.trainer import play_episodes
    from rl_core.networks.vector_environment import TEST_SEEDS, build_environment_factory
    from tasks.config import load_settings

    settings = load_settings(ROOT / "configs" / f"{name}.yaml").stages.network
    settings = dataclasses.replace(settings, checkpoint_every=0)
    training = rl_core.network_ppo(settings=settings, seed=seed)
    started = time.perf_counter(), time.process_time()
    training.run()
    seconds = time.perf_counter() - started[0]
    played = play_episodes(
        training.model,
        build_environment_factory(settings),
        TEST_SEEDS[:episodes],
        greedy=True,
        noise_seed=seed,
        name=settings.environment,
    )
    return {
        "name": name,
        "environment": settings.environment,
        "seed": seed,
        "steps": training.trainer.environment_steps,
        "seconds": seconds,
        "processor_seconds": time.process_time() - started[1],
        "returns": played.returns,
    }


def format_table(runs: list[dict[str, Any]]) -> str:
    """Format all results as Markdown: means by seed, their mean with its interval, the published mean."""
    lines = [
        "| environment | steps | mean return by seed | mean over seeds, 95% interval | published PPO (steps) |",
        "|---|---|---|---|---|",
    ]
    for name, (published, deviation, published_steps) in PUBLISHED.items():
        chosen = sorted((run for run in runs if run["name"] == name), key=lambda run: run["seed"])
        if not chosen:
            continue
        means = [statistics.fmean(run["returns"]) for run in chosen]
        lines.append(
            f"| {chosen[0]['environment']} | {chosen[0]['steps']:,} | "
            f"{' '.join(f'{mean:.1f}' for mean in means)} | {format_interval(estimate_interval(means))} | "
            f"{published:.1f} ± {deviation:.1f} ({published_steps:,}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=sorted(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        for seed in range(arguments.seeds):
            path = arguments.output / f"{name}-{seed}.json"
            if not path.exists():
                run = train_and_play(name, seed, arguments.episodes)
                path.write_text(json.dumps(run))
                mean = statistics.fmean(run["returns"])
                print(f"{name} seed {seed}: {mean:.1f}, {run['seconds']:.0f} s", flush=True)
            runs = [json.loads(file.read_text()) for file in arguments.output.glob("*-*.json")]
            (arguments.output / "table.md").write_text(format_table(runs))
    print(format_table(runs))


if __name__ == "__main__":
    main()
