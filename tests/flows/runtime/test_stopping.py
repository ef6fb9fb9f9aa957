"""A process that does not unwind after SIGTERM or Ctrl-C: its end is forced in bounded time, after its callbacks."""

import subprocess
import sys

import pytest
from helpers import ROOT

CODE = """
import os, pathlib, signal, sys, time
from flows.runtime import stopping
stopping.FORCED_EXIT_SECONDS = 0.2
signal.signal(signal.SIGTERM, lambda *arguments: None)  # this handler does not stop
path = pathlib.Path(sys.argv[1])
if sys.argv[2] == "custom":
    bound = stopping.bound_shutdown_time(0.1, 75, is_resumable=False)
else:
    bound = stopping.bound_shutdown_time()
with bound, stopping.on_forced_exit(lambda: path.write_text(f"stopped {stopping.stop_requested.is_set()}")):
    if sys.argv[2] != "end":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
print("ended")
"""


@pytest.mark.parametrize(("how", "code"), [("hang", 143), ("custom", 75), ("end", 0)])
def test_a_process_that_does_not_stop_is_ended(tmp_path, how, code):
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
stopping.FORCED_EXIT_SECONDS = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run in the background
path, how = pathlib.Path(sys.argv[1]), sys.argv[2]

def ignore_interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:  # as by a bare `except`, or a server that does not answer
        pass

bound = stopping.bound_shutdown_time(include_interrupt=how != "off")
with bound, stopping.on_forced_exit(lambda: path.write_text("stopped")):
    if how == "loop":
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.5)  # an iteration, longer than the bound
            print("iteration over", stop.signum, stopping.stop_requested.is_set(), flush=True)
    elif how != "end":
        ignore_interrupt()
    if how not in ("end", "off"):
        time.sleep(60)
print("ended")
"""


@pytest.mark.parametrize(
    ("how", "code", "output"),
    [
        ("hang", 130, ""),
        ("loop", 130, "iteration over 2 False\n"),
        ("end", 0, "ended\n"),
        ("off", 0, "ended\n"),
    ],
)
def test_ctrl_c_is_bounded_from_the_end_of_the_iteration(tmp_path, how, code, output):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "words"), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (code, output), done.stderr
    assert ("stopped by Ctrl-C; the same command resumes" in done.stderr) is (code == 130)
    assert (tmp_path / "words").exists() is (code == 130)


@pytest.mark.parametrize(("how", "code"), [("stopped", 143), ("unwound", 143), ("forced", 143)])
def test_a_time_limit_is_the_cause_of_its_stop(tmp_path, how, code):
    """Name `--stop-after` however the command ends: by its loop, by unwinding, or by force."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("posttrain: stopped by the time limit of 0.2 s (--stop-after)"), line
    assert "SIGTERM" not in line


LIMITED = """
import signal, sys, time, types
sys.path.insert(0, ROOT)
from flows.runtime import stopping
from posttrain.cli import main as cli
from rl_core.errors import Stopped
stopping.FORCED_EXIT_SECONDS = 0.2
def handle(arguments):
    if sys.argv[1] != "unwound":
        signal.signal(signal.SIGTERM, lambda *arguments: None)
    stopping.schedule_sigterm(0.2)
    if sys.argv[1] == "stopped":
        stopping.FORCED_EXIT_SECONDS = 60
        signal.pause()
        raise Stopped("stopped within iteration 3 (a second SIGTERM); the same command resumes", 15)
    time.sleep(30)
    time.sleep(30)
module = types.SimpleNamespace(EXAMPLES=(), add_arguments=lambda parser: None, run_command=handle)
cli.import_command_modules = lambda words: {"run": module}
sys.exit(cli.main(["run"]))
""".replace("ROOT", repr(str(ROOT)))
