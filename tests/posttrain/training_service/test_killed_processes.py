"""Processes that are killed with SIGKILL or end by SIGTERM; `make service-crash-test` is the long version."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT


def run_crash_test(folder, *options):
    command = [sys.executable, "-m", "crash.service", "--output", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "service-crash.json").read_text())["summary"]


INTERRUPTED_WORKER = """
import os, signal, sys
from pathlib import Path
from posttrain.training_service.store import open_service_store
from posttrain.training_service.worker import engine_process
from helpers.service_load import settings_of

def open_and_interrupt(settings):
    store = open_service_store(settings)
    os.kill(os.getpid(), signal.SIGTERM)
    return store

engine_process.open_service_store = open_and_interrupt
sys.exit(engine_process.run_worker(settings_of(Path(sys.argv[1]), Path(sys.argv[2]))))
"""


def test_a_worker_that_opens_its_store_ends_by_sigterm_with_143(tmp_path, base_folder):
    command = [sys.executable, "-c", INTERRUPTED_WORKER, str(tmp_path), str(base_folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


@pytest.mark.slow
def test_a_few_kills_of_worker_and_clients_change_nothing(tmp_path):
    result = run_crash_test(tmp_path / "crash", "--kills", "3", "--clients", "1", "--steps", "3")
    assert result["kills"] >= 3 and result["problems"] == 0 and result["updates"] >= 3
    # by SIGTERM; the exit code is among the problems
    assert result["seconds to stop, longest"] < 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path):
    result = run_crash_test(tmp_path / "crash", "--kills", "100", "--clients", "8", "--steps", "12")
    assert result["kills"] >= 100 and result["problems"] == 0
