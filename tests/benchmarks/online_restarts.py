"""Restarts of an update worker under load: killed, and stopped so that it hangs, each with a spare process ready.

    PYTHONPATH=.:tests python tests/benchmarks/online_restarts.py --output DIR [--times 3] [--seed 0]

noticed: from the signal to the note in events.jsonl. back: to the first numbers that the next worker writes, when it
has its state again and learns. The spare counts as ready once it has used no processor time for two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import threading
import time
from pathlib import Path

from helpers.killed_service import CLIENTS, KilledService
from helpers.waiting import wait_for

from rl_core.online.learning_folder import read_events
from rl_core.online.service_files import METRICS_FILE, read_json_object


def read_processor_ticks(pid: int) -> int:
    """Return the clock ticks that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def find_processes(service: KilledService) -> tuple[int, int | None]:
    """Return (worker, spare); a spare that became the worker keeps its command, and is the older of two."""
    children = service.children()
    spares = sorted(children.get("standby", []))
    workers = children.get("worker", []) or spares[:1]
    spares = [pid for pid in spares if pid not in workers]
    return workers[0], spares[0] if spares else None


def wait_for_spare(service: KilledService) -> None:
    """Wait until the spare has loaded everything."""
    while True:
        _, spare = find_processes(service)
        before = read_processor_ticks(spare) if spare is not None else -1
        time.sleep(2)
        if (
            spare is not None
            and find_processes(service)[1] == spare
            and read_processor_ticks(spare) == before
        ):
            return


def measure_restart(service: KilledService, number: int) -> dict[str, float]:
    """Send one signal to the worker; return seconds until it was noticed and until the next one had its state."""
    wait_for_spare(service)
    worker, _ = find_processes(service)
    known = len(read_events(service.service))
    began = time.time()
    os.kill(worker, number)

    def noticed() -> float | None:
        new = [
            event for event in read_events(service.service)[known:] if event["kind"] == "restart"
        ]
        return float(new[0]["time"]) if new else None

    seen = wait_for(noticed, "the end of the worker in the events", 60, every=0.02)
    numbers = service.service / METRICS_FILE
    wait_for(
        lambda: numbers.stat().st_mtime > seen and read_json_object(numbers),
        "the next worker",
        120,
        every=0.02,
    )
    return {"noticed": seen - began, "back": numbers.stat().st_mtime - began}


def main() -> None:
    """Measure, print, and write restarts.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.output.resolve() / "service"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    service = KilledService(folder, seed=options.seed)
    service.start()
    threads = [
        threading.Thread(target=service._client, args=(n,), daemon=True) for n in range(CLIENTS)
    ]
    runs_by_signal: dict[str, list[dict[str, float]]] = {"SIGKILL": [], "SIGSTOP": []}
    try:
        for thread in threads:
            thread.start()
        wait_for(lambda: read_json_object(service.service / METRICS_FILE), "the worker", 300)
        for _ in range(options.times):
            for name, runs in runs_by_signal.items():
                runs.append(measure_restart(service, getattr(signal, name)))
                print(name, runs[-1], flush=True)
    finally:
        service.is_over.set()
        service.stop()
    (options.output / "restarts.json").write_text(
        json.dumps({**runs_by_signal, "load": os.getloadavg()}, indent=1)
    )
    for name, runs in runs_by_signal.items():
        noticed, back = (statistics.median(run[key] for run in runs) for key in ("noticed", "back"))
        print(
            name, f"noticed after {noticed:.1f} s, back after {back:.1f} s (median of {len(runs)})"
        )


if __name__ == "__main__":
    main()
