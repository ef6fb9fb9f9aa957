"""Fault points: parsed strictly, fire at the requested hit, are documented and exist in the source."""

import ast
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT

from rl_core.errors import SettingsError
from rl_core.storage import faults
from rl_core.storage.faults import (
    FAULT_POINT_GROUPS,
    InjectedFault,
    format_fault_points,
    inject_fault,
)


def test_fires_at_its_hit_only():
    faults.configure_faults("loop.step:3:raise,loop.saved:1:raise")
    inject_fault("loop.step")
    inject_fault("loop.step")
    inject_fault("loop.logged")
    with pytest.raises(InjectedFault, match=r"loop\.step, hit 3"):
        inject_fault("loop.step")
    inject_fault("loop.step")
    with pytest.raises(InjectedFault):
        inject_fault("loop.saved")


@pytest.mark.parametrize("unset", [None, ""])
def test_unset_does_nothing_even_after_it_was_set(unset):
    faults.configure_faults("loop.step:1:raise")
    faults.configure_faults(unset)
    assert inject_fault("loop.step") is None
    faults.configure_faults("loop.step:1:raise")  # the same point, to show that it would have fired
    with pytest.raises(InjectedFault):
        inject_fault("loop.step")


def test_sleep_takes_its_seconds():
    faults.configure_faults("loop.step:1:sleep=0.05")
    before = time.monotonic()
    inject_fault("loop.step")
    assert time.monotonic() - before >= 0.05


def run_child(code, **environment):
    """Run code in a child process that has imported `inject_fault`."""
    code = f"from rl_core.storage.faults import inject_fault; {code}"
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


def test_kill_through_the_environment():
    done = run_child(
        "inject_fault('loop.step'); print('one', flush=True); inject_fault('loop.step')",
        POSTTRAIN_FAULT="loop.step:2:kill",
    )
    assert (done.returncode, done.stdout) == (-9, "one\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loop.stop:1:kill", "did you mean 'loop.step'"),
        ("loop.step:0:kill", "integer of at least 1"),
        ("loop.step:one:kill", "integer of at least 1"),
        ("loop.step:1:burn", "unknown action 'burn'"),
        ("loop.step:1:kill=3", "unknown action 'kill=3'"),
        ("loop.step:1:sleep=x", "not a number of seconds"),
        ("loop.step:1:raise=EOI", "did you mean 'EIO'"),
        ("loop.step:1:exit=256", "not an exit code"),
        ("loop.step:1:term=3", "unknown action 'term=3'"),
        ("loop.step@one:1:kill", "must end with @main or a process number"),
        ("loop.step", "point:hit:action"),
    ],
)
def test_an_invalid_plan_is_refused(text, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        faults.configure_faults(text)


def find_used_points():
    """Collect the names of points in the source: arguments of inject_fault(), and of the parameter `point`."""
    names = set()
    for package in ("rl_core", "tasks", "flows", "posttrain"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                values = [keyword.value for keyword in node.keywords if keyword.arg == "point"]
                if isinstance(node.func, ast.Name) and node.func.id == "inject_fault":
                    values += node.args
                constants = [
                    constant
                    for value in values
                    for constant in ast.walk(value)
                    if isinstance(constant, ast.Constant)
                ]
                names |= {item.value for item in constants if isinstance(item.value, str)}
    return names


def test_every_point_is_listed_once_and_compiled_in():
    listed = [point.name for points in FAULT_POINT_GROUPS.values() for point in points]
    assert len(listed) == len(set(listed)) == len(faults.FAULT_POINTS) >= 60
    assert find_used_points() == set(listed)


def test_the_listing_names_every_point_in_its_group_and_who_reaches_it():
    lines = format_fault_points().splitlines()
    assert lines[0].startswith(f"{len(faults.FAULT_POINTS)} fault points")
    assert [line for line in lines[1:] if line and not line.startswith(" ")] == list(
        FAULT_POINT_GROUPS
    )
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert rows.keys() == faults.FAULT_POINTS.keys()
    assert rows["gc.store"].endswith("the store has removed its part  (posttrain store gc --yes)")
    assert "(" not in rows["loop.step"].replace("step()", "")


@pytest.mark.parametrize(("action", "number"), [("raise", errno.ENOSPC), ("raise=EIO", errno.EIO)])
def test_an_error_has_its_number(action, number):
    faults.configure_faults(f"loop.step:1:{action}")
    with pytest.raises(InjectedFault) as raised:
        inject_fault("loop.step")
    assert raised.value.errno == number and os.strerror(number) in str(raised.value)


@pytest.mark.parametrize(
    ("action", "code", "output"),
    [("exit", 1, ""), ("exit=7", 7, ""), ("term", -signal.SIGTERM, ""), ("sleep=0", 0, "two")],
)
def test_actions_that_end_the_process(action, code, output):
    done = run_child(
        "inject_fault('loop.step'); print('two', end='')", POSTTRAIN_FAULT=f"loop.step:1:{action}"
    )
    assert (done.returncode, done.stdout) == (code, output)


@pytest.mark.parametrize(
    ("target", "rank", "code"),
    [
        ("@0", "0", 7),
        ("@0", "1", 0),
        ("@0", None, 0),
        ("@main", None, 7),
        ("@main", "0", 0),
        ("", "1", 7),
        ("", None, 7),
    ],
)
def test_a_fault_can_target_one_process_of_a_stage(target, rank, code):
    environment = {"RANK": rank} if rank is not None else {}
    done = run_child(
        "inject_fault('loop.step')", POSTTRAIN_FAULT=f"loop.step{target}:1:exit=7", **environment
    )
    assert done.returncode == code, done.stderr


def test_reached_points_are_logged_by_all_processes_of_a_run(tmp_path):
    log = tmp_path / "reached"
    for _ in range(2):
        run_child(
            "inject_fault('loop.step'); inject_fault('loop.saved')", POSTTRAIN_FAULT_LOG=str(log)
        )
    rows = [line.split() for line in log.read_text().splitlines()]
    assert [row[2] for row in rows] == ["loop.step", "loop.saved"] * 2
    assert len({row[0] for row in rows}) == 2 and all(float(row[1]) > 1e9 for row in rows)


def test_threads_count_together():
    faults.configure_faults("loop.step:1000:raise")
    raised = []

    def work():
        for _ in range(250):
            try:
                inject_fault("loop.step")
            except InjectedFault as error:
                raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 1
