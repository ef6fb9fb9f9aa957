"""Every algorithm from the same SFT model, for the same number of episodes, over several seeds; and what others claim.

    python tests/benchmarks/learning.py --output OUT [--config configs/demo.yaml] [--episodes 8960] [--seeds 3]
        [--workers 2] [--only 'grpo;ppo'] [--parts algorithms,variants,staleness,...]
    python tests/benchmarks/learning.py --compare tests/benchmarks/results/learning.md [--output OUT]

The SFT model is that of the config's pipeline (run first, its stages cached in OUT). Each run is one process with one
thread and writes OUT/jobs/<name>-<seed>.json; existing files are not run again, so the benchmark can be interrupted.
The teacher of `distillation` is GRPO from the same SFT model with another seed, in OUT/teacher. At the end:
OUT/learning.md (tables for results/learning.md) and OUT/learning.png (success against episodes). `--compare` prints one
table of all runs in the file and draws OUT/algorithms.png, every seed of them.

Success is sampled at temperature 1. Curves are measured on 200 validation episodes, the tables on 500 other held-out
episodes; intervals are 95% intervals over episodes, each played once by every seed's model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from learning_runs.gradient_variance import measure_gradient_variance  # noqa: E402
from learning_runs.jobs import Job, list_jobs  # noqa: E402
from learning_runs.report import compare_reports, draw_comparison, write_report  # noqa: E402
from learning_runs.training import run_job, train_sft_model, train_teacher  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compare", type=Path, help="print one table of all runs in this file")
    parser.add_argument("--config", default=str(ROOT / "configs/demo.yaml"))
    parser.add_argument(
        "--model", help="SFT model folder; left out: the config's pipeline makes it"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="changes the SFT's pipeline"
    )
    parser.add_argument("--episodes", type=int, default=8960)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help="names, separated by semicolons")
    parser.add_argument(
        "--parts", default="algorithms,variants,staleness,groups,curriculum,stopping,variance"
    )
    options = parser.parse_args()
    if options.compare:
        text = options.compare.read_text()
        print(compare_reports(text))
        if options.output is not None:
            draw_comparison(text, options.output / "algorithms.png")
        return
    if options.output is None:
        parser.error("--output: name a folder for the runs")
    output: Path = options.output.resolve()
    (output / "jobs").mkdir(parents=True, exist_ok=True)
    model = options.model or str(
        train_sft_model(options.config, output, options.workers, options.set)
    )
    parts = options.parts.split(",")
    jobs = [Job("sft", seed, "algorithms") for seed in range(options.seeds)] + list_jobs(
        options.seeds, parts
    )
    if options.only:
        jobs = [job for job in jobs if job.name in options.only.split(";")]
    jobs = [job for job in jobs if not (output / "jobs" / job.file).is_file()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        teacher = ""
        if any(job.name == "distillation" for job in jobs):
            arguments = (options.config, model, output, options.episodes)
            teacher = pool.submit(train_teacher, *arguments).result()
        futures = {
            pool.submit(
                run_job,
                options.config,
                model,
                teacher,
                job,
                options.episodes,
                str(output / "jobs" / job.file),
            ): job
            for job in jobs
        }
        for number, future in enumerate(as_completed(futures), 1):
            try:
                print(
                    f"[{number}/{len(jobs)}] {future.result()} seed {futures[future].seed}",
                    flush=True,
                )
            except Exception as error:
                failed = f"{futures[future].name} FAILED: {type(error).__name__}: {error}"
                print(f"[{number}/{len(jobs)}] {failed}", flush=True)
    if "variance" in parts and not (output / "variance.json").is_file():
        variance = measure_gradient_variance(options.config, model, batches=64, warmup=20)
        (output / "variance.json").write_text(json.dumps(variance))
    write_report(output, options.seeds, options.episodes)


if __name__ == "__main__":
    main()
