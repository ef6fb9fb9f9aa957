"""Our losses compared with TRL's where both mean the same; skipped without TRL."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_losses_agree_with_trl():
    pytest.importorskip("trl")
    completed = subprocess.run(  # separate process: importing TRL changes transformers' classes
        [sys.executable, "tests/benchmarks/compare_trl.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr[-2000:]
    verdicts = [
        line.rsplit(None, 1)[-1]
        for line in completed.stdout.splitlines()
        if line.endswith(("PASS", "CHOICE"))
    ]
    assert (verdicts.count("PASS"), verdicts.count("CHOICE")) == (28, 5)
