"""Distribution of trials over several processes: each takes the next job that no other process has claimed.

A process has a separate folder (`job-N` of the output), so that paths within it never change, with its own undisturbed
runs, templates and Prefect server. It compares only with its own undisturbed runs.
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
    """Run the crash test with these arguments in so many processes; return the largest of their exit codes.

    A folder of an earlier call is continued, whatever the number of processes was then.
    """
    claims = folder / CLAIMS
    # claims of an interrupted call: jobs without a recorded result are run again
    shutil.rmtree(claims, ignore_errors=True)
    claims.mkdir()
    processes = []
    try:
        for number in range(count):  # the last occurrence of an option counts
            options = ("--jobs", "1", "--output", str(folder / f"{PREFIX}{number}"))
            processes.append(
                subprocess.Popen([sys.executable, "-m", "crash", *arguments, *options])
            )
        return max(abs(process.wait()) for process in processes)
    except SystemExit:  # only this process received SIGTERM
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:  # they also receive Ctrl-C, and end their servers first
            process.wait()
        shutil.rmtree(claims, ignore_errors=True)


def claim(folder: Path, name: str) -> bool:
    """Claim a job; return False if another process has claimed it. A process without others claims all jobs."""
    if whole(folder) == folder:
        return True
    try:
        (folder.parent / CLAIMS / hashlib.sha256(name.encode()).hexdigest()).open("x").close()
    except FileExistsError:
        return False
    return True


def whole(folder: Path) -> Path:
    """Return the folder of all processes, from that of one process or from itself."""
    return folder.parent if (folder.parent / CLAIMS).is_dir() else folder


def trials(folder: Path) -> list[dict[str, Any]]:
    """List the trials recorded in a folder and in those of its processes."""
    return [
        row for job_folder in _list_job_folders(folder) for row in report.read(job_folder / TRIALS)
    ]


def facts(folder: Path) -> dict[str, Any]:
    """Return seconds and hits of undisturbed runs, those of one process for each kind."""
    results: dict[str, Any] = {"seconds": {}, "hits": {}}
    for path in (job_folder / FACTS for job_folder in _list_job_folders(folder)):
        if path.exists():
            recorded = json.loads(path.read_text())
            results = {key: recorded[key] | results[key] for key in results}
    return results


def forget(folder: Path) -> None:
    """Remove the recorded trials."""
    for job_folder in _list_job_folders(folder):
        (job_folder / TRIALS).unlink(missing_ok=True)


def _list_job_folders(folder: Path) -> Iterator[Path]:
    yield folder
    yield from sorted(folder.glob(f"{PREFIX}*"))
