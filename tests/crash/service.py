"""Command `python -m crash.service`: kill -9 of a training service's worker and client processes at random times.

Clients access the store directly, as the server does. A mixed load is run in rounds, each in a separate folder, once
undisturbed and once with kills. The answers of all requests and all saved weights of both must be equal to the last
bit. This process only forks: workers, clients and the comparison are its children, with everything imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.service import make_base
from helpers.service_clients import script
from helpers.service_load import Clients, answers, settings_of, weights

from posttrain.training_service.store import ServiceStore
from posttrain.training_service.worker.engine_process import run_worker

WORKER = dict(snapshot_steps=3, snapshot_seconds=1e6)
BEGINNING = 0.5  # seconds from a fork until a worker certainly handles signals
STUCK_SECONDS = 900.0  # without a kill; a busy machine is slow
LONGEST_LIVES = (0.5, 2.0, 5.0)  # seconds; a restarted worker needs some of them before it computes


@dataclass
class Round:
    """Load, with kills or without."""

    folder: Path
    base: Path
    scripts: list[Any]
    kills: dict[str, int] = field(default_factory=lambda: {"worker": 0, "clients": 0, "both": 0})
    children: dict[str, int] = field(default_factory=dict)
    begun: float = 0.0  # of the newest process, on the monotonic clock

    def start(self, name: str) -> None:
        self.begun = time.monotonic()
        bodies: dict[str, Callable[[], int]] = {"worker": self._worker, "clients": self._clients}
        self.children[name] = _fork(bodies[name], self.folder / f"{name}.log")

    def kill(self, name: str) -> None:
        pid = self.children.pop(name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def ended(self, name: str) -> int | None:
        """Return the exit code of a child that ended without a kill; None = still running."""
        pid, status = os.waitpid(self.children[name], os.WNOHANG)
        if not pid:
            return None
        del self.children[name]
        return os.waitstatus_to_exitcode(status)

    def stop_worker(self) -> tuple[int, float]:
        """Send SIGTERM; return exit code and seconds until the end. A new worker first gets time to handle signals."""
        time.sleep(max(0.0, self.begun + BEGINNING - time.monotonic()))
        started_at, pid = time.monotonic(), self.children.pop("worker")
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), time.monotonic() - started_at

    @property
    def _url(self) -> str:
        return f"sqlite:///{self.folder}/service.db"

    def _worker(self) -> int:
        return run_worker(settings_of(self.folder, self.base, **WORKER))

    def _clients(self) -> int:
        store = ServiceStore(self._url)
        clients = Clients(store, self.scripts)
        counter = store.read_change_counter()
        while clients.step():
            counter = store.wait_for_change(counter, 0.05)
        return 0

    def result(self) -> dict[str, Any]:
        """Read digests of answers and weights, and counts, in a child."""

        def read() -> dict[str, Any]:
            store = ServiceStore(self._url)
            results = answers(store, self.scripts)
            counts = store.read_worker_counters()
            steps = sum(
                json.loads(answer or b"{}").get("metrics", {}).get("step:max", 0) > 0
                for (kind, *_), (_, answer, _, _) in results.items()
                if kind == "optim_step"
            )
            return {
                "answers": {
                    " ".join(map(str, key)): _digest(value) for key, value in results.items()
                },
                "weights": {
                    path: _digest(value) for path, value in weights(store, self.folder).items()
                },
                "updates": steps,
                "replayed": counts.get("replayed", 0),
                "differences": counts.get("replay_differences", 0),
            }

        return _run_in_child(read, self.folder / "result.log")


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def _fork(body: Callable[[], int], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_in_child(body: Callable[[], dict[str, Any]], log: Path) -> dict[str, Any]:
    """Return the result of a function that runs in a child."""
    read, write = os.pipe()

    def answer() -> int:
        with os.fdopen(write, "wb") as file:
            pickle.dump(body(), file)
        return 0

    pid = _fork(answer, log)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        raise SystemExit(f"no result: {log.read_text()[-3000:]}")
    result: dict[str, Any] = pickle.loads(data)
    return result


def play(load: Round, draw: random.Random | None, max_kills: int) -> int:
    """Run a round to its end with a limited number of kills; return the number. No process is left after an error."""
    try:
        return _play_round(load, draw, max_kills)
    except BaseException:
        for name in list(load.children):
            load.kill(name)
        raise


def _play_round(load: Round, draw: random.Random | None, max_kills: int) -> int:
    load.folder.mkdir(parents=True)
    killed, progress = 0, time.monotonic()
    names = ["worker", "clients"]
    for name in names:
        load.start(name)
    while "clients" in load.children:
        if draw is not None and killed < max_kills:
            time.sleep(draw.random() * draw.choice(LONGEST_LIVES))
            victims = draw.choices(["worker", "clients", "both"], [6, 2, 2])[0]
            if load.ended("clients") is not None:
                break
            for name in names if victims == "both" else [victims]:
                load.kill(name)
                killed += 1
            load.kills[victims] += 1
            for name in names:
                if name not in load.children:
                    load.start(name)
            progress = time.monotonic()
            continue
        time.sleep(0.01)
        if (code := load.ended("worker")) is not None:
            raise SystemExit(
                f"the worker ended with {code}: {(load.folder / 'worker.log').read_text()[-3000:]}"
            )
        if (code := load.ended("clients")) is not None and code:
            raise SystemExit(
                f"the clients ended with {code}: {(load.folder / 'clients.log').read_text()[-3000:]}"
            )
        if time.monotonic() - progress > STUCK_SECONDS:
            raise SystemExit(f"{load.folder}: no end after {STUCK_SECONDS} s without kills")
    return killed


def compare(undisturbed: dict[str, Any], killed: dict[str, Any]) -> list[str]:
    """List the differences between an undisturbed round and one with kills."""
    problems = []
    for kind in ("answers", "weights"):
        names = undisturbed[kind].keys() | killed[kind].keys()
        problems += [
            f"{kind}: {name}"
            for name in sorted(names)
            if undisturbed[kind].get(name) != killed[kind].get(name)
        ]
    if undisturbed["updates"] != killed["updates"]:
        problems.append(f"updates: {undisturbed['updates']} and {killed['updates']}")
    if killed["differences"]:
        problems.append(f"{killed['differences']} recomputed answers differ")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Run rounds until there were enough kills; return 1 if anything differs."""
    arguments = _build_parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(arguments.output).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    base = folder / "base"
    _run_in_child(
        lambda: {"base": str(make_base(base, tie_word_embeddings=False))},
        _make_folder(folder) / "base.log",
    )
    draw, total, rows, stops = random.Random(arguments.seed), 0, [], []
    while total < arguments.kills:
        number = len(rows)
        scripts = [
            script(f"run{index}", 100 * number + index, arguments.steps)
            for index in range(arguments.clients)
        ]
        undisturbed = Round(folder / f"{number}-plain", base, scripts)
        started_at = time.monotonic()
        play(undisturbed, None, 0)
        seconds = time.monotonic() - started_at
        code, stop_seconds = undisturbed.stop_worker()
        stops.append(stop_seconds)
        disturbed = Round(folder / f"{number}-killed", base, scripts)
        started_at = time.monotonic()
        kills = play(disturbed, draw, arguments.kills - total)
        total += kills
        second_code, stop_seconds = disturbed.stop_worker()
        stops.append(stop_seconds)
        expected, actual = undisturbed.result(), disturbed.result()
        problems = compare(expected, actual)
        problems += [
            f"exit code {item} after SIGTERM" for item in (code, second_code) if item != 143
        ]
        rows.append(
            {
                "kills": kills,
                "by": disturbed.kills,
                "requests": len(expected["answers"]),
                "saved": len(expected["weights"]),
                "updates": expected["updates"],
                "replayed": actual["replayed"],
                "problems": problems,
                "seconds": round(time.monotonic() - started_at, 1),
                "undisturbed": round(seconds, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if not problems and not arguments.keep:
            shutil.rmtree(undisturbed.folder)
            shutil.rmtree(disturbed.folder)
    problems = sum(len(row["problems"]) for row in rows)
    summary = {
        "kills": total,
        "rounds": len(rows),
        "requests": sum(row["requests"] for row in rows),
        "updates": sum(row["updates"] for row in rows),
        "computed again": sum(row["replayed"] for row in rows),
        "problems": problems,
        "seconds to stop, median": round(statistics.median(stops), 2),
        "seconds to stop, longest": round(max(stops), 2),
    }
    print(json.dumps(summary, indent=1))
    (folder / "service-crash.json").write_text(
        json.dumps({"summary": summary, "rounds": rows}, indent=1) + "\n"
    )
    return int(problems > 0)


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m crash.service", description=__doc__)
    parser.add_argument(
        "--output", default="outputs/service-crash-test", help="folder of the rounds; emptied first"
    )
    parser.add_argument("--kills", type=int, default=500, help="processes to kill (default: 500)")
    parser.add_argument(
        "--clients", type=int, default=8, help="training runs at a time (default: 8)"
    )
    parser.add_argument("--steps", type=int, default=12, help="steps of each (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folders of rounds without a problem"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
