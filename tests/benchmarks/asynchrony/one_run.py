"""Measured runs in one process, with one Ray: python -m asynchrony.one_run JSON ...; prints a line of JSON for each.

kind "steps": iterations of one layout for so many seconds. "parts", "costs": see parts.py and costs.py. "learning":
success by iteration.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import torch

from asynchrony.slow_tools import SharedRay

WARM_UP = 2


def count_busy_cores(seconds=0.5):
    """Count the cores that other programs keep busy before this run starts."""

    def read():
        with open("/proc/stat") as file:
            fields = [int(text) for text in file.readline().split()[1:]]
        return sum(fields) - fields[3] - fields[4]

    before = read()
    time.sleep(seconds)
    return (read() - before) / 100 / seconds


def build_layout(options):
    from asynchrony.slow_tools import IN_PROCESS, make_ray_settings

    if not options["workers"]:
        return IN_PROCESS
    return make_ray_settings(
        options["workers"], options.get("staleness", 0), partial=options.get("partial", "keep")
    )


def measure_steps(options):
    """Time iterations after the warm-up for `seconds`, at least `least` of them."""
    from asynchrony.slow_tools import make_trainer
    from rl_core.timing import collect_seconds

    began = time.monotonic()
    more = {"sampling": {"rejoin": options.get("rejoin", "together")}, **options.get("trainer", {})}
    trainer, close = make_trainer(
        build_layout(options), shape=options.get("shape", "0.9M"), mean=options["mean"], **more
    )
    rows, ends = [], []
    try:
        for _ in range(WARM_UP):
            trainer.step()
        time.sleep(max(0.0, options.get("begin_at", 0.0) - time.time()))
        began_at, start = time.time(), time.monotonic()
        while time.monotonic() - start < options["seconds"] or len(rows) < options.get("least", 4):
            with collect_seconds() as seconds:
                row = trainer.step()
            rows.append(row | {f"perf/{name}_seconds": value for name, value in seconds.items()})
            ends.append(time.monotonic() - start)
    finally:
        close()
    names = sorted(
        {name for row in rows for name in row if name.startswith(("perf/", "policy/staleness"))}
    )
    return {
        "start_s": start - began,
        "began_at": began_at,
        "iterations": len(rows),
        "seconds": ends[-1],
        "iteration_s": ends[-1] / len(rows),
        "median_s": statistics.median(np.diff([0.0, *ends])),
        "each": np.diff([0.0, *ends]).tolist(),
        "metrics": {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in names},
        "tokens": statistics.fmean(row["train/action_tokens"] for row in rows),
    }


def measure_learning(options):
    """Measure the success of each iteration on the letters task, from the same untrained model."""
    from asynchrony.slow_tools import IN_PROCESS, SlowTools, make_ray_settings, make_trainer

    rollouts = (
        make_ray_settings(options["workers"], options["staleness"])
        if options["staleness"]
        else IN_PROCESS
    )
    task = SlowTools(options["mean"], 3, noise=0.0)
    trainer, close = make_trainer(
        rollouts,
        seed=options["seed"],
        learning_rate=options["learning_rate"],
        importance="token",
        environment=task,
        prompts_per_iteration=8,
        group_size=8,
        sampler_kl_max=1e6,
        shape="0.1M",
        ends=100,
    )
    rows = []
    try:
        for _ in range(options["iterations"]):
            row = trainer.step()
            rows.append(
                [
                    row["reward/mean"],
                    row.get("policy/staleness_mean", 0.0),
                    row.get("policy/staleness_max", 0.0),
                ]
            )
    finally:
        close()
    return {"rows": rows, "stale_groups": row.get("perf/stale_groups", 0.0)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.argv[1:]:
        job = json.loads(line)
        others = count_busy_cores()
        if job["kind"] == "costs":
            from asynchrony.costs import measure_costs as measure
        elif job["kind"] == "parts":
            from asynchrony.parts import measure_parts as measure
        else:
            measure = {"steps": measure_steps, "learning": measure_learning}[job["kind"]]
        result = measure(job)
        print(json.dumps({**job, **result, "others": round(others, 2)}), flush=True)
    if SharedRay.shared is not None:
        SharedRay.shared.close()
