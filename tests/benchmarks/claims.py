"""Claims of others about training, each with several seeds and intervals: true, refuted, or not shown.

    python tests/benchmarks/claims.py --output DIR [--parts rollback,kl,...] [--seeds 3] [--only 'ppo*']

Every run is DIR/results/PART/ARM-SEED.json; existing ones are not run again, so the benchmark can be interrupted. One
process, one thread. The start of a task (an SFT model, one for all seeds) is made once, in DIR/starts. At the end, and
with `--report` alone, DIR/claims.md has the tables. Settings are compared on 200 validation episodes; what is reported
are 500 other held-out ones, played once at temperature 1. Intervals are over seeds (Student's t); differences are taken
seed by seed.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
from claimed import memory, over_optimisation, rating_choice, thought_variance  # noqa: E402
from claimed.arms import PARTS  # noqa: E402
from claimed.policy_runs import train_arm  # noqa: E402
from claimed.report import write_report  # noqa: E402
from claimed.results import Results  # noqa: E402

OTHERS = {
    "memory": memory,
    "over-optimisation": over_optimisation,
    "thoughts": thought_variance,
    "ratings": rating_choice,
}


def main() -> None:
    """Measure what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", default=",".join([*PARTS, *OTHERS]))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="*", help="names of arms, with * and ?")
    parser.add_argument("--report", action="store_true", help="write the tables alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    output: Path = options.output.resolve()
    results = Results(output / "results")
    parts = options.parts.split(",")
    if unknown := set(parts) - {*PARTS, *OTHERS}:
        parser.error(
            f"--parts: {', '.join(sorted(unknown))}; there are {', '.join([*PARTS, *OTHERS])}"
        )
    for name in [] if options.report else parts:
        for seed in range(options.seeds):
            for arm, measure in list_arm_runs(name, output).items():
                if fnmatch.fnmatch(arm, options.only):
                    row = results.fill_slots(
                        name, arm, seed, lambda measure=measure, seed=seed: measure(seed)
                    )
                    print(
                        f"{name}, {arm}, seed {seed}: {row['processor_seconds']:.0f} s", flush=True
                    )
    write_report(output, results, options.seeds)


def list_arm_runs(name, output):
    """Return arms of a part: their names, and functions of a seed that measure them."""
    if name in OTHERS:
        return OTHERS[name].runs(output)
    part = PARTS[name]
    return {
        arm.name: lambda seed, arm=arm: train_arm(output, part.task, arm, seed) for arm in part.arms
    }


if __name__ == "__main__":
    main()
