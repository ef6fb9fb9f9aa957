"""Crash test in several processes: every job is taken once, and files in use by another process are no leftovers."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crash import jobs
from crash.content import left_in_shared_memory, shared_memory
from helpers import ROOT


def test_every_job_is_taken_by_one_process(tmp_path):
    folders = [tmp_path / "job-0", tmp_path / "job-1"]
    for folder in (*folders, tmp_path / jobs.CLAIMS):
        folder.mkdir()
    names = [f"training: every hit of point {number}" for number in range(200)]
    with ThreadPoolExecutor(2) as threads:
        taken = list(
            threads.map(
                lambda folder: [name for name in names if jobs.claim(folder, name)], folders
            )
        )
    assert sorted(taken[0] + taken[1]) == sorted(names)


def test_a_process_without_others_takes_every_job(tmp_path):
    (tmp_path / "job-0").mkdir()
    assert all(jobs.claim(tmp_path / "job-0", "one") for _ in range(2))


def test_stored_trials_are_those_of_all_processes(tmp_path):
    for number, kind in enumerate(("gc", "training")):
        folder = tmp_path / f"job-{number}"
        folder.mkdir()
        (folder / jobs.TRIALS).write_text(json.dumps({"job": kind}) + "\n")
        (folder / "facts.json").write_text(
            json.dumps({"seconds": {"gc": number, kind: number}, "hits": {kind: {}}})
        )
    (tmp_path / jobs.TRIALS).write_text('{"job": "alone"}\n{"job": "to')
    (tmp_path / jobs.CLAIMS).mkdir()
    assert jobs.whole(tmp_path / "job-1") == tmp_path == jobs.whole(tmp_path)
    assert [row["job"] for row in jobs.trials(tmp_path)] == ["alone", "gc", "training"]
    assert [row["job"] for row in jobs.trials(tmp_path / "job-1")] == ["training"]
    assert jobs.facts(tmp_path) == {
        "seconds": {"gc": 0, "training": 1},
        "hits": {"gc": {}, "training": {}},
    }
    jobs.forget(tmp_path)
    assert jobs.trials(tmp_path) == []


STARTER = """
import sys
from pathlib import Path
from crash import jobs
from crash.servers import end_by_sigterm
end_by_sigterm()
sys.executable = sys.argv[1]
jobs.run(Path(sys.argv[2]), 2, [])
"""
JOB = """#!/bin/sh
trap 'touch "{0}/ended-$$"; exit 143' TERM
touch "{0}/began-$$"
while :; do sleep 0.05; done
"""


def test_sigterm_ends_the_processes_that_share_the_trials(tmp_path):
    job = tmp_path / "job.sh"
    job.write_text(JOB.format(tmp_path))
    job.chmod(0o755)
    command = [sys.executable, "-c", STARTER, str(job), str(tmp_path)]
    starter = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("began-*"))) < 2:
        assert starter.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    starter.send_signal(signal.SIGTERM)
    assert starter.wait(60) == 128 + signal.SIGTERM
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_shared_memory_that_a_process_has_mapped_is_in_use():
    before = shared_memory()
    path = Path("/dev/shm", f"psm_crash_{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert path.name not in left_in_shared_memory(before, 0.0)
        assert path.name in left_in_shared_memory(before, 0.0)
    finally:
        path.unlink()
