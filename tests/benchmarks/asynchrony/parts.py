"""Seconds of the parts of an iteration in one process without Ray: of a decoding step, a row, a turn, and an update.

Rollouts are measured in processor seconds, so waiting for tools does not count: with tools, turns begin one
after the other, in steps of few rows, as they do on workers; without, many start together. Turns of a third of the
length tell
a turn from its rows.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from itertools import product

import numpy as np

from asynchrony.slow_tools import ENDS, IN_PROCESS, make_trainer


def measure_parts(options):
    """Return rows of counts with their seconds, and the lengths of turns; see `fit_parts`."""
    decode, update, sizes = [], [], []
    for mean, ends, prompts in product(options["means"], (ENDS, 3 * ENDS), options["prompts"]):
        trainer, _ = make_trainer(
            IN_PROCESS,
            mean=mean,
            ends=ends,
            shape=options.get("shape", "0.9M"),
            prompts_per_iteration=prompts,
            seed=prompts,
            sampling={"rejoin": "ready"},
        )
        with count_rollout_work(trainer) as counted:
            trainer.step()
            for _ in range(options["repeats"]):
                counted.clear()
                row = trainer.step()
                turns = [
                    t.num_tokens
                    for g in trainer.groups
                    for r in g.rollouts
                    for t in r.trajectory.turns
                ]
                decode.append(
                    [counted["steps"], sum(turns), len(turns), counted["joins"], counted["seconds"]]
                )
                if ends == ENDS:
                    update.append(
                        [1.0, sum(turns), row["perf/update_seconds"] + row["perf/reward_seconds"]]
                    )
                    sizes += turns
    return {"turn_tokens": sizes, "decode_rows": decode, "update_rows": update}


@contextmanager
def count_rollout_work(trainer):
    """Count the work of a trainer's rollouts inside the block: steps of the engine, joins, processor seconds."""
    from rl_core.inference import engine
    from rl_core.inference.engine import EngineRun

    counts = Counter()

    class CountingRun(EngineRun):
        def _start_sequences(self, slots):
            counts["joins"] += bool(slots)
            super()._start_sequences(slots)

        def _sample_one_token(self, n, to_append):
            counts["joins"] += bool(to_append)
            counts["steps"] += 1
            super()._sample_one_token(n, to_append)

        def _sample_steps(self, n, steps):
            before = self._sampled[:n].copy()
            super()._sample_steps(n, steps)
            counts["steps"] += int((self._sampled[:n] - before).max())

    play = trainer._play_round

    def counting(*arguments):
        began = time.process_time()
        groups = play(*arguments)
        counts["seconds"] += time.process_time() - began
        return groups

    trainer._play_round = counting
    engine.EngineRun = CountingRun
    try:
        yield counts
    finally:
        engine.EngineRun = EngineRun


def fit_parts(rounds):
    """Fit the seconds of each part by least squares over the rows of several rounds."""
    step, row, turn, join = solve([row for round_ in rounds for row in round_["decode_rows"]])
    fixed, token = solve([row for round_ in rounds for row in round_["update_rows"]])
    return {
        "step_seconds": step,
        "row_seconds": row,
        "turn_seconds": turn,
        "join_seconds": join,
        "update_seconds": fixed,
        "token_seconds": token,
    }


def solve(rows):
    """Solve non-negative least squares, relative to each measured time."""
    from scipy.optimize import nnls

    table = np.array(rows, float)
    weight = 1 / table[:, -1:]
    return nnls(table[:, :-1] * weight, np.ones(len(table)))[0].tolist()
