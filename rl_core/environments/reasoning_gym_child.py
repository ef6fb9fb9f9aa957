"""Child process of `reasoning_gym`: generates items and scores answers. See `reasoning_gym_tasks`."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from typing import Any

MAX_TRIES = 200  # items drawn to find one of the requested split


def start(setup: dict[str, Any]) -> None:
    """Import the package; takes seconds."""
    import reasoning_gym  # noqa: F401


def handle(request: dict[str, Any]) -> Any:
    """Answer one request: {"do": "check" | "item" | "score", ...}."""
    if request["do"] == "check":
        for task, options in request["tasks"].items():
            _create_item(task, json.dumps(options), 0)
        return None
    if request["do"] == "item":
        return draw_item(request["tasks"], request["key"], request["is_heldout"], request["share"])
    dataset, item = _create_item(request["task"], json.dumps(request["options"]), request["seed"])
    return float(dataset.score_answer(request["answer"], item))


def draw_item(
    tasks: dict[str, dict[str, Any]], key: str, is_heldout: bool, share: float
) -> dict[str, Any]:
    """Draw the item of a split that `key` determines.

    Questions are split by a hash of their text, so that no item is in both splits, however few a task can generate.
    Splitting by seed would not achieve that: item i of a dataset with seed s is generated from s + i, and different
    seeds
    can generate equal items.
    """
    rng = random.Random(key)
    task = rng.choice(sorted(tasks))
    for _ in range(MAX_TRIES):
        seed = rng.randrange(2**31)
        _, item = _create_item(task, json.dumps(tasks[task]), seed)
        digest = hashlib.blake2b(f"{task}\x1f{item['question']}".encode(), digest_size=8).digest()
        if (int.from_bytes(digest, "little") / 2**64 < share) == is_heldout:
            answer = item.get("answer")
            return {
                "task": task,
                "seed": seed,
                "question": item["question"],
                "answer": "" if answer is None else str(answer),
            }
    split = "held-out" if is_heldout else "training"
    raise ValueError(
        f"task '{task}' gave no {split} question in {MAX_TRIES} tries: it has too few distinct questions"
    )


@functools.lru_cache(maxsize=256)
def _create_item(task: str, options: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Create the only item of a dataset of size 1; return the dataset, which scores it, and the item."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, **json.loads(options), seed=seed, size=1)
    return dataset, dataset[0]
