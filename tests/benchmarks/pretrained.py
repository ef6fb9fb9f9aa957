"""GRPO on the pretrained SmolLM2-135M (configs/real.yaml): seeds, all weights beside LoRA, with what the texts became.

    python tests/benchmarks/pretrained.py --output OUT [--seeds 3] [--workers 1] [--threads 2] [--episodes 200]

Each run is `posttrain run real` in a process of its own, with OUT/VARIANT-SEED as output; finished stages are not run
again. At the end: OUT/pretrained.md, the tables and first texts of results/real-data.md. Success has Wilson's
95% interval over the held-out episodes, the gain that of the paired bootstrap. Timings hold on an idle machine with one
worker.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compare_speed import describe_processor, read_commit

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {
    "full": [],
    "lora": ["model.lora.rank=16", "stages.policy.learning_rate=3e-4"],
}
NUM_TEXTS = 2  # a level


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    options = parser.parse_args()
    jobs = [(name, seed) for seed in range(options.seeds) for name in options.variants.split(",")]
    with ThreadPoolExecutor(options.workers) as pool:
        codes = list(pool.map(lambda job: run_pipeline(*job, options), jobs))
    finished = [job for job, code in zip(jobs, codes, strict=True) if code == 0]
    text = format_tables([read_run(*job, options.output) for job in finished], options)
    (options.output / "pretrained.md").write_text(text)
    print(text)
    return int(len(finished) < len(jobs))


def run_pipeline(variant: str, seed: int, options: argparse.Namespace) -> int:
    """Run the pipeline of one variant and seed; return its exit code."""
    folder = options.output.resolve() / f"{variant}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    values = [f"output={folder}", f"seed={seed}", f"stages.evaluate.episodes={options.episodes}"]
    arguments = [part for value in values + VARIANTS[variant] for part in ("--set", value)]
    command = [sys.executable, "-m", "posttrain", "run", str(ROOT / "configs/real.yaml"), "--quiet"]
    with (folder / "log").open("w") as log:
        return subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def read_stage(output: Path, variant: str, seed: int, stage: str) -> tuple[Path, dict]:
    """Return the folder and the summary of the newest finished stage."""
    stages = output / f"{variant}-{seed}/real/stages" / stage
    paths = sorted(stages.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    return paths[-1].parent, json.loads(paths[-1].read_text())


def read_run(variant: str, seed: int, output: Path) -> dict:
    """Collect what the tables show of one run."""
    folder, evaluation = read_stage(output, variant, seed, "evaluate")
    summaries = {
        stage: read_stage(output, variant, seed, stage)[1]
        for stage in ("policy", "evaluate", "analyze", "export")
    }
    return {
        "variant": variant,
        "seed": seed,
        "models": evaluation["models"],
        "texts": {row["model"]: row for row in summaries["analyze"]["rows"]},
        "seconds": {stage: summary["seconds"] for stage, summary in summaries.items()},
        "folder": folder,
    }


def format_tables(runs: list[dict], options: argparse.Namespace) -> str:
    """Format success, texts and seconds of every run, and some answers of the first one."""

    def share(rate: list[float]) -> str:
        return f"{rate[0]:.0%}"

    lines = [
        f"{describe_processor()}, {options.threads} threads, commit {read_commit()}, {options.workers} at a time.",
        "",
        "| weights, seed | base | policy | gain, points | easy | medium | hard | unseen (base) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        base, policy = run["models"]["base"], run["models"]["policy"]
        cells = [
            f"{run['variant']}, {run['seed']}",
            *(
                f"{row['success']:.1%} [{100 * row['success_low']:.1f}, {100 * row['success_high']:.1f}]"
                for row in (base, policy)
            ),
            f"{100 * policy['gain_over_base']:+.1f} "
            f"[{100 * policy['gain_over_base_low']:.1f}, {100 * policy['gain_over_base_high']:.1f}]",
            *(share(policy["by_level"][level]) for level in ("easy", "medium", "hard")),
            f"{share(policy['by_level']['unseen'])} ({share(base['by_level']['unseen'])})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| weights, seed | reward (base) | perplexity under base | distinct-2 | most frequent opening | entropy | KL "
        "| seconds: policy, evaluate, analyze, export |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        base, policy = run["texts"]["base"], run["texts"]["policy"]
        pairs = [
            (name, form)
            for name, form in (
                ("reward_mean", ".2f"),
                ("perplexity_under_first", ".1f"),
                ("distinct_2", ".2f"),
                ("same_opening_rate", ".0%"),
                ("entropy", ".2f"),
            )
        ]
        cells = [
            f"{run['variant']}, {run['seed']}",
            *(f"{policy[name]:{form}} ({base[name]:{form}})" for name, form in pairs),
            f"{policy['kl_to_first']:.2f}",
            ", ".join(f"{seconds:.0f}" for seconds in run["seconds"].values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| level | instruction | base | policy |", "|---|---|---|---|"]
    if runs:
        lines += format_texts(runs[0]["folder"])
    return "\n".join([*lines, ""])


def format_texts(folder: Path) -> list[str]:
    """Format the first episodes of every level under both models, unchosen."""
    base, policy = (
        [json.loads(line) for line in (folder / f"trajectories_{name}.jsonl").open()]
        for name in ("base", "policy")
    )
    played = {(row["level"], row["seed"]): row for row in policy}
    lines, counts = [], dict.fromkeys((row["level"] for row in base), 0)
    for row in base:
        other = played.get((row["level"], row["seed"]))
        if other is None or counts[row["level"]] == NUM_TEXTS:
            continue
        counts[row["level"]] += 1
        answers = [
            " ".join(side["turns"][0]["action"].split()).replace("|", "\\|")
            + (" (success)" if side["success"] else "")
            for side in (row, other)
        ]
        lines.append(f"| {row['level']} | {row['prompt']} | {answers[0]} | {answers[1]} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
