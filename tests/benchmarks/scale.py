"""Rollout workers: steps a second, learning at a staleness, kills, the overhead of Ray, and their simulation.

    python tests/benchmarks/scale.py --output DIR [--parts steps,overhead,learning,kills,simulation,paper,report]
        [--seconds 20] [--seeds 3] [--kills 25] [--only 'async-4*']

Needs the extras `ray` and `plan`. Each run is a separate process with one thread; a finished one is DIR/points/*.json
and is not run again. Tools answer after a log-normal time (sigma 1) of mean 0, 50 or 500 ms. `simulation` needs no new
run: it takes the durations of the parts (`parts-*.json`, `costs-*.json`) and predicts the iterations of `steps`.
`report` writes DIR/scale.md and DIR/scale*.png from what is there.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "tests")]

MEANS = (0.0, 0.05, 0.5)
WORKERS = (1, 2, 4)
LONGER = 3.0  # times, runs with tools of 500 ms
PARTS = ("steps", "overhead", "learning", "kills", "simulation", "paper", "report")


def run_jobs(options):
    """Return jobs of the chosen parts: name -> arguments of asynchrony.one_run."""
    jobs = {}
    if "steps" in options.parts:
        parts = dict(kind="parts", prompts=[1, 2, 4, 8, 16], means=MEANS[:2], repeats=2)
        costs = dict(kind="costs", crowd_seconds=5, most=max(WORKERS) + 1)
        for turn, mean in enumerate(MEANS):
            jobs |= {f"parts-0.9M-{turn}": parts, f"costs-0.9M-{turn}": costs}
            ms = f"{1000 * mean:.0f}ms"
            seconds = options.seconds * (
                LONGER if mean > 0.1 else 1
            )  # few iterations, and a few long tools decide
            common = dict(kind="steps", mean=mean, seconds=seconds)
            jobs[f"alone-{ms}"] = {**common, "workers": 0}
            for workers in WORKERS:
                jobs[f"sync-{workers}-{ms}"] = {**common, "workers": workers}
                jobs[f"async-{workers}-{ms}"] = {
                    **common,
                    "workers": workers,
                    "staleness": 1,
                    "seconds": 2 * seconds,
                }
                if mean:  # synchronous, each step rejoins when its tool has answered
                    jobs[f"ready-{workers}-{ms}"] = {
                        **common,
                        "workers": workers,
                        "rejoin": "ready",
                    }
    if "overhead" in options.parts:
        for turn in range(options.repeats):
            for workers in (0, 1):
                jobs[f"overhead-{workers}-{turn}"] = dict(
                    kind="steps",
                    mean=0.0,
                    seconds=options.seconds,
                    least=6,
                    workers=workers,
                    shape="27M",
                    trainer={"ends": 136},
                )
    if "learning" in options.parts:
        for seed in range(options.seeds):
            for staleness in (0, 1, 4):
                jobs[f"learning-{staleness}-{seed}"] = dict(
                    kind="learning",
                    staleness=staleness,
                    workers=2,
                    seed=seed,
                    mean=0.02,
                    iterations=options.iterations,
                    learning_rate=options.learning_rate,
                )
    return {name: job for name, job in jobs.items() if fnmatch.fnmatch(name, options.only)}


def build_environment():
    """Return the environment of a process with one thread."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT / "tests", ROOT))),
    }


def measure(jobs, points):
    """Run jobs one after the other in one process, and keep each result."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "asynchrony.one_run",
        *map(json.dumps, jobs.values()),
    ]
    if not jobs:
        return
    log = None if "SHOW" in os.environ else subprocess.DEVNULL
    with subprocess.Popen(
        command, env=build_environment(), stdout=subprocess.PIPE, text=True, stderr=log
    ) as process:
        for name in jobs:
            line = process.stdout.readline()
            if not line:
                break
            (points / f"{name}.json").write_text(line)
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    if process.returncode:
        raise SystemExit(
            f"the measuring process ended with exit code {process.returncode}; SHOW=1 shows its messages"
        )


def run_python(arguments, environment=()):
    """Return the standard output of a process of this Python with one thread."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**build_environment(), **dict(environment)},
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL if "SHOW" not in os.environ else None,
        check=True,
    )
    return done.stdout


def read_or_make(path, make):
    """Return a finished point, or a new one."""
    if path.is_file():
        return json.loads(path.read_text())
    result = make()
    path.write_text(json.dumps(result))
    return result


def run_kills(options, points):
    """Send SIGKILL to workers and drivers, synchronous and asynchronous, in a separate temporary folder."""
    for kind in ("workers", "driver"):
        for staleness in (0, 1):
            name = f"kills-{kind}-{staleness}"
            if not fnmatch.fnmatch(name, options.only):
                continue
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:
                arguments = [
                    "-m",
                    "asynchrony.kills",
                    kind,
                    f"{folder}/runs",
                    "--staleness",
                    str(staleness),
                    "--kills",
                    str(options.kills),
                    "--seed",
                    str(options.seed),
                ]
                read_or_make(
                    points / f"{name}.json",
                    lambda a=arguments, f=folder: parse_last_line(
                        run_python(a, {"TMPDIR": f}.items())
                    ),
                )


def parse_last_line(text):
    """Parse the last line of JSON: Ray's processes print before and after it."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of each run of steps and overhead"
    )
    parser.add_argument("--repeats", type=int, default=2, help="of the overhead, alternating")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60, help="of each learning run")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--kills", type=int, default=25, help="of each of four kinds")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--only", default="*", help="names of runs, as a pattern")
    options = parser.parse_args()
    points = options.output.resolve() / "points"
    points.mkdir(parents=True, exist_ok=True)
    measure(
        {
            name: job
            for name, job in run_jobs(options).items()
            if not (points / f"{name}.json").is_file()
        },
        points,
    )
    if "kills" in options.parts:
        run_kills(options, points)
    from asynchrony import paper, report, validation

    if "simulation" in options.parts:
        validation.predict_runs(points)
    if "paper" in options.parts:
        paper.run_study(lambda name, make: read_or_make(points / f"paper-{name}.json", make))
    if "report" in options.parts:
        report.write_report(points, options.output.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
