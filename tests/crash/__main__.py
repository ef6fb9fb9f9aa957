"""`python -m crash`: the crash test, in pieces if need be: what an earlier call kept is not run again."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from crash import report
from crash.forks import Forks
from crash.pipelines import KINDS, write_inputs
from crash.trials import Bench, Trial, append, kills_at_points, random_kills

ROOT = Path(__file__).resolve().parents[2]


def environment(api: str) -> dict[str, str]:
    """Environment of the runs: this checkout, one thread, no network, a Prefect server of their own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return kept | {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "PREFECT_API_URL": api, "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "", "MPLBACKEND": "agg",
    }  # fmt: skip


@contextlib.contextmanager
def prefect_server() -> Iterator[str]:
    """A Prefect server with a database of its own; gives the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="crash-prefect-") as home:
        command = [
            sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--host",
            "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on",
        ]  # fmt: skip
        server = subprocess.Popen(
            command,
            env={**os.environ, "PREFECT_HOME": home, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1",
                 "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "true"},
            start_new_session=True,
        )  # fmt: skip
        try:
            _wait(f"http://127.0.0.1:{port}/api/health", server)
            yield f"http://127.0.0.1:{port}/api"
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, "the Prefect server ended"
        with contextlib.suppress(OSError), opener.open(url, timeout=2):
            return
        time.sleep(0.2)
    raise TimeoutError(f"{url} does not answer")


def main(argv: list[str] | None = None) -> int:
    """Run what is wanted and has not been run, within the budget."""
    arguments = _parser().parse_args(argv)
    folder = Path(arguments.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "trials.jsonl"
    if not arguments.keep:
        kept.unlink(missing_ok=True)
    deadline = time.monotonic() + arguments.seconds
    config = write_inputs(folder)
    with prefect_server() as api, Forks(environment(api)) as forks:
        bench = Bench(folder, config, forks)
        bench.prepare(arguments.kinds)
        facts = {"seconds": bench.seconds, "hits": bench.hits}
        (folder / "facts.json").write_text(json.dumps(facts))
        for kind, hits in bench.hits.items():
            print(f"{kind}: {bench.seconds[kind]:.1f} s undisturbed, {len(hits)} points, {sum(hits.values())} hits")
        if missing := report.unreached(bench.hits, arguments.kinds):
            print(f"not reached: {', '.join(missing)}")
        _run(bench, list(_wanted(arguments, bench)), kept, deadline)
    rows = report.read(kept)
    print(report.table(rows, facts))
    (folder / "crash.json").write_text(json.dumps(report.figures(rows, facts), indent=1) + "\n")
    (folder / "crash.md").write_text(report.markdown(rows, facts))
    print(f"figures: {folder / 'crash.json'}, {folder / 'crash.md'}")
    return int(any(row["failures"] for row in rows))


def _run(bench: Bench, wanted: list[Trial], kept: Path, deadline: float) -> None:
    """Run trials until the budget is over; what was run by an earlier call is left out."""
    known = {row["name"] for row in report.read(kept)}
    left = [trial for trial in wanted if trial.name not in known]
    print(f"{len(wanted)} trials, {len(left)} to run", flush=True)
    bad = 0
    for number, trial in enumerate(left, 1):
        if time.monotonic() > deadline:
            print(f"the time is over with {len(left) - number + 1} trials left; the same command with --keep goes on")
            return
        append(kept, bench.run(trial))
        bad += bool(trial.failures)
        if trial.failures:
            print(f"FAILED {trial.name}\n    " + "\n    ".join(trial.failures[:5]), flush=True)
        elif number % 20 == 0:
            print(f"{number} of {len(left)}, {bad} failed", flush=True)


def _wanted(arguments: argparse.Namespace, bench: Bench) -> Iterator[Trial]:
    """The trials: a sample in fresh processes, then points and hits, then random times."""
    first = arguments.kinds[0]
    points = {
        kind: list(kills_at_points(bench.hits[kind], arguments.hits, arguments.action, arguments.only))
        for kind in arguments.kinds
    }
    step = max(1, len(points[first]) // max(1, arguments.fresh))
    for kill in points[first][::step][: arguments.fresh]:
        yield Trial(first, [kill], fresh=True)
    known: set[str] = set()
    for kind, kills in points.items():
        for kill in kills:
            # What an earlier kind of run has been killed at is killed once more at its first hit only.
            point = kill.fault.partition(":")[0]
            if point in known and not kill.fault.startswith(f"{point}:1:"):
                continue
            yield Trial(kind, [kill])
        known |= {kill.fault.partition(":")[0] for kill in kills}
    for index, kills in enumerate(random_kills(arguments.random, arguments.seed)):
        kind = arguments.kinds[index % len(arguments.kinds)]
        yield Trial(kind, kills)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m crash", description=__doc__)
    parser.add_argument("--output", default="outputs/crash-test", help="folder of runs and figures")
    parser.add_argument("--seconds", type=float, default=3600, help="budget; no trial begins after it (default: 3600)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["pipeline", "prepared", "again"])
    parser.add_argument("--hits", type=int, default=4, help="kills at each point at most, at different hits")
    parser.add_argument("--random", type=int, default=300, help="runs that are killed at random times")
    parser.add_argument("--fresh", type=int, default=6, help="runs in fresh processes, not forked")
    parser.add_argument("--only", default=".*", help="points whose name matches this pattern")
    parser.add_argument("--action", default="kill", help="what happens at the points: kill, exit, term")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--keep", action="store_true", help="go on with the trials that are there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
