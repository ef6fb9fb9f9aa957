"""Agreement of a small pretrained model as judge with labels that a program knows.

    python tests/benchmarks/small_judge.py [--free] [--modes rubric,pairwise,ranking,score]

24 pairs of one-sentence answers to "What does the owl do?", one with the right verb, one with another animal's. The
judge is SmolLM2-135M in this process, with at most 160 tokens a reply; `--free` lets it answer in prose.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import rl_core
from rl_core.errors import RewardError

VERBS = {
    "owl": "hoots",
    "dog": "barks",
    "cow": "moos",
    "cat": "meows",
    "duck": "quacks",
    "horse": "neighs",
}


def build_pairs(count: int) -> list[dict[str, str]]:
    """Return pairs of a right and a wrong answer."""
    dice, animals, rows = random.Random(0), list(VERBS), []
    for _ in range(count):
        right = dice.randrange(len(animals))
        wrong = (right + dice.randrange(1, len(animals))) % len(animals)
        name = animals[right]
        rows.append(
            {
                "prompt": f"What does the {name} do?",
                "chosen": f"The {name} {VERBS[name]}.",
                "rejected": f"The {name} {VERBS[animals[wrong]]}.",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--modes", default="rubric,pairwise,ranking,score")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for mode in options.modes.split(","):
        settings = {"path": "smollm2-135m", "mode": mode, "max_tokens": 160}
        settings["structured"] = not options.free
        if mode == "rubric":
            settings["criteria"] = [{"name": "correct", "description": "The answer is true."}]
        try:
            result = rl_core.calibrate_judge(settings, build_pairs(24))
            rate = result.agreement
            print(
                f"{mode}: {100 * rate.rate:.0f}% [{100 * rate.low:.0f}, {100 * rate.high:.0f}]"
                f" {result.bias}",
                flush=True,
            )
        except RewardError as error:
            print(f"{mode}: {error}", flush=True)


if __name__ == "__main__":
    main()
