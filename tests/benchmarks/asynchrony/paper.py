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

COMMON = dict(step_seconds=0.008, row_seconds=7e-5, token_seconds=1.2e-4, load_seconds=2.0, switch_seconds=10.0)
TASKS = {
    "reasoning": ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=0.9, most=32768)),
    "agent": ClusterRates(
        **COMMON, turns=6, tokens=LogNormalSpread(mean=400, sigma=0.8, most=4096),
        tools=LogNormalSpread(mean=10, sigma=1.2, most=300),
    ),
}  # fmt: skip
BATCH = dict(prompts=128, group_size=16, slots=256)
FEW = (0.5, 0.75)
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


def comparisons():
    """(name, arguments of compare_shares, columns of its rows)."""
    for task, gpus, bounds, shares in (
        ("reasoning", 8, (0, 1, 4), FEW),
        ("reasoning", 128, (0, 1, 4), FEW),
        ("agent", 128, (0, 1, 4), FEW),
        ("reasoning", 32, (0, 1, 4), FEW),
        ("reasoning", 1000, (0, 1), FEW[:2]),
        ("agent", 8, (0, 1, 4), FEW),
    ):
        layout = {**BATCH, "prompts": max(gpus, BATCH["prompts"])}  # a group is the least that a GPU can play
        yield f"{task}-{gpus}", (layout, TASKS[task], gpus, bounds, shares), {"study": "base", "task": task}
    for sigma in TAILS:
        rates = ClusterRates(**COMMON, tokens=LogNormalSpread(mean=4000, sigma=sigma, most=32768))
        about = {"study": f"sigma of the lengths {sigma:g}", "task": "reasoning"}
        yield f"tail-{sigma:g}", (BATCH, rates, 128, (1,), FEW), about
    for task in TASKS:
        about = {"study": "a run of the engine ends before the next", "task": task}
        yield f"ends-{task}", ({**BATCH, "refill": False}, TASKS[task], 128, (4,), FEW), about


def study(kept):
    """All rows; iterations 24, of which the first 2 are not counted. `kept`: a finished comparison, or a new one."""
    rows = []
    for name, (layout, rates, gpus, bounds, shares), about in comparisons():
        began = time.monotonic()

        def compare(layout=layout, rates=rates, gpus=gpus, bounds=bounds, shares=shares, about=about):
            found = compare_shares(ClusterLayout(**layout), rates, gpus, staleness=bounds, shares=shares, iterations=24)
            return rows_of(found, gpus=gpus, **about)

        rows += kept(name, compare)
        print(f"{time.monotonic() - began:6.0f} s  {name}", flush=True)
    return rows
