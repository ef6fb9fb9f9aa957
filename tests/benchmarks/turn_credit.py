"""What credit by turn gains where an environment rewards each turn: GRPO, PPO and three comparisons of turns.

    python tests/benchmarks/turn_credit.py OUTPUT.json [--seeds 0 1 2] [--iterations 15]

The task is `Walk` of tests/helpers/letters.py: an untrained model of 0.03M parameters writes actions of a few tokens.
One that begins with a right letter earns 1/2, another one costs 1/8; two right ones in at most four turns succeed.
Success and reward are those of the training episodes, 36 an iteration. Then the table; intervals over seeds (Student's
t).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
from claimed.intervals import format_share  # noqa: E402
from helpers.letters import LOW, Walk, make_trainer  # noqa: E402
from helpers.policy_recipes import WALK  # noqa: E402

from rl_core.data.tokenizer import train_tokenizer  # noqa: E402
from rl_core.settings import CriticSettings, TurnCreditSettings  # noqa: E402

ARMS = {
    "grpo": {},
    "ppo": dict(algorithm="ppo", critic=CriticSettings(learning_rate=1e-2)),
    "states": dict(turn_credit=TurnCreditSettings()),
    "turns": dict(turn_credit=TurnCreditSettings(compare="turns", episode_weight=0.0)),
    "group": dict(turn_credit=TurnCreditSettings(compare="group", episode_weight=0.0)),
}
LAST = 5  # iterations of the second column


def train_arm(tokenizer, name, seed, iterations):
    trainer = make_trainer(
        tokenizer,
        Walk(),
        model_seed=seed,
        sampling=WALK,
        context=64,
        curriculum=LOW,
        **ARMS[name],
    )
    metrics = [trainer.step() for _ in range(iterations)]
    return {
        "arm": name,
        "seed": seed,
        "success": [row["train/success_rate"] for row in metrics],
        "reward": [row["reward/mean"] for row in metrics],
    }


def format_row(name, rows):
    columns = [
        [100 * statistics.fmean(row["success"]) for row in rows],
        [100 * statistics.fmean(row["success"][-LAST:]) for row in rows],
    ]
    cells = [name]
    cells += map(format_share, columns)
    each = ", ".join(f"{value:.1f}" for value in columns[1])
    return f"| {' | '.join([*cells, each])} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    tokenizer = train_tokenizer(["abc xyz"], 300)
    rows = [
        train_arm(tokenizer, name, seed, options.iterations)
        for seed in options.seeds
        for name in ARMS
    ]
    options.output.write_text(json.dumps(rows))
    print(f"| advantage | success, all iterations [95%] | last {LAST} [95%] | each seed |")
    print("|---|---|---|---|")
    for name in ARMS:
        print(format_row(name, [row for row in rows if row["arm"] == name]))


if __name__ == "__main__":
    main()
