"""Model and data of the recipes: a small chat model that answers sums, right in about half of its samples.

    python examples/recipes/sums.py        # makes outputs/recipes/base

All recipes but `tools.py` call `make_base_model`, which trains it once (no download): full SFT on answers of a
teacher that errs in four of ten cases.
"""

import json
import random
from pathlib import Path

import rl_core

FOLDER = Path("outputs/recipes")
NUMBERS = range(8)
GREEDY = rl_core.SamplingSettings(temperature=0.0, max_completion_tokens=12)


def list_sums():
    """Return every question with its answer: 64 rows of {"prompt", "answer"}."""
    return [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a in NUMBERS for b in NUMBERS]


def choose_wrong_answer(row, rng):
    """Return another answer, as text."""
    return rng.choice([str(n) for n in range(15) if str(n) != row["answer"]])


def write_rows(path, rows):
    """Write rows as JSON lines and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_base_model(folder=FOLDER / "base", epochs=50):
    """Train the base model unless the folder has it; return the folder."""
    if (folder / "config.json").exists():
        return folder
    rng = random.Random(0)
    rows = []
    for row in list_sums() * 10:
        is_right = rng.random() < 0.6
        answer = row["answer"] if is_right else choose_wrong_answer(row, rng)
        rows.append({"prompt": row["prompt"], "completion": answer})
    texts = [f"{row['prompt']} {row['completion']}" for row in rows] + [
        "answer in a sentence : the sum is"
    ]
    policy = rl_core.create_policy(
        texts, rl_core.ModelSettings(preset="tiny", vocab_size=300, context=64)
    )
    settings = rl_core.SFTSettings(
        epochs=epochs, batch_size=64, learning_rate=2e-3, schedule="cosine"
    )
    trainer = rl_core.sft(policy, rows, heldout=0.0, settings=settings)
    trainer.run()
    return trainer.save(folder)


def measure_success(model, samples=16):
    """Return the share of sampled answers that are right."""
    rows = list_sums()
    sampling = rl_core.SamplingSettings(temperature=1.0, max_completion_tokens=8)
    texts = rl_core.generate(
        model, [row["prompt"] for row in rows], samples=samples, sampling=sampling
    )
    answers = [
        (text.strip(), row["answer"]) for row, t in zip(rows, texts, strict=True) for text in t
    ]
    return sum(text == answer for text, answer in answers) / len(answers)


if __name__ == "__main__":
    print(
        f"{make_base_model()}: {measure_success(make_base_model()):.1%} of its sampled answers are right"
    )
