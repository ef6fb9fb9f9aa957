"""Our losses are TRL's wherever both mean the same thing; skipped where TRL is not installed."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT


def test_losses_agree_with_trl():
    pytest.importorskip("trl")
    done = subprocess.run(  # a process of its own: TRL changes transformers' classes when it is imported
        [sys.executable, "tests/benchmarks/compare_trl.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    verdicts = [
        line.rsplit(None, 1)[-1]
        for line in done.stdout.splitlines()
        if line.endswith(("PASS", "CHOICE"))
    ]
    assert (verdicts.count("PASS"), verdicts.count("CHOICE")) == (28, 5)
