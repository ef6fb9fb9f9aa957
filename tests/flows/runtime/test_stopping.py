"""A process that does not unwind after SIGTERM: ended in bounded time, its last words said."""

import subprocess
import sys

import pytest
from helpers import ROOT

CODE = """
import os, pathlib, signal, sys, time
from flows.runtime import stopping
stopping.LAST_SECONDS = 0.2
signal.signal(signal.SIGTERM, lambda *arguments: None)  # whoever handles it does not stop
path = pathlib.Path(sys.argv[1])
bound = stopping.bounded(0.1, 75) if sys.argv[2] == "own" else stopping.bounded()
with bound, stopping.last_words(lambda: path.write_text(f"stopped {stopping.asked.is_set()}")):
    if sys.argv[2] != "end":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
print("ended by itself")
"""


@pytest.mark.parametrize(("how", "code"), [("hang", 143), ("own", 75), ("end", 0)])
def test_what_does_not_stop_is_ended(tmp_path, how, code):
    command = [sys.executable, "-c", CODE, str(tmp_path / "words"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == code, done.stderr
    assert ("stopped by SIGTERM" in done.stderr) is (how != "end")
    assert (tmp_path / "words").exists() is (how != "end")
    assert how == "end" or (tmp_path / "words").read_text() == "stopped True"
