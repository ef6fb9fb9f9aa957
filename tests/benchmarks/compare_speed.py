"""Speed against TRL and transformers: one command, from nothing to a table and a picture.

    python tests/benchmarks/compare_speed.py --output DIR [--peer-python VENV/bin/python]
        [--ppo-python VENV/bin/python] [--sizes small,medium] [--threads 1,2] [--stages sft,...] [--steps 5]

Models (3.2M and 27M), tokenizer and rows are made from a seed in DIR/inputs; both sides read them. The peer runs in a
separate virtual environment, made in DIR unless one is passed: TRL 1.16, and for PPO 1.12, whose experimental trainer
is the last. The rollout stages are measured against transformers' `generate` in this Python.

Each side of a case is a process that waits for its turn; they take steps alternately, the first two each are dropped.
For grpo and ppo a step is a full round: generate, score, update. Ours for dpo includes the reference's share, which is
computed once per pair. A finished case is DIR/cases/*.json and is not run again: delete one to measure it again. At the
end: DIR/speed.md and DIR/speed.png. Exit code 1 where a case failed or an equality does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from speed import inputs, table
from speed.protocol import Others, Worker, WorkerFailed, take_turns

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("sft", "reward", "dpo", "grpo", "grpo4", "ppo", "generate", "episodes")
DECODED = tuple(f"generate_{rows}x{new}" for rows in (32, 64) for new in (64, 256))
WARMUP = 2
PEER = ("torch==2.13.0", "transformers==5.23.0", "accelerate", "datasets")
TRL, TRL_WITH_PPO = "trl==1.16.0", "trl==1.12.0"


def main():
    options = parse()
    output = options.output.resolve()
    for folder in ("cases", "logs"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    for size in options.sizes:
        run_python(
            ["-c", f"from speed import inputs; inputs.build({str(output / 'inputs')!r}, {size!r})"]
        )
    stages = [
        name for stage in options.stages for name in (DECODED if stage == "generate" else (stage,))
    ]
    pythons, notes = find_pythons(options, output, stages)
    lines, failures = [], 0
    for size in options.sizes:
        for threads in options.threads:
            floor = read_or_make(
                output / f"cases/floor-{size}-{threads}t.json",
                partial(measure_floor, output, size, threads),
            )
            for stage in stages:
                if pythons.get(stage) is None:
                    continue
                name = f"{stage}-{size}-{threads}t"
                print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
                try:
                    case = read_or_make(
                        output / f"cases/{name}.json",
                        partial(run_case, stage, size, threads, options, pythons[stage]),
                    )
                except WorkerFailed as error:
                    notes.append(f"{name}: {error}")
                    failures += 1
                    continue
                lines.append(table.summarize_case(case, floor["tokens_per_s"].get(stage)))
    checks = {
        size: read_or_make(output / f"cases/checks-{size}.json", partial(run_checks, output, size))
        for size in options.sizes
    }
    failures += sum(
        check["value"] > check["limit"] for size_checks in checks.values() for check in size_checks
    )
    failures += sum(line.same_tokens is False for line in lines)
    return report(output, lines, checks, notes, failures)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--peer-python", type=Path, help=f"Python that has {TRL}; left out: made in OUTPUT/peer"
    )
    parser.add_argument(
        "--ppo-python",
        type=Path,
        help=f"Python that has {TRL_WITH_PPO}; left out: made in OUTPUT/ppo",
    )
    parser.add_argument(
        "--sizes", type=parse_names(tuple(inputs.SIZES)), default=list(inputs.SIZES)
    )
    parser.add_argument(
        "--threads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--stages", type=parse_names(STAGES), default=list(STAGES))
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps of each side, after 2 to warm up"
    )
    options = parser.parse_args()
    for python in (options.peer_python, options.ppo_python):
        if python is not None and not python.is_file():
            parser.error(f"there is no Python at {python}")
    return options


def parse_names(known):
    """Return a parser of comma-separated names."""

    def parse_words(text):
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(known)}")
        return text.split(",")

    return parse_words


def find_pythons(options, output, stages):
    """Return stage -> the peer's Python, None if there is none, and notes on what is missing."""
    pythons, notes = (
        {stage: sys.executable for stage in stages if stage.startswith(("generate", "episodes"))},
        [],
    )
    trained = [stage for stage in stages if stage not in pythons]
    pythons_by_trl = {TRL: options.peer_python, TRL_WITH_PPO: options.ppo_python}
    for trl, folder, names in (
        (TRL, "peer", [s for s in trained if s != "ppo"]),
        (TRL_WITH_PPO, "ppo", [s for s in trained if s == "ppo"]),
    ):
        if names:
            try:
                python = pythons_by_trl[trl] or make_environment(output / folder, trl)
            except subprocess.CalledProcessError as error:
                python = None
                notes.append(
                    f"{', '.join(names)}: {trl} could not be installed (exit code {error.returncode})"
                )
            pythons |= dict.fromkeys(names, python)
    return pythons, notes


