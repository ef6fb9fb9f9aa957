"""Waiting of a person who rates 10,000 pairs on the page of `posttrain label`: from a rating to the next question.

    python tests/benchmarks/rating_page.py [--pairs 10000] [--choose uncertainty] [--output rating_page.json]

Three raters send ratings over HTTP, one after another, until every pair has one, with the posterior of a reward model
(64 axes of random features) choosing the pairs. Milliseconds of the first, the middle and the last tenth; then the same
room is reopened from its journal. In Chromium, where there is one: from a pressed key to the next pair on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import chromium  # noqa: E402
from helpers.rating import TOKEN, items, serve_rating_page  # noqa: E402

from posttrain.preferences.rating_session import RatingSession  # noqa: E402
from rl_core.preferences.question_order import RewardPosterior  # noqa: E402
from rl_core.settings import RatingSettings  # noqa: E402

AXES = 64
RATERS = ("ann", "bob", "cleo")
KEYS = 20  # pressed in the browser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--choose", choices=("uncertainty", "random"), default="uncertainty")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.pairs < 300:
        parser.error("--pairs: at least 300, so that pairs are left for the browser")
    pairs = items(options.pairs)
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {
            "machine": platform.processor() or platform.machine(),
            "load": os.getloadavg()[0],
        }
        room, results["opened_s"] = open_room(Path(folder), pairs, options.choose)
        with serve_rating_page(room) as address:
            results["ms"] = measure_rating(address, options.pairs)
            results["agreement_ms"] = time_call(lambda: request_json(address, "agreement"))[1]
        room, results["opened_again_s"] = open_room(Path(folder), pairs, options.choose)
        with serve_rating_page(room) as address:
            results["browser_ms"] = measure_in_browser(address) if chromium.PROGRAM else None
    print(json.dumps(results, indent=1))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def open_room(folder: Path, pairs: list[Any], choose: str) -> tuple[RatingSession, float]:
    """Open the room; return it and the seconds until it can ask."""
    features = np.random.default_rng(0).standard_normal((len(pairs), AXES))
    settings = RatingSettings(choose=choose, overlap=0.1, repeat=0.02)

    def make() -> RatingSession:
        room = RatingSession(folder, pairs, settings, seed=0, posterior=RewardPosterior(features))
        room.describe_question("dan")
        return room

    room, milliseconds = time_call(make)
    return room, round(milliseconds / 1000, 2)


def measure_rating(address: str, pairs: int) -> dict[str, Any]:
    """Return milliseconds of a rating with the next question, at three times of the work."""
    with httpx.Client(
        base_url=address.split("/#")[0], headers={"Authorization": f"Bearer {TOKEN}"}
    ) as client:
        open_ = {
            rater: client.post("/api/question", json={"rater": rater}).json() for rater in RATERS
        }
        spent: list[float] = []
        for number in range(pairs):
            rater = RATERS[number % len(RATERS)]
            question = open_[rater]["question"]
            if question is None:
                break
            body = {
                "rater": rater,
                "item": question["item"],
                "count": open_[rater]["rated"],
                "choice": "left",
            }
            answer, milliseconds = time_call(
                lambda body=body: client.post("/api/rate", json=body).raise_for_status().json()
            )
            open_[rater] = answer
            spent.append(milliseconds)
    tenth = max(1, len(spent) // 10)
    middle = len(spent) // 2
    parts = {
        "first tenth": spent[:tenth],
        "middle tenth": spent[middle : middle + tenth],
        "last tenth": spent[-tenth:],
    }
    return {"ratings": len(spent)} | {
        name: compute_percentiles(part) for name, part in parts.items()
    }


def measure_in_browser(address: str) -> dict[str, float]:
    """Return milliseconds from a pressed key to the next pair, for a rater in a room with all these ratings."""
    with chromium.Chromium(address, size=(1280, 900)) as page:
        page.wait("(document.activeElement || {}).id == 'name'")
        page.run(
            "document.getElementById('name').value = 'eve'; document.getElementById('name').form.requestSubmit()"
        )
        page.wait("!document.getElementById('task').hidden")
        return compute_percentiles(
            [page.run(PRESS.format(number=number + 1)) for number in range(KEYS)]
        )


PRESS = """
new Promise(done => {{
  const began = performance.now();
  document.dispatchEvent(new KeyboardEvent("keydown", {{ key: "1", bubbles: true }}));
  const look = () => document.getElementById("progress").textContent.startsWith("you: {number} ")
    ? done(performance.now() - began) : requestAnimationFrame(look);
  look();
}})
"""


def request_json(address: str, path: str) -> Any:
    url = f"{address.split('/#')[0]}/api/{path}"
    return (
        httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        .raise_for_status()
        .json()
    )


def time_call(call: Any) -> tuple[Any, float]:
    """Return its result, and its milliseconds."""
    began = time.perf_counter()
    result = call()
    return result, round(1000 * (time.perf_counter() - began), 2)


def compute_percentiles(spent: list[float]) -> dict[str, float]:
    return {
        name: round(float(np.percentile(spent, share)), 1)
        for name, share in (("p50", 50), ("p99", 99))
    }


if __name__ == "__main__":
    main()
