"""`python -m crash.service`: kill -9 of a training service's worker and of its clients' process, at random times.

Clients go through the store, as the server does. Rounds of a mixed load are run, each in a folder of its own: once
undisturbed, once with kills; answers of all requests and all saved weights of both have to be equal to the last bit.
This process only forks: workers, clients and the comparison are children of it, with everything imported.
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
BEGINNING = 0.5  # seconds from a fork until a worker surely takes signals
STUCK_SECONDS = 900.0  # without a kill; a crowded machine is slow
LONGEST_LIVES = (0.5, 2.0, 5.0)  # seconds; a restarted worker needs some of them until it computes


@dataclass
class Round:
    """One load, with kills or without."""

    folder: Path
    base: Path
    scripts: list[Any]
    kills: dict[str, int] = field(default_factory=lambda: {"worker": 0, "clients": 0, "both": 0})
    children: dict[str, int] = field(default_factory=dict)
    begun: float = 0.0  # of the newest process, on the monotonic clock

    def start(self, name: str) -> None:
        self.begun = time.monotonic()
        bodies: dict[str, Callable[[], int]] = {"worker": self._worker, "clients": self._clients}
        self.children[name] = _forked(bodies[name], self.folder / f"{name}.log")

    def kill(self, name: str) -> None:
        pid = self.children.pop(name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def ended(self, name: str) -> int | None:
        """Exit code of a child that ended by itself."""
        pid, status = os.waitpid(self.children[name], os.WNOHANG)
        if not pid:
            return None
        del self.children[name]
        return os.waitstatus_to_exitcode(status)

    def stop_worker(self) -> tuple[int, float]:
        """SIGTERM; exit code and seconds until it. A worker that was started a moment ago gets time to take signals."""
        time.sleep(max(0.0, self.begun + BEGINNING - time.monotonic()))
        began, pid = time.monotonic(), self.children.pop("worker")
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), time.monotonic() - began

    @property
    def _url(self) -> str:
        return f"sqlite:///{self.folder}/service.db"

    def _worker(self) -> int:
        return run_worker(settings_of(self.folder, self.base, **WORKER))

    def _clients(self) -> int:
        store = ServiceStore(self._url)
        clients = Clients(store, self.scripts)
        seen = store.read_change_counter()
        while clients.step():
            seen = store.wait_for_change(seen, 0.05)
        return 0

    def result(self) -> dict[str, Any]:
        """Digests of answers and weights, and counts, read by a child."""

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

        return _asked(read, self.folder / "result.log")


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def _forked(body: Callable[[], int], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(said, 1)
        os.dup2(said, 2)
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _asked(body: Callable[[], dict[str, Any]], log: Path) -> dict[str, Any]:
    """The result of a child."""
    read, write = os.pipe()

    def answer() -> int:
        with os.fdopen(write, "wb") as file:
            pickle.dump(body(), file)
        return 0

    pid = _forked(answer, log)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    if not data:
        raise SystemExit(f"no result: {log.read_text()[-3000:]}")
    found: dict[str, Any] = pickle.loads(data)
    return found


def play(one: Round, draw: random.Random | None, most: int) -> int:
    """Run a round to its end; at most so many kills. Returns their number; after an error no process is left."""
    try:
        return _played(one, draw, most)
    except BaseException:
        for name in list(one.children):
            one.kill(name)
        raise


def _played(one: Round, draw: random.Random | None, most: int) -> int:
    one.folder.mkdir(parents=True)
    killed, progress = 0, time.monotonic()
    names = ["worker", "clients"]
    for name in names:
        one.start(name)
    while "clients" in one.children:
        if draw is not None and killed < most:
            time.sleep(draw.random() * draw.choice(LONGEST_LIVES))
            victims = draw.choices(["worker", "clients", "both"], [6, 2, 2])[0]
            if one.ended("clients") is not None:
                break
            for name in names if victims == "both" else [victims]:
                one.kill(name)
                killed += 1
            one.kills[victims] += 1
            for name in names:
                if name not in one.children:
                    one.start(name)
            progress = time.monotonic()
            continue
        time.sleep(0.01)
        if (code := one.ended("worker")) is not None:
            raise SystemExit(
                f"the worker ended with {code}: {(one.folder / 'worker.log').read_text()[-3000:]}"
            )
        if (code := one.ended("clients")) is not None and code:
            raise SystemExit(
                f"the clients ended with {code}: {(one.folder / 'clients.log').read_text()[-3000:]}"
            )
        if time.monotonic() - progress > STUCK_SECONDS:
            raise SystemExit(f"{one.folder}: no end after {STUCK_SECONDS} s without kills")
    return killed


def compare(plain: dict[str, Any], killed: dict[str, Any]) -> list[str]:
    """Differences between an undisturbed round and one with kills."""
    results = []
    for what in ("answers", "weights"):
        names = plain[what].keys() | killed[what].keys()
        results += [
            f"{what}: {name}"
            for name in sorted(names)
            if plain[what].get(name) != killed[what].get(name)
        ]
    if plain["updates"] != killed["updates"]:
        results.append(f"updates: {plain['updates']} and {killed['updates']}")
    if killed["differences"]:
        results.append(f"{killed['differences']} answers computed again were others")
    return results


def main(argv: list[str] | None = None) -> int:
    """Rounds until there were enough kills; 1 where anything differs."""
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(arguments.output).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    base = folder / "base"
    _asked(
        lambda: {"base": str(make_base(base, tie_word_embeddings=False))},
        _made(folder) / "base.log",
    )
    draw, total, rows, stops = random.Random(arguments.seed), 0, [], []
    while total < arguments.kills:
        number = len(rows)
        scripts = [
            script(f"run{index}", 100 * number + index, arguments.steps)
            for index in range(arguments.clients)
        ]
        plain = Round(folder / f"{number}-plain", base, scripts)
        began = time.monotonic()
        play(plain, None, 0)
        seconds = time.monotonic() - began
        code, took = plain.stop_worker()
        stops.append(took)
        broken = Round(folder / f"{number}-killed", base, scripts)
        began = time.monotonic()
        kills = play(broken, draw, arguments.kills - total)
        total += kills
        code_too, took = broken.stop_worker()
        stops.append(took)
        wanted, results = plain.result(), broken.result()
        problems = compare(wanted, results)
        problems += [f"exit code {item} after SIGTERM" for item in (code, code_too) if item != 143]
        rows.append(
            {
                "kills": kills,
                "by": broken.kills,
                "requests": len(wanted["answers"]),
                "saved": len(wanted["weights"]),
                "updates": wanted["updates"],
                "replayed": results["replayed"],
                "problems": problems,
                "seconds": round(time.monotonic() - began, 1),
                "undisturbed": round(seconds, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        if not problems and not arguments.keep:
            shutil.rmtree(plain.folder)
            shutil.rmtree(broken.folder)
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


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _parser() -> argparse.ArgumentParser:
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
