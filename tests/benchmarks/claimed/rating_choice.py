"""Labels that a held-out accuracy needs: pairs chosen by the reward model's uncertainty, and at random.

Simulated people and reward models of `preferences.py`. All begin with the same 150 random labels of a seed.
"""

from __future__ import annotations

import os
import shutil

FIRST, COUNTS = 150, (250, 400, 600)


def list_runs(output):
    """Return arms and their measurement."""

    def measured(choose, labels, seed):
        from preferences import measure_choice

        return {
            "accuracy": measure_choice(find_start(output, seed), choose, labels, seed),
            "labels": labels,
        }

    return {
        name_arm(choose, labels): lambda seed, choose=choose, labels=labels: measured(
            choose, labels, seed
        )
        for labels in COUNTS
        for choose in ("uncertainty", "random")
    }


def name_arm(choose, labels):
    """Return the name of an arm."""
    return f"{choose} {labels}"


def find_start(output, seed):
    """Return the first labels and their reward model; make them if absent."""
    from preferences import draw_items, make_start

    folder = output / "starts" / f"raters-{seed}"
    if not folder.is_dir():
        temporary = folder.with_name(folder.name + ".part")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        make_start(temporary, draw_items(3000, seed), FIRST, seed)
        os.rename(temporary, folder)
    return folder
