"""Labels that a held-out accuracy needs: pairs chosen by the reward model's uncertainty, and at random.

Simulated people and reward models of `preferences.py`. All begin with the same 150 random labels of a seed.
"""

from __future__ import annotations

import os
import shutil

FIRST, COUNTS = 150, (250, 400, 600)


def runs(output):
    """Arms and their measurement."""

    def measured(choose, labels, seed):
        from preferences import accuracy_of_choice

        return {
            "accuracy": accuracy_of_choice(start_of_seed(output, seed), choose, labels, seed),
            "labels": labels,
        }

    return {
        arm_of(choose, labels): lambda seed, choose=choose, labels=labels: measured(
            choose, labels, seed
        )
        for labels in COUNTS
        for choose in ("uncertainty", "random")
    }


def arm_of(choose, labels):
    """Name of an arm."""
    return f"{choose} {labels}"


def start_of_seed(output, seed):
    """First labels and their reward model, made where they are not there yet."""
    from preferences import items_of, start_of_raters

    folder = output / "starts" / f"raters-{seed}"
    if not folder.is_dir():
        made = folder.with_name(folder.name + ".part")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        start_of_raters(made, items_of(3000, seed), FIRST, seed)
        os.rename(made, folder)
    return folder