def make_environment(folder, trl):
    """Return the Python of a virtual environment with this TRL; an environment finished before is used unchanged."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        print(f"installing {trl} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", trl, *PEER]
        subprocess.run(pip, check=True)
        done.touch()
    return python


def build_environment(threads=1, peer=False):
    """Build the environment of a worker: module path and threads. The peer's sees only the benchmark's modules."""
    paths = [str(ROOT / "tests" / "benchmarks")] + ([] if peer else [str(ROOT)])
    cores = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {**os.environ, **cores, "PYTHONPATH": os.pathsep.join(paths)}


def run_python(arguments, threads=1):
    """Return the output of a separate Python process of this project, which keeps this one small."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=build_environment(threads),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def read_or_make(file, make):
    """Return the contents of the file, created first if it is absent."""
    if not file.exists():
        result = make()
        temporary = file.with_suffix(".partial")
        temporary.write_text(json.dumps(result, indent=1))
        temporary.replace(file)
    return json.loads(file.read_text())


def measure_floor(output, size, threads):
    folder = str(output / "inputs" / size)
    floor = json.loads(
        run_python(["-m", "speed.floor", folder, "--threads", str(threads)], threads)
    )
    return {**floor, "commit": read_commit()}


def run_checks(output, size):
    rows = "16" if size == "small" else "4"
    output_text = run_python(["-m", "speed.checks", str(output / "inputs" / size), "--rows", rows])
    return json.loads(output_text)


def run_case(stage, size, threads, options, peer_python):
    """Run both sides of one case, step by step. Raises: WorkerFailed with the last lines of a worker's log."""
    output, steps = options.output.resolve(), options.steps + WARMUP
    peer = "generating" if stage.startswith(("generate", "episodes")) else "trl"
    began, sides = time.perf_counter(), {}
    try:
        for name, side, python in (("ours", "ours", sys.executable), ("peer", peer, peer_python)):
            command = [
                str(python),
                "-m",
                "speed.worker",
                side,
                stage,
                str(output / "inputs" / size),
            ]
            command += ["--threads", str(threads), "--steps", str(steps)]
            sides[name] = Worker(
                command,
                env=build_environment(threads, peer=side == "trl"),
                log=output / "logs" / f"{stage}-{size}-{threads}t-{name}.txt",
            )
        others = Others(sides.values())
        dropped, answers = take_turns(sides, options.steps, WARMUP)
        busy = others.cores()
    finally:
        for worker in sides.values():
            worker.stop()
    return {
        "stage": stage,
        "size": size,
        "threads": threads,
        "steps": options.steps,
        "others_cpu": busy,
        "seconds": round(time.perf_counter() - began, 1),
        "commit": read_commit(),
        "sides": {
            name: {"about": sides[name].about, "dropped": dropped[name], "steps": answers[name]}
            for name in sides
        },
    }


def read_commit():
    """Return the measured commit; '+' = with uncommitted changes."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def report(output, lines, checks, notes, failures):
    """Writes the table and the picture; the exit code."""
    (output / "speed.md").write_text(
        table.format_report(describe_processor(), lines, checks, describe_machine(output), notes)
        + "\n"
    )
    if lines:
        table.draw_ratios(lines, output / "speed.png")
    print((output / "speed.md").read_text())
    return int(failures > 0)


def describe_machine(output):
    """Describe machine and versions, for the head of the report."""
    cases = [json.loads(file.read_text()) for file in sorted((output / "cases").glob("*.json"))]
    measured = [case for case in cases if "sides" in case]
    versions = {
        f"{name} {version}"
        for case in measured
        for side in case["sides"].values()
        for name, version in side["about"]["versions"].items()
    }
    commits = sorted({case["commit"] for case in measured if case["commit"]})
    steps = sorted({case["steps"] for case in measured})
    return [
        f"machine: {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        f"versions: {', '.join(sorted(versions))}; commit {', '.join(commits)}",
        f"float32; median [lowest, highest] of {', '.join(map(str, steps))} steps, taken alternately; "
        f"{WARMUP} of each side were dropped before",
        "tokens: all real ones for sft, reward, dpo, grpo and ppo; sampled ones for generate and episodes",
        "peer: TRL for sft to ppo, transformers' `generate` for the others; a step of grpo and ppo is a whole round; "
        "ours of dpo includes the reference's forward pass, which it does once for each pair beforehand",
        "others' cores: those that other programs kept busy meanwhile; above 0.2, read the column by processor time",
    ]


def describe_processor(cpuinfo=Path("/proc/cpuinfo")):
    """Describe the processor: name, family, model and the instructions that decide the speed, where known."""
    try:
        entries = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        known = {
            name.strip(): value.strip() for name, _, value in reversed(entries)
        }  # of the first processor
        features = known["flags"].split()
        name = known["model name"]
    except (OSError, KeyError):
        return platform.processor() or platform.machine()
    vectors = (
        "AVX-512"
        if "avx512f" in features
        else "AVX2"
        if "avx2" in features
        else "neither AVX-512 nor AVX2"
    )
    tiles = "AMX" if "amx_int8" in features else "no AMX"
    return (
        f"{name}, family {known.get('cpu family')}, model {known.get('model')} ({vectors}, {tiles})"
    )


if __name__ == "__main__":
    sys.exit(main())
