"""Trials shared out to several processes: each takes the next job that no other has taken.

A process has a folder of its own (`job-N` of the output), so that paths within it never change, and there its own
undisturbed runs, templates and Prefect server. It compares with its own undisturbed runs alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crash import report

__all__ = ["TRIALS", "claim", "facts", "forget", "run", "trials", "whole"]

TRIALS, CLAIMS, FACTS = "trials.jsonl", "claims", "facts.json"
PREFIX = "job-"


def run(folder: Path, count: int, arguments: Sequence[str]) -> int:
    """Run the crash test of these arguments in so many processes; the largest of their exit codes.

    A folder that an earlier call has made goes on, whatever their number was then.
    """
    claims = folder / CLAIMS
    # of a call that was ended: what it had not kept is run again
    shutil.rmtree(claims, ignore_errors=True)
    claims.mkdir()
    processes = []
    try:
        for number in range(count):  # of an option that is given twice the last one counts
            own = ("--jobs", "1", "--output", str(folder / f"{PREFIX}{number}"))
            processes.append(subprocess.Popen([sys.executable, "-m", "crash", *arguments, *own]))
        return max(abs(process.wait()) for process in processes)
    except SystemExit:  # SIGTERM was for this process alone
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:  # Ctrl-C reaches them, too: they end their servers first
            process.wait()
        shutil.rmtree(claims, ignore_errors=True)


def claim(folder: Path, name: str) -> bool:
    """Take a job; False = another process has taken it. A process without others takes all."""
    if whole(folder) == folder:
        return True
    try:
        (folder.parent / CLAIMS / hashlib.sha256(name.encode()).hexdigest()).open("x").close()
    except FileExistsError:
        return False
    return True


def whole(folder: Path) -> Path:
    """The folder of all processes, from that of one or from itself."""
    return folder.parent if (folder.parent / CLAIMS).is_dir() else folder


def trials(folder: Path) -> list[dict[str, Any]]:
    """Trials that were kept in a folder and in those of its processes."""
    return [row for place in _places(folder) for row in report.read(place / TRIALS)]


def facts(folder: Path) -> dict[str, Any]:
    """Seconds and hits of undisturbed runs, of each kind those of one process."""
    results: dict[str, Any] = {"seconds": {}, "hits": {}}
    for path in (place / FACTS for place in _places(folder)):
        if path.exists():
            there = json.loads(path.read_text())
            results = {key: there[key] | results[key] for key in results}
    return results


def forget(folder: Path) -> None:
    """Remove the trials that were kept."""
    for place in _places(folder):
        (place / TRIALS).unlink(missing_ok=True)


def _places(folder: Path) -> Iterator[Path]:
    yield folder
    yield from sorted(folder.glob(f"{PREFIX}*"))
