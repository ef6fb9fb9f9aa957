"""Approval, resume, repair and retention on real runs of configs/test.yaml, in new processes."""

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
SMALL_OVERRIDES = (
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
    """Command line with one output folder."""

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

    def try_command(self, *arguments: str, **environment: str) -> tuple[int, str]:
        child = self.start(*arguments, **environment)
        out = child.communicate(timeout=600)[0]
        return child.returncode, out

    def run_command(self, *arguments: str) -> str:
        """Run a command that must succeed, and return its output."""
        code, output = self.try_command(*arguments)
        assert code == 0, output
        return output

    def run(self, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        options = [
            part
            for setting in (f"output={self.output}", *SMALL_OVERRIDES, *overrides)
            for part in ("--set", setting)
        ]
        return self.start("run", str(CONFIG), *options, **environment)

    def find_champion_version(self) -> int | None:
        champion = Tracking(None, self.output, "test").find_champion("test")
        return champion.version if champion else None


@pytest.fixture
def machine(tmp_path, prefect_api, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    machine = Machine(tmp_path / "out", prefect_api)
    yield machine
    for child in machine.children:
        if child.poll() is None:
            child.kill()
            child.wait()


def read_until(child: subprocess.Popen[str], text: str) -> str:
    """Return the output of a process up to a line with `text`."""
    lines = []
    for line in child.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"never printed {text!r}:\n{''.join(lines)}")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen processes, each of which imports torch or MLflow
def test_a_run_waits_is_left_approved_killed_resumed_and_cleared_away(machine):
    out = ("--output", str(machine.output))
    # The run waits, also after Ctrl-C. Another process approves; the same command then finishes from the cache.
    waiting_run = machine.run()
    output = read_until(waiting_run, "Ctrl-C leaves it waiting")
    run = re.search(r"posttrain promote .*--approve (\S+) --note", output)[1]
    assert machine.find_champion_version() is None
    waiting_run.send_signal(signal.SIGINT)
    assert waiting_run.wait(120) == 130
    machine.run_command("promote", "--approve", run, "--note", "fine", "--by", "ada", *out)
    promoted = machine.find_champion_version()
    assert promoted is not None
    output = machine.run().communicate(timeout=600)[0]
    assert (
        f"version {promoted} of test is the champion already" in output
        and "approved by ada" in output
    )
    assert "answered before: version" in machine.run_command("promote", "--approve", run, *out)
    code, output = machine.try_command("promote", "--reject", run, *out)
    assert code == 2 and "is not pending" in output

    # Killed in the policy stage: marked by the repair, resumed with its settings, from its checkpoint.
    killed = machine.run("seed=1", POSTTRAIN_FAULT="loop.stepped:3:kill")
    assert killed.wait(600) == -signal.SIGKILL
    output = machine.run_command("check", "machine", "--repair", *out)
    assert "crashed: process" in output and "marked 1 Prefect flow run as Crashed" in output
    name = re.search(r"posttrain resume (test-[0-9a-f]+)", output)[1]
    rows = {row.short_id: row for row in Tracking(None, machine.output, "test").list_runs()}
    assert rows[name].status == "KILLED"
    resumed = machine.start("resume", name, *out)
    read_until(resumed, "Ctrl-C leaves it waiting")

    # Its process waits and polls the store. The champion changed meanwhile, so it is compared again.
    options = (str(CONFIG), "--set", f"output={machine.output}")
    challenger = next(
        v
        for v in Tracking(None, machine.output, "test").list_versions("test")
        if v.version != promoted
    )
    machine.run_command("promote", "--version", str(challenger.version), *options)
    assert "has to be compared again" in machine.run_command("promote", "--approve", name, *out)
    read_until(resumed, "Ctrl-C leaves it waiting")
    machine.run_command("promote", "--reject", name, "--note", "not now", *out)
    output = resumed.communicate(timeout=300)[0]
    assert (
        resumed.returncode == 0
        and "rejected by" in output
        and machine.find_champion_version() == challenger.version
    )

    # Deletions are listed first; the champion loads afterwards.
    assert "nothing was changed" in machine.run_command("store", "gc", "--keep", "1", *out)
    assert "freed" in machine.run_command("store", "gc", "--keep", "1", "--yes", *out)
    tracking = Tracking(None, machine.output, "test")
    folder = tracking.download_version(
        "test", machine.find_champion_version(), machine.output / "cache"
    )
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder) is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen processes, each of which imports torch or MLflow
def test_nobody_answers_and_the_clock_rejects(machine):
    child = machine.run("stages.promote.approval_timeout_seconds=15")
    output = child.communicate(timeout=600)[0]
    assert child.returncode == 0 and "rejected: nobody approved it until" in output
    assert machine.find_champion_version() is None
    code, output = machine.try_command(
        "promote", "--approve", "test", "--output", str(machine.output)
    )
    assert code == 2 and "is not pending" in output
