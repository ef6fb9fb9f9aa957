"""What self-play learns in Kuhn poker: exploitability before and after, with other opponents and baselines.

    python tests/benchmarks/self_play.py OUTPUT.json [--seeds 0 1 2] [--arms ...] [--iterations 200]

Settings are those of configs/self-play.yaml; an arm changes what its name says. Each seed makes its own model: SFT on
the demonstrator's games, then self-play. Exploitability is exact, in chips per game; `mean` is that of the last half of
the evaluations, `last` of the final weights. Payoffs are per game, in matches of 400 games. Then the table; intervals
over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT)]

import torch  # noqa: E402
from claimed.intervals import estimate_interval, format_interval  # noqa: E402

import rl_core  # noqa: E402
from rl_core.environments import make_environment  # noqa: E402
from tasks.config.yaml_loader import read_yaml  # noqa: E402

CONFIG = read_yaml(ROOT / "configs" / "self-play.yaml").data
ARMS = {
    "pool, role baseline": {},
    "current only, role baseline": {"self_play": {"opponent": "current"}},
    "pool, batch mean (no role baseline)": {"role_baseline": None},
    "pool, group-relative (dr_grpo)": {
        "role_baseline": None,
        "algorithm": "dr_grpo",
        "loss_aggregation": "token_mean",
    },
    "pool, role baseline, no KL": {"kl_coef": 0.0},
    "random opponent, role baseline": {"self_play": {"opponent": "random"}},
}
DEFAULT_ARMS = list(ARMS)[:4]


def build_start(seed, folder):
    """Make the SFT model of a seed; return its folder and demonstrations' environment."""
    environment = make_environment("kuhn_poker", CONFIG["environment"]["options"])
    count = CONFIG["stages"]["prepare_data"]["num_demonstrations"]
    games = [
        environment.demonstration(seed * 1_000_000 + n, "standard").messages for n in range(count)
    ]
    texts = [message["content"] for game in games for message in game]
    policy = rl_core.create_policy(texts, CONFIG["model"], seed=seed)
    rows = [{"messages": game} for game in games]
    rl_core.sft(policy, rows, settings=CONFIG["stages"]["sft"], seed=seed).run()
    policy.save(folder)
    return environment


def run_arm(name, seed, iterations):
    settings = {**CONFIG["stages"]["policy"], **ARMS[name], "iterations": iterations}
    settings["self_play"] = CONFIG["stages"]["policy"]["self_play"] | settings["self_play"]
    settings = {key: value for key, value in settings.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        environment = build_start(seed, folder)
        training = rl_core.policy_gradient(
            folder, environment=environment, settings=settings, seed=seed
        )
        before = training.trainer.evaluate()
        started = time.perf_counter()
        outcome = training.run()
        seconds = time.perf_counter() - started
    history = outcome.history
    curve = [value for _, value in history.list_points("eval/exploitability", 500)]
    return {
        "arm": name,
        "seed": seed,
        "seconds": seconds,
        "before": {key: value for key, value in before.items() if key.startswith("eval/")},
        "after": {key: value for key, value in outcome.metrics.items() if key.startswith("eval/")},
        "curve": curve,
        "mean": statistics.fmean(curve[len(curve) // 2 :]),
        "swaps": statistics.fmean(v for _, v in history.list_points("perf/weight_swaps", 500)),
    }


def format_cell(values, digits=3):
    return format_interval(estimate_interval(values), digits=digits)


def format_row(name, rows):
    after = [row["after"] for row in rows]
    cells = [
        name,
        format_cell([row["before"]["eval/exploitability"] for row in rows]),
        format_cell([row["after"]["eval/exploitability"] for row in rows]),
        format_cell([row["mean"] for row in rows]),
        format_cell(
            [
                row["after"]["eval/exploitability"] - row["before"]["eval/exploitability"]
                for row in rows
            ]
        ),
        ", ".join(f"{row['after']['eval/exploitability']:.3f}" for row in rows),
        format_cell([metrics["eval/game_value"] for metrics in after]),
        format_cell([metrics["eval/payoff_against/random"] for metrics in after], 2),
        format_cell([metrics["eval/payoff_against/first"] for metrics in after], 2),
        f"{statistics.fmean(row['seconds'] for row in rows):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=DEFAULT_ARMS, choices=list(ARMS))
    parser.add_argument("--iterations", type=int, default=CONFIG["stages"]["policy"]["iterations"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = []
    for name in options.arms:
        for seed in options.seeds:
            rows.append(run_arm(name, seed, options.iterations))
            options.output.write_text(json.dumps(rows))
            curve = ", ".join(f"{value:.3f}" for value in rows[-1]["curve"])
            print(f"{name}, seed {seed}: {curve} ({rows[-1]['seconds']:.0f} s)", flush=True)
    columns = (
        "arm",
        "exploitability before [95%]",
        "last [95%]",
        "mean of the last half [95%]",
        "change [95%]",
        "last, each seed",
        "game value",
        "payoff against random",
        "payoff against the first",
        "seconds",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in options.arms:
        print(format_row(name, [row for row in rows if row["arm"] == name]))


if __name__ == "__main__":
    main()
