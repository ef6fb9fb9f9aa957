"""Analyses generated trajectories of two models: rate and peak memory, at growing numbers of them.

    python tests/benchmarks/bench_analysis.py [COUNT ...]        default: 10000 100000 1000000 trajectories in all

Each size runs in a separate process, whose peak of resident memory is then that size's alone. Files are written to
a temporary folder (--folder), one at a time, and removed. The rate counts reading, checking, counting, pairing, drawing
and writing the report.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = (10_000, 100_000, 1_000_000)
COLOURS = ("red", "green", "blue", "black", "white", "yellow")
LEVELS = (("easy", 1), ("medium", 2), ("hard", 3))
KINDS = ("colour", "digit", "count", "larger", "pointer")


def main() -> None:
    """Run every size in a separate process and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "counts", nargs="*", type=int, default=list(SIZES), help="trajectories in all"
    )
    parser.add_argument("--folder", default=None, help="where the files are written for a while")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(Path(arguments.folder), arguments.counts[0])))
        return
    print(
        "| trajectories | files, MB | seconds | trajectories/s | processor s | peak memory, MB | of it imports, MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for count in arguments.counts:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            size = sum(
                generate(Path(folder) / f"{name}.jsonl", count // 2, name)
                for name in ("sft", "policy")
            )
            command = [sys.executable, __file__, "--child", "--folder", folder, str(count)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {count:,} | {size / 1e6:,.0f} | {result['seconds']:.1f} | {count / result['seconds']:,.0f} | "
            f"{result['processor']:.1f} | {result['peak']:.0f} | {result['before']:.0f} |",
            flush=True,
        )


def measure(folder: Path, count: int) -> dict[str, float]:
    """Analyse both files in `folder`; return seconds and megabytes."""
    sys.path.insert(0, str(ROOT))
    from rl_core.analysis import analyze
    from rl_core.settings import AnalysisSettings

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    models = {name: folder / f"{name}.jsonl" for name in ("sft", "policy")}
    started, busy = time.perf_counter(), time.process_time()
    result = analyze(models, folder / "out", AnalysisSettings())
    seconds = time.perf_counter() - started
    assert sum(row["samples"] for row in result.summary) == count // 2 * 2
    return {
        "seconds": seconds,
        "processor": time.process_time() - busy,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before": before,
    }


def generate(path: Path, count: int, model: str) -> int:
    """Write `count` trajectories of a synthetic model, one per episode; returns the bytes."""
    draw = random.Random(model)
    skill = 0.5 if model == "sft" else 0.9
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps(make_trajectory(draw, number, skill)) + "\n")
    return path.stat().st_size


def make_trajectory(draw: random.Random, number: int, skill: float) -> dict[str, object]:
    """Make one line: looks with tools, some of them misused or repeated, then an answer."""
    level, depth = LEVELS[number % 3]
    target = COLOURS[number % 6]
    turns = [make_look(draw, skill) for _ in range(depth + (draw.random() > skill))]
    if draw.random() > 0.5 + skill / 2:
        turns += turns[-2:]  # a loop
    success = draw.random() < skill
    answer = target if success else draw.choice(COLOURS)
    turns.append(make_turn(f"answer {answer}", None, None, 3))
    tokens = sum(int(str(t["num_tokens"])) for t in turns)
    reward = float(success) - 0.01 * len(turns)
    return {
        "environment": "pixel_grid",
        "level": level,
        "kind": KINDS[number % 5],
        "seed": 2**30 + number,
        "prompt": f"colour at row {number % 9} column {number // 9 % 9}?",
        "target": target,
        "turns": turns,
        "answer": answer,
        "success": success,
        "reward": reward,
        "rewards": {"task": float(success), "tool_use": -0.01 * len(turns)},
        "stop_reason": "terminated",
        "num_prompt_tokens": 12,
        "num_completion_tokens": tokens + 3 * len(turns),
        "num_action_tokens": tokens,
        "mean_logprob": -draw.random(),
        "policy_version": 0,
        "sample": 0,
        "is_grounded": success,
    }


def make_look(draw: random.Random, skill: float) -> dict[str, object]:
    """Make one tool call that shows a cell, or misuse."""
    row, column = draw.randint(1, 8), draw.randint(1, 8)
    if draw.random() > 0.8 + skill / 5:
        return make_turn(f"zom {row}", None, "error: there is no tool 'zom'", 4, is_error=True)
    call = {"name": "zoom", "arguments": {"row": row, "column": column}}
    return make_turn(
        f"zoom {row} {column}", call, f"{draw.randint(0, 9)} {draw.choice(COLOURS)}", 6
    )


def make_turn(
    action: str,
    call: dict[str, object] | None,
    seen: str | None,
    tokens: int,
    *,
    is_error: bool = False,
) -> dict[str, object]:
    """Make one turn as it stands in trajectories.jsonl."""
    return {
        "action": action,
        "tool_call": call,
        "observation": seen,
        "is_error": is_error,
        "num_tokens": tokens,
    }


if __name__ == "__main__":
    main()
