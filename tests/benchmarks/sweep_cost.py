"""Cost of a sweep: 6 rates x 3 seeds against the same runs by hand, in processor and wall seconds.

    python tests/benchmarks/sweep_cost.py --output DIR [--by-hand 18] [--parallel 1]

By hand: one `posttrain run` after another in one output folder, with the settings of the trials; finished stages are
shared there too. The pipeline is small (tests/helpers/small_sweep.py), so what a run costs besides its training is
measured. Processor seconds are those of the command and of every process that it started and waited for.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from helpers import ROOT
from helpers.small_sweep import CONFIG

RATES = ("1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2")
KEY = "stages.policy.learning_rate"


def time_command(*arguments: str, folder: Path) -> dict[str, float]:
    """Return the seconds of one command; it has to succeed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "posttrain.cli.main", *arguments, "--quiet"]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor": round(processor, 1), "wall": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--by-hand", type=int, default=18, help="how many of the 18 runs are done by hand"
    )
    parser.add_argument("--parallel", type=int, default=1)
    options = parser.parse_args()
    options.output.mkdir(parents=True)
    (options.output / "small.yaml").write_text(CONFIG)
    results: dict[str, object] = {}
    trials = [(rate, seed) for rate in RATES for seed in range(3)][: options.by_hand]
    results["by hand"] = [
        time_command(
            "run",
            "small.yaml",
            "--set",
            "output=hand",
            "--set",
            f"{KEY}={rate}",
            "--set",
            f"seeds={{policy: {seed}}}",
            folder=options.output,
        )
        for rate, seed in trials
    ]
    results["sweep"] = time_command(
        "sweep",
        "small.yaml",
        "--set",
        "output=sweep",
        "--set",
        f"{KEY}={','.join(RATES)}",
        "--seeds",
        "3",
        "--seed-stage",
        "policy",
        "--parallel",
        str(options.parallel),
        folder=options.output,
    )
    results["processor"] = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    print(json.dumps(results, indent=1))
    (options.output / "sweep_cost.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
