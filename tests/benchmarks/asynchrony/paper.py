"""Clusters up to 1,000 GPUs on paper: the share of rollout GPUs, the bound of staleness, the gain over taking turns.

Durations are assumptions for a dense model of 7B on GPUs of the H100's kind, one model a GPU: a decoding step 8 ms and
70 us a sequence; 0.12 ms of training a token and GPU (6 x 7e9 operations at 35% of 989 TFLOP/s); 2 s for new weights;
10 s for a GPU's change between rollouts and updates where it does both.
"""

from __future__ import annotations

import time

from posttrain.planning.layout_comparison import compare_gpu_shares
from posttrain.planning.simulation_inputs import ClusterLayout
from rl_core.settings.planning import ClusterRates, LogNormalSpread

COMMON = dict(
    step_seconds=0.008,
    row_seconds=7e-5,
    token_seconds=1.2e-4,
    load_seconds=2.0,
    switch_seconds=10.0,
)
BASE = "base"
TASKS = {
    "reasoning": ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=0.9, most=32768)),
    "agent": ClusterRates(
        **COMMON,
        turns=6,
        tokens=LogNormalSpread(mean=400, sigma=0.8, most=4096),
        tools=LogNormalSpread(mean=10, sigma=1.2, most=300),
    ),
}
BATCH = dict(prompts=128, group_size=16, slots=256)
ITERATIONS, FEWER = 100, 60  # the warm-up included; of the variants and of 1,000 GPUs
BOUNDS = (0, 1, 2, 4, 8)
FEW = (1, 4)  # bounds of the variants
SMALL, LARGE = (0.375, 0.5, 0.625, 0.75), (0.5, 0.75, 0.875, 0.9375)  # shares of the GPUs that play
TAILS = (0.0, 0.6, 1.2)


def build_rows(comparison, **about):
    return [
        {
            **about,
            "workers": row.run.layout.workers,
            "trainers": row.run.layout.trainers,
            "shared": row.run.layout.shares_gpus,
            "bound": row.run.layout.max_staleness,
            "speed_up": row.speed_up,
            "iteration_s": row.run.iteration_s,
            "staleness": row.run.staleness,
            "worker_busy": row.run.worker_share,
            "trainer_busy": row.run.trainer_share,
            "stale_groups": row.run.stale_groups,
        }
        for row in comparison
    ]


def list_comparisons():
    """Return (name, arguments of compare_shares, columns of its rows)."""
    for task, gpus, bounds, shares, iterations in (
        ("reasoning", 8, BOUNDS, SMALL, ITERATIONS),
        ("reasoning", 32, BOUNDS, (0.5, 0.625, 0.75, 0.875), ITERATIONS),
        ("reasoning", 128, BOUNDS, LARGE, ITERATIONS),
        ("agent", 8, BOUNDS, (0.5, 0.625, 0.75), ITERATIONS),
        ("agent", 128, BOUNDS, LARGE, ITERATIONS),
        ("reasoning", 1000, (0, 1, 4), (0.75, 0.875), FEWER),
    ):
        layout = {
            **BATCH,
            "prompts": max(gpus, BATCH["prompts"]),
        }  # a group is the least that a GPU can play
        yield (
            f"{task}-{gpus}",
            (layout, TASKS[task], gpus, bounds, shares, iterations),
            {"study": BASE, "task": task},
        )
    for study, task, layout, rates in list_variants():
        name = f"{task}-{study.replace(' ', '-')}"
        yield (
            name,
            ({**BATCH, **layout}, rates, 128, FEW, (0.75,), FEWER),
            {"study": study, "task": task},
        )


def list_variants():
    """Return (name, task, changes of the layout, rates) with one thing changed on 96 + 32 GPUs."""
    for sigma in TAILS:
        rates = ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=sigma, most=32768))
        yield f"sigma of the lengths {sigma:g}", "reasoning", {}, rates
    rates = ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=0.9, most=16384))
    yield "at most 16384 tokens", "reasoning", {}, rates
    yield "512 prompts", "reasoning", {"prompts": 512}, TASKS["reasoning"]
    yield "partial drop", "reasoning", {"partial": "drop"}, TASKS["reasoning"]
    for task in TASKS:
        yield "a run of the engine ends before the next", task, {"refill": False}, TASKS[task]


def run_study(read_or_make):
    """Return all rows. `read_or_make` returns a finished comparison or makes a new one."""
    rows = []
    for name, (layout, rates, gpus, bounds, shares, iterations), about in list_comparisons():
        began = time.monotonic()

        def compare(
            layout=layout,
            rates=rates,
            gpus=gpus,
            bounds=bounds,
            shares=shares,
            n=iterations,
            about=about,
        ):
            comparison = compare_gpu_shares(
                ClusterLayout(**layout), rates, gpus, staleness=bounds, shares=shares, iterations=n
            )
            return build_rows(comparison, gpus=gpus, **about)

        rows += read_or_make(name, compare)
        print(f"{time.monotonic() - began:6.0f} s  {name}", flush=True)
    return rows
