"""Cost of a training service's snapshots, and time until a killed worker is replaced, by `snapshot_steps`.

One run trains an adapter on a small Llama; every step is a forward_backward and an update. Then the worker is replaced
when all but `snapshot_steps` requests behind the newest snapshot are lost from memory, as after a kill.

    PYTHONPATH=.:tests python tests/benchmarks/service_recovery.py --output outputs/service-recovery
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from helpers.service import make_base
from helpers.service_clients import create, loss, update
from helpers.service_load import settings_of

from posttrain.training_service.paths import measure_folder_bytes
from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.engine_process import EngineProcess
from rl_core.service.requests import Datum
from rl_core.settings import ServiceEngineSettings

SHAPE = dict(
    vocab_size=2048,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=688,
    max_position_embeddings=256,
)
ROWS, TOKENS, RANK = 8, 64, 32


def draw_data(seed: int) -> tuple[Datum, ...]:
    """Draw sequences of random tokens."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(2, 2048, (ROWS, TOKENS + 1))
    return tuple(Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows)


def measure(folder: Path, base: Path, snapshot_steps: int, steps: int) -> dict[str, Any]:
    """Measure one row."""
    settings = settings_of(folder, base, snapshot_steps=snapshot_steps, snapshot_seconds=1e6)
    engine = ServiceEngineSettings(bases=settings.engine.bases, device="cpu")
    settings = dataclasses.replace(settings, engine=engine)
    store = ServiceStore(f"sqlite:///{folder}/service.db")
    worker = EngineProcess(settings, store)
    saves: list[float] = []
    save = worker._runs.save_snapshot

    def timed(model_id: str) -> bool:
        began = time.perf_counter()
        done = save(model_id)
        saves.append(time.perf_counter() - began)
        return done

    worker._runs.save_snapshot = timed  # type: ignore[method-assign]
    store.accept_request(create("r", rank=RANK))
    while worker.step(wait=0.0):
        pass
    began = time.perf_counter()
    for step in range(steps):
        store.accept_request(loss("r", 2 * step + 1, draw_data(step)))
        store.accept_request(update("r", 2 * step + 2))
        while worker.step(wait=0.0):
            pass
    seconds = time.perf_counter() - began
    snapshot = folder / "snapshots" / "r"
    size = (
        measure_folder_bytes(snapshot) / max(1, len(list(snapshot.glob("checkpoint-*"))))
        if snapshot.is_dir()
        else 0
    )
    began = time.perf_counter()
    again = EngineProcess(settings, store)
    again._runs.ensure_loaded("r")
    back = time.perf_counter() - began
    counts = store.read_worker_counters()
    store.close()
    assert counts.get("replay_differences", 0) == 0
    return {
        "snapshot_steps": snapshot_steps,
        "updates": steps,
        "seconds_per_update": round(seconds / steps, 4),
        "snapshots": len(saves),
        "seconds_per_snapshot": round(float(np.median(saves)), 4) if saves else None,
        "share_of_time": round(sum(saves) / seconds, 4),
        "megabytes": round(size / 1e6, 1),
        "requests_replayed": counts.get("replayed", 0),
        "seconds_until_it_goes_on": round(back, 2),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", required=True, help="folder of the services and of service_recovery.json"
    )
    parser.add_argument("--steps", type=int, default=29, help="updates of each row (default: 29)")
    arguments = parser.parse_args()
    folder = Path(arguments.output)
    base = make_base(folder / "base", **SHAPE)
    rows = []
    measure(folder / f"warm-{time.time_ns()}", base, 1, 2)
    for snapshot_steps in (1, 5, 10, 1000):
        rows.append(
            measure(
                folder / f"{snapshot_steps}-{time.time_ns()}", base, snapshot_steps, arguments.steps
            )
        )
        print(json.dumps(rows[-1]), flush=True)
    (folder / "service_recovery.json").write_text(
        json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
