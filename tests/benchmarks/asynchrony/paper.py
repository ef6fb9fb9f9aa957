"""Clusters up to 1,000 GPUs on paper: the share of rollout GPUs, the bound of staleness, the gain over taking turns.

Durations are assumptions for a dense model of 7B on GPUs of the H100's kind, one model a GPU: a decoding step 8 ms and
70 us a sequence; 0.12 ms of training a token and GPU (6 x 7e9 operations at 35% of 989 TFLOP/s); 2 s for new weights;
10 s for a GPU's change between rollouts and updates where it does both.
"""

from __future__ import annotations

import time

from flows.planning.cluster_layout import ClusterLayout
from flows.planning.cluster_study import compare_shares
from rl_core.settings.cluster_rates import ClusterRates, LogNormalSpread

GPUS = (8, 32, 128, 512, 1000)
BOUNDS = (0, 1, 4)
SHARES = (0.25, 0.5, 0.625, 0.75, 0.875)
COMMON = dict(step_seconds=0.008, row_seconds=7e-5, token_seconds=1.2e-4, load_seconds=2.0, switch_seconds=10.0)
TASKS = {
    "reasoning": ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=0.9, most=32768)),
    "agent": ClusterRates(
        **COMMON, turns=6, tokens=LogNormalSpread(mean=400, sigma=0.8, most=4096),
        tools=LogNormalSpread(mean=10, sigma=1.2, most=300),
    ),
}  # fmt: skip
BATCH = dict(prompts=128, group_size=16, slots=256)
TAILS = (0.0, 0.6, 1.2)


def rows_of(found, **about):
    return [
        {
            **about, "workers": one.run.layout.workers, "trainers": one.run.layout.trainers,
            "shared": one.run.layout.shares_gpus, "bound": one.run.layout.max_staleness, "speed_up": one.speed_up,
            "iteration_s": one.run.iteration_s, "staleness": one.run.staleness, "worker_busy": one.run.worker_share,
            "trainer_busy": one.run.trainer_share, "stale_groups": one.run.stale_groups,
        }
        for one in found
    ]  # fmt: skip


def study():
    """All rows; iterations 8, of which the first 2 are not counted."""
    began, rows = time.monotonic(), []

    def compare(rates, gpus, layout, bounds=BOUNDS, shares=SHARES, **about):
        found = compare_shares(ClusterLayout(**layout), rates, gpus, staleness=bounds, shares=shares, iterations=8)
        rows.extend(rows_of(found, gpus=gpus, **about))
        print(f"{time.monotonic() - began:6.0f} s  {about} {gpus}", flush=True)

    for task, rates in TASKS.items():
        for gpus in GPUS:
            compare(rates, gpus, BATCH, study="batch of 2,048", task=task)
    for sigma in TAILS:
        rates = ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=sigma, most=32768))
        compare(rates, 128, BATCH, (1,), (0.5, 0.625, 0.75), study=f"tail {sigma:g}", task="reasoning", sigma=sigma)
    compare(TASKS["reasoning"], 128, {**BATCH, "refill": False}, (1, 4), (0.5, 0.625, 0.75),
            study="runs to their end", task="reasoning")  # fmt: skip
    compare(TASKS["agent"], 128, {**BATCH, "refill": False}, (1, 4), (0.5, 0.625, 0.75),
            study="runs to their end", task="agent")  # fmt: skip
    compare(TASKS["reasoning"], 1000, {**BATCH, "prompts": 1024}, (1,), (0.5, 0.625, 0.75),
            study="batch of 16,384", task="reasoning")  # fmt: skip
    return {"rows": rows, "seconds": time.monotonic() - began}
