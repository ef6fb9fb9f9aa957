"""Effect of reference models in few bits on what DPO and GRPO learn: seeds by precision, on pixel_grid.

    python examples/service_grpo.py models/grid
    python tests/benchmarks/references_learning.py models/grid OUTPUT [--seeds 3] [--part dpo|grpo]

DPO learns right answers over wrong ones after the same look; GRPO learns from the environment's rewards under a KL
term. Every run is one JSON line in OUTPUT/results.jsonl; what is there is not run again. Then the table: means over
seeds with 95% intervals (t), and of the differences to full precision, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from claimed.intervals import estimate_gap, estimate_interval

import rl_core
from rl_core import environments
from rl_core.api.data import load_preference_pairs
from rl_core.api.recipes import Recipe
from rl_core.environments.pixel_grid_questions import COLOURS
from rl_core.references.scorer import ReferenceSource, load_reference_model
from rl_core.settings import CurriculumStage, ModelSettings, resolve_defaults
from rl_core.trainers.preference import PreferenceTrainer, compute_reference_logprobs

PRECISIONS = ("full", "int8", "int4")
LEVEL, KL_COEF, BETA = "easy", 0.05, 0.1


def make_pairs(seed, count):
    """Make conversational rows: the demonstrator's look, then the right answer or another one."""
    environment, rows = environments.make_environment("pixel_grid"), []
    seeds, rng = environment.seeds_of("train", LEVEL), random.Random(seed)
    while len(rows) < count:
        shown = environment.demonstration(seeds[rng.randrange(100_000, 1_000_000)], LEVEL)
        if shown.success:
            *before, last = shown.messages
            right = last["content"].split()[-1]
            others = "0123456789" if right.isdigit() else COLOURS
            wrong = rng.choice([color for color in others if color != right])
            wrong_look = {**last, "content": last["content"].removesuffix(right) + wrong}
            rows.append({"prompt": before, "chosen": [last], "rejected": [wrong_look]})
    return rows


def train_dpo(folder, precision, seed):
    policy = rl_core.load_policy(folder)
    settings = rl_core.PreferenceSettings(
        learning_rate=1e-4,
        epochs=1,
        batch_size=16,
        warmup_steps=5,
        eval_every=0,
        patience=None,
        beta=BETA,
    )
    settings = resolve_defaults(settings, policy.kind, policy.context)
    pairs = load_preference_pairs(
        make_pairs(seed, 800), 0.25, policy.renderer, policy.context, seed, "dpo", None
    )

    def sums(model, part):
        return compute_reference_logprobs(
            model, part, pad_id=policy.renderer.pad_id, max_tokens=8192
        )

    source = {"path": str(folder), "kind": "policy", "model": ModelSettings(device="cpu")}
    reference = load_reference_model(ReferenceSource(precision=precision, **source))[0]
    exact = torch.tensor(
        sums(load_reference_model(ReferenceSource(precision="full", **source))[0], pairs.heldout)
    )
    known = tuple(sums(reference, part) for part in (pairs.train, pairs.heldout))
    trainer = PreferenceTrainer(
        policy.model, policy.renderer.pad_id, pairs.train, pairs.heldout, settings, seed, known
    )
    Recipe(trainer, trainer.total_steps).run(settings)
    margins = BETA * (
        (torch.tensor(sums(policy.model, pairs.heldout)) - exact) @ torch.tensor([1.0, -1.0])
    )
    return {
        "accuracy": float((margins > 0).float().mean()),
        "margin": float(margins.mean()),
        "eval_loss": float(torch.nn.functional.softplus(-margins).mean()),
        "heldout": len(pairs.heldout),
    }


def train_grpo(folder, precision, seed):
    settings = rl_core.PolicySettings(
        kl_coef=KL_COEF,
        reference_precision=precision,
        iterations=40,
        prompts_per_iteration=8,
        group_size=8,
        learning_rate=2e-4,
        warmup_steps=2,
        eval_every=0,
        patience=None,
        curriculum=(CurriculumStage(name=LEVEL, levels={LEVEL: 1.0}),),
        sampling=rl_core.SamplingSettings(max_completion_tokens=64, max_turns=4),
    )
    environment = environments.make_environment("pixel_grid")
    training = rl_core.grpo(folder, environment=environment, settings=settings, seed=seed)
    training.run()
    table = training.metrics()
    success, kl = list(table["train/success_rate"].dropna()), list(table["policy/ref_kl"].dropna())
    return {
        "success_first_5": float(np.mean(success[:5])),
        "success_last_10": float(np.mean(success[-10:])),
        "ref_kl_first": kl[0],
        "ref_kl_last_10": float(np.mean(kl[-10:])),
    }


PARTS = {"dpo": train_dpo, "grpo": train_grpo}


def print_table(results, part):
    """Print the table of one part, in Markdown."""
    seeds = sorted({key[2] for key in results if key[0] == part})
    names = [
        name
        for name in next(results[key] for key in results if key[0] == part)
        if name != "heldout"
    ]
    print(f"\n| {part} | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for precision in PRECISIONS:
        cells = []
        for name in names:
            values = [results[part, precision, seed][name] for seed in seeds]
            mean, low, high = estimate_interval(values)
            gap, gap_low, gap_high = estimate_gap(
                values, [results[part, "full", seed][name] for seed in seeds]
            )
            difference = (
                "" if precision == "full" else f" ({gap:+.4f} ± {(gap_high - gap_low) / 2:.4f})"
            )
            cells.append(f"{mean:.4f} ± {(high - low) / 2:.4f}{difference}")
        print(f"| {precision} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", choices=sorted(PARTS))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.jsonl"
    lines = results.read_text().splitlines() if results.is_file() else []
    results_by_run = {
        (row["part"], row["precision"], row["seed"]): row["numbers"]
        for row in map(json.loads, lines)
    }
    parts = [options.part] if options.part else sorted(PARTS)
    for part in parts:
        for seed in range(options.seeds):
            for precision in PRECISIONS:
                if (part, precision, seed) not in results_by_run:
                    numbers = results_by_run[part, precision, seed] = PARTS[part](
                        options.folder, precision, seed
                    )
                    row = {"part": part, "precision": precision, "seed": seed, "numbers": numbers}
                    print(json.dumps(row), flush=True)
                    with results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    for part in parts:
        print_table(results_by_run, part)


if __name__ == "__main__":
    main()
