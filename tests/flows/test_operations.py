"""Approval, resume, repair and retention on real runs of configs/test.yaml, in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from tasks.tracking import Tracking

CONFIG = ROOT / "configs/test.yaml"
SMALL = (
    "stages.reward_model=null",
    "stages.policy.rewards.learned=0",
    "stages.analyze=null",
    "stages.sft.max_steps=10",
    "stages.policy.iterations=4",
    "stages.policy.checkpoint_every=1",
    "stages.policy.curriculum=[]",
    "stages.promote.approve=manual",
    "stages.promote.min_gain=-1",
)


class Machine:
    """The command line beside one output folder."""

    def __init__(self, output: Path, api: str) -> None:
        self.output, self.api = output, api
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "posttrain.cli.main", *arguments]
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PREFECT_API_URL": self.api, "PYTHONUNBUFFERED": "1", **environment},
        )
        self.children.append(child)
        return child

    def say(self, *arguments: str, **environment: str) -> tuple[int, str]:
        child = self.start(*arguments, **environment)
        out = child.communicate(timeout=600)[0]
        return child.returncode, out

    def do(self, *arguments: str) -> str:
        """Output of a successful command."""
        code, said = self.say(*arguments)
        assert code == 0, said
        return said

    def run(self, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        options = [
            part
            for setting in (f"output={self.output}", *SMALL, *overrides)
            for part in ("--set", setting)
        ]
        return self.start("run", str(CONFIG), *options, **environment)

    def champion(self) -> int | None:
        found = Tracking(None, self.output, "test").find_champion("test")
        return found.version if found else None


@pytest.fixture
def machine(tmp_path, prefect_api, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    machine = Machine(tmp_path / "out", prefect_api)
    yield machine
    for child in machine.children:
        if child.poll() is None:
            child.kill()
            child.wait()


def until(child: subprocess.Popen[str], text: str) -> str:
    """Output of a process up to a line with `text`."""
    lines = []
    for line in child.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"never said {text!r}:\n{''.join(lines)}")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen processes, each of which imports torch or MLflow
def test_a_run_waits_is_left_approved_killed_resumed_and_cleared_away(machine):
    out = ("--output", str(machine.output))
    # It waits; Ctrl-C leaves it waiting; another process approves; the same command finishes from what is there.
    first = machine.run()
    said = until(first, "Ctrl-C leaves it waiting")
    run = re.search(r"posttrain approve '(.+?)' --yes", said)[1]
    assert machine.champion() is None
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 130
    machine.do("approve", run, "--yes", "--note", "fine", "--by", "ada", *out)
    promoted = machine.champion()
    assert promoted is not None
    said = machine.run().communicate(timeout=600)[0]
    assert (
        f"version {promoted} of test is the champion already" in said and "approved by ada" in said
    )
    assert "answered before: version" in machine.do("approve", run, "--yes", *out)
    code, said = machine.say("approve", run, "--no", *out)
    assert code == 2 and "is not pending" in said

    # Killed in the policy stage: marked by the repair, resumed under its own settings, from its checkpoint.
    killed = machine.run("seed=1", POSTTRAIN_FAULT="loop.stepped:3:kill")
    assert killed.wait(600) == -signal.SIGKILL
    said = machine.do("doctor", "--repair", *out)
    assert "crashed: process" in said and "marked 1 Prefect flow run as Crashed" in said
    name = re.search(r"posttrain resume '(.+?)'", said)[1]
    rows = {row.name: row for row in Tracking(None, machine.output, "test").list_runs()}
    assert rows[name].status == "KILLED"
    resumed = machine.start("resume", name, *out)
    until(resumed, "Ctrl-C leaves it waiting")

    # Its process waits and is told by the store; the champion that moved meanwhile has it compared anew.
    options = ("--config", str(CONFIG), "--set", f"output={machine.output}")
    other = next(
        v
        for v in Tracking(None, machine.output, "test").list_versions("test")
        if v.version != promoted
    )
    machine.do("promote", "--version", str(other.version), *options)
    assert "has to be compared again" in machine.do("approve", name, "--yes", *out)
    until(resumed, "Ctrl-C leaves it waiting")
    machine.do("approve", name, "--no", "--note", "not now", *out)
    said = resumed.communicate(timeout=300)[0]
    assert resumed.returncode == 0 and "rejected by" in said and machine.champion() == other.version

    # What goes is said first; the champion loads afterwards.
    assert "nothing was changed" in machine.do("gc", "--keep", "1", *out)
    assert "freed" in machine.do("gc", "--keep", "1", "--yes", *out)
    tracking = Tracking(None, machine.output, "test")
    folder = tracking.download_version("test", machine.champion(), machine.output / "cache")
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder) is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen processes, each of which imports torch or MLflow
def test_nobody_answers_and_the_clock_rejects(machine):
    child = machine.run("stages.promote.approval_timeout_seconds=15")
    said = child.communicate(timeout=600)[0]
    assert child.returncode == 0 and "rejected: nobody approved it until" in said
    assert machine.champion() is None
    code, said = machine.say("approve", "test", "--yes", "--output", str(machine.output))
    assert code == 2 and "is not pending" in said
