"""Recipes of docs/recipes.md, measured: each script of examples/recipes in a child process, alone.

    python tests/benchmarks/recipes.py measure       runs all (5 minutes), writes results/recipes.json and the page
    python tests/benchmarks/recipes.py write         writes the page's figures from results/recipes.json

Wall and processor seconds and peak resident memory are those of the child, imports included; curves are means over
windows of its metrics. The base model is made first, as the recipe `sums`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rl_core

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAGE = ROOT / "examples/recipes", ROOT / "docs/recipes.md"
RESULTS = ROOT / "tests/benchmarks/results/recipes.json"
# By recipe: folder of a training below outputs/recipes, metric, its name for people, format
CURVES: dict[str, list[tuple[str, str, str, str]]] = {
    "sums": [],
    "sft_lora": [("sft_lora", "eval/loss", "held-out loss, nats per token", ".3f")],
    "grpo_reward": [("grpo_reward", "reward/mean", "right answers in training", ".1%")],
    "dpo": [
        ("dpo", "eval/accuracy", "held-out accuracy", ".1%"),
        ("dpo", "eval/margin", "held-out margin", ".2f"),
    ],
    "rlhf": [
        ("rlhf/reward_model", "eval/accuracy", "reward model, held-out accuracy", ".1%"),
        ("rlhf/policy", "reward/learned/score", "PPO, mean score", ".2f"),
        ("rlhf/policy", "policy/ref_kl", "PPO, KL to the start, nats per token", ".3f"),
    ],
    "tools": [
        ("tools/policy", "train/success_rate", "episodes solved in training", ".1%"),
        ("tools/policy", "tool/calls", "calls per episode", ".2f"),
    ],
}
POINTS = 5


def run_script(name: str, folder: Path) -> dict[str, Any]:
    """Run a script and return its last line, seconds and peak memory in MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = folder / f"{name}.log"
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(FOLDER / f"{name}.py")],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{name} failed: {log.read_text()[-2000:]}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "lines": log.read_text().strip().splitlines(),
    }


def thin_curve(run: Path, metric: str) -> list[tuple[int, float]]:
    """Return (last step, mean) of `POINTS` equal windows of a metric."""
    values = rl_core.read_metrics(run)[metric].dropna()
    size = max(len(values) // POINTS, 1)
    starts = [round(index * (len(values) - size) / (POINTS - 1)) for index in range(POINTS)]
    windows = [values.iloc[start : start + size] for start in dict.fromkeys(starts)]
    return [(int(window.index[-1]), float(window.mean())) for window in windows]


def measure_all(folder: Path) -> dict[str, Any]:
    """Run all recipes in `folder`, one after the other."""
    results: dict[str, Any] = {}
    for name, curves in CURVES.items():
        load = os.getloadavg()[0]
        results[name] = {
            **run_script(name, folder),
            "load": round(load, 1),
            "curves": [
                {"metric": metric, "name": label, "format": form, "points": points}
                for run, metric, label, form in curves
                for points in [thin_curve(folder / "outputs/recipes" / run, metric)]
            ],
        }
        print(f"{name}: {results[name]['seconds']} s, {results[name]['peak_mib']} MiB", flush=True)
    return results


def format_figures(result: dict[str, Any]) -> str:
    """Format one recipe's figures: a sentence, and a table of its curves."""
    text = (
        f"{result['seconds']:.0f} s ({result['processor_seconds']:.0f} s of processor time, "
        f"load {result['load']} before), "
        f"peak memory {result['peak_mib']:,} MiB.\n"
    )
    header: list[int] = []
    for curve in result["curves"]:
        steps = [step for step, _ in curve["points"]]
        if steps != header:
            text += f"\n| step | {' | '.join(map(str, steps))} |\n|---{'|---' * len(steps)}|\n"
            header = steps
        values = " | ".join(format(value, curve["format"]) for _, value in curve["points"])
        text += f"| {curve['name']} (`{curve['metric']}`) | {values} |\n"
    if result["curves"]:
        lines = "\n".join(f"    {line}" for line in result["lines"][-2:] if line[:4] != "data")
        text += f"\nIt prints\n\n{lines}\n"
    return text


def render_page(page: str, results: dict[str, Any]) -> str:
    """Return the page with the figures of `results` between its markers."""
    for name, result in results.items():
        begin, end = f"<!-- measured: {name} -->\n", f"<!-- end: {name} -->"
        head, found, rest = page.partition(begin)
        if not found:
            raise SystemExit(f"{PAGE.name}: no marker {begin.strip()}")
        page = head + begin + format_figures(result) + end + rest.partition(end)[2]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("measure", "write"))
    options = parser.parse_args()
    if options.action == "measure":
        with tempfile.TemporaryDirectory() as folder:
            results = measure_all(Path(folder))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(render_page(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
