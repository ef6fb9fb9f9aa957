"""Three simulated people of known noise rate answers through `posttrain label`'s room; a reward model learns from it.

    python tests/benchmarks/preferences.py --output preferences.json [--seeds 0 1 2]

Answers are six words each; a hidden weight of every word makes an answer's quality. A person prefers by the difference
of quality plus logistic noise, and calls small differences a tie. The reward model (nano, from random weights) is
trained on the data file that the room wrote, and judged on noise-free held-out pairs. Labels that are needed where
pairs are chosen by uncertainty: `claims.py --parts ratings`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rl_core  # noqa: E402
from posttrain.preferences.rating_session import RatingSession  # noqa: E402
from posttrain.preferences.sampled_answers import build_reward_posterior  # noqa: E402
from rl_core.models import heads  # noqa: E402
from rl_core.preferences.items import RatedItem  # noqa: E402
from rl_core.settings import ModelSettings, RatingSettings, RewardModelSettings  # noqa: E402

WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "paper",
    "tiger",
    "lemon",
    "piano",
    "candle",
    "forest",
    "mirror",
    "button",
    "garden",
    "silver",
    "thunder",
    "velvet",
]
PEOPLE = {
    "careful": 0.3,
    "usual": 1.0,
    "careless": 2.5,
}  # scale of the noise; qualities differ by about 3
TIE = 0.5  # difference below which a person sees none


def draw_quality(seed: int) -> dict[str, float]:
    """Draw the hidden weight of each word."""
    rng = random.Random(f"quality {seed}")
    return {word: rng.gauss(0, 1) for word in WORDS}


def draw_items(count: int, seed: int) -> list[RatedItem]:
    """Draw pairs of answers of six words."""
    rng = random.Random(f"items {seed}")
    items: dict[str, RatedItem] = {}
    while len(items) < count:
        answers = tuple(" ".join(rng.choices(WORDS, k=6)) for _ in range(2))
        item = RatedItem(
            f"Write six words, number {rng.randrange(50)}.", answers, ("model", "model")
        )
        if answers[0] != answers[1]:
            items.setdefault(item.id, item)
    return list(items.values())


def compute_difference(item: RatedItem, weights: dict[str, float]) -> float:
    """Return the quality of the first answer minus that of the second."""
    first, second = (sum(weights[word] for word in str(answer).split()) for answer in item.answers)
    return first - second


def rate_items(
    room: RatingSession, labels: int, weights: dict[str, float], people: Sequence[str], seed: int
) -> None:
    """Let the people rate in turn until the room has so many ratings."""
    rng = random.Random(f"rate {seed} {labels}")
    known = {item.id: item for item in room.items}
    while len(room.journal) < labels:
        for name in people:
            shown = room.describe_question(name)
            if shown["question"] is None or len(room.journal) >= labels:
                continue
            item = known[shown["question"]["item"]]
            gap = compute_difference(item, weights)
            noise = PEOPLE[name] * np.log(1 / (u := rng.uniform(1e-9, 1 - 1e-9)) - 1)
            felt = gap + float(noise)
            question = room.order.choose_next_question(name)
            assert question is not None and 0 < u < 1
            side = "left" if (felt > 0) == (question.left == 0) else "right"
            choice = "tie" if abs(felt) < TIE else side
            room.record_rating(
                name, {"item": item.id, "count": shown["rated"], "choice": choice}, time.time()
            )


def measure_reward_accuracy(
    rows: Path, policy: Path, weights: dict[str, float], test: list[RatedItem], **options: Any
) -> float:
    """Return the share of noise-free pairs that a reward model, trained on the data file, orders rightly."""
    settings = RewardModelSettings(
        **{"epochs": 6.0, "batch_size": 32, "learning_rate": 2e-3, "checkpoint_every": 0, **options}
    )
    training = rl_core.reward_model(
        ModelSettings(path=str(policy), device="cpu"), str(rows), heldout=0, settings=settings
    )
    training.run()
    renderer = training.policy.renderer
    ids = [
        [
            *renderer.prompt_ids([{"role": "user", "content": str(item.prompt)}]),
            *renderer.action_ids(str(answer)),
        ]
        for item in test
        for answer in item.answers
    ]
    scores = np.array(heads.score_rows(training.model, ids, pad_id=renderer.pad_id))
    right = (scores[0::2] > scores[1::2]) == np.array(
        [compute_difference(item, weights) > 0 for item in test]
    )
    return float(right.mean())


def make_base_policy(folder: Path, seed: int) -> Path:
    """Make a nano policy with random weights, and a tokenizer that knows the words."""
    texts = [f"Write six words, number 1. {' '.join(WORDS)}"] * 4
    settings = ModelSettings(preset="nano", vocab_size=420, context=128, device="cpu")
    return rl_core.create_policy(texts, settings, seed=seed).save(folder / "policy")


def measure_label_counts(seed: int, counts: Sequence[int]) -> dict[str, Any]:
    """Return accuracy by number of labels of three people, each of them alone, and agreement."""
    weights, results = draw_quality(seed), {"seed": seed}
    test = draw_items(500, seed + 1000)
    with tempfile.TemporaryDirectory() as name:
        policy = make_base_policy(Path(name), seed)
        for people in (tuple(PEOPLE), *((person,) for person in PEOPLE)):
            key = "all three" if len(people) > 1 else people[0]
            for count in counts if len(people) > 1 else counts[-1:]:
                folder = Path(name) / f"{key} {count}"
                settings = RatingSettings(choose="random", overlap=0.2, repeat=0.05)
                room = RatingSession(folder, draw_items(3000, seed), settings, seed=seed)
                rate_items(room, count, weights, people, seed)
                room.write_data_file()
                accuracy = measure_reward_accuracy(room.rows_file, policy, weights, test)
                results.setdefault(key, {})[count] = accuracy
                if len(people) > 1:
                    alpha = room.compute_agreement()
                    results.setdefault("alpha", {})[count] = [alpha.alpha, alpha.low, alpha.high]
                    results["alpha by rater"] = {
                        person.rater: person.alpha for person in alpha.raters
                    }
                print(seed, key, count, f"{accuracy:.3f}", flush=True)
    return results


def make_start(folder: Path, items: list[RatedItem], first: int, seed: int) -> Path:
    """Make the first labels, at random, and their reward model: in `start/` and `reward/` of the folder."""
    policy = make_base_policy(folder, seed)
    room = RatingSession(
        folder / "start", items, RatingSettings(choose="random", overlap=0.0), seed=seed
    )
    rate_items(room, first, draw_quality(seed), ["usual"], seed)
    room.write_data_file()
    settings = RewardModelSettings(
        epochs=6.0, batch_size=32, learning_rate=2e-3, checkpoint_every=0
    )
    training = rl_core.reward_model(
        ModelSettings(path=str(policy), device="cpu"),
        str(room.rows_file),
        heldout=0,
        settings=settings,
        seed=seed,
    )
    training.run()
    training.save(folder / "reward")
    return policy


def measure_choice(
    start: Path, choose: Literal["uncertainty", "random"], labels: int, seed: int
) -> float:
    """Return held-out accuracy from so many labels; those after the first ones were chosen by `choose`."""
    items = draw_items(3000, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ratings.jsonl").write_bytes((start / "start" / "ratings.jsonl").read_bytes())
        posterior = None
        if choose == "uncertainty":
            posterior = build_reward_posterior(
                items, ModelSettings(device="cpu"), policy=None, reward_model=start / "reward"
            )
        settings = RatingSettings(choose=choose, overlap=0.0, repeat=0.0)
        room = RatingSession(folder, items, settings, seed=seed, posterior=posterior)
        rate_items(room, labels, draw_quality(seed), ["usual"], seed)
        room.write_data_file()
        return measure_reward_accuracy(
            room.rows_file, start / "policy", draw_quality(seed), draw_items(500, seed + 1000)
        )


def main() -> None:
    """Measure, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("preferences.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--counts", type=int, nargs="+", default=[150, 400, 1200])
    arguments = parser.parse_args()
    started = time.process_time()
    results: dict[str, Any] = {}
    results["labels"] = [measure_label_counts(seed, arguments.counts) for seed in arguments.seeds]
    results["processor_seconds"] = time.process_time() - started
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
