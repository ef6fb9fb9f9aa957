"""A process that does not unwind after SIGTERM or Ctrl-C: ended in bounded time, its last words said."""

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
bound = stopping.bounded(0.1, 75, resumes=False) if sys.argv[2] == "own" else stopping.bounded()
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
    assert ("resumes from the last checkpoint" in done.stderr) is (
        how == "hang"
    )  # a server has none
    assert (tmp_path / "words").exists() is (how != "end")
    assert how == "end" or (tmp_path / "words").read_text() == "stopped True"


INTERRUPTED = """
import os, pathlib, signal, sys, time
from flows.runtime import stopping
from rl_core.training.signals import StopRequests
stopping.LAST_SECONDS = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run in the background
path, how = pathlib.Path(sys.argv[1]), sys.argv[2]

def ignored():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:  # as by a bare `except`, or a server that answers nothing
        pass

with stopping.bounded(interrupt=how != "off"), stopping.last_words(lambda: path.write_text("stopped")):
    if how == "loop":
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.5)  # an iteration, longer than the bound
            print("iteration over", stop.signum, stopping.asked.is_set(), flush=True)
    elif how != "end":
        ignored()
    if how not in ("end", "off"):
        time.sleep(60)
print("ended by itself")
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("hang", 130, ""),
        ("loop", 130, "iteration over 2 False\n"),
        ("end", 0, "ended by itself\n"),
        ("off", 0, "ended by itself\n"),
    ],
)
def test_ctrl_c_is_bounded_from_the_end_of_the_iteration(tmp_path, how, code, said):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "words"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert ("stopped by Ctrl-C; the same command resumes" in done.stderr) is (code == 130)
    assert (tmp_path / "words").exists() is (code == 130)
