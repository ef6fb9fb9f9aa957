"""A supervisor that waits for children outlives the bound of SIGTERM."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT

PROGRAM = """
import os, signal, sys, time
from flows.runtime import stopping
stopping.FORCED_EXIT_SECONDS = 0.3
seen = []
with stopping.bound_shutdown_time():
    with {block}:
        signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
        print("ready", flush=True)
        while not seen:
            time.sleep(0.01)
        time.sleep(1.0)
    print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("block", "code", "output"),
    [
        ("stopping.suspend_shutdown_bound()", 0, "saved"),
        ("__import__('contextlib').nullcontext()", 143, ""),
    ],
)
def test_a_block_without_the_bound_may_finish(block, code, output):
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(block=block)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    rest, _ = child.communicate(timeout=60)
    assert (child.returncode, rest.strip()) == (code, output)
