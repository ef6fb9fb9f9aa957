"""A process that does not unwind after SIGTERM: ended in bounded time, its last words said."""

import signal
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
with stopping.bounded(), stopping.last_words(lambda: path.write_text(f"stopped {stopping.asked.is_set()}")):
    if sys.argv[2] == "hang":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
print("ended by itself")
"""


@pytest.mark.parametrize(("how", "code"), [("hang", 143), ("end", 0)])
def test_what_does_not_stop_is_ended(tmp_path, how, code):
    command = [sys.executable, "-c", CODE, str(tmp_path / "words"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == code == (128 + signal.SIGTERM if how == "hang" else 0), done.stderr
    assert ("stopped by SIGTERM" in done.stderr) is (how == "hang")
    assert (tmp_path / "words").exists() is (how == "hang")
    assert how == "end" or (tmp_path / "words").read_text() == "stopped True"
