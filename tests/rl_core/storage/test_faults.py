"""Fault points: parsed strictly, fire at the hit that was asked for, documented and really there."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rl_core
from rl_core.errors import SettingsError
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault, fault


def test_fires_at_its_hit_only():
    faults.configure("loop.step:3:raise,loop.saved:1:raise")
    fault("loop.step")
    fault("loop.step")
    fault("loop.logged")
    with pytest.raises(InjectedFault, match=r"loop\.step, hit 3"):
        fault("loop.step")
    fault("loop.step")
    with pytest.raises(InjectedFault):
        fault("loop.saved")


@pytest.mark.parametrize("unset", [None, ""])
def test_unset_does_nothing_also_after_it_was_set(unset):
    faults.configure("loop.step:1:raise")
    faults.configure(unset)
    assert fault("loop.step") is None
    faults.configure("loop.step:1:raise")  # the same point, to show that it would have fired
    with pytest.raises(InjectedFault):
        fault("loop.step")


def test_sleep_takes_its_seconds():
    faults.configure("loop.step:1:sleep=0.05")
    before = time.monotonic()
    fault("loop.step")
    assert time.monotonic() - before >= 0.05


def test_kill_through_the_environment():
    code = "from rl_core.storage.faults import fault\nfault('loop.step'); print('one', flush=True); fault('loop.step')"
    environment = {"POSTTRAIN_FAULT": "loop.step:2:kill", "PYTHONPATH": str(Path(rl_core.__file__).parents[1])}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (-9, "one\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loop.stop:1:kill", "did you mean 'loop.step'"),
        ("loop.step:0:kill", "whole number from 1"),
        ("loop.step:one:kill", "whole number from 1"),
        ("loop.step:1:burn", "unknown action 'burn'"),
        ("loop.step:1:kill=3", "unknown action 'kill=3'"),
        ("loop.step:1:sleep=x", "not a number of seconds"),
        ("loop.step", "point:hit:action"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        faults.configure(text)


def test_every_point_is_documented_and_compiled_in():
    table = set(re.findall(r"^    ((?:publish|pointer|prune|loop)\.\w+) ", faults.__doc__, re.MULTILINE))
    assert table == faults.POINTS
    sources = [path.read_text() for path in Path(rl_core.__file__).parent.rglob("*.py") if path.name != "faults.py"]
    used = set(re.findall(r"(?:fault\(|point=)\"(\w+\.\w+)\"", "\n".join(sources)))
    assert used == faults.POINTS
